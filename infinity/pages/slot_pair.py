"""Slot pair: the two slots in host RAM of a chunk's range of a page at home there.

[Note: slots in RAM]
A page at home in RAM whose unit has speculative updates (`Plan.speculating`) has two slots for each range
that a chunk update changes, as on NVMe (infinity/pages/parts.py): A is the range's place in the page, B lies
in the pool of second places. An update that may be undone reads the newest slot and writes the other one.
`step()` then makes that slot the newest one, and nothing is moved; or the results are forgotten. So the
newest bytes of a page may lie in several places: `Home.views` finds them.

The model may compute with the home itself, as the CPU does with parameters in its RAM, and other ranks may
copy parameters from there. The newest bytes then have to be in slot A, to which confirmed results are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from infinity.pages.home import Home


class SlotPair:
    """A range of a home in host RAM that a chunk update changes, and its two slots."""

    __slots__ = ("beside", "end", "home", "newest", "start", "tentative")

    def __init__(self, home: Home, start: int, end: int, beside: int) -> None:
        """start, end: the range of bytes in the home, which is slot A. beside: start of slot B in
        `Home.second`.
        """
        self.home = home
        self.start = start
        self.end = end
        self.beside = beside
        self.newest = 0
        """The slot with the newest bytes: 0 for A, 1 for B."""
        self.tentative: int | None = None
        """The slot with the results of a speculative update; None if there is none that `step()` has yet to
        confirm.
        """

    def place(self, slot: int) -> torch.Tensor:
        """The memory of a slot, uint8 (end - start,)."""
        memory, start = (self.home.second, self.beside) if slot else (self.home.memory, self.start)
        assert memory is not None
        return memory[start : start + self.end - self.start]

    def begin(self) -> torch.Tensor:
        """Begin a speculative update, and return the memory for its results."""
        self.tentative = 1 - self.newest
        return self.place(self.tentative)


def confirm(pairs: Iterable[SlotPair]) -> None:
    """Make the results of a speculative update, where there are any, the newest bytes."""
    for pair in pairs:
        if pair.tentative is not None:
            if pair.home.shown:
                pair.home.withdraw(pair.start, pair.end)
                pair.place(0).copy_(pair.place(1))
            else:
                pair.newest = pair.tentative
            pair.tentative = None
