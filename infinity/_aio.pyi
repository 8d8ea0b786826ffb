"""The native I/O engine (csrc/aio/bindings.cpp). Use infinity.aio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Buffer, Self

from infinity.errors import InfinityError

class TensorLike(Protocol):
    """A torch tensor or storage: contiguous, in host memory."""

    @property
    def device(self) -> Any: ...
    @property
    def nbytes(self) -> Any: ...
    def data_ptr(self) -> int: ...

Bytes = Buffer | TensorLike | tuple[int, int, object]
"""Memory to read into or to write from. It is a C-contiguous buffer (bytearray, memoryview, numpy array), a
CPU tensor of any dtype, or a tuple (address, nbytes, owner). The owner is any object that keeps the memory
alive.
"""

class Timing:
    """The times at which one request began and ended. Does not keep the request's buffer alive."""

    def times(self) -> tuple[int, int] | None:
        """(began, ended) in nanoseconds of time.monotonic_ns(); None while the request is under way.

        The request begins when it is asked for, and ends when its last byte was moved.
        """

class Future:
    """The result of one request. Once the future is done, the engine no longer uses the request's buffer."""

    @property
    def timing(self) -> Timing:
        """The times at which the request began and ended, which do not depend on when `wait` is called."""

    def done(self) -> bool:
        """Whether the request has ended, successfully or with an error.

        Never blocks, and never raises the request's error.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep, without the GIL, until the request has ended.

        Returns False after `timeout` seconds, otherwise True. A signal (Ctrl-C) ends the sleep. Raises the
        request's error (StorageError, StorageFull, CorruptState).
        """

    def watcher(self) -> Future:
        """Return another future of the same request, which does not keep the request's buffer alive."""

    def result(self, timeout: float | None = None) -> int:
        """Like `wait`, but returns the bytes moved, and raises TimeoutError after `timeout` seconds."""

    def exception(self, timeout: float | None = None) -> InfinityError | None:
        """Like `result`, but returns the request's error instead of raising it.

        Returns None for a request without an error.
        """

def wait_all(futures: Sequence[Future], timeout: float | None = None) -> None:
    """Wait until all futures are done, then raise the error of the first future that has an error.

    Raises TimeoutError after `timeout` seconds in all.
    """

def wait_for_dropped() -> None:
    """Wait until all requests have ended whose futures were dropped before, and let go of their buffers."""

