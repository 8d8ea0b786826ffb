"""Reserve: memory of the computing tier for activations, fresh gradients and buffers, not for pages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import round_up
from infinity.planning.headroom import NO_HEADROOM, Headroom
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class Reserve:
    """The part of a budget that is left to autograd's and the model's own allocations."""

    nbytes: int
    """Bytes of buffers, headroom, and activations where they are known; a multiple of 4096."""
    kept_out_of: int | None = None
    """The budget divided by this is reserved besides, for activations not measured; None: nothing is."""

    headroom: int = 0
    """Bytes within `nbytes` that torch takes on a CUDA device; see infinity/planning/headroom.py."""

    @staticmethod
    def of(
        activations: int | None, buffers: int, *, unknown: int | None, headroom: Headroom = NO_HEADROOM
    ) -> Reserve:
        """The reserve for bytes of activations (None: unknown) and of buffers.

        unknown: `kept_out_of` where `activations` is None. headroom: of the device that computes.
        """
        live = (activations or 0) + buffers
        beside = headroom.beside(live)
        nbytes = round_up(live + beside, PAGE_ALIGNMENT)
        return Reserve(nbytes, unknown if activations is None else None, headroom=beside)

    def within(self, budget: int) -> int:
        """Bytes of `budget` that no page may take."""
        return self.nbytes + (budget // self.kept_out_of if self.kept_out_of else 0)

    def budget_for(self, pages: int) -> int:
        """The smallest budget, in whole 4 KiB, that leaves `pages` bytes to pages."""
        needed = pages + self.nbytes
        if self.kept_out_of is None:
            return needed
        budget = round_up(-(-needed * self.kept_out_of // (self.kept_out_of - 1)), PAGE_ALIGNMENT)
        while budget - PAGE_ALIGNMENT - self.within(budget - PAGE_ALIGNMENT) >= pages:
            budget -= PAGE_ALIGNMENT
        return budget
