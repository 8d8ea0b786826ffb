"""An emulated device: its memory is RAM, a seed decides how late its streams are, and it checks the order of
accesses to memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import infinity
from infinity.pages import store
from infinity.tiers import open_device
from infinity.tiers.copy_streams import CopyStreams, Order
from infinity.tiers.device import DeviceTier
from infinity.tiers.driver import Driver, Event, Stream, emulated

LIBRARY = Path(infinity.__file__).with_name("libinfinity_test_driver.so")

COMPUTE = 0
"""The handle of the compute stream, whose work the calling thread does, as it does torch's on the CPU."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.infinity_test_reset.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.infinity_test_hold.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.infinity_test_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.infinity_test_count.argtypes = [ctypes.c_char_p]
    library.infinity_test_count.restype = ctypes.c_uint64
    for name in ("violations", "left", "calls"):
        function = getattr(library, f"infinity_test_{name}")
        function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        function.restype = ctypes.c_size_t
    library.infinity_test_unregistered_copies.restype = ctypes.c_uint64
    library.infinity_test_name.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.infinity_test_separate_threads.argtypes = [ctypes.c_int]
    library.infinity_test_blind.argtypes = [ctypes.c_int]
    library.infinity_test_release.argtypes = [ctypes.c_uint64]
    library.infinity_test_acquire.argtypes = [ctypes.c_uint64]
    for name in ("reset", "hold", "fail", "name", "separate_threads", "blind", "release", "acquire"):
        getattr(library, f"infinity_test_{name}").restype = None
    return library


@contextlib.contextmanager
def planned_apart() -> Iterator[None]:
    """Have plans that are made in the block be plans for an emulated device with memory of its own."""
    driver = Driver.load(str(LIBRARY))
    with emulated(driver, driver.foreign(COMPUTE)):
        yield


class EmulatedDevice:
    """The one device of the test driver, in its initial state. All its random choices follow `seed`.

    threads: each stream is a thread. Otherwise the streams' work is done inside of calls of the driver, in an
    order that the seed gives.
    """

    def __init__(self, seed: int = 0, *, threads: bool = False) -> None:
        self.driver = Driver.load(str(LIBRARY))
        self.reset(seed, threads=threads)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[EmulatedDevice]:
        """Have runtimes that are opened in the block, on the CPU with a device budget, use this device.

        The checker takes it that compute has used the memory of these runtimes before, as it may have used
        memory that torch's allocator hands out. Asserts at the end that the checker has found no violation.
        """

        def used_before(*arguments: Any) -> DeviceTier:
            tier = open_device(*arguments)
            region = tier.region
            self.compute.touched(region.address, region.nbytes, writes=True, label="somebody before")
            return tier

        with mock.patch.object(store, "open_device", used_before), emulated(self.driver, self.compute):
            yield self
        assert self.violations == [], self.violations[:3]

    @property
    def compute(self) -> Stream:
        """The compute stream, whose work the calling thread does; its handle is COMPUTE."""
        return self.driver.foreign(COMPUTE)

    def reset(self, seed: int, *, threads: bool = False) -> None:
        """End all work, and forget calls, violations, held streams and injected failures."""
        _library().infinity_test_reset(seed, threads)

    def hold(self, stream: Stream) -> None:
        """Keep a stream from beginning any work until `let_go`."""
        _library().infinity_test_hold(stream.handle, True)

    def let_go(self, stream: Stream) -> None:
        _library().infinity_test_hold(stream.handle, False)

    def fail(self, call: str, code: int, nth: int = 1) -> None:
        """Have the nth call from now on of the driver's function `call` do nothing and return `code`."""
        _library().infinity_test_fail(call.encode(), nth, code)

    def count(self, call: str) -> int:
        """How often the driver's function `call` was called since the last reset."""
        return int(_library().infinity_test_count(call.encode()))

    def name(self, stream: Stream, name: str) -> None:
        """Set the name by which messages of violations call a stream."""
        _library().infinity_test_name(stream.handle, name.encode())

    def separate_threads(self) -> None:
        """Have the checker treat threads of the host as unordered, except by `release` and `acquire`."""
        _library().infinity_test_separate_threads(True)

    def release(self, key: int) -> None:
        """Order what this thread has done before whatever a thread does after it acquires `key`."""
        _library().infinity_test_release(key)

    def acquire(self, key: int) -> None:
        _library().infinity_test_acquire(key)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide waits in the block from the checker. The waits happen, so that no bytes are harmed."""
        _library().infinity_test_blind(True)
        try:
            yield
        finally:
            _library().infinity_test_blind(False)

    @contextlib.contextmanager
    def without(self, order: Order) -> Iterator[None]:
        """Hide from the checker all waits of this order that links make in the block."""
        wait, ask = CopyStreams._wait, CopyStreams._ask

        def waits(self_: CopyStreams, which: Order, event: Event, waiter: Stream | None) -> None:
            with self.unseen() if which is order else contextlib.nullcontext():
                wait(self_, which, event, waiter)

        def asks(self_: CopyStreams, which: Order, event: Event) -> bool:
            with self.unseen() if which is order else contextlib.nullcontext():
                return ask(self_, which, event)

        with mock.patch.object(CopyStreams, "_wait", waits), mock.patch.object(CopyStreams, "_ask", asks):
            yield

    @property
    def violations(self) -> list[str]:
        """Messages about wrong uses of memory since the last reset.

        A use is wrong if no wait orders it with another use of the same bytes and one of the two writes, or
        if the memory is a stand-in, which is mapped in place of a page that is away.
        """
        return _lines("violations")

    @property
    def left(self) -> list[str]:
        """What was registered, reserved or allocated since the last reset and still is, garbage excluded."""
        if _lines("left"):
            gc.collect()
        return _lines("left")

    @property
    def calls(self) -> list[str]:
        """The first 4096 calls of the driver since the last reset, in order.

        Calls that destroy streams and events are left out.
        """
        return _lines("calls")

    @property
    def unregistered_copies(self) -> int:
        """Number of copies since the last reset of which neither end lay in registered memory.

        A real device makes the calling thread wait for such copies.
        """
        return int(_library().infinity_test_unregistered_copies())


def _lines(control: str) -> list[str]:
    text = ctypes.create_string_buffer(1 << 17)
    getattr(_library(), f"infinity_test_{control}")(text, len(text))
    return text.value.decode().splitlines()


def host_uses(device: EmulatedDevice, tensor: torch.Tensor, *, writes: bool) -> None:
    """Tell the checker that the calling thread reads or writes `tensor`."""
    device.driver.touched_by_host(tensor.data_ptr(), tensor.nbytes, writes=writes, label="test")


def compute_uses(device: EmulatedDevice, tensor: torch.Tensor, *, writes: bool) -> None:
    """Tell the checker that the compute stream reads or writes `tensor`."""
    device.compute.touched(tensor.data_ptr(), tensor.nbytes, writes=writes, label="test")
