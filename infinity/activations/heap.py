"""Heap of the C library, where the CPU's activations live: holes in it are returned when memory is short.

Saved activations and temporaries of a forward alternate in the heap, and later allocations split the holes
that temporaries leave: resident memory grows up to a third above the memory in use. One rule keeps it within
the budget: when memory has grown to the budget, holes are returned to the kernel. To return every freed block
at once (a low mmap threshold) would cost a page fault per 4 KiB of every temporary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from infinity.system import machine

_SLACK = 8 << 20
"""Bytes by which memory must grow after an unsuccessful trim before the next trim."""

_BETWEEN_LOOKS = 2 << 20
_LOOKS = 128
"""At most this many checks are made while the limit's bytes are allocated: one takes 4 to 50 us."""


def malloc_trim() -> Callable[[int], int] | None:
    """The C library's function that returns holes in the heap to the kernel; None if it is not glibc."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapGuard:
    """Keeps this process's memory within a limit, as far as returning holes in the heap is enough.

    It does nothing if the C library cannot return holes (it is not glibc).
    """

    def __init__(self, limit: int | None) -> None:
        """limit: bytes of resident memory of the whole process. None: no limit, and nothing is done."""
        self._limit = limit or 0
        self._next = self._limit
        """Bytes of resident memory above which the heap is trimmed; above the limit after a vain trim."""
        self._between = max(_BETWEEN_LOOKS, self._limit // _LOOKS)
        self._allocated = 0
        self._trim: Callable[[int], int] | None = None
        if limit is not None:
            self._trim = malloc_trim()

    def allocated(self, nbytes: int) -> None:
        """Count `nbytes` of new allocations; every few MiB, resident memory is checked."""
        self._allocated += nbytes
        if self._allocated >= self._between:
            self._allocated = 0
            self.check()

    def check(self) -> None:
        """Return holes to the kernel if resident memory is above the limit."""
        if self._trim is None:
            return
        resident = machine.resident_bytes()
        if resident <= self._limit:
            self._next = self._limit
        elif resident > self._next:
            self._trim(0)
            # Memory in use remains after the trim; do not try again before it has grown.
            self._next = max(self._limit, machine.resident_bytes() + _SLACK)
