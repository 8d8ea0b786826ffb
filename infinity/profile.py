"""Bandwidths of this machine, measured now: memory, the disk under a directory, the link to a device."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers, aio, cpu_adam
from infinity.errors import storage_error
from infinity.settings import open_engine

_STREAM_ELEMENTS = 16 << 20
_TRANSFER_BYTES = 16 << 20
_REQUESTS_IN_FLIGHT = 8


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
    it is removed. What is not written after `fill_seconds` is left out. Its bytes are random: a disk may find
    zeros, or what compresses, less work. Engine, block size and depth are those of
    `infinity.settings.open_engine`. Raises StorageError and StorageFull as the engine does, ConfigError for
    an unknown backend.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix="infinity-profile-", dir=directory)
    except OSError as error:
        raise storage_error("create a file in", os.fspath(directory), None, error.errno or 0) from error
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(os.unlink, path)
        cleanup.callback(os.close, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            raise storage_error("preallocate", path, None, error.errno or 0) from error
        engine = cleanup.enter_context(open_engine(directory, backend=backend))
        file = cleanup.enter_context(engine.open(path))
        return _measure_disk(file, engine.facts.backend, nbytes, seconds, fill_seconds)


_Request = Callable[[tuple[int, int, object], int], aio.Future]


def _measure_disk(
    file: aio.File, backend: str, nbytes: int, seconds: float, fill_seconds: float
) -> DiskSpeed:
    lease_bytes = min(nbytes, _TRANSFER_BYTES)
    # Huge, as an arena's pages are: a request over base pages has more segments, and a disk half the speed.
    region = _tiers.map_host(nbytes=2 * lease_bytes, huge_pages=True, populate=True)
    lease = _tiers.Pool(region, 0, region.nbytes, 4096).lease(region.nbytes, 0.0)
    assert isinstance(lease, _tiers.Lease)
    own = torch.Generator().manual_seed(0)  # what is measured leaves no trace in the caller's random numbers
    from_dlpack(lease.to_dlpack()).view(torch.int64).random_(generator=own)
    buffers = [(region.address + index * lease_bytes, lease_bytes, region) for index in range(2)]
    offsets = range(0, nbytes - lease_bytes + 1, lease_bytes)

    def rate(seconds: float, *requests: _Request) -> float:
        """Bytes per second of the requests in turn along the file, several in flight, until time is up."""
        moved, in_flight = 0, deque[aio.Future]()
        start = time.perf_counter()
        for number, offset in enumerate(itertools.cycle(offsets)):
            if number and time.perf_counter() - start >= seconds:
                break
            kind = number % len(requests)
            in_flight.append(requests[kind](buffers[kind], offset))
            moved += lease_bytes
            if len(in_flight) > _REQUESTS_IN_FLIGHT:
                in_flight.popleft().result()
        aio.wait_all(list(in_flight))
        return moved / (time.perf_counter() - start)

    offsets = offsets[: _fill(lambda offset: file.write(buffers[0], offset), offsets, fill_seconds)]
    return DiskSpeed(
        write=rate(seconds, file.write),
        read=rate(seconds, file.read),
        mixed=rate(seconds, file.read, file.write),
        backend=backend,
    )


def _fill(write: Callable[[int], aio.Future], offsets: range, seconds: float) -> int:
    """Write at the offsets in turn, one at least, until time is up; how many were written."""
    in_flight = deque[aio.Future]()
    start, done = time.perf_counter(), 0
    for offset in offsets:
        if done and time.perf_counter() - start >= seconds:
            break
        in_flight.append(write(offset))
        done += 1
        if len(in_flight) > _REQUESTS_IN_FLIGHT:
            in_flight.popleft().result()
    aio.wait_all(list(in_flight))
    return done


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
