"""Placement: the units and chunks of a model, the homes of its pages, and the sizes of its buffers. Pure."""

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
    """Parameters as forward and backward take them."""
    GRADIENT = "gradient"
    """Accumulated gradients of trainable parameters."""
    OPTIMIZER = "optimizer"
    """Master parameters (or what completes them) and moments."""


def line_of(accumulation: int | None) -> tuple[Kind, ...]:
    """The order of kinds in which pages stand in line. accumulation: micro-batches of a step; None: unknown.

    A byte of states is read and written once a step, both under the next forward. A byte of gradients is
    written under the backward and read once, and read and written once more for every further micro-batch.
    """
    if accumulation == 1:
        return (Kind.PARAMETER, Kind.OPTIMIZER, Kind.GRADIENT)
    return tuple(Kind)


DtypeOf = Callable[[torch.dtype], torch.dtype]

Homes = tuple[dict[Kind, Tier | None], ...]
"""The home of every page, by unit and kind; None for a page without bytes."""


@dataclass(frozen=True)
class Room:
    """Bytes that each tier has for pages and buffers."""

    device: int | None
    """Bytes of the device; None where device and host are the same RAM."""
    host: int
    nvme: int


@dataclass(frozen=True)
class Placement:
    """One way to fit a model: its units and chunks, its pages' homes, and the buffers' sizes."""

    grouping: Grouping
    chunk_elements: int
    homes: Homes
    chain_bytes: int
    """Bytes that one chunk's update takes at most: its parameters, gradient and states."""
    staging_bytes: int
    transit_buffer_bytes: int
    transit_bytes: int
    resident_bytes: int
    ring_bytes: int
