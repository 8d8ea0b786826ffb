"""The cap: a limit on the bytes that torch's allocator may reserve on a CUDA device where runtimes have
budgets.

One limit is enough to keep the budgets, because all that counts against them is allocated by torch's
allocator: the memory of the pages (one large tensor), activations and workspaces. The limit is the sum of
the budgets of all runtimes, plus the bytes that this process had on the device before the first runtime.
Beyond the limit torch raises OutOfMemoryError in the code that asks for memory, often the model's own
forward. This package cannot add advice to that error, so it gives the advice in a warning.
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
class MemoryShare:
    """One runtime's share of a device's memory."""

    budget: int
    """Bytes that the pages, and everything else that torch allocates, may take together."""
    pages: int
    """Bytes of the budget that are allocated when the runtime opens, for pages and for the buffers through
    which pages move.
    """


def fraction_of(total: int, others: int, budgets: int) -> float:
    """The fraction of `total` bytes that limits torch's allocator to `others + budgets` bytes.

    total: bytes of the device's memory. others: bytes that no budget counts. budgets: the sum of the
    budgets in bytes. Torch multiplies `total` by the fraction and rounds down. The fraction is therefore
    the next larger float, so that the limit is not one byte too low. A pure function.
    """
    return min(1.0, math.nextafter((others + budgets) / total, 2.0))


def advice(asked: int, share: MemoryShare) -> str:
    """Make the text of the warning that precedes torch's OutOfMemoryError. A pure function.

    asked: bytes of the allocation that failed. share: the share of the runtime whose budget is used up.
    """
    rest = share.budget - share.pages
    return (
        f"Torch asked for {format_size(asked)} and its allocator is at the device budget of "
        f"{format_size(share.budget)}: pages have {format_size(share.pages)}, which leaves "
        f"{format_size(rest)} to activations, workspaces and holes between them. Give infinity.offload the "
        "largest batch as example_inputs, so that the plan knows what a step takes; or a larger device "
        "budget, or a smaller batch."
    )


class _Device:
    """The shares of all runtimes on one device, from which `set` sets the limit of torch's allocator.

    The attribute `others` is the number of bytes that this process had on the device before the first of
    these runtimes opened.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.others = 0
        self.shares: list[MemoryShare] = []

    def set(self) -> None:
        fraction = 1.0
        if self.shares:
            total = torch.cuda.get_device_properties(self.device).total_memory
            fraction = fraction_of(total, self.others, sum(each.budget for each in self.shares))
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)


_lock = threading.Lock()
_devices: dict[int, _Device] = {}


@contextlib.contextmanager
def capped(device: torch.device, share: MemoryShare, *, others: int) -> Iterator[None]:
    """A context in which torch's allocator may take `share.budget` bytes on `device` for one runtime.

    The limit is the sum of all runtimes' budgets and of `others`. Beyond the limit torch raises
    OutOfMemoryError. others: bytes that this process had allocated on the device before the runtime opened,
    and will keep. If several runtimes use the device, only the `others` of the first runtime counts.
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
    """Have torch call `_out_of_memory` before it raises any OutOfMemoryError.

    Done once per process, because torch has no way to remove the callback.
    """
    attach: Callable[[Any], None] | None = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_out_of_memory)


def _out_of_memory(device: int, asked: int, allocated: int, free: int) -> None:
    """Warn, in the thread that asked torch for memory, that a request of `asked` bytes is beyond the limit.

    Torch calls this function. device: the CUDA device's index. allocated, free: numbers from torch that are
    not used. Nothing is raised here, because an exception would replace torch's OutOfMemoryError.
    """
    found = _devices.get(device)
    if found is None or not found.shares:
        return
    with contextlib.suppress(Exception):
        warnings.warn(advice(asked, found.shares[-1]), stacklevel=2)
