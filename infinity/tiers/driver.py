"""Driver: streams, events, copies and kernels of a device, through one table of driver calls.

The table is filled from the CUDA driver's library, or from another library that exports the same names.
Tests load a library whose memory is RAM and whose streams lag on purpose (csrc/test_driver/). That library
checks that accesses to memory are ordered, and lists memory that is still allocated or registered at the end.
Every wait releases the GIL, and the result of every call is checked. A signal (Ctrl-C) ends every wait except
`Driver.synchronize`.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from infinity import _driver
from infinity._driver import (
    CopiesAround,
    Driver,
    Event,
    Function,
    Module,
    RepeatedMemory,
    SharedMemory,
    Stream,
)

atexit.register(_driver._leave)

__all__ = [
    "CopiesAround",
    "Driver",
    "Event",
    "Function",
    "Module",
    "RepeatedMemory",
    "SharedMemory",
    "Stream",
    "compute_stream",
    "cuda_driver",
    "current",
    "driver_of",
    "emulated",
    "emulation",
    "has_driver",
]


@functools.cache
def cuda_driver(device: int) -> Driver:
    """The CUDA driver for the device with number `device`. The same number gives the same object.

    Raises ConfigError if the CUDA driver's library cannot be used, DeviceError without such a device.
    """
    return Driver.load("libcuda.so.1", device)


@dataclass(frozen=True)
class Emulation:
    """The arguments of an `emulated` context, in which the CPU counts as a device with its own memory."""

    driver: Driver
    compute: Stream
    """The stream that represents torch's work on the CPU."""


_emulation = threading.local()


@contextmanager
def emulated(driver: Driver, compute: Stream) -> Iterator[None]:
    """A context in which this thread treats the CPU as a device of `driver`, to test the order of copies.

    driver: a driver of the tests, whose "device memory" is RAM. compute: the stream that represents torch's
    work on the CPU.
    """
    before = emulation()
    _emulation.now = Emulation(driver, compute)
    try:
        yield
    finally:
        _emulation.now = before


def emulation() -> Emulation | None:
    """The emulation that is active in this thread; None outside of `emulated`."""
    found: Emulation | None = getattr(_emulation, "now", None)
    return found


def has_driver(device: torch.device) -> bool:
    """Whether a device has a driver: a CUDA device always has one, the CPU only inside `emulated`."""
    return device.type == "cuda" or emulation() is not None


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device; None for the CPU outside of `emulated`. Raises the errors of `cuda_driver`."""
    if device.type == "cuda":
        return cuda_driver(torch.cuda.current_device() if device.index is None else device.index)
    found = emulation()
    return None if found is None else found.driver


def compute_stream(device: torch.device) -> Stream:
    """The stream on which this thread computes on a device that has a driver."""
    if device.type == "cuda":
        driver = driver_of(device)
        assert driver is not None
        return driver.foreign(torch.cuda.current_stream(device).cuda_stream)
    found = emulation()
    assert found is not None, "the device has a driver"
    return found.compute


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is torch's current CUDA device; does nothing for the CPU.

    The previous device is restored at the end. A driver call makes a CUDA context current in a thread that
    has none. Without this function that context would stay, and torch would take the context's device for
    the thread's current device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
