"""Comfort: how much room a placement leaves to work in, from what a step runs best with to the least. Pure.

[Note: slots that flow]
Eager updates go on all through a backward only while the gradients of one unit can come into slots and those
of others leave them. Units are no smaller than a module, so a wide model needs more slots for that than a
narrow one, and it is worth more than the pages that could stay in RAM instead: 926M parameters within 3.2 GB,
whose modules have 16 chunks, took 10.0 s a step with 16 slots, 7.4 s with 32 and 6.3 s with 64. An eighth
for a unit is better still where it costs few pages: 309M all on NVMe, whose modules have 4 chunks, took 3.1 s
with 16 slots and 2.8 s with 32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Comfort:
    """How much working room a placement leaves, and how far down it may go."""

    slots: int
    lookahead: int
    """Parameter pages that can be resident at one time besides those at home there."""
    nvme: bool = True
    share: float = 1.0
    """The most of the host tier that slots may take, and of the tier that computes, resident pages."""
    chunks: int | None = None
    """How many of the lengths of chunks will do, None for all: short ones cost work by the piece."""
    flow: int = 0
    """Most bytes are of units that take one in so many slots, or fewer; 0: of any."""


LOOKAHEAD = 12
"""Parameter pages that a disk needs: eager updates run in some while others arrive. With 3 a step took a
quarter longer than with 10 (309M parameters, all on NVMe)."""

LEAST = Comfort(1, 1)

_IN_RAM = (
    Comfort(4, 3, nvme=False),
    Comfort(2, 2, nvme=False),
)
_USUAL = (
    Comfort(16, LOOKAHEAD, share=0.25, chunks=1),
    Comfort(16, LOOKAHEAD, share=0.25, chunks=2),
    Comfort(16, 3, share=0.25, chunks=1),
    Comfort(16, 3, share=0.25, chunks=2),
)
_TIGHT = (
    Comfort(8, 3, share=0.5, chunks=2),
    Comfort(4, 3, share=0.5),
    Comfort(4, 2, share=0.5),
    Comfort(4, 1, share=0.5),
    Comfort(2, 3),
    Comfort(2, 2),
    Comfort(2, 1),
    Comfort(1, 3),
    Comfort(1, 2),
    LEAST,
)
_MANY = (32, 64, 128, 256)
_ABUNDANT = tuple(Comfort(slots, LOOKAHEAD, share=0.25, chunks=1, flow=8) for slots in (16, *_MANY))
_MANY_SLOTS = tuple(
    Comfort(slots, lookahead, share=0.4, chunks=1) for lookahead in (LOOKAHEAD, 3) for slots in _MANY
)
_FLOWS = (4, 2)
"""A quarter of the slots for most units, so that reads ahead have room beside them; else half."""

COMFORTS = (*_IN_RAM, *_USUAL, *_TIGHT)
"""The best first."""

FLOWING = (
    *_IN_RAM,
    *_ABUNDANT,
    *(replace(each, flow=flow) for flow in _FLOWS for each in (*_USUAL, *_MANY_SLOTS, *_TIGHT)),
    *_USUAL,
    *_TIGHT,
)
"""Likewise, for eager updates."""
