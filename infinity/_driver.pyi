"""A device, driven by a table of CUDA driver calls (csrc/driver/bindings.cpp). Use infinity.tiers.driver."""

from __future__ import annotations

from collections.abc import Sequence

class Event:
    """A point in a stream's work, which happens when the stream has done all work queued before it."""

    def done(self) -> bool:
        """Whether the event has happened. Never blocks. Raises DeviceError where the device has failed."""

    def synchronize(self) -> None:
        """Sleep, without the GIL, until the event has happened. A signal (Ctrl-C) ends the sleep.

        Raises the errors of `done`.
        """

    def milliseconds_since(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this event, on the device's clock.

        Both events have happened, and were recorded with timing=True.
        """

class Stream:
    """A queue of work on the device, made by this module or by torch."""

    @property
    def handle(self) -> int:
        """The stream's CUstream as an int, the form that torch.cuda.ExternalStream takes."""

    def wait(self, event: Event) -> None:
        """Make all work that is queued from now on wait for `event`."""

    def record(self, timing: bool = False) -> Event:
        """Queue an event, which happens when all work queued so far is done.

        timing: True for an event that is used in `milliseconds_since`.
        """

    def done(self) -> bool:
        """Whether all work queued so far is done. Never blocks."""

    def synchronize(self) -> None:
        """Sleep, without the GIL, until all queued work is done. A signal (Ctrl-C) ends the sleep."""

    def copy(self, into: int, source: int, nbytes: int, *, piece: int = 0) -> None:
        """Queue a copy of `nbytes` bytes from address `source` to address `into`, in either direction.

        piece: the copy is cut into pieces of this many bytes, between which copies of other streams can
        run. 0 means that the copy is not cut.
        """

    def transfer(
        self,
        into: int,
        source: int,
        nbytes: int,
        *,
        after: Event | None = None,
        piece: int = 0,
        timing: bool = False,
    ) -> Event:
        """Call `wait` (where `after` is given), `copy` and `record` in one call.

        Returns the event that `record` made.
        """

    def touched(self, address: int, nbytes: int, *, writes: bool, label: str = "") -> None:
        """Tell a checker of the order of accesses that work queued here by other code uses these bytes.

        address, nbytes: the range of bytes. writes: whether the work writes the bytes. label: a name of the
        work for messages. Does nothing where the driver is not `checked`.
        """

class CopiesAround:
    """The copies around jobs of `infinity.cpu_adam.ThreadPool` that are submitted together.

    The pool's threads wait for some and begin the others, without the GIL.
    """

    def __init__(
        self,
        driver: Driver,
        downs: Sequence[Event | None],
        up: tuple[Stream, Event | None, Sequence[tuple[int, int, int]], int, bool] | None,
        uses: Sequence[Sequence[tuple[int, int, bool]]],
        label: str,
    ) -> None:
        """downs: for each job, an event that happens when what the job reads has come to the host; None: it
        is there. up: the copies of what the jobs have written, (stream, after, [(into, source, nbytes) of
        each job], piece, timing) as in `Stream.transfer`; None: nothing is copied. uses, label: for each job
        (address, nbytes, writes) of bytes that it uses, for a checker of the order of accesses, and a name of
        the jobs. Without a checker `uses` may be empty.
        """

    @property
    def capsule(self) -> object:
        """The object for other native modules; see csrc/job_hooks.hpp."""

    def before(self, job: int) -> bool:
        """Whether the event of `downs` has happened, as the pool asks. Tells the checker of `uses` then."""

    def after(self, job: int) -> None:
        """Queue the copy of `up`, as the pool does at the job's end. Raises nothing; `check` does."""

    def events(self) -> tuple[Event | None, Event | None]:
        """Once all jobs are done, return the events before the first copy of `up` and after the last one: the
        first with timing only, both None if nothing was copied.
        """

    def check(self) -> None:
        """Once all jobs are done, raise DeviceError if a call failed that asked for an event of `downs` or
        queued a copy.
        """

class Function:
    """A kernel that can be launched."""

    def launch(self, stream: Stream, grid: int, block: int, arguments: bytes) -> None:
        """Queue the kernel on `stream`, with `grid` blocks of `block` threads.

        arguments: the bytes of the one struct that the kernel takes by value. Raises ValueError for more
        than 4096 bytes of arguments, DeviceError for a failed driver call.
        """

class Module:
    """A loaded image of compiled kernels."""

    def function(self, name: str) -> Function:
        """The kernel with this name in the image.

        Raises DeviceError (CUDA_ERROR_NOT_FOUND) where the image has no such kernel.
        """

class RepeatedMemory:
    """One chunk of device memory that is mapped at many adjacent addresses.

    Kernels may read and write the memory at all of these addresses.
    """

    @property
    def address(self) -> int:
        """Address of the first byte."""

    def release(self) -> None:
        """Free the memory and its addresses. A second call does nothing.

        Call this once no queued work uses the memory. The memory is never freed without this call. Raises
        DeviceError for the first driver call that failed, after all calls were made.
        """

class SharedMemory:
    """Device memory of another process of this machine, which this process can read until `close`."""

    @property
    def address(self) -> int:
        """Address of the first byte of the other process's allocation; 0 after `close`."""

    def close(self) -> None:
        """Unmap the memory, of which no copy may be under way. A second call does nothing.

        Raises DeviceError.
        """

class Driver:
    """The primary CUDA context of one device. Any thread may use this object and objects made by it."""

    @staticmethod
    def load(path: str, device: int = 0) -> Driver:
        """Load the table of driver calls from a library, and open a device.

        path: file name of the library. device: number of the device. Raises ConfigError where the library
        cannot be loaded or lacks a call, DeviceError where there is no such device.
        """

    @property
    def checked(self) -> bool:
        """Whether the library checks the order of memory accesses, of which the `touched` methods inform
        it.
        """

    def stream(self, priority: int = 0) -> Stream:
        """Make a stream that does not wait for any other stream by itself.

        priority: work of streams with larger numbers goes first.
        """

    def foreign(self, handle: int) -> Stream:
        """The stream with this handle (torch.cuda.Stream.cuda_stream), which other code made.

        That stream must live longer than the returned object.
        """

    def module(self, image: bytes) -> Module:
        """Load a cubin, a fat binary or PTX. Raises DeviceError where the device cannot use the image."""

    def synchronize(self) -> None:
        """Sleep, without the GIL, until all work queued on all streams is done. Raises DeviceError."""

    @property
    def granularity(self) -> int:
        """Number of bytes that the chunk of `repeat` must be a multiple of. Raises DeviceError."""

    def repeat(self, chunk: int, count: int, value: int) -> RepeatedMemory:
        """Map one chunk of `chunk` bytes of device memory at `count` adjacent places.

        The chunk is filled with the byte `value` on the null stream. Raises DeviceError, after which
        nothing is left allocated. Raises ValueError where `chunk` or `count` is 0.
        """

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that DMA can use it. Raises DeviceError."""

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` for the memory at `address`. Raises DeviceError."""

    def share(self, address: int) -> tuple[bytes, int]:
        """Return (handle, offset) of device memory, by which other processes can read it (CUDA IPC).

        address: of a byte. handle: 64 bytes, for `open_shared`. offset: bytes from the start of the
        allocation to the byte. Raises DeviceError for memory that cannot be shared, such as that of torch's
        expandable segments.
        """

    def open_shared(self, handle: bytes) -> SharedMemory:
        """Map another process's allocation. handle: what `share` returned there.

        Raises DeviceError if the device cannot reach the memory, and in the process that shared it.
        """

    def touched_by_host(self, address: int, nbytes: int, *, writes: bool, label: str = "") -> None:
        """Tell a checker of the order of accesses that the calling thread uses these bytes.

        Parameters as in `Stream.touched`.
        """

def _leave() -> None: ...