class File:
    """An existing file, opened by `Engine.open`.

    Closing the file, or leaving its `with` block, refuses further requests and waits for requests under
    way. Opening takes no lock on the file. The file's size changes only by writes.
    """

    def read(
        self,
        buffer: Bytes,
        offset: int,
        deadline: float | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> Future:
        """Start to fill `buffer` from byte `offset` of the file.

        The future raises an error where the file is too short, and CorruptState for other bytes than were
        written, if the file is verified. describe: function that is called for that error, with the offset
        of the first such 4096 bytes in `buffer`, and returns words for what lies there. deadline: a
        time.monotonic() time in seconds, by default now; requests with earlier deadlines go first. Raises
        ConfigError for an unusable buffer or offset, a closed file or engine, and in a forked child. The
        future of a request for zero bytes is done at once.
        """

    def write(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future:
        """Start to write `buffer` at byte `offset` of the file.

        deadline: a time.monotonic() time in seconds, by default now plus the engine's `write_slack`. Raises
        the errors of `read`, and ConfigError for a file that was opened for reading only.
        """

    def sync(self, deadline: float | None = None) -> Future:
        """Start an fdatasync, which makes durable all writes whose futures are done now.

        A sync that fails with EIO is not repeated.
        """

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
        """Size of the file in bytes, as it is now."""

    @property
    def direct(self) -> bool:
        """Whether the aligned parts of requests go through O_DIRECT."""

    @property
    def memory_alignment(self) -> int:
        """Alignment of memory in bytes that O_DIRECT needs.

        A buffer avoids the page cache if its address and its file offset leave the same remainder when
        divided by this number.
        """

    @property
    def offset_alignment(self) -> int:
        """Alignment of offsets and lengths in bytes that O_DIRECT needs.

        Aligned requests avoid the page cache.
        """

class Faults:
    """Rules that make transfers of an engine fail, stay short, lie or wait, counts, a recording; for tests.

    One object can serve several engines, and is thread-safe. A transfer is one block that is handed to the
    kernel, and counts again when it is submitted again. Each method that adds a rule has these parameters.
    kind: "read", "write", "sync" or "any", the transfers that the rule is for. nth, times: the rule acts on
    `times` transfers of its kind from the `nth` on. Transfers are counted from 1, since the rule was added.
    times=None means all transfers from the `nth` on. path: the file whose transfers the rule is for, spelled
    as in `Engine.open`. None means all files.
    """

    def __init__(self) -> None: ...
    def fail(self, kind: str, nth: int, errno: int, times: int | None = 1, path: str | None = None) -> None:
        """Add a rule by which a transfer does not happen and ends with the error `errno`."""

    def shorten(
        self, kind: str, nth: int, nbytes: int, times: int | None = 1, path: str | None = None
    ) -> None:
        """Add a rule by which a transfer moves only its first `nbytes` bytes.

        The rule does nothing to a sync.
        """

    def tear(self, nth: int, nbytes: int = 0, times: int | None = 1, path: str | None = None) -> None:
        """Add a rule by which a write moves only its first `nbytes` bytes, and ends as if it had moved all.

        With nbytes=0 the write is dropped. `nth` counts writes.
        """

    def delay(
        self, kind: str, nth: int, seconds: float, times: int | None = 1, path: str | None = None
    ) -> None:
        """Add a rule by which a transfer starts `seconds` seconds later.

        Other transfers may overtake the delayed transfer.
        """

    def hold(self, kind: str, nth: int, times: int | None = 1, path: str | None = None) -> None:
        """Add a rule by which a transfer does not start until `release` is called or the engine closes.

        Other transfers may overtake the held transfer.
        """

    def release(self) -> None:
        """Let all held transfers start, and drop all rules that `hold` added."""

    def clear(self) -> None:
        """Drop all rules. The counts stay."""

    def record(self) -> None:
        """Start to record the writes and syncs of the engines, and the operations given to `note`.

        Every write keeps a copy of its bytes in memory.
        """

    def note(self, kind: str, path: str, target: str, offset: int, data: bytes) -> int:
        """Record that an operation of the caller's own begins now. Returns a ticket for `noted`.

        Call this before the operation. The arguments come back in `recorded` as they are. Returns 0 if
        nothing is being recorded.
        """

    def noted(self, ticket: int) -> None:
        """Record that the operation of this ticket has succeeded. Call it after the operation.

        An operation that failed is left without this call. A second call does nothing, and neither does a
        ticket from before `clear_record`.
        """

    def recorded(self) -> list[tuple[str, str, str, int, bytes, int, int | None, bool, int, bool]]:
        """The events recorded so far, in the order of their submission.

        An event is (kind, path, target, offset, data, submitted, completed, ok, moved, changed). kind:
        "write" or "sync" for a transfer, or what `note` was given. data: the bytes to write, copied when
        the transfer was submitted. submitted, completed: numbers of one counter for all events, greater
        than 0; completed is None for an event that has not ended. A transfer is submitted when the engine
        hands it over, also if a rule then holds it. ok: whether the event ended without an error.
        moved: number of bytes of `data` that a write moved, fewer than all for a short write, which the
        engine goes on with in an event of its own. changed: whether the memory held other bytes when the
        write ended than when it was submitted, which is a bug of the caller.
        """

    def clear_record(self) -> None:
        """End the recording and free its events. The counter of submissions and completions goes on."""

    @property
    def calls(self) -> dict[str, int]:
        """Number of transfers seen for each kind: "read", "write" and "sync"."""

    @property
    def fired(self) -> int:
        """Number of times that a rule has acted on a transfer."""

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
    def open(self, path: str, write: bool = True, verify: bool = False) -> File: ...
    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Have the kernel pin a range of memory once, instead of at each request with a buffer in it.

        Returns False where the kernel does not pin the memory. `facts.registration_failure` gives the
        reason then. Requests work either way. The memory stays pinned until `close`.
        """

    def close(self) -> None:
        """Cancel queued requests, wait for requests in the kernel, and end the submission thread.

        The futures of cancelled requests raise StorageError with ECANCELED. A second call does nothing, and
        neither does a call in a forked child.
        """

    @property
    def closed(self) -> bool: ...
    def _stats(self) -> dict[str, Any]: ...
    def _facts(self) -> dict[str, Any]: ...

class StripeMap:
    """The places of a volume's bytes in the volume's files.

    The places depend on the three arguments alone. weights: number of stripes of each file in one period.
    stripe_bytes: bytes of a stripe. base: offset in every file, in bytes, at which its stripes begin.
    """

    def __init__(self, weights: Sequence[int], stripe_bytes: int, base: int = 0) -> None: ...
    @property
    def weights(self) -> tuple[int, ...]: ...
    @property
    def stripe_bytes(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def period(self) -> tuple[int, ...]:
        """The index of the file in which each stripe of a period lies."""

    def extents(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """(file index, byte offset in the file, nbytes) of each contiguous part of a range of the volume.

        offset, nbytes: the range of the volume's bytes. The parts are in the volume's order. Adjacent parts
        in one file are merged.
        """

class Volume:
    def __init__(self, files: Sequence[File], map: StripeMap) -> None: ...
    def read(
        self,
        buffer: Bytes,
        offset: int,
        deadline: float | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> Future: ...
    def write(self, buffer: Bytes, offset: int, deadline: float | None = None) -> Future: ...
    def sync(self, deadline: float | None = None) -> Future: ...
    @property
    def files(self) -> tuple[File, ...]: ...
    @property
    def map(self) -> StripeMap: ...

def probe(directory: str | None) -> dict[str, Any]: ...
def _leave() -> None:
    """Close all engines and let waiting threads return. Called at the end of the interpreter."""
