"""The C library's heap, where the CPU's activations live: what is freed in it is given back in time.

Saved activations and temporaries of a forward alternate in the heap. The holes that temporaries leave are
split by what comes next, so that resident memory ends up to a third above what is alive. Returning every
freed block at once (a low mmap threshold) would cost a page fault per 4 KiB of every temporary; giving the
holes back only when the plan's bytes are reached costs little. It costs least where a forward ends: never is
more alive, so never are fewer pages given back that are needed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from infinity import machine

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
        self._least = self._most = 0
        """Memory after the last time that most was alive, or at the first look, and the most since."""
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
        if self._trim is not None and self._look() > self._next:
            self._give_back(self._trim)

    def most_is_alive(self) -> None:
        """As `check`, but already if memory would come above the limit by growing as it did after the last
        such time."""
        if self._trim is None:
            return
        resident = self._look()
        grows_to = resident + self._most - self._least
        if resident > self._next or (self._next == self._limit and grows_to > self._limit):
            resident = self._give_back(self._trim)
        self._least = self._most = resident

    def _look(self) -> int:
        resident = machine.resident_bytes()
        self._most = max(self._most, resident)
        self._least = self._least or resident
        if resident <= self._limit:
            self._next = self._limit
        return resident

    def _give_back(self, trim: Callable[[int], int]) -> int:
        trim(0)
        resident = machine.resident_bytes()
        # Memory that others use does not go away, and is not tried again and again.
        self._next = max(self._limit, resident + _SLACK)
        return resident
