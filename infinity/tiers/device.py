"""The device tier: CUDA memory, or RAM where the model computes on the CPU."""

from __future__ import annotations

import torch

from infinity.config import format_size
from infinity.errors import BudgetError
from infinity.tiers.arena import HostArena
from infinity.tiers.pool import Pool
from infinity.tiers.region import adopt
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


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process can take on a CUDA device now, less a safety margin.

    This is the default device budget.
    """
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    in_use = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    return left_of(free, held - in_use)


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

    def pool(self, name: str, nbytes: int, *, granule: int | None = None) -> Pool:
        """Carve a pool out of the host arena. Parameters and errors are those of `MemoryTier.pool`."""
        pool = self._host.pool(name, nbytes, granule=granule)
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
