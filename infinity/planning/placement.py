"""Placement: where pages rest, how units and chunks are cut for it, and what room is left. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.layout.units import Grouping
from infinity.tiers import Tier


class Kind(enum.Enum):
    """What a page holds of its unit."""

    PARAMETER = "parameter"
    """Parameters as forward and backward take them."""
    GRADIENT = "gradient"
    """Accumulated gradients of the trainable ones."""
    OPTIMIZER = "optimizer"
    """Master parameters (or what completes them) and moments."""


def line_of(accumulation: int | None) -> tuple[Kind, ...]:
    """The kinds in line, for so many micro-batches a step (None: unknown).

    A byte of states is read and written once a step, both under the next forward; one of gradients is written
    under the backward and read once, and for every further micro-batch read and written once more.
    """
    if accumulation == 1:
        return (Kind.PARAMETER, Kind.OPTIMIZER, Kind.GRADIENT)
    return tuple(Kind)


DtypeOf = Callable[[torch.dtype], torch.dtype]

Homes = tuple[dict[Kind, Tier | None], ...]
"""Per unit; None for a page without bytes."""


@dataclass(frozen=True)
class Room:
    """Bytes that each tier has for pages and buffers."""

    device: int | None
    """None: the same RAM as the host's."""
    host: int
    nvme: int


@dataclass(frozen=True)
class Placement:
    """A way to fit: how units and chunks are cut, where pages rest, what room is left to work in."""

    grouping: Grouping
    chunk_elements: int
    homes: Homes
    chain_bytes: int
    """What one chunk's update takes at the most: its parameters, gradient and states."""
    staging_bytes: int
    piece_bytes: int
    transit_bytes: int
    resident_bytes: int
    ring_bytes: int
