"""How much memory this process has in use, by its allocators' own counts, and what a step adds to it.

[Note: counted, not seen] Resident memory says little of a leak: malloc keeps what was freed, threads keep
caches and arenas of their own, Python keeps its arenas, and a pool's bytes are resident once they have been
touched, whichever step that was. What allocators have handed out is exact once nothing is under way. Only
what another thread has freed and keeps for itself is counted as handed out, too: that is bounded, and no more
after many steps than after a few.
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
    """Memory in use at several points of a run, and what a step adds to it. Looking takes next to none."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.heap = array("q")
        """Bytes of the C library's heap, in arenas and in mappings of their own. 0 where it does not tell."""
        self.objects = array("q")
        """Small objects of Python, by number. Large ones are in the heap."""
        self.mapped = array("q")
        """Bytes of anonymous mappings that are not the C library's: Python's arenas, stacks, ours."""

    def look(self, step: int) -> None:
        """Note what is in use after so many steps, garbage apart. Nothing should be under way."""
        gc.collect()
        # Types remember the names that were looked up in them, some 4096, each a new string where C asked.
        getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
        self.objects.append(sys.getallocatedblocks())
        heap, mapped_by_heap = _heap()
        self.heap.append(heap)
        self.mapped.append(_anonymous() - mapped_by_heap)
        self.steps.append(step)

    def per_step(self, counts: array[int]) -> float:
        """The median of the growths from each look to the next: what happens a few times does not count."""
        looks = pairwise(zip(self.steps, counts, strict=True))
        return median((after - before) / (end - start) for (start, before), (end, after) in looks)


class _Mallinfo2(ctypes.Structure):
    """The C library's struct of that name; fields of no use here have one letter."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", *"bcd", "hblkhd", *"fg", "uordblks", "fordblks", "keepcost")
    ]


def _heap() -> tuple[int, int]:
    """Bytes that the C library has handed out, and that it has from the kernel."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # not glibc, or older than 2.33
        return 0, 0
    _fill_the_cache(library)
    library.mallinfo2.restype = _Mallinfo2
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd, found.arena + found.hblkhd


_CACHED_SIZES = range(24, 1041, 16)
"""Bytes of the blocks that a thread keeps when it frees them, a size each; see malloc's tcache."""
_MOST_KEPT = 32
"""More than a thread keeps of a size (7; 16 since glibc 2.42)."""


def _fill_the_cache(library: ctypes.CDLL) -> None:
    """Have this thread keep as many freed blocks as it ever does, so that they are a constant."""
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    for size in _CACHED_SIZES:
        blocks = [library.malloc(size) for _ in range(_MOST_KEPT)]
        for block in blocks:
            library.free(block)


def _anonymous() -> int:
    """Bytes of private mappings that are written to and of no file."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *path = line.split(maxsplit=5)
        if inode == "0" and rights == "rw-p" and (not path or path[0].startswith("[heap]")):
            start, end = (int(each, 16) for each in place.split("-"))
            total += end - start
    return total
