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
from infinity.tiers import device, open_device
from infinity.tiers.copy_streams import CopyStreams, Order
from infinity.tiers.device import DeviceTier
from infinity.tiers.driver import Driver, Event, Stream, emulated

LIBRARY = Path(infinity.__file__).with_name("libinfinity_test_driver.so")

COMPUTE = 0
"""The handle of the compute stream. Its work is done by the calling thread, which also runs torch's CPU
operations.
"""


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
    """Within the `with` statement, plans are made for an emulated device that has memory of its own."""
    driver = Driver.load(str(LIBRARY))
    with emulated(driver, driver.foreign(COMPUTE)):
        yield


class EmulatedDevice:
    """The only device of the test driver in this process. Making this object resets the device.

    seed: decides all random choices of the device. threads: whether each stream is a thread. Otherwise the
    streams' work is done inside calls of the driver, in an order that the seed decides.
    """

    def __init__(self, seed: int = 0, *, threads: bool = False) -> None:
        self.driver = Driver.load(str(LIBRARY))
        self.reset(seed, threads=threads)

    @contextlib.contextmanager
    def in_use(self, *, shared: bool = False) -> Iterator[EmulatedDevice]:
        """Within the `with` statement, runtimes opened with device="cpu" and a device budget use this device.

        The device's checker is told that the compute stream has written the runtimes' device memory before
        they got it, as can be true of memory from torch's allocator. So a runtime's first accesses to this
        memory must be ordered after those writes. Asserts at the end that the checker has found no
        violation.

        shared: whether other processes can read the runtimes' device memory.
        """

        def used_before(*arguments: Any) -> DeviceTier:
            tier = open_device(*arguments)
            region = tier.region
            self.compute.touched(region.address, region.nbytes, writes=True, label="somebody before")
            return tier

        mapped = functools.partial(device.map_ram, shared=shared)
        with (
            mock.patch.object(device, "map_ram", mapped),
            mock.patch.object(store, "open_device", used_before),
            emulated(self.driver, self.compute),
        ):
            yield self
        assert self.violations == [], self.violations[:3]

    @property
    def compute(self) -> Stream:
        """The compute stream. Its handle is COMPUTE, and the calling thread does its work."""
        return self.driver.foreign(COMPUTE)

    def reset(self, seed: int, *, threads: bool = False) -> None:
        """End all work, and forget calls, violations, held streams and injected failures.

        seed, threads: as for the class.
        """
        _library().infinity_test_reset(seed, threads)

    def hold(self, stream: Stream) -> None:
        """Keep a stream from beginning any work until `let_go(stream)`."""
        _library().infinity_test_hold(stream.handle, True)

    def let_go(self, stream: Stream) -> None:
        _library().infinity_test_hold(stream.handle, False)

    def fail(self, call: str, code: int, nth: int = 1) -> None:
        """Have a later call of a driver function do nothing and return the error `code` (a CUresult).

        call: the function's name. nth: 1 for the next call of this function, 2 for the one after it.
        """
        _library().infinity_test_fail(call.encode(), nth, code)

    def count(self, call: str) -> int:
        """How often the driver's function `call` was called since the last reset."""
        return int(_library().infinity_test_count(call.encode()))

    def name(self, stream: Stream, name: str) -> None:
        """Set the name that `violations` uses for a stream."""
        _library().infinity_test_name(stream.handle, name.encode())

    def separate_threads(self) -> None:
        """Have the checker regard accesses by different host threads as unordered.

        Only `release` and `acquire` order them then.
        """
        _library().infinity_test_separate_threads(True)

    def release(self, key: int) -> None:
        """Tell the checker that all accesses by this thread so far come before those that another thread
        makes after it has called `acquire(key)`.

        key: any number that identifies this pair of calls.
        """
        _library().infinity_test_release(key)

    def acquire(self, key: int) -> None:
        _library().infinity_test_acquire(key)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the `with` statement, hide from the checker every wait for a stream's work.

        To the checker the waits are missing. They still happen, so that no data is corrupted.
        """
        _library().infinity_test_blind(True)
        try:
            yield
        finally:
            _library().infinity_test_blind(False)

    @contextlib.contextmanager
    def without(self, *orders: Order) -> Iterator[None]:
        """Within the `with` statement, hide from the checker all waits of CopyStreams for these orders.

        Waits of the update threads for these orders are left out.
        """
        wait, ask, awaited = CopyStreams._wait, CopyStreams._ask, CopyStreams._awaited

        def waits(self_: CopyStreams, which: Order, event: Event, waiter: Stream | None) -> None:
            with self.unseen() if which in orders else contextlib.nullcontext():
                wait(self_, which, event, waiter)

        def asks(self_: CopyStreams, which: Order, event: Event) -> bool:
            with self.unseen() if which in orders else contextlib.nullcontext():
                return ask(self_, which, event)

        def gives(self_: CopyStreams, which: Order, event: Event) -> Event | None:
            return None if which in orders else awaited(self_, which, event)

        with (
            mock.patch.object(CopyStreams, "_wait", waits),
            mock.patch.object(CopyStreams, "_ask", asks),
            mock.patch.object(CopyStreams, "_awaited", gives),
        ):
            yield

    @property
    def violations(self) -> list[str]:
        """Messages about wrong accesses to memory since the last reset.

        Two accesses to the same bytes are wrong if at least one of them writes and no wait orders them. An
        access to memory that is mapped in place of an evicted page is always wrong.
        """
        return _lines("violations")

    @property
    def left(self) -> list[str]:
        """Memory that was registered, reserved or allocated since the last reset and is not given back yet.

        Collects garbage first, so that unreachable objects do not count.
        """
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
