"""Working room: memory that a placement keeps for pages on their way, from the most to the least. Pure.

Staging has room for all chains of the largest unit, but takes at most a quarter of the host tier and at least
two chains. Besides pages at home there, the tier that computes has room for 12 parameter pages if they take
at most a quarter of it, else for 3 if they take at most half. Where not even that fits,
there is room for two chains and three or two pages, else for one chain and three, two or one.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 4
"""Staging takes at most the host budget divided by this, but at least two chains."""

_RING_SHARE = 64
"""The ring for gradients takes at most the device budget divided by this, but at least two blocks."""

_LARGEST_RING = 64 << 20
"""Bytes of the largest ring. A link of 50 GB/s takes 1.3 ms for them; the host's threads are seldom later."""


@dataclass(frozen=True)
class WorkingRoom:
    """The sizes of the buffers that a placement keeps, as rules and limits."""

    pages: int
    """Parameter pages that can be resident at one time besides those at home there."""
    chains: int | None = None
    """Chains of the largest size that staging has room for; None: as the module's rule says."""
    transit_buffers: int = 8
    """Transit buffers for pages on two hops, where the device has memory of its own."""
    nvme: bool = True
    """Whether pages may rest on NVMe."""
    share: float = 1.0
    """The largest share of the computing tier for resident pages, and of the host tier for staging."""

    def staging(self, host: int, chain: int, unit: int) -> int:
        """Bytes of staging in a host tier of `host` bytes. chain: bytes of the largest chain. unit: bytes of
        the largest unit's chains, for all of which staging should have room."""
        if self.chains is not None:
            return self.chains * chain
        return max(2 * chain, min(host // _SHARE // 4096 * 4096, unit))

    def ring(self, device: int, block: int) -> int:
        """Bytes of the ring for gradients in a device tier of `device` bytes. block: bytes of the smallest
        block; a ring has at least two."""
        if self.transit_buffers == 1:
            return 2 * block
        return max(2, min(device // _RING_SHARE, _LARGEST_RING) // block) * block


AMPLE_PAGES = 12
"""Resident parameter pages where units come from disk: eager updates run in some while others arrive. With 3
a step took a quarter longer than with 10 (309M parameters, all on NVMe)."""

LEAST = WorkingRoom(1, chains=1, transit_buffers=1)
LEAST_IN_RAM = WorkingRoom(1, chains=1, transit_buffers=1, nvme=False)

WORKING_ROOMS = (
    WorkingRoom(3, nvme=False),
    WorkingRoom(2, nvme=False),
    LEAST_IN_RAM,
    WorkingRoom(AMPLE_PAGES, share=0.25),
    WorkingRoom(3, share=0.5),
    WorkingRoom(3, chains=2, transit_buffers=2),
    WorkingRoom(2, chains=2, transit_buffers=2),
    WorkingRoom(3, chains=1, transit_buffers=1),
    WorkingRoom(2, chains=1, transit_buffers=1),
    LEAST,
)
"""Working rooms in the order in which they are tried: a model that fits in RAM at all is kept there."""
