"""The device tier: CUDA memory, or RAM in its place."""

from __future__ import annotations

import torch

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import BudgetError
from infinity.tiers.arena import HostArena
from infinity.tiers.pool import Pool
from infinity.tiers.tier import MemoryTier, Tier, map_ram, usable_device

_CUDA_KIND = 2
"""kDLCUDA."""

_CUDA_ALIGNMENT = 512
"""Bytes; what torch's CUDA allocator aligns to. Nothing on the device needs more."""

_CUDA_MARGIN = 512 << 20
"""Bytes left to the CUDA context, cuBLAS workspaces and other processes where no budget is given."""


class CudaTier(MemoryTier):
    """CUDA memory: one block of exactly `nbytes`, taken once from torch's allocator.

    nbytes: None takes what is free, less 5% or 512 MiB, whichever is more. Raises BudgetError where the
    device has not that much.
    """

    def __init__(self, device: torch.device, nbytes: int | None) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        available = max(0, free - max(_CUDA_MARGIN, free // 20)) // _CUDA_ALIGNMENT * _CUDA_ALIGNMENT
        wanted = available if nbytes is None else nbytes
        if wanted <= 0:
            raise BudgetError(
                f"The device {device} has {format_size(free)} free; the budget is {format_size(wanted)}.",
                "End other processes on it, or give a budget of at least one page.",
            )
        try:
            block = torch.empty(wanted, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"The device {device} has {format_size(free)} free; the budget is {format_size(wanted)}.",
                f"Give a device budget of at most {format_size(available)} ({available} bytes).",
            ) from error
        region = _tiers.adopt(
            block.data_ptr(), wanted, device_kind=_CUDA_KIND, device_index=block.device.index, owner=block
        )
        super().__init__(Tier.DEVICE, region, wanted, granule=_CUDA_ALIGNMENT)
        self.device = block.device
        self.shares_host = False

    def close(self) -> None:
        """As MemoryTier.close, once all work on the device is done: torch may hand the block out again."""
        if not self.closed:
            torch.cuda.synchronize(self.device)
        super().close()


class CpuDeviceTier(MemoryTier):
    """RAM in a device's place, with a budget of its own: every path of three tiers runs without a GPU."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(Tier.DEVICE, map_ram(Tier.DEVICE, nbytes), nbytes)
        self.device = torch.device("cpu")
        self.shares_host = False


class UnifiedTier(MemoryTier):
    """Device and host are the same RAM: pools come out of the host arena, and a page that is in one tier
    is in the other without a copy."""

    def __init__(self, host: HostArena) -> None:
        super().__init__(Tier.DEVICE, host.region, host.budget)
        self._host = host
        self.device = torch.device("cpu")
        self.shares_host = True

    @property
    def free_bytes(self) -> int:
        """Bytes of the host budget that belong to no pool yet."""
        return self._host.free_bytes

    def pool(self, name: str, nbytes: int, *, granule: int | None = None) -> Pool:
        """A pool of the host arena; see MemoryTier.pool."""
        pool = self._host.pool(name, nbytes, granule=granule)
        self.pools[name] = pool
        return pool


DeviceTier = CudaTier | CpuDeviceTier | UnifiedTier


def open_device(device: torch.device | str, budget: int | None, host: HostArena) -> DeviceTier:
    """The device tier for `device` with `budget` bytes; None means all that is free.

    On the CPU, None means unified memory: the tier shares `host`. Raises BudgetError where the bytes
    cannot be had, ConfigError for a device that is neither the CPU nor a CUDA device at hand.
    """
    target = usable_device(device)
    if target.type == "cuda":
        return CudaTier(target, budget)
    return UnifiedTier(host) if budget is None else CpuDeviceTier(budget)
