"""Reserve: memory, in the tier that computes, that is kept for activations, new gradients and buffers.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import round_up
from infinity.planning.headroom import NO_HEADROOM, Headroom
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class Reserve:
    """The part of a budget that pages leave free, because autograd and the model allocate memory
    themselves.
    """

    nbytes: int
    """Bytes of the model's buffers, of `headroom` and, if known, of activations; a multiple of 4096."""
    kept_out_of: int | None = None
    """None if the bytes of activations are known. Otherwise `budget // kept_out_of` bytes are reserved for
    them, in addition to `nbytes`.
    """

    headroom: int = 0
    """Bytes, counted in `nbytes`, that torch takes on a CUDA device in addition to live tensors; see
    infinity/planning/headroom.py.
    """
    activations: int = 0
    """Bytes of activations, counted in `nbytes`; 0 if unknown."""
    buffers: int = 0
    """Bytes of the model's buffers, counted in `nbytes`."""

    @staticmethod
    def of(
        activations: int | None, buffers: int, *, unknown: int | None, headroom: Headroom = NO_HEADROOM
    ) -> Reserve:
        """Make the Reserve for a model.

        activations: bytes of activations; None if unknown. buffers: bytes of the model's buffers. unknown:
        the value of `kept_out_of` to use if `activations` is None. headroom: the headroom of the device
        that computes.
        """
        live = (activations or 0) + buffers
        beside = headroom.beside(live)
        nbytes = round_up(live + beside, PAGE_ALIGNMENT)
        return Reserve(
            nbytes,
            unknown if activations is None else None,
            headroom=beside,
            activations=activations or 0,
            buffers=buffers,
        )

    def within(self, budget: int) -> int:
        """Return how many bytes of a budget of `budget` bytes no page may take."""
        return self.nbytes + (budget // self.kept_out_of if self.kept_out_of else 0)

    def budget_for(self, pages: int) -> int:
        """Return the smallest budget, in bytes, that leaves at least `pages` bytes for pages."""
        needed = pages + self.nbytes
        if self.kept_out_of is None:
            return needed
        budget = round_up(-(-needed * self.kept_out_of // (self.kept_out_of - 1)), PAGE_ALIGNMENT)
        while budget - PAGE_ALIGNMENT - self.within(budget - PAGE_ALIGNMENT) >= pages:
            budget -= PAGE_ALIGNMENT
        return budget
