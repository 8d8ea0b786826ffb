"""Placement: the homes of a model's pages, and the sizes of working buffers. Pure.

infinity/planning/homes.py decides which page gets which tier.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infinity.layout.chunks import ModelLayout
from infinity.tiers import Tier


class Kind(enum.Enum):
    """The kinds of pages that a unit has."""

    PARAMETER = "parameter"
    """Parameters in the dtype that forward and backward use."""
    GRADIENT = "gradient"
    """Accumulated gradients of trainable parameters."""
    OPTIMIZER = "optimizer"
    """The optimizer's moments, and the bits of the fp32 master parameters that the parameter page lacks."""


Homes = tuple[dict[Kind, Tier | None], ...]
"""The tier in which each page rests: one dict for each unit, by kind of page. The tier is None for a page
without bytes, for instance the gradient page of a frozen unit.
"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A way to fit a model into the tiers."""

    layout: ModelLayout
    homes: Homes
    chunk_update_bytes: int
    """Bytes of the largest chunk update: the chunk's parameters, gradients and optimizer states."""
    staging_bytes: int
    transit_buffer_bytes: int
    """Bytes of one transit buffer."""
    transit_bytes: int
    """Bytes of all transit buffers together. One of them is for reads and writes of single parameters. The
    others carry pages from NVMe to a device with memory of its own.
    """
    resident_bytes: int
    """Bytes of the pool to which parameter pages are brought while the model uses them; 0 if all parameters
    are at home where the model computes. Pages in the pool are whole, even if this rank's homes hold only
    some of their chunks.
    """
    leaving_bytes: int
    """The most bytes of device memory that gradients take while they leave the device during a backward,
    beside the one whose hook runs. Autograd has allocated them, so they are no part of the device tier. 0
    where the CPU can use the device's memory.
    """
    visiting_bytes: int
    """Bytes of device memory to which optimizer states at home in host RAM come to be updated there, with
    lazy updates beside their gradients: room for VISITORS chunks of the greatest length; 0 if none come.
    """
    staying_bytes: int
    """The most bytes of device memory that gradients take while they wait there for such states, beside the
    one whose hook runs; 0 with lazy updates. Like those of `leaving_bytes` they are no part of the device
    tier.
    """
    landing_bytes: int
    """Bytes of host RAM to which gradients come from a device with its own memory before they are added to
    stored ones: two landings, which get blocks in turn. 0 where the CPU can use the device's memory.
    """
    squares_bytes: int
    """Bytes of host RAM to which a device with its own memory copies the sums of squares of gradients, one
    float64 for each block of cpu_adam.BLOCK elements, and at the end the word that stops updates there; 0
    where the CPU can use the device's memory.
    """
    exchange_block_bytes: int
    """The most bytes of a page or a gradient that one rank asks of another at once; 0 with one rank."""
    exchange_bytes: int
    """Host RAM in which bytes wait that are sent to other ranks or were received from them: the exchange
    buffers, each of which holds a chunk's gradients at least, and `Plan.waiting_bytes`; 0 with one rank.
    """


@dataclass(frozen=True)
class Room:
    """The bytes of each tier that pages and working buffers may take."""

    device: int | None
    """None if device and host are the same RAM."""
    host: int
    nvme: int


@dataclass(frozen=True)
class WorkingRoom:
    """Rules by which a candidate chooses the sizes of its working buffers."""

    pages: int
    """Number of parameter pages for which the pool of resident pages has room. Pages that are at home where
    the model computes take none of it.
    """
    updates: int | None = None
    """Number of chunk updates, each of the largest size, for which staging has room; None: as many as a share
    of the host tier holds.
    """
    transit_buffers: int = 8
    """Transit buffers between NVMe and a device with memory of its own."""
    nvme: bool = True
    """Whether pages may rest on NVMe."""
    share: float = 1.0
    """The largest fraction of the computing tier that the pool of resident pages may take, and of the host
    tier that staging may take.
    """


AMPLE_PAGES = 12
"""Parameter pages in the pool of resident pages if memory is ample. Eager updates use some pages while others
arrive from disk. With 3 pages a step took a quarter longer than with 10 (309M parameters, all on NVMe).
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
"""The working rooms, in the order in which the search (infinity/planning/homes.py) tries them. Those without
NVMe come first, so that a model stays in memory if it fits there at all.
"""
