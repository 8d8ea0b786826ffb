"""Memory of the tier that computes that is no page: activations, fresh gradients, buffers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import round_up
from infinity.planning.headroom import NO_HEADROOM, Headroom
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class Reserve:
    """How much of a budget is left to what autograd and the model allocate themselves."""

    nbytes: int
    """Of buffers, and of activations where they are known; a multiple of 4096."""
    kept_out_of: int | None = None
    """One in so many bytes of the budget is left besides: for activations that nobody has measured."""

    headroom: int = 0
    """Of `nbytes`: what torch takes on a CUDA device beside them; see infinity/planning/headroom.py."""

    @staticmethod
    def of(
        activations: int | None, buffers: int, *, unknown: int | None, headroom: Headroom = NO_HEADROOM
    ) -> Reserve:
        """unknown: `kept_out_of` where `activations` is None. headroom: of the device that computes."""
        live = (activations or 0) + buffers
        beside = headroom.beside(live)
        nbytes = round_up(live + beside, PAGE_ALIGNMENT)
        return Reserve(nbytes, unknown if activations is None else None, headroom=beside)

    def within(self, budget: int) -> int:
        """The bytes of `budget` that no page may take."""
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
