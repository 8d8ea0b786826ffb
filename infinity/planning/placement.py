"""Placement: the units and chunks of a model, the homes of its pages, and the sizes of working buffers. Pure.

A placement gives every page a home. In addition it needs room for two buffers:

- Staging is host RAM in which the CPU updates chunks whose pages are at home in another place. It has
  room for all chunk updates of the largest unit, but takes at most a quarter of the host tier, or the bytes
  of two updates if these are more than a quarter.
- The pool of resident pages is a part of the tier in which the model computes. Parameter pages with a home in
  another tier are brought there for use. The pool has room for 12 pages if they take at most a quarter of the
  tier, else for 3 pages if they take at most half of the tier.

Where that does not fit, smaller buffers are tried, down to one update and one page. Placements without NVMe
are tried before all others, with room for 3, 2 or 1 pages. WORKING_ROOMS lists all sizes in this order.
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
    chunk_update_bytes: int
    """Bytes that the largest chunk update works on: a chunk's parameters, gradients and optimizer states."""
    staging_bytes: int
    transit_buffer_bytes: int
    transit_bytes: int
    resident_bytes: int
    ring_bytes: int
    exchange_block_bytes: int
    exchange_bytes: int


_SHARE = 4
"""Staging, the host RAM in which chunks are updated, takes at most the host budget divided by this number,
but always at least the bytes of two chunk updates.
"""

_RING_SHARE = 64
"""The ring, a buffer through which gradients leave the device, takes at most the device budget divided by
this number, but always at least two of the blocks that `WorkingRoom.ring` describes.
"""

_LARGEST_RING = 64 << 20
"""The most bytes of the ring through which gradients leave the device. A link of 50 GB/s moves these bytes
in 1.3 ms, and the threads that empty the ring are seldom delayed for longer.
"""

_EXCHANGE_BUFFERS = 8
"""Number of exchange buffers where memory is not at its least: enough for several transfers to be on their
way while others are read or added.
"""


@dataclass(frozen=True)
class WorkingRoom:
    """The rules and limits by which a placement chooses the sizes of its working buffers."""

    pages: int
    """Number of parameter pages that the pool of resident pages has room for. Pages that are at home where
    the model computes take no room in this pool.
    """
    updates: int | None = None
    """Number of chunk updates, each of the largest size, that staging has room for. If None, the method
    `staging` chooses the bytes by the size of the host tier.
    """
    transit_buffers: int = 8
    """Number of buffers in host RAM through which pages pass from NVMe to a device with memory of its own."""
    nvme: bool = True
    """Whether pages may rest on NVMe."""
    share: float = 1.0
    """The largest fraction, from 0 to 1, of the computing tier that the pool of resident pages may take.
    The same fraction limits staging in the host tier.
    """

    def staging(self, host: int, update: int, unit: int) -> int:
        """Bytes of staging, the host RAM in which chunks are updated, in a host tier of `host` bytes.

        update: bytes of the largest chunk update. unit: bytes of all updates of the largest unit together,
        for which staging has room where the host tier is large enough.
        """
        if self.updates is not None:
            return self.updates * update
        return max(2 * update, min(host // _SHARE // 4096 * 4096, unit))

    def ring(self, device: int, block: int) -> int:
        """Bytes of the ring, the buffer through which gradients leave the device, in a device tier of
        `device` bytes.

        block: bytes of the equal parts that the ring consists of. The ring has at least two of them.
        """
        if self.transit_buffers == 1:
            return 2 * block
        return max(2, min(device // _RING_SHARE, _LARGEST_RING) // block) * block

    def exchange(self, block: int) -> int:
        """Bytes of the exchange buffers, the host RAM in which chunks wait that are sent to other ranks or
        were received from them.

        block: bytes of one buffer. There are two at the least, one for each direction.
        """
        return (2 if self.transit_buffers == 1 else _EXCHANGE_BUFFERS) * block


AMPLE_PAGES = 12
"""Number of parameter pages that the pool of resident pages has room for if memory is ample. Eager updates
use some pages while other pages arrive from disk. With 3 pages a step took a quarter longer than with 10
(309M parameters, all on NVMe).
"""

LEAST = WorkingRoom(1, updates=1, transit_buffers=1)
LEAST_IN_RAM = WorkingRoom(1, updates=1, transit_buffers=1, nvme=False)

WORKING_ROOMS = (
    WorkingRoom(3, nvme=False),
    WorkingRoom(2, nvme=False),
    LEAST_IN_RAM,
    WorkingRoom(AMPLE_PAGES, share=0.25),
    WorkingRoom(3, share=0.5),
    WorkingRoom(3, updates=2, transit_buffers=2),
    WorkingRoom(2, updates=2, transit_buffers=2),
    WorkingRoom(3, updates=1, transit_buffers=1),
    WorkingRoom(2, updates=1, transit_buffers=1),
    LEAST,
)
"""The working rooms, in the order in which the search for a placement (infinity/planning/search.py) tries
them. Working rooms without NVMe come first, so that a model stays in memory if it fits there at all.
"""
