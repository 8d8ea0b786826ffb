"""Bandwidths of this machine, measured now: memory, the disk under a directory, the link to a device."""

from __future__ import annotations

import functools
import math
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infinity import cpu_adam
from infinity.settings import IoSettings, open_engine
from infinity.testfile import Memory, TestFile

_STREAM_ELEMENTS = 16 << 20
_GRADIENT_BYTES = 2 << 20
_GRADIENTS = 16
_FRESH_BYTES = 32 << 20
_BUFFERS = 32 << 20
"""Bytes of RAM, at the most, that a disk is probed with."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second of one path, through the I/O engine with direct I/O where there is such."""

    read: float
    write: float
    mixed: float
    """Reads and writes together, half of the bytes each; this is what a training step sees."""
    backend: str


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second between pinned host memory and a CUDA device, one way at a time."""

    to_device: float
    to_host: float


def stream_speed(*, repeats: int = 5) -> float:
    """Bytes per second that the update threads read and write in place over two fp32 arrays (0.1 GB).

    The median of `repeats`; the limit of every update, and below the sum of what one reads in
    memory's data sheet.
    """
    arrays = [torch.zeros(_STREAM_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(2)]
    with cpu_adam.ThreadPool() as pool:
        work = cpu_adam.Stream(read_write=arrays)
        pool.run(work)
        return statistics.median(work.bytes_moved / _seconds(lambda: pool.run(work)) for _ in range(repeats))


def gradient_speed(dtype: torch.dtype, *, repeats: int = 5) -> float:
    """Bytes per second of fresh gradients of this dtype that the update's threads copy and square, 2 MiB at a
    time, as a backward brings them: with nothing of it in a cache, and torch's threads between.

    The median of `repeats`.
    """
    count = _GRADIENT_BYTES // dtype.itemsize
    fresh, stored = (torch.zeros(_GRADIENTS, count, dtype=dtype, device="cpu") for _ in range(2))
    whole = [cpu_adam.Segment(0, count)]
    with cpu_adam.ThreadPool() as pool:

        def seconds() -> float:
            taken = 0.0
            for source, target in zip(fresh, stored, strict=True):
                source.add_(1)
                work = cpu_adam.Gradient(grad=source, copy=target, squares=True, segments=whole)
                taken += _seconds(functools.partial(pool.run, work))
            return taken

        seconds()
        return fresh.nbytes / statistics.median(seconds() for _ in range(repeats))


def fault_speed(*, repeats: int = 5) -> float:
    """Bytes per second that torch's threads lose to page faults where memory was given back and comes anew:
    what the first writes of 32 MiB take more than the second ones. Of `repeats` that than which a quarter
    lost less: others at work only add, once four times as much.
    """

    def lost() -> float:
        fresh = torch.frombuffer(mmap.mmap(-1, _FRESH_BYTES), dtype=torch.uint8)
        first, second = (_seconds(functools.partial(fresh.fill_, 1)) for _ in range(2))
        return max(first - second, 1e-9)

    lost()
    return _FRESH_BYTES / sorted(lost() for _ in range(repeats))[repeats // 4]


def link_speed(device: torch.device, host: torch.Tensor, *, repeats: int = 5) -> LinkSpeed:
    """Copy `host` (page-locked, uint8, such as a residency of an arena) each way; medians, by CUDA events."""
    there = torch.empty_like(host, device=device)
    cuda: Any = torch.cuda  # its events have no types

    def copies(target: torch.Tensor, source: torch.Tensor) -> float:
        rates: list[float] = []
        for _ in range(repeats + 1):  # the first warms up
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(host.nbytes / (start.elapsed_time(end) / 1e3))
        return statistics.median(rates[1:])

    with torch.cuda.device(device):
        return LinkSpeed(to_device=copies(there, host), to_host=copies(host, there))


def disk_speed(
    directory: str | os.PathLike[str],
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    fill_seconds: float = math.inf,
    backend: str = "auto",
) -> DiskSpeed:
    """Write, read and mix on a temporary file of `nbytes` bytes in `directory`, about `seconds` each.

    The file is written once before anything is timed, so that no first allocation is in the figures, and
    it has no name. What is not written after `fill_seconds` is left out. Engine, block size and depth are
    those of `infinity.settings.open_engine`. Raises StorageError and StorageFull as `TestFile` and the engine
    do, ConfigError for an unknown backend.
    """
    with open_engine(directory, backend=backend) as engine:
        facts = engine.facts
    settings = IoSettings(facts.backend, facts.block_bytes, facts.depth)
    memory = Memory(min(nbytes, _BUFFERS))
    with TestFile(os.fspath(directory), nbytes, memory, settings, seconds=fill_seconds) as file:
        write, read, mixed = (file.rate(settings, mode, seconds).whole for mode in ("write", "read", "mixed"))
    return DiskSpeed(read=read, write=write, mixed=mixed, backend=facts.backend)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
