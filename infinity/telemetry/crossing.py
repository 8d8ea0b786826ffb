"""Crossing: a payload that has crossed to or from another rank, and when it did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """The direction of a crossing, as seen by this rank."""

    FROM = "from"
    TO = "to"


@dataclass(frozen=True, slots=True)
class Crossing:
    """A payload that has crossed between this rank and another one."""

    way: Way
    peer: int
    """The other rank."""
    label: str
    """What the bytes are, such as "parameters" or "gradients"."""
    unit: int | None
    """Index of the unit to which they belong; None if they belong to none, or to one that is not known."""
    nbytes: int
    began: int
    """When the payload was given to the network, or when its message came and its memory was ready for it.

    In nanoseconds of time.perf_counter_ns().
    """
    ended: int
    """When the other rank had taken the last byte, or when it had come; as `began`."""
