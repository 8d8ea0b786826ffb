"""The cap: the most that torch's allocator may take on a CUDA device while runtimes have budgets there.

Pages are one tensor of torch's, and activations, workspaces and all else come from the same allocator: so
one limit, of reserved bytes, holds the budget. It stands above what this process had on the device before,
which is nobody's budget, and above other runtimes' budgets. Beyond it torch raises OutOfMemoryError in
whoever asks, often the model's own forward; the cure is a warning then: nothing of ours is around that code.
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
    """What one runtime has of a device."""

    budget: int
    """Bytes: of pages, and of what torch allocates besides."""
    pages: int
    """Of these, bytes of pages and what moves them, which are there from the start."""


def fraction_of(total: int, others: int, budgets: int) -> float:
    """The fraction of `total` bytes by which torch lets exactly `others + budgets` be reserved. Pure.

    Not a byte less: torch multiplies and cuts off, and a budget may be a sum of whole segments.
    """
    return min(1.0, math.nextafter((others + budgets) / total, 2.0))


def advice(asked: int, share: Share) -> str:
    """For who runs out of memory on a device with this share, by asking for `asked` bytes. Pure."""
    rest = share.budget - share.pages
    return (
        f"Torch asked for {format_size(asked)} and its allocator is at the device budget of "
        f"{format_size(share.budget)}: pages have {format_size(share.pages)}, which leaves "
        f"{format_size(rest)} to activations, workspaces and holes between them. Give infinity.offload the "
        "largest batch as example_inputs, so that the plan knows what a step takes; or a larger device "
        "budget, or a smaller batch."
    )


class _Device:
    """The shares of one device, and what the process had there before the first of them."""

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
    """Inside, torch's allocator ends with OutOfMemoryError beyond `share.budget` bytes.

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
    """Have torch tell of every OutOfMemoryError before it raises it. Once: there is no way to end that."""
    attach: Callable[[Any], None] | None = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_out_of_memory)


def _out_of_memory(device: int, asked: int, allocated: int, free: int) -> None:
    """Called by torch in the thread that asked. An exception from here would take that error's place."""
    found = _devices.get(device)
    if found is None or not found.shares:
        return
    with contextlib.suppress(Exception):
        warnings.warn(advice(asked, found.shares[-1]), stacklevel=2)
