"""Probes: measurements of the speed of the disk under a directory, and of the link to a device."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass

import torch

from infinity.system.io_settings import IoSettings, open_engine
from infinity.tiers.driver import compute_stream, current, driver_of
from infinity.tiers.trial_file import Memory, TestFile

_BUFFERS = 32 << 20
"""The most bytes of RAM that a measurement of a disk uses as buffers."""


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of the disk under one directory in bytes per second, measured through the I/O engine.

    I/O is direct (O_DIRECT) where the file system supports it.
    """

    read: float
    write: float
    mixed: float
    """Bytes per second of reads and writes together, half of the bytes each, as in a training step."""
    backend: str


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of copies between pinned host memory and a CUDA device in bytes per second.

    Each direction is measured while no copy runs in the other direction.
    """

    to_device: float
    to_host: float


def link_speed(device: torch.device, host: torch.Tensor, *, repeats: int = 5) -> LinkSpeed:
    """Measure the link's speed: the median of `repeats` copies of `host` in each direction.

    device: a device with a driver. host: a page-locked uint8 tensor, such as `Lease.residency` makes over
    bytes of an arena. Events of the device time the copies. Raises DeviceError.
    """
    driver = driver_of(device)
    assert driver is not None, "the device has a driver"
    with current(device):
        there, stream = torch.empty_like(host, device=device), driver.stream()
        stream.wait(compute_stream(device).record())  # kernels may still use the memory

        def copies(into: torch.Tensor, source: torch.Tensor) -> float:
            rates: list[float] = []
            for _ in range(repeats + 1):  # the first copy warms up and is left out
                start = stream.record(timing=True)
                end = stream.transfer(into.data_ptr(), source.data_ptr(), host.nbytes, timing=True)
                end.synchronize()
                rates.append(host.nbytes / (end.milliseconds_since(start) / 1e3))
            return statistics.median(rates[1:])

        return LinkSpeed(to_device=copies(there, host), to_host=copies(host, there))


def disk_speed(
    directory: str | os.PathLike[str],
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    fill_seconds: float = math.inf,
    backend: str = "auto",
) -> DiskSpeed:
    """Measure the speed of the disk under `directory`: writes, reads and both mixed.

    Each of the three takes about `seconds` seconds. The test file has `nbytes` bytes and no name. It is
    written once before anything is timed, so that no speed includes the disk's first allocation of blocks.
    If this first writing takes longer than `fill_seconds` seconds, the file stays shorter. Engine, block
    size and depth are those that `infinity.system.io_settings.open_engine` chooses. Raises StorageError and
    StorageFull like `TestFile` and the engine, ConfigError for an unknown backend.
    """
    with open_engine(directory, backend=backend) as engine:
        facts = engine.facts
    settings = IoSettings(facts.backend, facts.block_bytes, facts.depth)
    memory = Memory(min(nbytes, _BUFFERS))
    with TestFile(os.fspath(directory), nbytes, memory, settings, seconds=fill_seconds) as file:
        write, read, mixed = (file.rate(settings, mode, seconds).whole for mode in ("write", "read", "mixed"))
    return DiskSpeed(read=read, write=write, mixed=mixed, backend=facts.backend)
