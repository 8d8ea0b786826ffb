"""The cap: the most that torch's allocator may take on a CUDA device while runtimes have budgets there.

Pages are one tensor of torch's, and activations, workspaces and all else come from the same allocator: so
one limit, of reserved bytes, holds the budget. The limit is the sum of all runtimes' budgets and of the bytes
that this process had on the device before, which no budget counts. Beyond it torch raises OutOfMemoryError in
the code that asks, often the model's own forward. No code of this package is around that to add the cure to
the error, so a warning gives it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from infinity.config import format_size


@dataclass(frozen=True)
class Share:
    """One runtime's share of a device."""

    budget: int
    """Bytes for pages, and for all else that torch allocates."""
    pages: int
    """Bytes within the budget for pages and the buffers that move them; taken from the start."""


def fraction_of(total: int, others: int, budgets: int) -> float:
    """The fraction of `total` bytes with which torch's limit is `others + budgets` bytes. Pure.

    The limit is not a byte less: torch multiplies and rounds down, and a budget may be exactly a sum of whole
    segments.
    """
    return min(1.0, math.nextafter((others + budgets) / total, 2.0))


def advice(asked: int, share: Share) -> str:
    """The warning's text where torch asked for `asked` bytes and the device's share was used up. Pure."""
    rest = share.budget - share.pages
    return (
        f"Torch asked for {format_size(asked)} and its allocator is at the device budget of "
        f"{format_size(share.budget)}: pages have {format_size(share.pages)}, which leaves "
        f"{format_size(rest)} to activations, workspaces and holes between them. Give infinity.offload the "
        "largest batch as example_inputs, so that the plan knows what a step takes; or a larger device "
        "budget, or a smaller batch."
    )


class _Device:
    """The shares of one device, and `others`: bytes that the process had there before the first of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.others = 0
        self.shares: list[Share] = []

    def set(self) -> None:
        fraction = 1.0
        if self.shares:
            total = torch.cuda.get_device_properties(self.device).total_memory
            fraction = fraction_of(total, self.others, sum(each.budget for each in self.shares))
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)


_lock = threading.Lock()
_devices: dict[int, _Device] = {}


@contextlib.contextmanager
def capped(device: torch.device, share: Share, *, others: int) -> Iterator[None]:
    """A context in which torch's allocator raises OutOfMemoryError beyond `share.budget` bytes.

    others: bytes that this process had allocated on the device before the runtime opened, and will keep.
    """
    assert device.index is not None
    _watch()
    with _lock:
        found = _devices.setdefault(device.index, _Device(device))
        if not found.shares:
            found.others = others
        found.shares.append(share)
        found.set()
    try:
        yield
    finally:
        with _lock:
            found.shares.remove(share)
            found.set()


@functools.cache
def _watch() -> None:
    """Have torch call `_out_of_memory` before any OutOfMemoryError; once a process, for nothing unregisters
    it."""
    attach: Callable[[Any], None] | None = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_out_of_memory)


def _out_of_memory(device: int, asked: int, allocated: int, free: int) -> None:
    """Warn, in the thread that asked torch for memory. An exception would replace the OutOfMemoryError."""
    found = _devices.get(device)
    if found is None or not found.shares:
        return
    with contextlib.suppress(Exception):
        warnings.warn(advice(asked, found.shares[-1]), stacklevel=2)
