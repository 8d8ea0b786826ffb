"""The three tiers, and the base class of the two tiers that are memory (device and host)."""

from __future__ import annotations

import enum

import torch

from infinity import _tiers
from infinity.config import format_size, round_up
from infinity.errors import BudgetError, ConfigError
from infinity.system import machine
from infinity.system.closing import Closing
from infinity.tiers.pool import Pool

PAGE_ALIGNMENT = 4096
"""Bytes that leases are aligned to by default. Every disk accepts this alignment for direct I/O, and it is
a multiple of the width of every vector register.
"""


LEAST_MARGIN = 512 << 20
"""The least number of bytes of RAM, or of a device's memory, that a default budget leaves unused."""


class Tier(enum.Enum):
    """The kinds of memory and storage in which a page can lie."""

    DEVICE = "device"
    """Memory of the device that computes. It is usually the smallest tier."""
    HOST = "host"
    """RAM. It is pinned where there is a CUDA device. The CPU update and direct I/O use it in place."""
    NVME = "nvme"
    """Slab files on disk. Pages there take no memory. They are read into leases of the other tiers before
    use.
    """


def less_margin(free: int, margin: int) -> int:
    """Return a tier's default budget in bytes: `free` - `margin`, at least 0, rounded down to whole 4 KiB.

    free: bytes of the tier's memory that are free now. margin: bytes of them to leave unused.
    """
    return max(0, free - margin) // PAGE_ALIGNMENT * PAGE_ALIGNMENT


def aligned_ram(nbytes: int) -> torch.Tensor:
    """New ordinary RAM outside of all budgets, uint8 (nbytes,), at an address that direct I/O takes."""
    memory = torch.empty(nbytes + PAGE_ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % PAGE_ALIGNMENT
    return memory[start : start + nbytes]


def map_ram(
    tier: Tier,
    nbytes: int,
    *,
    huge_pages: bool = False,
    numa_node: int = -1,
    populate: bool = False,
    shared: bool = False,
) -> _tiers.Region:
    """Map `nbytes` bytes of RAM for a tier, rounded up to whole 4 KiB pages.

    The memory is 2 MiB aligned and not inherited over fork(). tier: is named in errors. huge_pages: asks
    the kernel for huge pages. numa_node: the preferred node, -1 for none. populate: faults all pages in at
    once. shared: whether other processes can read the memory by `Region.descriptor`.

    Raises BudgetError where this process cannot have so many bytes now. Without this check the kernel would
    grant the addresses all the same, and would kill a process once the pages are written. Raises
    ConfigError where `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise ConfigError(f"A {tier.value} tier of {nbytes} bytes was asked for.", "Give at least one page.")
    # The kernel still counts memory as available that was mapped before and is not touched yet.
    usable = max(0, machine.memory().usable - _tiers.unbacked_bytes())
    cure = f"Give a {tier.value} budget of at most {format_size(usable)} ({usable} bytes)."
    if nbytes > usable:
        raise BudgetError(
            f"The {tier.value} budget is {format_size(nbytes)}; RAM and cgroup leave {format_size(usable)}.",
            cure,
        )
    try:
        return _tiers.map_host(
            nbytes, huge_pages=huge_pages, numa_node=numa_node, populate=populate, shared=shared
        )
    except OSError as error:
        raise BudgetError(
            f"The kernel grants no {format_size(nbytes)} for the {tier.value} tier: {error.strerror}.", cure
        ) from error


def usable_device(device: torch.device | str) -> torch.device:
    """Return `device` as a torch.device, with an index if it is a CUDA device.

    Raises ConfigError unless `device` is the CPU or a CUDA device that this process can use.
    """
    cure = 'Give "cpu", or "cuda" on a machine whose torch build finds a CUDA device.'
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"There is no device {device!r}.", cure) from error
    if target.type == "cpu":
        return target
    if target.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"The device {target} cannot be used here.", cure)
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"There are {torch.cuda.device_count()} CUDA devices, none is {target}.", cure)
    return torch.device("cuda", index)


class MemoryTier(Closing):
    """A tier in memory: one region of exactly `budget` bytes, which is divided into pools.

    A context manager. Closing the tier closes its pools. The memory itself is freed when the last lease and
    the last Storage over it are gone, so that a tensor that outlives the tier stays readable.
    """

    def __init__(
        self, tier: Tier, region: _tiers.Region, budget: int, *, granule: int = PAGE_ALIGNMENT
    ) -> None:
        self.tier = tier
        self.budget = budget
        self.granule = granule
        """Each lease starts at a multiple of this number of bytes: a power of two up to 2 MiB."""
        self.pools: dict[str, Pool] = {}
        self._region: _tiers.Region | None = region
        self._carved = 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._region is None

    @property
    def region(self) -> _tiers.Region:
        """The tier's memory. Raises ConfigError after `close`."""
        if self._region is None:
            raise ConfigError(f"The {self.tier.value} tier is closed.", "Use the tier before it is closed.")
        return self._region

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that belong to no pool yet."""
        return self.budget - self._carved

    def pool(self, name: str, nbytes: int) -> Pool:
        """Carve a pool of `nbytes` bytes out of the budget, rounded up to whole granules.

        The tier never gets the pool's bytes back. name: the pool's name, unique in the tier. Raises
        BudgetError where the budget does not have that many bytes left, and ConfigError for a name in use or
        a negative size.
        """
        region = self.region
        if nbytes < 0:
            raise ConfigError(f"The pool {name!r} was given {nbytes} bytes.", "Give zero bytes or more.")
        if name in self.pools:
            raise ConfigError(
                f"The {self.tier.value} tier already has a pool {name!r}.", "Give each pool its own name."
            )
        # A pool's address is a multiple of the granule. A device's region may start at any address.
        start = round_up(region.address + self._carved, self.granule) - region.address
        size = round_up(nbytes, self.granule)
        if start + size > self.budget:
            needed = start + size
            raise BudgetError(
                f"The pool {name!r} of {format_size(size)} does not fit the {self.tier.value} budget of "
                f"{format_size(self.budget)}, of which {format_size(self.free_bytes)} are left.",
                f"Give the {self.tier.value} tier {format_size(needed)} ({needed} bytes).",
                needed=needed,
            )
        pool = Pool(name, _tiers.Pool(region, start, size, self.granule))
        self.pools[name] = pool
        self._carved = start + size
        return pool

    def close(self) -> None:
        """Close every pool and drop this object's reference to the memory. A second call does nothing."""
        if self._region is None:
            return
        for pool in self.pools.values():
            pool.close()
        self._region = None
