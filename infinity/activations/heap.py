"""Heap: the C library's heap, which holds activations on the CPU, and the return of its holes to the kernel.

Saved activations and temporaries of a forward alternate in the heap, and later allocations split the holes
that temporaries leave. So resident memory grows up to a third above the memory in use. Holes are returned to
the kernel when resident memory has grown to the budget. Returning every freed block at once (a low mmap
threshold) would cost a page fault for each 4 KiB of every temporary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from infinity.system import machine

_SLACK = 8 << 20
"""Bytes by which resident memory that a trim could not bring below the limit grows before the next trim."""
_LEAST_SLACK = 1 << 20
"""The least number of such bytes, near the budget."""
_BETWEEN_LOOKS = 2 << 20
"""The fewest bytes allocated between two checks of this process's resident memory."""
_LOOKS = 128
"""Number of checks of resident memory while `limit` bytes are allocated. A check takes 4 to 50 us."""


def malloc_trim() -> Callable[[int], int] | None:
    """The C library's malloc_trim, which returns holes in the heap to the kernel; None without glibc."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapGuard:
    """Keeps the resident memory of this process within a limit by returning holes in the heap to the kernel.
    Memory in use is not reduced, so the limit can still be exceeded. Without glibc the guard does nothing.
    """

    def __init__(self, limit: int | None, margin: int = 0) -> None:
        """limit: bytes of resident memory of the whole process. None: the guard does nothing. margin: bytes
        between the limit and the budget.
        """
        self._limit = limit or 0
        self._budget = self._limit + margin
        self._next = self._limit
        """Bytes of resident memory above which the heap is trimmed: the limit, or more after a trim that did
        not reach it.
        """
        self._far = max(_BETWEEN_LOOKS, self._limit // _LOOKS)
        self._between = self._far
        self._allocated = 0
        self._trim: Callable[[int], int] | None = None
        if limit is not None:
            self._trim = malloc_trim()

    @property
    def guards(self) -> bool:
        """Whether the guard does something."""
        return self._trim is not None

    def allocated(self, nbytes: int) -> None:
        """Count `nbytes` bytes of new allocations, and call `check` each time that enough bytes are counted.

        Enough is 1/128 of the limit, but at least 2 MiB; while resident memory is above the limit, 2 MiB.
        """
        self._allocated += nbytes
        if self._allocated >= self._between:
            self._allocated = 0
            self.check()

    def check(self) -> None:
        """Return holes in the heap to the kernel if resident memory is above the limit.

        If it is still above the limit afterwards, the next trim waits until it has grown further: by half of
        its distance to the budget, but at least 1 MiB and at most 8 MiB; by 8 MiB if it is at or above the
        budget.
        """
        if self._trim is None:
            return
        resident = machine.resident_bytes()
        self._between = self._far if resident <= self._limit else _BETWEEN_LOOKS
        if resident <= self._limit:
            self._next = self._limit
        elif resident > self._next:
            self._trim(0)
            resident = machine.resident_bytes()
            left = self._budget - resident
            slack = _SLACK if left <= 0 else min(_SLACK, max(_LEAST_SLACK, left // 2))
            # Memory in use remains after the trim; do not try again before it has grown.
            self._next = self._limit if resident <= self._limit else resident + slack
