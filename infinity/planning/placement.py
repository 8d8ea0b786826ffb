"""Placement: the units and chunks of a model, the homes of its pages, and the sizes of working buffers.
Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.layout.units import Grouping
from infinity.tiers import Tier


class Kind(enum.Enum):
    """The kinds of pages that a unit has."""

    PARAMETER = "parameter"
    """Parameters in the dtype that forward and backward use."""
    GRADIENT = "gradient"
    """Accumulated gradients of trainable parameters."""
    OPTIMIZER = "optimizer"
    """The optimizer's moments, and the bits of the fp32 master parameters that the parameter page lacks."""


def line_of(accumulation: int | None) -> tuple[Kind, ...]:
    """Return the kinds of pages in the order in which the planner gives them room.

    The first kind gets room in the fastest tiers (device memory, then host RAM), and later kinds get what is
    left.

    accumulation: number of micro-batches in a step; None if unknown. Parameters come first. If there is one
    micro-batch, optimizer states come before gradients: both the read and the write of a byte of states
    fall into the next forward, whereas a byte of gradients is written during the backward and read in the
    next forward. Every further micro-batch reads and writes each byte of gradients once more, so gradients
    then come before optimizer states.
    """
    if accumulation == 1:
        return (Kind.PARAMETER, Kind.OPTIMIZER, Kind.GRADIENT)
    return tuple(Kind)


DtypeOf = Callable[[torch.dtype], torch.dtype]

Homes = tuple[dict[Kind, Tier | None], ...]
"""The tier in which each page rests: one dict for each unit, by kind of page. The tier is None for a page
without bytes.
"""


@dataclass(frozen=True)
class Room:
    """The bytes of each tier that pages and working buffers may take."""

    device: int | None
    """Bytes of the device tier; None if device and host are the same RAM."""
    host: int
    nvme: int


@dataclass(frozen=True)
class Placement:
    """One way to fit a model into the tiers: the model's units and chunks, the homes of its pages, and the
    sizes of working buffers.
    """

    grouping: Grouping
    chunk_elements: int
    homes: Homes
    chain_bytes: int
    """Bytes that the largest chain (the update of one chunk) works on: the sum of the chunk's parameters,
    gradients and optimizer states.
    """
    staging_bytes: int
    transit_buffer_bytes: int
    transit_bytes: int
    resident_bytes: int
    ring_bytes: int
    exchange_block_bytes: int
    exchange_bytes: int
