"""The C library's heap, where the CPU's activations live: what is freed in it is given back in time.

Saved activations and temporaries of a forward alternate in the heap, and the holes that temporaries leave are
split by what comes next: resident memory ends up to a third above what is alive. One rule keeps it within the
budget: where memory has grown to the budget, holes are given back. Returning every freed block at once (a low
mmap threshold) would cost a page fault per 4 KiB of every temporary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from infinity.system import machine

_SLACK = 8 << 20
"""Bytes by which memory must grow after a trim that did not help, before the next."""

_BETWEEN_LOOKS = 2 << 20
_LOOKS = 128
"""To a limit's worth of allocations, at the most: a look takes 4 us, and 50 beside busy threads."""


def malloc_trim() -> Callable[[int], int] | None:
    """The C library's function that gives holes in the heap back; None if it is not glibc."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapGuard:
    """Keeps this process's memory within a limit, as far as that is made of holes in the heap.

    Where the C library cannot give holes back (it is not glibc) it does nothing.
    """

    def __init__(self, limit: int | None) -> None:
        """limit: bytes of resident memory, of the whole process. None: none, and nothing is done."""
        self._limit = limit or 0
        self._next = self._limit
        """Memory above it is trimmed; higher than the limit where a trim did not help."""
        self._between = max(_BETWEEN_LOOKS, self._limit // _LOOKS)
        self._allocated = 0
        self._trim: Callable[[int], int] | None = None
        if limit is not None:
            self._trim = malloc_trim()

    def allocated(self, nbytes: int) -> None:
        """So many bytes more are in use; every few MiB memory is looked at."""
        self._allocated += nbytes
        if self._allocated >= self._between:
            self._allocated = 0
            self.check()

    def check(self) -> None:
        """Give holes back if memory is above the limit; otherwise only look."""
        if self._trim is None:
            return
        resident = machine.resident_bytes()
        if resident <= self._limit:
            self._next = self._limit
        elif resident > self._next:
            self._trim(0)
            # Memory that others use does not go away, and is not tried again and again.
            self._next = max(self._limit, machine.resident_bytes() + _SLACK)
