"""Trial file: a temporary file on which the rate of I/O with given settings is measured."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infinity import _tiers, aio
from infinity.errors import StorageError, storage_error
from infinity.system.closing import Closing
from infinity.system.directory import nameless_file, preallocate
from infinity.system.io_settings import IoSettings
from infinity.tiers.pool import tensor_over

MODES = ("read", "write", "mixed")
"""Names of the kinds of trials. "mixed" means that reads and writes alternate, half of the bytes each, as
in a training step.
"""

REQUEST_BYTES = 4 << 20
"""Bytes of one request of a trial, as in the runtime. Most block sizes that are tried are smaller; the I/O
engine then cuts each request into several blocks.
"""
SMALLEST = 32 << 20
"""The smallest size of a test file, in bytes, at which a measurement says something about the disk."""
_AHEAD = 2
"""Number of additional requests that a trial keeps pending, beyond those whose blocks fill the queue of the
I/O engine (`depth` blocks). They wait in the engine, so that the queue is never short of blocks.
"""
_PATTERN_BYTES = 32 << 20


@dataclass(frozen=True)
class Rate:
    """Speed of a series of requests in bytes per second, computed for two different spans of time."""

    whole: float
    """Bytes per second from the start of the first request to the end of the last request."""
    steady: float
    """Bytes per second from the end of the first request to the end of the last request that ended within
    the trial's time. The filling of the queue and its draining do not count. Short trials are compared by
    this rate.
    """


class Memory:
    """RAM that the requests of a trial read into and write from.

    The bytes are random, because zeros or compressible bytes may be less work for a disk. The RAM has huge
    pages, like an arena. Requests over base pages have more segments, and run at half the speed.
    """

    def __init__(self, nbytes: int) -> None:
        self.region = _tiers.map_host(nbytes, huge_pages=True, populate=True)
        words = tensor_over(self.region)[: nbytes // 8 * 8].view(torch.int64)
        # The generator is separate, because measuring must not change the caller's random numbers.
        own = torch.Generator().manual_seed(0)
        pattern = words[: _PATTERN_BYTES // 8].random_(generator=own)
        for start in range(pattern.numel(), words.numel(), pattern.numel()):
            part = words[start : start + pattern.numel()]
            part.copy_(pattern[: part.numel()])

    @property
    def nbytes(self) -> int:
        return self.region.nbytes

    def part(self, offset: int, nbytes: int) -> tuple[int, int, object]:
        """Return a part of this RAM as a buffer for the I/O engine: (address, nbytes, owner of the RAM).

        offset: bytes from the start of this RAM to the start of the part. nbytes: bytes of the part. The RAM
        stays mapped as long as anything refers to the owner.
        """
        return self.region.address + offset, nbytes, self.region


class TestFile(Closing):
    """A file without a name in `directory`, filled with bytes, which vanishes when it is closed.

    The file vanishes also when the process ends. A context manager. nbytes: size of the file, preallocated so
    that a full disk shows at once. memory: the RAM that all requests use; the file is filled with its bytes.
    settings: the I/O settings for filling the file. seconds: the time limit for filling it. If a slow disk
    needs longer, the file stays shorter, but it gets at least `SMALLEST` bytes.

    Raises StorageError for a directory that cannot be written, StorageFull for one without room.
    """

    __test__ = False  # pytest collects classes by this name otherwise

    def __init__(
        self, directory: str, nbytes: int, memory: Memory, settings: IoSettings, *, seconds: float = 8.0
    ) -> None:
        self.directory = os.path.realpath(directory)
        self._memory = memory
        self._cleanup = contextlib.ExitStack()
        self._descriptor = nameless_file(self.directory)
        self._cleanup.callback(os.close, self._descriptor)
        self._position = 0
        self.direct = False
        """Whether the file is open with O_DIRECT. Otherwise all I/O passes through the page cache."""
        try:
            preallocate(self._descriptor, nbytes, self.directory)
            with self._errors_of_the_directory():
                written, rate = self._fill(nbytes, seconds, settings)
        except BaseException:
            self.close()
            raise
        self.nbytes = written
        """Number of bytes that were written. Trials use only these bytes."""
        self.first_write = rate
        """Bytes per second at which the file was first written."""

    @property
    def path(self) -> str:
        """The path under which this process can open the file."""
        return f"/proc/self/fd/{self._descriptor}"

    def rate(self, settings: IoSettings, mode: str, seconds: float) -> Rate:
        """Measure the rate of requests of kind `mode` (one of MODES) for about `seconds` seconds.

        settings: the I/O settings to measure. Raises StorageError and StorageFull with the directory's name.
        """
        request = min(max(settings.block_bytes, REQUEST_BYTES), self.nbytes, self._memory.nbytes)
        blocks = -(-request // settings.block_bytes)
        window = -(-settings.depth // blocks) + _AHEAD
        with self._errors_of_the_directory(), self.opened(settings) as file:
            if not file.direct:
                self._drop_page_cache()
            return measure(self.requests(file, mode, request), request, window, seconds)

    @contextlib.contextmanager
    def opened(self, settings: IoSettings) -> Iterator[aio.File]:
        """A context with the file opened in a new I/O engine, which ends with the context.

        settings: backend, depth and block size of the engine. The RAM that requests read into and write from
        (`memory` of the constructor) is registered with the engine, where the kernel allows it.
        """
        # The engine gets no directory, so that it tests its backend in memory. The backend is known to work
        # on this disk, and a test there would cost a sync each time.
        engine = aio.Engine(backend=settings.backend, depth=settings.depth, block_bytes=settings.block_bytes)
        with engine, engine.open(self.path) as file:
            engine.register_buffer(self._memory.region.address, self._memory.nbytes)
            yield file

    def close(self) -> None:
        """Close the file, which also removes it. A second call does nothing."""
        self._cleanup.close()

    def requests(self, file: aio.File, mode: str, nbytes: int) -> Iterator[aio.Future]:
        """Start one request of `nbytes` bytes after another, without end, and yield the requests' futures.

        mode: one of MODES. The requests go through the file from where the requests of the last call ended,
        so that no cache has the bytes that they read. At the end of the file they begin at its start.
        """

        def places() -> Iterator[int]:
            while True:
                if self._position + nbytes > self.nbytes:
                    self._position = 0
                self._position += nbytes
                yield self._position - nbytes

        return issue(file, mode, nbytes, places(), self._memory)

    def _fill(self, nbytes: int, seconds: float, settings: IoSettings) -> tuple[int, float]:
        """Write the file from its start until `nbytes` bytes are written, or `seconds` seconds are over and
        at least `SMALLEST` bytes are written.

        Returns (number of bytes written, bytes per second).
        """
        written, in_flight = 0, deque[aio.Future]()
        buffers = max(1, self._memory.nbytes // REQUEST_BYTES)
        start = time.monotonic()
        with self.opened(settings) as file:
            self.direct = file.direct
            while written < nbytes and (written < SMALLEST or time.monotonic() - start < seconds):
                step = min(REQUEST_BYTES, nbytes - written)
                offset = written // REQUEST_BYTES % buffers * REQUEST_BYTES
                in_flight.append(file.write(self._memory.part(offset, step), written))
                written += step
                if len(in_flight) > settings.depth:
                    in_flight.popleft().result()
            aio.wait_all(list(in_flight))
            rate = written / (time.monotonic() - start)
            file.sync().result()
        return written, rate

    def _drop_page_cache(self) -> None:
        """Drop the file from the page cache. Without O_DIRECT, reads would otherwise find bytes in RAM."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _errors_of_the_directory(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise storage_error(
                "do I/O on a test file in", self.directory, error.offset, error.errno or 0
            ) from error


