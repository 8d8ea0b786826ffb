"""A device whose memory is RAM and whose streams dawdle by a seed, and which checks the order of accesses."""

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
"""The handle of the stream whose work the calling thread does, as torch's operations on the CPU are."""


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
    """Plans inside are for an emulated device."""
    driver = Driver.load(str(LIBRARY))
    with emulated(driver, driver.foreign(COMPUTE)):
        yield


class EmulatedDevice:
    """The one device of the test driver, begun anew: all that is drawn follows `seed`.

    threads: streams are threads, else their work is done inside of calls, in an order that the seed gives.
    """

    def __init__(self, seed: int = 0, *, threads: bool = False) -> None:
        self.driver = Driver.load(str(LIBRARY))
        self.reset(seed, threads=threads)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[EmulatedDevice]:
        """Runtimes opened inside, on the CPU with a device budget of its own, take it for their device.

        Their memory was used by compute before, as torch's allocator hands it out. Asserts at the end that
        nothing was unordered.
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
        """The stream of the calling thread; see COMPUTE."""
        return self.driver.foreign(COMPUTE)

    def reset(self, seed: int, *, threads: bool = False) -> None:
        """End all work, forget what was seen and asked for."""
        _library().infinity_test_reset(seed, threads)

    def hold(self, stream: Stream) -> None:
        """Have a stream begin nothing until `let_go`."""
        _library().infinity_test_hold(stream.handle, True)

    def let_go(self, stream: Stream) -> None:
        _library().infinity_test_hold(stream.handle, False)

    def fail(self, call: str, code: int, nth: int = 1) -> None:
        """The nth next `call` of the driver does nothing and ends with `code`."""
        _library().infinity_test_fail(call.encode(), nth, code)

    def count(self, call: str) -> int:
        """How often the driver's `call` was made since the last reset."""
        return int(_library().infinity_test_count(call.encode()))

    def name(self, stream: Stream, name: str) -> None:
        """What violations call a stream."""
        _library().infinity_test_name(stream.handle, name.encode())

    def separate_threads(self) -> None:
        """Give each thread of the host a clock of its own: `release` and `acquire` order them."""
        _library().infinity_test_separate_threads(True)

    def release(self, key: int) -> None:
        """Whoever acquires `key` later comes after what this thread has done."""
        _library().infinity_test_release(key)

    def acquire(self, key: int) -> None:
        _library().infinity_test_acquire(key)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Waits inside happen, and the checker does not see them: as if they were missing, without harm."""
        _library().infinity_test_blind(True)
        try:
            yield
        finally:
            _library().infinity_test_blind(False)

    @contextlib.contextmanager
    def without(self, order: Order) -> Iterator[None]:
        """Links inside have no wait of this order, for the checker."""
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
        """Pairs of uses of the same bytes, of which one writes, that nothing orders, and uses of stand-ins;
        since the last reset."""
        return _lines("violations")

    @property
    def left(self) -> list[str]:
        """What was registered, reserved or allocated since the last reset and is still, garbage apart."""
        if _lines("left"):
            gc.collect()
        return _lines("left")

    @property
    def calls(self) -> list[str]:
        """The first 4096 calls since the last reset in their order, but for those that destroy streams and
        events."""
        return _lines("calls")

    @property
    def unregistered_copies(self) -> int:
        """Copies since the last reset of which neither end lay in registered memory: a device would do them
        in the calling thread's time."""
        return int(_library().infinity_test_unregistered_copies())


def _lines(control: str) -> list[str]:
    text = ctypes.create_string_buffer(1 << 17)
    getattr(_library(), f"infinity_test_{control}")(text, len(text))
    return text.value.decode().splitlines()


def host_uses(device: EmulatedDevice, tensor: torch.Tensor, *, writes: bool) -> None:
    """The calling thread reads or writes `tensor`."""
    device.driver.touched_by_host(tensor.data_ptr(), tensor.nbytes, writes=writes, label="test")


def compute_uses(device: EmulatedDevice, tensor: torch.Tensor, *, writes: bool) -> None:
    """Compute reads or writes `tensor`."""
    device.compute.touched(tensor.data_ptr(), tensor.nbytes, writes=writes, label="test")
