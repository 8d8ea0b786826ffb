"""The host tier: one arena of RAM, whose bytes DMA, the optimizer update on the CPU and direct I/O use where
they are, without bounce buffers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity import _tiers
from infinity.config import format_size, round_up
from infinity.errors import DeviceError
from infinity.system import machine
from infinity.tiers.driver import Driver, compute_stream, current, driver_of, has_driver
from infinity.tiers.pool import tensor_over
from infinity.tiers.probes import LinkSpeed, link_speed
from infinity.tiers.tier import (
    LEAST_MARGIN,
    PAGE_ALIGNMENT,
    MemoryTier,
    Tier,
    less_margin,
    map_ram,
    usable_device,
)

_PINNED_AT_ONCE = 2 << 30
"""Each thread that registers memory with CUDA gets at least this number of bytes."""
_MOST_PINNING = 8
"""Number of threads that register memory at most. More would wait for the kernel's and the driver's locks."""
_HUGE_PAGE = 2 << 20
_PROBE_BYTES = 64 << 20
_LINK_BYTES = 256 << 20

_MARGIN_SHARE = 20
"""The default host budget leaves at least 1/_MARGIN_SHARE of the free RAM to other processes, and never
less than LEAST_MARGIN bytes.
"""


@dataclass(frozen=True)
class HugePageProbe:
    """The result of measuring whether huge pages make memory faster on this machine."""

    helps: bool
    speedup: float | None
    """Time with base pages divided by the time with huge pages; None where nothing was measured."""
    reason: str
    """A text for users that gives the measured speed-up, or the reason why nothing was measured."""


@functools.cache
def probe_huge_pages() -> HugePageProbe:
    """Measure whether huge pages speed up passes over 64 MiB of memory. Takes 0.4 s, once per process.

    Passes with base pages and with huge pages alternate. The result's `helps` is False if the median speed-up
    is below 0.98. Equal speed counts as help, because huge pages have two more advantages. A disk request
    from huge pages has fewer segments (twice the bandwidth, docs/lab-notes.md), and registering memory pins
    512 times fewer pages. The first touch of the memory is not timed: on a virtual machine its duration
    depends on how the host finds memory, and can vary by a factor of tens.
    """
    mode = machine.transparent_huge_pages()
    if mode in ("never", "absent"):
        return HugePageProbe(False, None, f"transparent huge pages are {mode} in this kernel")
    try:
        speedup = statistics.median(_time_passes(False) / _time_passes(True) for _ in range(5))
    except OSError as error:
        return HugePageProbe(False, None, f"the probe found no memory ({error.strerror})")
    return HugePageProbe(speedup >= 0.98, speedup, f"passes over memory run {speedup:.2f}x as fast with them")


def _time_passes(huge: bool) -> float:
    region = _tiers.map_host(_PROBE_BYTES, huge_pages=huge)
    words = tensor_over(region).view(torch.int64)
    words.zero_()
    start = time.perf_counter()
    for _ in range(4):
        words.add_(1)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Registration:
    """Whether CUDA has registered (page-locked) an arena for direct access, and a text that says why not."""

    done: bool
    reason: str
    seconds: float = 0.0
    """Seconds that the registration took."""


class HostArena(MemoryTier):
    """The host tier of this process: anonymous memory of exactly `nbytes` bytes, aligned to 2 MiB.

    The memory has huge pages where `probe_huge_pages` finds that they help, and lies on the NUMA node of
    `device`. If `device` is a CUDA device, the memory is registered (page-locked) with CUDA, so that copies
    run by DMA at full speed and beside compute. The memory does not come from torch's pinned allocator,
    which rounds each allocation up to a power of two. The memory is not inherited over fork(): a forked
    child (a DataLoader worker) must not touch tensors that lie in the arena.

    nbytes: the budget in bytes. huge_pages: None lets the probe decide. populate: True faults all pages in
    at once, on all CPUs, so that a machine with too little memory fails here. An arena that is registered
    with CUDA is always populated, because registering would fault the pages in on one CPU only. shared:
    whether other processes can read the memory by `region.descriptor`. Kernels rarely give such memory huge
    pages.

    Warns where CUDA does not register the memory, once for each reason. Raises BudgetError where this
    process cannot have `nbytes` bytes, ConfigError for a device that cannot be used.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str | None = None,
        huge_pages: bool | None = None,
        populate: bool = False,
        shared: bool = False,
    ) -> None:
        target = usable_device(device or "cpu")
        self.off: list[str] = []
        """Facilities that the arena does without, each with the reason, as text for users."""
        if huge_pages is None:
            probe = probe_huge_pages() if nbytes >= _PROBE_BYTES else None
            huge_pages = probe is not None and probe.helps
            if probe is not None and not probe.helps:
                self.off.append(f"huge pages ({probe.reason})")
        started = time.perf_counter()
        region = map_ram(
            Tier.HOST,
            nbytes,
            huge_pages=huge_pages,
            numa_node=_numa_node(target),
            populate=populate or has_driver(target),
            shared=shared,
        )
        super().__init__(Tier.HOST, region, nbytes)
        self.huge_pages = huge_pages
        self.mapped_seconds = time.perf_counter() - started
        """Seconds in which the memory was mapped and, if it is populated, faulted in."""
        self.cuda_registration = Registration(False, "no CUDA device is used")
        driver = driver_of(target)
        if driver is not None:
            with current(target):
                self.cuda_registration = register_with_cuda(region, driver, target)
            if not self.cuda_registration.done:
                say_slow_copies(self.cuda_registration.reason, nbytes)
                self.off.append(f"registration of RAM with CUDA ({self.cuda_registration.reason})")

    @property
    def pinned(self) -> str:
        """The seconds that page-locking the memory took, as text; empty if CUDA has not registered it."""
        found = self.cuda_registration
        if not found.done:
            return ""
        return (
            f"{format_size(self.budget)} of RAM: faulted in within {self.mapped_seconds:.1f} s, page-locked "
            f"within {found.seconds:.1f} s"
        )


