"""A link to a device apart whose copies up are under way until somebody waits for them, as a GPU's may be."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from infinity.tiers.link import CpuLink, Timing, Transfer


class HeldCopy:
    """A copy up that compute can follow, while the host does not know that it is over: it keeps both ends."""

    timing: Timing | None = None

    def __init__(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = (into, source)
        self._copied = False

    def happen(self) -> None:
        """What the device does, whoever knows."""
        if self._ends is not None and not self._copied:
            self._ends[0].copy_(self._ends[1])
            self._copied = True

    def done(self) -> bool:
        return self._ends is None

    def wait(self) -> object:
        self.happen()
        self._ends = None
        return None


class HeldLink(CpuLink):
    """Every copy up is a HeldCopy. They happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self._queued: list[HeldCopy] = []
        self._known = weakref.WeakSet[HeldCopy]()
        """Not longer than somebody of the runtime's keeps them."""

    def to_device(self, into: torch.Tensor, source: torch.Tensor, *others: Any) -> Transfer:
        self._happen()
        self.asked += 1
        copy = HeldCopy(into, source)
        self._queued.append(copy)
        self._known.add(copy)
        return copy

    def to_host(self, into: torch.Tensor, source: torch.Tensor, *others: Any) -> Transfer:
        self._happen()
        return super().to_host(into, source, *others)

    def fence(self, transfer: Transfer, *others: Any) -> None:
        self._happen()

    def drain(self) -> None:
        self._happen()
        for copy in self._known:
            copy.wait()

    def _happen(self) -> None:
        for copy in self._queued:
            copy.happen()
        self._queued.clear()
