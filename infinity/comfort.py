"""Comfort: how much room a placement leaves to work in, from the most that helps to the least. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 4
"""Ample staging takes at the most one in so many bytes of the host budget."""


_RING_SHARE = 64
"""A ring for gradients takes at the most one in so many bytes of the device budget."""

_LARGEST_RING = 64 << 20
"""Bytes. A link of 50 GB/s takes 1.3 ms for them: more than the host's threads are late, as a rule."""


@dataclass(frozen=True)
class Comfort:
    """How much working room a placement leaves, and how far down it may go."""

    lookahead: int
    """Parameter pages that can be resident at one time besides those at home there."""
    chains: int | None = 2
    """The largest chains that staging has room for; None: as many as `staging` finds ample."""
    pieces: int = 2
    """Pieces of transit, where the device has memory of its own."""
    nvme: bool = True
    share: float = 1.0
    """The most of the host tier that staging may take, and of the tier that computes, resident pages."""

    def staging(self, host: int, chain: int, unit: int) -> int:
        """Bytes of staging, of `host` bytes of the tier: for two of the largest chains (`chain` bytes), or
        for all chains of the largest unit (`unit` bytes) where that is no more than a quarter of the host's.
        """
        if self.chains is not None:
            return self.chains * chain
        return max(2 * chain, min(host // _SHARE // 4096 * 4096, unit))

    def ring(self, device: int, block: int) -> int:
        """Bytes of the ring for gradients, of `device` bytes of the tier: the least is two of the smallest
        blocks (`block` bytes)."""
        if self.pieces == 1:
            return 2 * block
        return max(2, min(device // _RING_SHARE, _LARGEST_RING) // block) * block


LOOKAHEAD = 12
"""Parameter pages that a disk needs: eager updates run in some while others arrive. With 3 a step took a
quarter longer than with 10 (309M parameters, all on NVMe)."""

LEAST = Comfort(1, chains=1, pieces=1)
LEAST_IN_RAM = Comfort(1, chains=1, pieces=1, nvme=False)

COMFORTS = (
    Comfort(3, nvme=False),
    Comfort(2, nvme=False),
    LEAST_IN_RAM,
    Comfort(LOOKAHEAD, chains=None, pieces=8, share=0.25),
    Comfort(3, chains=None, pieces=8, share=0.25),
    Comfort(3, chains=None, pieces=4, share=0.5),
    Comfort(2, share=0.5),
    Comfort(1, share=0.5),
    Comfort(3),
    Comfort(2),
    Comfort(1),
    Comfort(3, chains=1, pieces=1),
    Comfort(2, chains=1, pieces=1),
    LEAST,
)
"""The best first."""