def issue(
    target: aio.File | aio.Volume, mode: str, nbytes: int, places: Iterator[int], memory: Memory
) -> Iterator[aio.Future]:
    """Start one request of `nbytes` bytes at each offset of `places`, and yield the requests' futures.

    target: the file or volume to read and write. mode: "read", "write", or "mixed" for reads and writes in
    turn. places: offsets in `target`, in bytes. memory: the RAM that is cut into buffers of the requests.
    Several requests may use one buffer at the same time. A request starts when its future is asked for.
    """
    kinds = {"read": (target.read,), "write": (target.write,), "mixed": (target.read, target.write)}[mode]
    buffers = max(1, memory.nbytes // nbytes)  # requests may share a buffer, since its bytes do not matter
    for number, place in enumerate(places):
        yield kinds[number % len(kinds)](memory.part(number % buffers * nbytes, nbytes), place)


def measure(requests: Iterator[aio.Future], nbytes: int, window: int, seconds: float) -> Rate:
    """Measure the rate of `requests` for about `seconds` seconds.

    requests: an endless iterator that starts a request of `nbytes` bytes whenever the next future is taken
    from it; see `issue`. window: number of requests that are pending at a time.
    """
    begun = time.perf_counter()
    pending = deque(itertools.islice(requests, window))
    pending.popleft().result()
    start = now = time.perf_counter()
    done = 0
    while now - start < seconds or done < 2:
        pending.append(next(requests))
        pending.popleft().result()
        done += 1
        now = time.perf_counter()
    steady = done * nbytes / (now - start)
    moved = (1 + done + len(pending)) * nbytes
    aio.wait_all(list(pending))
    return Rate(whole=moved / (time.perf_counter() - begun), steady=steady)
