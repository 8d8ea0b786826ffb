"""A device through the table of CUDA driver calls (csrc/driver/bindings.cpp). Use infinity.tiers.driver."""

from __future__ import annotations

class Event:
    """A moment in a stream's work."""

    def done(self) -> bool:
        """Whether the stream has come to it. Never blocks. Raises DeviceError where the device has failed."""

    def synchronize(self) -> None:
        """Sleep until done, without the GIL. Signals (Ctrl-C) are seen. Raises as `done`."""

    def milliseconds_since(self, earlier: Event) -> float:
        """Milliseconds of the device's time; both are done and were recorded with timing."""

class Stream:
    """A queue of work on the device, its own or torch's."""

    @property
    def handle(self) -> int:
        """CUstream, as torch.cuda.ExternalStream takes it."""

    def wait(self, event: Event) -> None:
        """What is queued from now on comes after `event`."""

    def record(self, timing: bool = False) -> Event:
        """The moment after all that is queued now. timing: whether `milliseconds_since` is to know it."""

    def done(self) -> bool:
        """Whether nothing is queued or under way. Never blocks."""

    def synchronize(self) -> None:
        """Sleep until done, as `Event.synchronize`."""

    def copy(self, into: int, source: int, nbytes: int, *, piece: int = 0) -> None:
        """Queue a copy from address to address, in either direction. piece: bytes of each of the copies that
        it is cut into, between which other streams' copies may pass; 0: one."""

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
        """`wait` (where there is something to wait for), `copy` and `record`, in one call."""

    def touched(self, address: int, nbytes: int, *, writes: bool, label: str = "") -> None:
        """Tell a checker that work queued here by others uses these bytes. Nothing on a real driver."""

class Function:
    """A kernel."""

    def launch(self, stream: Stream, grid: int, block: int, arguments: bytes) -> None:
        """Queue it on `grid` blocks of `block` threads. arguments: its one struct, by value.

        Raises ValueError for more than 4096 bytes, DeviceError as the driver does.
        """

class Module:
    """Compiled kernels."""

    def function(self, name: str) -> Function:
        """By its name, as compiled. Raises DeviceError (CUDA_ERROR_NOT_FOUND) where there is none."""

class RepeatedMemory:
    """One chunk of device memory behind each of many addresses, which all may read and write."""

    @property
    def address(self) -> int:
        """Where it begins."""

    def release(self) -> None:
        """Give it back, once nothing that is queued may use it; nobody else does. Again: does nothing.

        Raises DeviceError, after every call that gives something back was made.
        """

class Driver:
    """The primary context of one device. Any thread may use it and what it makes."""

    @staticmethod
    def load(path: str, device: int = 0) -> Driver:
        """By the table of calls in a library. Raises ConfigError where it cannot be loaded or lacks a call,
        DeviceError where it has no such device."""

    @property
    def checked(self) -> bool:
        """Whether somebody looks at the order of accesses, so that `touched` is worth calling."""

    def stream(self, priority: int = 0) -> Stream:
        """A stream that waits for no other by itself. priority: above 0 goes before others."""

    def foreign(self, handle: int) -> Stream:
        """Somebody else's stream (torch.cuda.Stream.cuda_stream), which must outlive this one."""

    def module(self, image: bytes) -> Module:
        """Load a cubin, a fat binary or PTX. Raises DeviceError where the device cannot use it."""

    def synchronize(self) -> None:
        """Sleep, without the GIL, until all is done that was queued on any stream. Raises DeviceError."""

    @property
    def granularity(self) -> int:
        """Bytes of which a chunk to `repeat` is a multiple. Raises DeviceError."""

    def repeat(self, chunk: int, count: int, value: int) -> RepeatedMemory:
        """`chunk` bytes of device memory at `count` places side by side, filled with the byte `value` on the
        null stream. Raises DeviceError, and leaves nothing then; ValueError for no bytes."""

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for DMA. Raises DeviceError."""

    def unregister_host(self, address: int) -> None:
        """The end of `register_host`."""

    def touched_by_host(self, address: int, nbytes: int, *, writes: bool, label: str = "") -> None:
        """As `Stream.touched`, of the calling thread."""

def _leave() -> None: ...
