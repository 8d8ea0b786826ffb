"""The virtual clock of the emulated device: how long copies and computations take at given rates.

Nothing waits for the clock, so it is exact on a busy machine; see [Note: virtual time] in
csrc/test_driver/virtual_clock.hpp.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import astuple, dataclass

from emulated_device import LIBRARY

from infinity.tiers.driver import Stream

SECOND = 10**12
"""A second of virtual time, which is counted in picoseconds."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second that the emulated device's resources move."""

    link_up: int
    link_down: int
    device: int
    """Of the device's memory: a copy on the device reads and writes it."""
    host_memory: int


RESOURCES = tuple(Rates.__dataclass_fields__)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.infinity_test_start_clock.argtypes = [ctypes.c_uint64 * len(RESOURCES), ctypes.c_int]
    library.infinity_test_time.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.infinity_test_computes.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.infinity_test_host_works.argtypes = [ctypes.c_uint64]
    library.infinity_test_wait_until.argtypes = [ctypes.c_int64]
    library.infinity_test_busy.argtypes = [ctypes.c_uint, ctypes.c_int64, ctypes.c_int64]
    for name in ("start_clock", "computes", "wait_until"):
        getattr(library, f"infinity_test_{name}").restype = None
    for name in ("time", "host_works", "busy"):
        getattr(library, f"infinity_test_{name}").restype = ctypes.c_int64
    return library


class VirtualClock:
    """The clock, which runs from 0 on until `EmulatedDevice.reset`. All times are picoseconds.

    Each host thread and each stream has a time. A copy takes the time of its link, or of the device's memory
    if neither end is in registered host memory. Kernels take no time unless `computes` says so.
    """

    def __init__(self, rates: Rates, *, copies: bool = True) -> None:
        """copies: whether copies move their bytes. If not, they only take time."""
        _library().infinity_test_start_clock((ctypes.c_uint64 * len(RESOURCES))(*astuple(rates)), copies)

    @property
    def now(self) -> int:
        """The time of the calling thread."""
        return int(_library().infinity_test_time(None, True))

    def end_of(self, stream: Stream) -> int:
        """The time when a stream has done all that is queued."""
        return int(_library().infinity_test_time(stream.handle, False))

    def computes(self, stream: Stream, length: int) -> None:
        """Queue `length` of the device's time on a stream, for work of which the driver knows nothing."""
        _library().infinity_test_computes(stream.handle, length)

    def host_works(self, nbytes: int) -> int:
        """Have other threads of the host move `nbytes` bytes of its memory. The calling thread begins this
        now and does not wait for it. Returns when it ends.
        """
        return int(_library().infinity_test_host_works(nbytes))

    def wait_until(self, time: int) -> None:
        """Let the calling thread wait until `time`."""
        _library().infinity_test_wait_until(time)

    def busy(self, resource: str, begin: int, end: int) -> int:
        """For how much of the time from `begin` to `end` a resource, one of RESOURCES, has work."""
        return int(_library().infinity_test_busy(RESOURCES.index(resource), begin, end))
