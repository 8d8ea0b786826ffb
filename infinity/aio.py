"""Asynchronous file I/O: one engine per path, one future per request, for the NVMe tier.

An `Engine` has a submission thread of its own and a backend: the first of io_uring, libaio and plain threads
that works in the engine's directory. Requests may have any size, offset and address, and are cut into blocks.
Blocks that O_DIRECT does not take go through the page cache, and `Engine.stats` counts their bytes. Short
transfers are continued, EAGAIN and EINTR are retried. Any other error is raised by the future of its request,
and leaves the engine usable.

What the caller must know:

- A request's buffer belongs to the engine until the request's future is done. The engine keeps the buffer's
  owner alive, even if the future is dropped.
- Requests that are in flight together are not ordered, whether they overlap or not. If a request must come
  after another, wait for the other first. `sync` makes those writes durable whose futures were done when
  `sync` was called.
- `wait` and `result` raise the request's error. The error of a future that is dropped without them only
  counts in `Engine.stats.failures`.
- In a forked child every request raises ConfigError. Make new engines in the child.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infinity import _aio
from infinity._aio import Faults, File, Future, StripeMap, wait_all, wait_for_dropped
from infinity.errors import ConfigError

__all__ = [
    "BACKENDS",
    "BackendReport",
    "DirectoryReport",
    "Engine",
    "EngineStats",
    "Facts",
    "Faults",
    "File",
    "Future",
    "StripeMap",
    "Volume",
    "probe",
    "wait_all",
    "wait_for_dropped",
]

_MOST_STRIPES = 65536

BACKENDS = ("io_uring", "libaio", "threads")
"""Names of the backends, in the order in which they are tried."""

atexit.register(_aio._leave)


@dataclass(frozen=True)
class BackendReport:
    """The result of testing one backend by writing a file and reading it back."""

    name: str
    ok: bool
    direct: bool
    reason: str
    """Why the backend does not work, or works only through the page cache; "" otherwise."""
    features: str
    """Optional features of the kernel that the backend found and uses, as text for users."""


@dataclass(frozen=True)
class DirectoryReport:
    """The kinds of I/O that work in a directory."""

    direct: bool
    """Whether the file system says that it supports O_DIRECT."""
    memory_alignment: int
    """For O_DIRECT, memory addresses must be multiples of this many bytes."""
    offset_alignment: int
    """For O_DIRECT, offsets and lengths must be multiples of this many bytes, at least a page; see the note
    "unaligned parts" in csrc/aio/file.hpp.
    """
    backends: tuple[BackendReport, ...]


@dataclass(frozen=True)
class Facts:
    """The backend and the settings of an engine, and the reasons for the choice of the backend."""

    chosen: BackendReport
    rejected: tuple[BackendReport, ...]
    """Backends that were tried before the chosen one and did not work."""
    depth: int
    block_bytes: int
    registered_bytes: int
    """Bytes of the buffers that are registered with the kernel, by `register_buffer`."""
    registration_failure: str
    """Why the last call of `register_buffer` failed; "" if it did not."""

    @property
    def backend(self) -> str:
        return self.chosen.name


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, for reads, writes and syncs.

    A request is one call of `read`, `write` or `sync`, and is cut into blocks. A transfer is one submission
    of a block to the kernel, so a block that is submitted again counts again. Bytes count once the kernel has
    moved them.
    """

    read_requests: int
    read_transfers: int
    read_bytes: int
    read_busy_seconds: float
    """Seconds during which at least one read was in flight."""
    write_requests: int
    write_transfers: int
    write_bytes: int
    write_busy_seconds: float
    sync_requests: int
    sync_transfers: int
    sync_busy_seconds: float
    failures: int
    """Requests that ended with an error, including those whose futures were never waited for."""
    retries: int
    """Transfers that were submitted again after EAGAIN, after EINTR, or after a write of zero bytes."""
    short_transfers: int
    buffered_bytes: int
    """Bytes that went through the page cache instead of O_DIRECT."""
    verified_bytes: int
    """Bytes of reads that were compared with their checksums; see `Engine.open`."""
    queue_peak: int
    """The most requests that waited in the engine's queue at one time."""
    in_flight_peak: int
    waits: int
    """Calls of the submission thread to its backend, to submit transfers and to wait for completions."""


