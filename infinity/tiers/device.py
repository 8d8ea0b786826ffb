"""The device tier: CUDA memory, or RAM where the model computes on the CPU; and the limit on the bytes that
torch's allocator may reserve on a CUDA device where runtimes have budgets.

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
from infinity.errors import BudgetError
from infinity.tiers.arena import HostArena
from infinity.tiers.pool import Pool, adopt
from infinity.tiers.tier import LEAST_MARGIN, MemoryTier, Tier, less_margin, map_ram, usable_device

_CUDA_ALIGNMENT = 512
"""Bytes that torch's CUDA allocator aligns memory to. Nothing on the device needs a larger alignment."""

_MARGIN_SHARE = 64
"""The margin of the default device budget is 1/_MARGIN_SHARE of the free bytes plus LEAST_MARGIN bytes.

The share is for the stacks of GPU threads and for page tables, which are larger on larger devices. The
LEAST_MARGIN bytes are for other processes and for the code of kernels, which is loaded at their first run.
"""


def left_of(free: int, cached: int) -> int:
    """Return the bytes that this process can take on a CUDA device, less a safety margin; a multiple of 4096.

    free: free bytes of the device, as CUDA counts them. cached: bytes of empty segments that torch's
    allocator holds and would give back. Pure: this function does not ask the device.
    """
    found = free + cached
    return less_margin(found, LEAST_MARGIN + found // _MARGIN_SHARE)


def available_bytes(device: torch.device, own: int = 0) -> int:
    """Return the bytes that this process can take on a CUDA device now, less a safety margin.

    This is the default device budget. own: bytes of tensors that `infinity.offload` frees there.
    """
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return left_of(free, held - partly_used_bytes(device) + own)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that segments of torch's allocator have taken on a CUDA device so far."""
    return torch.cuda.max_memory_reserved(device)


def partly_used_bytes(device: torch.device) -> int:
    """The free bytes of those segments of torch's CUDA allocator in which a tensor lies. They cannot go back
    to CUDA.
    """
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on torch's current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class CudaTier(MemoryTier):
    """The device tier in CUDA memory: one block of exactly `nbytes` bytes from torch's allocator.

    nbytes: if None, the block has `available_bytes(device)` bytes. Raises BudgetError if the device does not
    have so many bytes free.
    """

    def __init__(self, device: torch.device, nbytes: int | None) -> None:
        available = available_bytes(device)
        wanted = available if nbytes is None else nbytes
        short = f"The device {device} has {format_size(available)} free; {format_size(wanted)} are wanted."
        if wanted <= 0:
            raise BudgetError(
                short,
                "End other processes on the device, or give a budget of at least one page.",
            )
        try:
            block = torch.empty(wanted, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                short,
                f"Give a device budget of at most {format_size(available)} ({available} bytes).",
            ) from error
        region = adopt(block.data_ptr(), wanted, block.device, block)
        super().__init__(Tier.DEVICE, region, wanted, granule=_CUDA_ALIGNMENT)
        self.device = block.device
        self.shares_host = False

    def close(self) -> None:
        """Wait until all work on the device is done, then close the tier.

        Torch may reuse the tier's block afterwards.
        """
        if not self.closed:
            torch.cuda.synchronize(self.device)
        super().close()


class CpuDeviceTier(MemoryTier):
    """The device tier in RAM, with a budget of its own. It allows all three tiers to run without a GPU."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(Tier.DEVICE, map_ram(Tier.DEVICE, nbytes), nbytes)
        self.device = torch.device("cpu")
        self.shares_host = False


class UnifiedTier(MemoryTier):
    """The device tier where device and host are the same RAM.

    The tier's pools are carved out of the host arena, so that a page in one of the two tiers is in the
    other tier without a copy.
    """

    def __init__(self, host: HostArena) -> None:
        super().__init__(Tier.DEVICE, host.region, host.budget)
        self._host = host
        self.device = torch.device("cpu")
        self.shares_host = True

    @property
    def free_bytes(self) -> int:
        """Bytes of the host arena that no pool has taken yet."""
        return self._host.free_bytes

    def pool(self, name: str, nbytes: int) -> Pool:
        """Carve a pool out of the host arena. Parameters and errors are those of `MemoryTier.pool`."""
        pool = self._host.pool(name, nbytes)
        self.pools[name] = pool
        return pool


DeviceTier = CudaTier | CpuDeviceTier | UnifiedTier


def open_device(device: torch.device | str, budget: int | None, host: HostArena) -> DeviceTier:
    """Open the device tier of `device` with a budget of `budget` bytes, and return the tier.

    budget: on a CUDA device, None means all free bytes less a safety margin. On the CPU, None means unified
    memory, where the tier shares the memory of `host`. Raises BudgetError where the bytes cannot be had,
    ConfigError for a device that is neither the CPU nor a usable CUDA device.
    """
    target = usable_device(device)
    if target.type == "cuda":
        return CudaTier(target, budget)
    return UnifiedTier(host) if budget is None else CpuDeviceTier(budget)


def check_room(device: torch.device, nbytes: int) -> None:
    """Raise BudgetError if a CUDA device does not have `nbytes` bytes free for its tier. They are allocated
    and freed, which leaves them with torch's allocator.
    """
    if device.type == "cuda":
        CudaTier(device, nbytes).close()


@dataclass(frozen=True)
class MemoryShare:
    """One runtime's share of a device's memory."""

    budget: int
    """Bytes that the pages, and everything else that torch allocates, may take together."""
    pages: int
    """Bytes of the budget that are allocated at once, for pages and the buffers through which they move."""


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
    """The shares of all runtimes on one CUDA device. They determine the limit of torch's allocator there.

    others: bytes that this process had on the device before the first of these runtimes opened.
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
    OutOfMemoryError. others: bytes of torch's segments that this process had on the device before the runtime
    opened, and will keep. If several runtimes use the device, only the `others` of the first runtime counts.
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
