"""Driver: streams, events, copies and kernels of a device, through one table of driver calls.

The table is filled from the CUDA driver's library, or from any other that exports the same names. Tests load
one whose memory is RAM and whose streams lag on purpose; it checks that accesses are ordered and that nothing
is left behind (csrc/test_driver/). A signal (Ctrl-C) ends every wait but `Driver.synchronize`; all of them
release the GIL, and every result is checked.
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
from infinity._driver import Driver, Event, Function, Module, RepeatedMemory, Stream

atexit.register(_driver._leave)

__all__ = [
    "Driver",
    "Event",
    "Function",
    "Module",
    "RepeatedMemory",
    "Stream",
    "cuda_driver",
    "current",
    "driver_of",
    "emulated",
    "emulation",
    "has_driver",
]


@functools.cache
def cuda_driver(device: int) -> Driver:
    """The CUDA driver for the device of this number; one a process.

    Raises ConfigError where there is no such driver, DeviceError where there is no such device.
    """
    return Driver.load("libcuda.so.1", device)


@dataclass(frozen=True)
class Emulation:
    """The driver and the compute stream that make the CPU look like a device of its own."""

    driver: Driver
    compute: Stream
    """The stream that stands for torch's work on the CPU."""


_emulation = threading.local()


@contextmanager
def emulated(driver: Driver, compute: Stream) -> Iterator[None]:
    """A context in which this thread takes the CPU for a device of `driver`; for tests of copies' order."""
    before = emulation()
    _emulation.now = Emulation(driver, compute)
    try:
        yield
    finally:
        _emulation.now = before


def emulation() -> Emulation | None:
    """The emulation that this thread is in; None outside of `emulated`."""
    found: Emulation | None = getattr(_emulation, "now", None)
    return found


def has_driver(device: torch.device) -> bool:
    """Whether a device has a driver; see `driver_of`."""
    return device.type == "cuda" or emulation() is not None


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device; None for the CPU, unless it is emulated. Raises as `cuda_driver`."""
    if device.type == "cuda":
        return cuda_driver(torch.cuda.current_device() if device.index is None else device.index)
    found = emulation()
    return None if found is None else found.driver


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch uses a CUDA device; afterwards it uses the device from before.

    Without it, a thread that had no CUDA context would keep the one that a driver's call made, and torch
    would take that context's device for the thread's.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
