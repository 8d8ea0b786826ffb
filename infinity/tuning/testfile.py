"""A file to try settings on, and how fast a moment of I/O with them is."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers, aio
from infinity.config import format_size
from infinity.errors import StorageError, StorageFull, storage_error
from infinity.settings import DEFAULT, IoSettings
from infinity.tiers import Tier
from infinity.tiers.slab import check_directory
from infinity.tiers.tier import map_ram

REQUEST_BYTES = 4 << 20
"""As the runtime asks: larger than most blocks, so that the engine cuts them."""
SMALLEST = 32 << 20
"""Bytes of a file that still says something about a disk."""
_AHEAD = 2
"""Requests that wait in the queue beyond those in flight."""
_PATTERN_BYTES = 32 << 20


class Memory:
    """RAM that transfers start from or end in, random bytes: huge pages, as an arena has them."""

    def __init__(self, nbytes: int) -> None:
        self.region = map_ram(Tier.HOST, nbytes, huge_pages=True, populate=True)
        lease = _tiers.Pool(self.region, 0, self.region.nbytes, 4096).lease(self.region.nbytes, 0.0)
        assert isinstance(lease, _tiers.Lease)
        words: torch.Tensor = from_dlpack(lease.to_dlpack())[: nbytes // 8 * 8].view(torch.int64)
        pattern = words[: _PATTERN_BYTES // 8].random_(generator=torch.Generator().manual_seed(0))
        for start in range(pattern.numel(), words.numel(), pattern.numel()):
            part = words[start : start + pattern.numel()]
            part.copy_(pattern[: part.numel()])

    @property
    def nbytes(self) -> int:
        return self.region.nbytes

    def part(self, offset: int, nbytes: int) -> tuple[int, int, object]:
        """A buffer as the engine takes it."""
        return self.region.address + offset, nbytes, self.region


class TestFile:
    """A nameless file in `directory`, every byte of it written: nothing is left behind, however this ends.

    directory: on a disk. nbytes: its size; preallocated, so that a full disk says so at once. What is not
    written after `seconds` is left out, so that slow disks are tried on a smaller file. backend: writes it. A
    context manager.

    Raises StorageError for a directory that cannot hold pages or be written, StorageFull for one without
    that much room.
    """

    __test__ = False  # for pytest, which collects by name

    def __init__(
        self, directory: str, nbytes: int, memory: Memory, *, seconds: float = 8.0, backend: str = "auto"
    ) -> None:
        self.directory = os.fspath(check_directory(directory))
        self._memory = memory
        self._cleanup = contextlib.ExitStack()
        self._descriptor = _nameless(self.directory)
        self._cleanup.callback(os.close, self._descriptor)
        self._position = 0
        self.direct = False
        """O_DIRECT; without it, all passes through the page cache."""
        try:
            self._preallocate(nbytes)
            with self._errors_of_the_directory():
                written, rate = self._fill(nbytes, seconds, replace(DEFAULT, backend=backend))
        except BaseException:
            self.close()
            raise
        self.nbytes = written
        """Bytes that were written, and that trials use."""
        self.first_write = rate
        """Bytes per second of that."""

    @property
    def path(self) -> str:
        """Under which this process can open it."""
        return f"/proc/self/fd/{self._descriptor}"

    def rate(self, settings: IoSettings, mode: str, seconds: float) -> float:
        """Bytes per second of "read", "write" or "mixed" (half each) with these settings, for some time.

        Between the first request that is done and the last one, so that neither the filling of the queue nor
        its draining counts. Raises StorageError and StorageFull, naming the directory.
        """
        request = max(settings.block_bytes, REQUEST_BYTES)
        window = -(-settings.bytes_in_flight // request) + _AHEAD
        with self._errors_of_the_directory(), self.opened(settings) as file:
            if not file.direct:
                self._drop_page_cache()
            return measure(self.requests(file, mode, request), request, window, seconds)

    @contextlib.contextmanager
    def opened(self, settings: IoSettings) -> Iterator[aio.File]:
        """The file on an engine of its own, which has the memory registered where the kernel allows."""
        # Tried in memory: that it works on this disk is known, and a trial there would cost a sync each time.
        engine = aio.Engine(backend=settings.backend, depth=settings.depth, block_bytes=settings.block_bytes)
        with engine, engine.open(self.path) as file:
            engine.register_buffer(self._memory.region.address, self._memory.nbytes)
            yield file

    def close(self) -> None:
        """The file is gone. Again: does nothing."""
        self._cleanup.close()

    def __enter__(self) -> TestFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def requests(self, file: aio.File, mode: str, nbytes: int) -> Iterator[aio.Future]:
        """Requests along the file from where the last ones ended, so that no cache has what they read."""

        def places() -> Iterator[int]:
            while True:
                if self._position + nbytes > self.nbytes:
                    self._position = 0
                self._position += nbytes
                yield self._position - nbytes

        return issue(file, mode, nbytes, places(), self._memory)

    def _preallocate(self, nbytes: int) -> None:
        room = os.fstatvfs(self._descriptor)
        available = room.f_bavail * room.f_frsize
        if nbytes > available:
            raise StorageFull(
                f"{self.directory} has {format_size(available)} free of {format_size(nbytes)} needed.",
                f"Give --size at most {available} bytes, free space there, or give another path.",
                path=self.directory,
                errno=errno.ENOSPC,
            )
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise storage_error(
                "preallocate a test file in", self.directory, None, error.errno or 0
            ) from error

    def _fill(self, nbytes: int, seconds: float, settings: IoSettings) -> tuple[int, float]:
        """Write from the start until all is written or time is up; the bytes written, and their rate."""
        written, in_flight = 0, deque[aio.Future]()
        start = time.monotonic()
        with self.opened(settings) as file:
            self.direct = file.direct
            while written < nbytes and (written < SMALLEST or time.monotonic() - start < seconds):
                step = min(REQUEST_BYTES, nbytes - written)
                offset = written % (self._memory.nbytes // REQUEST_BYTES * REQUEST_BYTES)
                in_flight.append(file.write(self._memory.part(offset, step), written))
                written += step
                if len(in_flight) > settings.depth:
                    in_flight.popleft().result()
            aio.wait_all(list(in_flight))
            rate = written / (time.monotonic() - start)
            file.sync().result()
        return written, rate

    def _drop_page_cache(self) -> None:
        """Where there is no O_DIRECT: what was read or written before must not be found in RAM."""
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
    """Requests of `nbytes` at these offsets: reads, writes, or for "mixed" both in turn."""
    kinds = {"read": (target.read,), "write": (target.write,), "mixed": (target.read, target.write)}[mode]
    buffers = max(1, memory.nbytes // nbytes)  # some are used twice at a time; nobody looks at the bytes
    for number, place in enumerate(places):
        yield kinds[number % len(kinds)](memory.part(number % buffers * nbytes, nbytes), place)


def measure(requests: Iterator[aio.Future], nbytes: int, window: int, seconds: float) -> float:
    """Bytes per second of requests of `nbytes` each, `window` of them pending, for about `seconds`."""
    pending = deque(itertools.islice(requests, window))
    pending.popleft().result()
    start = now = time.perf_counter()
    done = 0
    while now - start < seconds or done < 2:
        pending.append(next(requests))
        pending.popleft().result()
        done += 1
        now = time.perf_counter()
    aio.wait_all(list(pending))
    return done * nbytes / (now - start)


def usable_bytes(directories: Sequence[str]) -> list[int]:
    """Free room of each directory's file system, divided by the directories that share it.

    Raises StorageError as `check_directory` does.
    """
    paths = [check_directory(directory) for directory in directories]
    devices = [os.stat(path).st_dev for path in paths]
    rooms = [os.statvfs(path) for path in paths]
    return [
        room.f_bavail * room.f_frsize // devices.count(device)
        for room, device in zip(rooms, devices, strict=True)
    ]


def _nameless(directory: str) -> int:
    """The descriptor of a new file without a name, or whose name is gone already."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise storage_error("create a file in", directory, None, error.errno or 0) from error
    try:
        descriptor, path = tempfile.mkstemp(prefix=".infinity-tune-", dir=directory)
    except OSError as error:
        raise storage_error("create a file in", directory, None, error.errno or 0) from error
    os.unlink(path)
    return descriptor
