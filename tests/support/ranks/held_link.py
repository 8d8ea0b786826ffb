"""A link to a device with memory of its own whose copies to the device stay under way until somebody waits
for them, as a GPU's copies may.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from infinity.tiers.link import DeviceLink, Timing, Transfer


class HeldCopy:
    """A copy to the device that counts as under way until `wait`. It keeps both of its tensors until then."""

    timing: Timing | None = None

    def __init__(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = (into, source)
        self._copied = False

    def happen(self) -> None:
        """Copy the bytes now. The copy still counts as under way until `wait`."""
        if self._ends is not None and not self._copied:
            self._ends[0].copy_(self._ends[1])
            self._copied = True

    def done(self) -> bool:
        return self._ends is None

    def wait(self) -> object:
        self.happen()
        self._ends = None
        return None


class HeldLink(DeviceLink):
    """A link whose copies to the device are HeldCopy objects.

    The bytes of a copy move when the link is next asked for a copy, a fence or `drain`, or in the copy's
    `wait` if that comes first.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._queued: list[HeldCopy] = []
        self._known = weakref.WeakSet[HeldCopy]()
        """All copies to which the runtime still refers. This set does not keep them alive itself."""

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
