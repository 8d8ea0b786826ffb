"""The device through one table of driver calls: streams, events, copies and kernels.

The table is filled from the CUDA driver's library, or from any other that exports the same names: tests load
one whose memory is RAM and whose streams dawdle, and which checks that accesses are ordered
(csrc/test_driver/). Every wait releases the GIL and ends with a signal (Ctrl-C); every result is looked at.
"""

from __future__ import annotations

import atexit
import functools

from infinity import _driver
from infinity._driver import Driver, Event, Function, Module, Stream

atexit.register(_driver._leave)

__all__ = ["Driver", "Event", "Function", "Module", "Stream", "cuda_driver"]


@functools.cache
def cuda_driver(device: int) -> Driver:
    """The CUDA driver's, for the device of this number; one a process.

    Raises ConfigError where there is no such driver, DeviceError where there is no such device.
    """
    return Driver.load("libcuda.so.1", device)
