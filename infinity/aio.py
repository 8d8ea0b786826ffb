"""Asynchronous file I/O for the NVMe tier: one engine per path, a future per request.

An `Engine` has a submission thread of its own over io_uring, libaio or plain threads: the first of them that
works in its directory. Requests of any size, offset and address are cut into blocks. Blocks that O_DIRECT
does not take go through the page cache, and `Engine.stats` counts their bytes. Every result is checked: short
transfers are continued, EAGAIN and EINTR are retried, any other error is raised by the future of its request
and leaves the engine usable.

What the caller must know:

- A buffer belongs to the engine until its future is done. The engine keeps the buffer's owner alive, also
  when the future is dropped.
- Requests in flight together are not ordered, overlapping or not. Wait for the first before asking for the
  second. `sync` makes those writes durable whose futures were done when it was asked for.
- `wait` and `result` raise the request's error. If a future is dropped without either, its error only counts
  in `Engine.stats.failures`.
- In a forked child every call raises ConfigError: make new engines there.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infinity import _aio
from infinity._aio import Faults, File, Future, StripeMap, wait_all
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
]

_MOST_STRIPES = 65536
"""The most stripes of one file in one period."""

BACKENDS = ("io_uring", "libaio", "threads")
"""Names of the backends, in the order of choice."""

atexit.register(_aio._leave)


@dataclass(frozen=True)
class BackendReport:
    """The outcome of trying one backend by writing and reading back."""

    name: str
    ok: bool
    """Whether the backend works."""
    direct: bool
    """Whether it works with O_DIRECT."""
    reason: str
    """The reason why it does not work, or only through the page cache; else empty."""
    features: str
    """The kernel's newer features that are in use."""


@dataclass(frozen=True)
class DirectoryReport:
    """The kinds of I/O that work in a directory."""

    direct: bool
    """Whether the file system says that it has O_DIRECT."""
    memory_alignment: int
    """Bytes that addresses have to be multiples of for O_DIRECT."""
    offset_alignment: int
    """Bytes that offsets and lengths have to be multiples of. At least a page, see the note "unaligned parts"
    in csrc/aio/file.hpp."""
    backends: tuple[BackendReport, ...]


@dataclass(frozen=True)
class Facts:
    """An engine's backend and settings, and the reasons for them."""

    chosen: BackendReport
    rejected: tuple[BackendReport, ...]
    """Backends that were tried before the chosen one and did not work."""
    depth: int
    block_bytes: int
    registered_bytes: int
    """Bytes of buffers that the kernel has registered."""
    registration_failure: str
    """The reason why the last `register_buffer` failed; else empty."""

    @property
    def backend(self) -> str:
        return self.chosen.name


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made. Bytes are those that were moved; transfers include resubmissions."""

    read_requests: int
    read_transfers: int
    read_bytes: int
    read_busy_seconds: float
    """Seconds with at least one read in flight."""
    write_requests: int
    write_transfers: int
    write_bytes: int
    write_busy_seconds: float
    sync_requests: int
    sync_transfers: int
    sync_busy_seconds: float
    failures: int
    """Requests that ended with an error, whether anyone asked for it or not."""
    retries: int
    """Transfers that were submitted again after EAGAIN or EINTR."""
    short_transfers: int
    buffered_bytes: int
    """Bytes that went through the page cache instead of O_DIRECT."""
    queue_peak: int
    """The most requests that waited for a free slot at one time."""
    in_flight_peak: int
    """The most transfers in the kernel at one time."""
    waits: int
    """Times that the submission thread called its backend."""


def probe(directory: str | os.PathLike[str] | None) -> DirectoryReport:
    """Try every backend by writing and reading back a few pages of a temporary file in `directory`.

    For None they are tried in memory, which shows only that the system calls are allowed. Raises StorageError
    where no file can be made, StorageFull where it cannot be written.
    """
    found = _aio.probe(None if directory is None else os.fspath(directory))
    backends = tuple(BackendReport(**report) for report in found.pop("backends"))
    return DirectoryReport(backends=backends, **found)


class Engine(_aio.Engine):
    """Asynchronous I/O on one device.

    Backends are tried in `directory` (any directory on the device; for None, in memory). `backend` is "auto"
    or one of BACKENDS; for "auto" the environment variable INFINITY_AIO decides, if set.

    Requests are cut into blocks of `block_bytes`; up to `depth` blocks are in flight. Blocks go out by
    deadline: a read's is the moment of its request, a write's is `write_slack` seconds later, so that reads
    go ahead of writes and writes never starve. `faults` makes a wrapper around the backend inject faults.

    Raises ConfigError for an unknown or unavailable backend (with the reason), StorageError for a directory
    that cannot be written, StorageFull for one without room.
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
                "Give 1 to 4096 transfers, a multiple of 4096 bytes up to 1 GiB, and seconds from 0.",
            )
        super().__init__(
            None if directory is None else os.fspath(directory),
            backend,
            depth,
            block_bytes,
            write_slack,
            faults,
        )

    def open(self, path: str | os.PathLike[str], write: bool = True) -> File:
        """Open an existing regular file or block device, for reading only unless `write`.

        Raises StorageError (with errno) where the system refuses, ConfigError for pipes and the like.
        """
        return super().open(os.fspath(path), write)

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
    """Several files, on engines of their own, as one range of bytes.

    `parts` are (file, weight) pairs: `weight` (an int from 1) stripes of each period lie in that file.
    `map` says where each byte lies and is made from (weights, stripe_bytes) alone, so a manifest that stores
    these can rebuild it.

    `read`, `write` and `sync` are those of a file, with one future for all parts.
    """

    def __init__(self, parts: Iterable[tuple[File, int]], stripe_bytes: int = 4 << 20) -> None:
        pairs = list(parts)
        if not pairs:
            raise ConfigError("A volume needs at least one file.", "Give (file, weight) pairs.")
        if not 0 < stripe_bytes <= 1 << 40:
            raise ConfigError(f"stripe_bytes is {stripe_bytes}.", "Give between 1 byte and 1 TiB.")
        weights = [weight for _, weight in pairs]
        if not all(isinstance(weight, int) and 0 < weight <= _MOST_STRIPES for weight in weights):
            raise ConfigError(f"The weights are {weights}.", f"Give ints from 1 to {_MOST_STRIPES}.")
        super().__init__([file for file, _ in pairs], StripeMap(weights, stripe_bytes))
