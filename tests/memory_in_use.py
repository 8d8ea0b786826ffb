"""Memory that this process has in use, by its allocators' own counts, and its growth per step.

[Note: counted, not seen] Resident memory says little about a leak: malloc keeps what was freed, threads keep
caches and arenas of their own, Python keeps its arenas, and a pool's bytes are resident once any step has
touched them. What allocators have handed out is exact once nothing is under way. It also includes what
another thread has freed and keeps for itself, but these bytes are bounded: they are no more after many steps
than after a few.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from array import array
from itertools import pairwise
from pathlib import Path
from statistics import median


class Growth:
    """A record of memory in use at several points of a run, which itself takes hardly any memory."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.heap = array("q")
        """Bytes that the C library's heap has handed out, at each look. 0 where the library does not tell."""
        self.objects = array("q")
        """Number of Python's small objects, at each look. Large objects are part of `heap`."""
        self.mapped = array("q")
        """Bytes of anonymous mappings that the C library's heap did not make, at each look.

        These are Python's arenas, stacks and infinity's own mappings.
        """

    def look(self, step: int) -> None:
        """Collect garbage and record what is in use after `step` steps. Nothing should be under way."""
        gc.collect()
        # Python caches some 4096 attribute lookups of types, each of which may keep a string alive.
        getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
        self.objects.append(sys.getallocatedblocks())
        heap, mapped_by_heap = _heap()
        self.heap.append(heap)
        self.mapped.append(_anonymous() - mapped_by_heap)
        self.steps.append(step)

    def per_step(self, counts: array[int]) -> float:
        """The median of the growth per step in the intervals between looks.

        Growth that happens only a few times thus does not count. counts: `heap`, `objects` or `mapped`.
        """
        looks = pairwise(zip(self.steps, counts, strict=True))
        return median((after - before) / (end - start) for (start, before), (end, after) in looks)


class _Mallinfo2(ctypes.Structure):
    """The C library's `struct mallinfo2`. Fields that are not used here have one letter."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", *"bcd", "hblkhd", *"fg", "uordblks", "fordblks", "keepcost")
    ]


def _heap() -> tuple[int, int]:
    """(bytes that the C library has handed out, bytes that it has from the kernel)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # not glibc, or older than 2.33
        return 0, 0
    _fill_the_cache(library)
    library.mallinfo2.restype = _Mallinfo2
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd, found.arena + found.hblkhd


_CACHED_SIZES = range(24, 1041, 16)
"""Sizes in bytes of the blocks that malloc keeps in a thread's cache (tcache) when the thread frees them."""
_MOST_KEPT = 32
"""A number of blocks larger than a thread's cache keeps of each size (7, and 16 since glibc 2.42)."""


def _fill_the_cache(library: ctypes.CDLL) -> None:
    """Fill this thread's cache of freed blocks, so that its share of the count is constant."""
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    for size in _CACHED_SIZES:
        blocks = [library.malloc(size) for _ in range(_MOST_KEPT)]
        for block in blocks:
            library.free(block)


def _anonymous() -> int:
    """Bytes of this process's private, writable mappings that belong to no file."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *path = line.split(maxsplit=5)
        if inode == "0" and rights == "rw-p" and (not path or path[0].startswith("[heap]")):
            start, end = (int(each, 16) for each in place.split("-"))
            total += end - start
    return total
