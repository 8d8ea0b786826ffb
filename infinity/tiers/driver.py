"""The device through one table of driver calls: streams, events, copies, kernels, and what is told of memory.

The table is filled from the CUDA driver's library, or from any other that exports the same names: tests load
one whose memory is RAM and whose streams dawdle, and which checks that accesses are ordered and that nothing
is left (csrc/test_driver/). Every wait but `Driver.synchronize` ends with a signal (Ctrl-C), all of them
release the GIL, and every result is looked at.
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
    """The CUDA driver's, for the device of this number; one a process.

    Raises ConfigError where there is no such driver, DeviceError where there is no such device.
    """
    return Driver.load("libcuda.so.1", device)


@dataclass(frozen=True)
class Emulation:
    """What stands in for a device's driver."""

    driver: Driver
    compute: Stream
    """The stream that stands for what torch does on the CPU."""


_emulation = threading.local()


@contextmanager
def emulated(driver: Driver, compute: Stream) -> Iterator[None]:
    """What this thread opens inside on the CPU takes it for a device of `driver`: how order is tested."""
    before = emulation()
    _emulation.now = Emulation(driver, compute)
    try:
        yield
    finally:
        _emulation.now = before


def emulation() -> Emulation | None:
    """What the CPU is taken for where this is called; None outside of `emulated`."""
    found: Emulation | None = getattr(_emulation, "now", None)
    return found


def has_driver(device: torch.device) -> bool:
    """Whether `driver_of(device)` is one."""
    return device.type == "cuda" or emulation() is not None


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device: None of the CPU, unless it is emulated. Raises as `cuda_driver`."""
    if device.type == "cuda":
        return cuda_driver(torch.cuda.current_device() if device.index is None else device.index)
    found = emulation()
    return None if found is None else found.driver


def current(device: torch.device) -> AbstractContextManager[object]:
    """Has torch use a CUDA device inside, and the one before again afterwards.

    A thread that has no context keeps the one that a driver's call needed, and torch would take the device of
    that for the thread's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
