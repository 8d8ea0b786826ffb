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
    """A record of memory in use, sampled by `look` at several points of a run.

    `steps`, `heap`, `objects` and `mapped` have one entry for each sample, and take hardly any memory.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.heap = array("q")
        """For each sample, bytes that the C library's heap has handed out; 0 if the library does not tell."""
        self.objects = array("q")
        """For each sample, number of Python's small objects. Large objects are part of `heap`."""
        self.mapped = array("q")
        """For each sample, bytes of anonymous mappings that the C library's heap did not make.

        These are Python's arenas, stacks and infinity's own mappings.
        """

    def look(self, step: int) -> None:
        """Take a sample: collect garbage, and record the memory in use after `step` steps of training.

        The caller sees to it that no transfer and no update is under way.
        """
        gc.collect()
        # Python caches some 4096 attribute lookups of types, each of which may keep a string alive.
        getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
        self.objects.append(sys.getallocatedblocks())
        heap, mapped_by_heap = _heap()
        self.heap.append(heap)
        self.mapped.append(_anonymous() - mapped_by_heap)
        self.steps.append(step)

    def per_step(self, counts: array[int]) -> float:
        """Return the growth of `counts` per step: the median over the intervals between successive samples.

        Growth in fewer than half of the intervals thus does not count. counts: `heap`, `objects` or `mapped`.
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
    """Return (bytes that the C library's heap has handed out, bytes that the heap has from the kernel).

    Both are 0 if the library has no mallinfo2.
    """
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
"""Number of blocks that are freed of each size. A thread's cache keeps fewer: 7, or 16 since glibc 2.42."""


def _fill_the_cache(library: ctypes.CDLL) -> None:
    """Fill this thread's cache of freed blocks (tcache).

    mallinfo2 counts cached blocks as handed out. With a full cache they add the same bytes to every sample.
    """
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