def probe(directory: str | os.PathLike[str] | None) -> DirectoryReport:
    """Test every backend by writing and reading back a few pages of a temporary file in `directory`.

    directory: None tests the backends on a file in memory, which shows only that their system calls are
    allowed. Raises StorageError if no file can be made, StorageFull if the file system is full.
    """
    found = _aio.probe(None if directory is None else os.fspath(directory))
    backends = tuple(BackendReport(**report) for report in found.pop("backends"))
    return DirectoryReport(backends=backends, **found)


class Engine(_aio.Engine):
    """Asynchronous I/O on one device.

    directory: any directory on the device, in which backends are tested; None tests them on a file in memory.
    backend: "auto" or one of BACKENDS. "auto" takes the backend that the environment variable INFINITY_AIO
    names, or else the first backend that works. block_bytes: requests are cut into blocks of this many bytes.
    depth: the most blocks in flight.

    write_slack: seconds. Blocks go out in the order of their deadlines. By default the deadline of a read is
    the moment of its request, and the deadline of a write is `write_slack` seconds after its request. So
    reads go ahead of writes, and writes never starve. faults: faults to inject between the engine and its
    backend, for tests.

    Raises ConfigError (with the reason) for an unknown or unavailable backend, StorageError for a directory
    that cannot be written, StorageFull for a directory without room.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        backend: str = "auto",
        depth: int = 32,
        block_bytes: int = 4 << 20,
        write_slack: float = 0.1,
        faults: Faults | None = None,
    ) -> None:
        if backend == "auto":
            backend = os.environ.get("INFINITY_AIO") or "auto"
        if not 0 <= depth < 1 << 31 or not 0 <= block_bytes < 1 << 31 or not 0 <= write_slack < 1e9:
            raise ConfigError(
                f"depth {depth}, block_bytes {block_bytes} or write_slack {write_slack} is out of range.",
                "Give a depth of 1 to 4096, blocks of 4096 bytes or a multiple up to 1 GiB, and 0 s or more.",
            )
        super().__init__(
            None if directory is None else os.fspath(directory),
            backend,
            depth,
            block_bytes,
            write_slack,
            faults,
        )

    def open(self, path: str | os.PathLike[str], write: bool = True, verify: bool = False) -> File:
        """Open an existing regular file or block device.

        write: False opens the file for reading only. verify: whether reads are compared with what was written
        through this File. The engine then keeps a CRC-32C of each block of 4096 bytes that is written or
        read, up to the present size of the file: 4 bytes of RAM each. Nobody else may write to the file, and
        blocks that were not written yet must not change after their first read. A block is not compared if
        the read covers only a part of it, or if the last write did.

        Raises StorageError (with errno) if the system refuses, ConfigError for other types of files, such as
        pipes.
        """
        return super().open(os.fspath(path), write, verify)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(**self._stats())

    @property
    def facts(self) -> Facts:
        found: dict[str, Any] = self._facts()
        chosen = BackendReport(**found.pop("chosen"))
        rejected = tuple(BackendReport(**report) for report in found.pop("rejected"))
        return Facts(chosen=chosen, rejected=rejected, **found)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Volume(_aio.Volume):
    """Several files, each on an engine of its own, that are used as one range of bytes.

    parts: pairs of (file, weight), where weight is an int from 1 to 65536. The range is cut into stripes of
    `stripe_bytes` bytes. A pattern of as many stripes as the sum of the weights repeats over the range, and
    `weight` stripes of each repetition lie in the pair's file. The attribute `map`, a StripeMap, says where
    each byte lies, and follows from the weights and `stripe_bytes` alone.

    `read`, `write` and `sync` work like the methods of a File, with one future for all files.
    """

    def __init__(self, parts: Iterable[tuple[File, int]], stripe_bytes: int = 4 << 20) -> None:
        pairs = list(parts)
        if not pairs:
            raise ConfigError("A volume needs at least one file.", "Give (file, weight) pairs.")
        if not 0 < stripe_bytes <= 1 << 40:
            raise ConfigError(f"A stripe of {stripe_bytes} bytes cannot be used.", "Give 1 byte to 1 TiB.")
        weights = [weight for _, weight in pairs]
        if not all(isinstance(weight, int) and 0 < weight <= _MOST_STRIPES for weight in weights):
            raise ConfigError(f"The weights are {weights}.", f"Give ints from 1 to {_MOST_STRIPES}.")
        super().__init__([file for file, _ in pairs], StripeMap(weights, stripe_bytes))