def available_ram() -> int:
    """Bytes of RAM that this process can take now, less a safety margin. This is the default host budget."""
    return ram_budget(machine.memory().usable)


def ram_budget(free: int) -> int:
    """The default host budget where `free` bytes of RAM are free."""
    return less_margin(free, max(LEAST_MARGIN, free // _MARGIN_SHARE))


def arena_link(device: torch.device) -> tuple[LinkSpeed, Registration]:
    """Measure the speed of copies between a temporary arena and a device with a driver.

    Returns (speed, whether CUDA has registered the arena).
    """
    with (
        HostArena(_LINK_BYTES, device=device, populate=True) as arena,
        arena.pool("link", _LINK_BYTES).lease(_LINK_BYTES) as lease,
    ):
        return link_speed(device, lease.residency()), arena.cuda_registration


def register_with_cuda(region: _tiers.Region, driver: Driver, device: torch.device) -> Registration:
    """Page-lock a region for DMA by every CUDA device, for as long as the region is mapped.

    device: one of `driver`, to which bytes of the region are copied and back. Where they do not come back,
    the region does not stay page-locked. Large regions are registered in pieces, by several threads at once,
    or as a whole where copies over the seam of two pieces fail. A failure is returned and not raised, because
    copies work without registration, only slower. The CUDA driver is called directly, because the CUDA
    runtime would report the failure again at the next kernel launch.
    """
    started = time.perf_counter()
    threads = min(region.nbytes // _PINNED_AT_ONCE, _MOST_PINNING, len(os.sched_getaffinity(0)))
    length = round_up(-(-region.nbytes // max(1, threads)), _HUGE_PAGE)
    found = _register(region, driver, device, length)
    if not found.done and length < region.nbytes:
        found = _register(region, driver, device, region.nbytes)
    return replace(found, seconds=time.perf_counter() - started)


def _register(region: _tiers.Region, driver: Driver, device: torch.device, length: int) -> Registration:
    """Page-lock a region in pieces of `length` bytes, each by a thread of its own, and copy bytes over the
    first seam to `device` and back. After a failure nothing is page-locked.
    """
    end = region.address + region.nbytes
    starts = range(region.address, end, length)
    with ThreadPoolExecutor(len(starts)) as pool:
        registered = [pool.submit(driver.register_host, start, min(length, end - start)) for start in starts]
    errors = [each.exception() for each in registered]
    pieces = [start for start, error in zip(starts, errors, strict=True) if error is None]
    reason: str | None = None
    for error in filter(None, errors):
        if not isinstance(error, DeviceError):
            raise error
        reason = f"{error.call}: {error.name}"
    if reason is None:
        reason = _lost(region, device, 0 if len(pieces) == 1 else length - PAGE_ALIGNMENT // 2)
    undo: list[Callable[[], None]] = [functools.partial(driver.unregister_host, each) for each in pieces]
    if reason is None:
        for call in undo:
            region.before_release(call)
        return Registration(True, "registered")
    for call in (driver.synchronize, *undo) if undo else ():
        with contextlib.suppress(DeviceError):  # the copies may be under way
            call()
    return Registration(False, f"{reason}; copies are staged and slower")


def _lost(region: _tiers.Region, device: torch.device, start: int) -> str | None:
    """Copy bytes of a region to the device, and from there to the region's last bytes. Returns why they have
    not arrived; None if they have. start: index of the first byte.
    """
    memory = tensor_over(region)
    count = min(PAGE_ALIGNMENT, memory.nbytes // 2)
    sent, back = memory[start : start + count], memory[-count:]
    sent.copy_(torch.arange(count, device="cpu") % 251)
    back.zero_()
    try:
        there, stream = torch.empty(count, dtype=torch.uint8, device=device), compute_stream(device)
        stream.copy(there.data_ptr(), sent.data_ptr(), count)
        stream.transfer(back.data_ptr(), there.data_ptr(), count).synchronize()
        same = torch.equal(sent, back)
    except DeviceError as error:
        return f"{error.call}: {error.name}"
    finally:
        sent.zero_()
        back.zero_()
    return None if same else "other bytes came back from the device than were sent"


_said: set[str] = set()


def say_slow_copies(reason: str, nbytes: int) -> None:
    """Warn that an arena of `nbytes` bytes could not be registered with CUDA, once for each `reason`."""
    if reason in _said:
        return
    _said.add(reason)
    warnings.warn(
        f"The host tier of {format_size(nbytes)} could not be registered with CUDA ({reason}). "
        "Copies to and from the device are several times slower, and the trainer waits for them. "
        f"{REGISTER_CURE}",
        stacklevel=2,
    )


REGISTER_CURE = (
    "Raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit "
    "memlock=-1), or give a smaller host budget."
)


def _numa_node(device: torch.device) -> int:
    """The number of the NUMA node next to a CUDA device; -1 for the CPU, and where the node is not known."""
    if device.type != "cuda":
        return -1
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1
