"""The native I/O engine (csrc/aio/bindings.cpp). Use infinity.aio."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Buffer, Self

from infinity.errors import StorageError

class TensorLike(Protocol):
    """A torch tensor or storage: contiguous, in host memory."""

    @property
    def device(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    def data_ptr(self) -> int: ...

Bytes = Buffer | TensorLike | tuple[int, int, object]
"""Memory to read into or write from: a C-contiguous buffer (bytearray, memoryview, numpy array), a CPU tensor
of any dtype, or (address, nbytes, owner), where owner is whatever keeps the memory alive."""

class Timing:
    """When one request began and ended. It holds nothing of the request's memory."""

    def times(self) -> tuple[int, int] | None:
        """(asked for, last byte landed), in nanoseconds of time.monotonic_ns(); None while under way."""

class Future:
    """The result of one request. Once done, nothing touches its buffer any more."""

    @property
    def timing(self) -> Timing:
        """When it began, and when it ended, whoever asks when."""

    def done(self) -> bool:
        """Whether all of it has landed, well or not. Never blocks, never raises the request's error."""

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until done, without the GIL; False after `timeout` seconds. Signals (Ctrl-C) are seen.

        Raises the request's error: StorageError, StorageFull.
        """

    def result(self, timeout: float | None = None) -> int:
        """Like `wait`, but returns the bytes moved, and raises TimeoutError after `timeout` seconds."""

    def exception(self, timeout: float | None = None) -> StorageError | None:
        """Like `result`, but returns the request's error, or None."""

def wait_all(futures: Sequence[Future], timeout: float | None = None) -> None:
    """Wait until all have landed, then raise the first one's error that has one.

    Raises TimeoutError after `timeout` seconds in all.
    """

class File:
    """An existing file, opened by `Engine.open`. Closing it, or leaving it as a context manager, refuses
    further requests and waits for those under way. It holds no lock; only writes change its size."""

    def read(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future:
        """Fill `buffer` from byte `offset`. A shorter file is an error of the future.

        `deadline` is a time.monotonic() time: requests with earlier ones go first; default now. Raises
        ConfigError for a bad buffer or offset, a closed file or engine, a forked child. A buffer of no bytes
        is done at once.
        """

    def write(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future:
        """Write `buffer` at byte `offset`, as `read`; the default deadline is `write_slack` from now."""

    def sync(self, deadline: float | None = None) -> Future:
        """fdatasync: makes durable what futures that are done now have written. Never repeated after EIO."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> str: ...
    @property
    def writable(self) -> bool: ...
    @property
    def size(self) -> int:
        """Bytes, now."""

    @property
    def direct(self) -> bool:
        """Aligned parts go through O_DIRECT."""

    @property
    def memory_alignment(self) -> int:
        """Bytes; buffers so aligned (relative to their offset) avoid the page cache."""

    @property
    def offset_alignment(self) -> int:
        """Bytes; offsets and sizes so aligned avoid the page cache."""

class Faults:
    """Rules for the fault-injecting backend, and counts of what it saw. Thread-safe, serves several engines.

    `kind` is "read", "write", "sync" or "any". A rule counts the transfers (blocks, resubmissions included)
    of its kind from when it was added, and acts on the `nth` (from 1) and the `times - 1` after it;
    times=None: on all from the nth.
    """

    def __init__(self) -> None: ...
    def fail(self, kind: str, nth: int, errno: int, times: int | None = 1) -> None:
        """The transfer does not happen; its result is `errno`."""

    def shorten(self, kind: str, nth: int, nbytes: int, times: int | None = 1) -> None:
        """Only the first `nbytes` bytes move. Does nothing to a sync."""

    def delay(self, kind: str, nth: int, seconds: float, times: int | None = 1) -> None:
        """The transfer starts `seconds` later; others overtake it."""

    def hold(self, kind: str, nth: int, times: int | None = 1) -> None:
        """The transfer starts at `release`, or as its engine closes; others overtake it."""

    def release(self) -> None:
        """Let what is held start, and hold no more: drops the rules that `hold`."""

    def clear(self) -> None:
        """Drop all rules; counts stay."""

    @property
    def calls(self) -> dict[str, int]:
        """Transfers seen, by kind."""

    @property
    def fired(self) -> int:
        """How often a rule has acted."""

class Engine:
    def __init__(
        self,
        directory: str | None,
        backend: str,
        depth: int,
        block_bytes: int,
        write_slack: float,
        faults: Faults | None,
    ) -> None: ...
    def open(self, path: str, write: bool = True) -> File: ...
    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Have the kernel pin memory once instead of at each request inside it.

        False where it does not (`facts.registration_failure` says why); requests work either way. The memory
        stays pinned until `close`.
        """

    def close(self) -> None:
        """Cancel what is queued (those futures raise StorageError with ECANCELED), wait for what is in the
        kernel, end the thread. A second call does nothing, nor does one in a forked child."""

    @property
    def closed(self) -> bool: ...
    def _stats(self) -> dict[str, Any]: ...
    def _facts(self) -> dict[str, Any]: ...

class StripeMap:
    """Where the bytes of a volume lie: a pure function of (weights, stripe_bytes)."""

    def __init__(self, weights: Sequence[int], stripe_bytes: int) -> None: ...
    @property
    def weights(self) -> tuple[int, ...]: ...
    @property
    def stripe_bytes(self) -> int: ...
    @property
    def period(self) -> tuple[int, ...]:
        """The file of each stripe of a period."""

    def extents(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(file index, offset in that file, nbytes) of a range, in the volume's order; neighbours merged."""

class Volume:
    def __init__(self, files: Sequence[File], map: StripeMap) -> None: ...
    def read(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future: ...
    def write(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future: ...
    def sync(self, deadline: float | None = None) -> Future: ...
    @property
    def files(self) -> tuple[File, ...]: ...
    @property
    def map(self) -> StripeMap: ...

def probe(directory: str | None) -> dict[str, Any]: ...
def _leave() -> None:
    """At the end of the interpreter: close all engines, let waiting threads come back."""
