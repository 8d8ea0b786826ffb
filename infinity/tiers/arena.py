"""The host tier: one arena of RAM that DMA, the CPU update and direct I/O all use in place."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import DeviceError
from infinity.system import machine
from infinity.tiers.driver import Driver, current, driver_of, has_driver
from infinity.tiers.probes import LinkSpeed, link_speed
from infinity.tiers.region import tensor_over
from infinity.tiers.tier import LEAST_MARGIN, MemoryTier, Tier, less_margin, map_ram, usable_device

_PROBE_BYTES = 64 << 20
_LINK_BYTES = 256 << 20

_MARGIN_SHARE = 20
"""Free RAM divided by this is left to others, or LEAST_MARGIN where that is more."""


@dataclass(frozen=True)
class HugePageProbe:
    """Whether huge pages help on this machine, and how that is known."""

    helps: bool
    speedup: float | None
    """Time with base pages divided by time with huge ones; None where it was not measured."""
    reason: str
    """The text that says how it is known, for people."""


@functools.cache
def probe_huge_pages() -> HugePageProbe:
    """Time passes over 64 MiB with base and with huge pages alternately. It takes 0.4 s, once a process.

    Huge pages help unless the median pair of passes is slower with them. An equal pass is a gain already: a
    disk takes larger requests from memory in fewer pieces (twice the bandwidth, docs/lab-notes.md) and
    registering has 512 times fewer pages to pin. The first touch is left out: on a virtual machine it
    measures how the host finds memory, tens of times slower once than the next time.
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
    """Whether CUDA has registered an arena for direct access, and if not, why."""

    done: bool
    reason: str


class HostArena(MemoryTier):
    """The process's host tier: anonymous memory of exactly `nbytes`, 2 MiB aligned.

    The memory has huge pages where `probe_huge_pages` says that they help, and lies on the NUMA node of
    `device`. Where `device` is a CUDA device, it is registered with CUDA, so that copies run by DMA at full
    speed and beside compute. It does not come from torch's pinned allocator, which rounds each allocation up
    to a power of two. It is not inherited over fork(): a forked child (a DataLoader worker) must not touch
    tensors that live in it.

    nbytes: bytes of the budget. huge_pages: None lets the probe decide. populate: whether to fault all pages
    in at once, on all CPUs, so that a machine without the memory says so here. An arena to be registered with
    CUDA is populated in any case, since registering would fault it in on one CPU.

    Warns, once for each cause, where CUDA does not register the memory. Raises BudgetError where this process
    cannot have that much, ConfigError for a device that is not at hand.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str | None = None,
        huge_pages: bool | None = None,
        populate: bool = False,
    ) -> None:
        target = usable_device(device or "cpu")
        if huge_pages is None:
            huge_pages = nbytes >= _PROBE_BYTES and probe_huge_pages().helps
        region = map_ram(
            Tier.HOST,
            nbytes,
            huge_pages=huge_pages,
            numa_node=_numa_node(target),
            populate=populate or has_driver(target),
        )
        super().__init__(Tier.HOST, region, nbytes)
        self.huge_pages = huge_pages
        self.cuda_registration = Registration(False, "no CUDA device is used")
        driver = driver_of(target)
        if driver is not None:
            with current(target):
                self.cuda_registration = register_with_cuda(region, driver)
            if not self.cuda_registration.done:
                say_slow_copies(self.cuda_registration.reason, nbytes)


def available_ram() -> int:
    """Bytes of RAM that this process can have now, less a margin: the host budget where none is given."""
    free = machine.memory().usable
    return less_margin(free, max(LEAST_MARGIN, free // _MARGIN_SHARE))


def arena_link() -> tuple[LinkSpeed, Registration]:
    """The link's speed between an arena and the current CUDA device, and the arena's registration."""
    with (
        HostArena(_LINK_BYTES, device="cuda", populate=True) as arena,
        arena.pool("link", _LINK_BYTES).lease(_LINK_BYTES) as lease,
    ):
        return link_speed(torch.device("cuda"), lease.residency()), arena.cuda_registration


def register_with_cuda(region: _tiers.Region, driver: Driver) -> Registration:
    """Page-lock a region for DMA by every CUDA device, for as long as it is mapped.

    A failure is returned, not raised: copies work without registration, only slower. The call goes to the
    driver: the CUDA runtime would report its failure at the next kernel launch.
    """
    try:
        driver.register_host(region.address, region.nbytes)
    except DeviceError as error:
        return Registration(False, f"{error.call}: {error.name}; copies are staged and slower")
    region.before_release(functools.partial(driver.unregister_host, region.address))
    return Registration(True, "registered")


_said: set[str] = set()


def say_slow_copies(reason: str, nbytes: int) -> None:
    """Warn that an arena of `nbytes` bytes could not be registered with CUDA: once for each reason."""
    if reason in _said:
        return
    _said.add(reason)
    warnings.warn(
        f"The host tier of {format_size(nbytes)} could not be registered with CUDA ({reason}), which makes "
        "copies to and from the device several times slower, and the trainer wait for them. "
        f"{REGISTER_CURE}",
        stacklevel=2,
    )


REGISTER_CURE = (
    "Raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit "
    "memlock=-1), or give a smaller host budget."
)


def _numa_node(device: torch.device) -> int:
    """The NUMA node next to a CUDA device, or -1 for no preference."""
    if device.type != "cuda":
        return -1
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1
