"""Tests of the helper `memory_in_use`: what it counts grows by leaked memory, whoever allocated it, and by
nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
from memory_in_use import Growth

STEPS = 8
LIBRARY = ctypes.CDLL(None)
LIBRARY.malloc.restype = ctypes.c_void_p
LIBRARY.malloc.argtypes = [ctypes.c_size_t]
LIBRARY.free.argtypes = [ctypes.c_void_p]

needs_counts = pytest.mark.skipif(not hasattr(LIBRARY, "mallinfo2"), reason="needs glibc 2.33 or later")


def grown(act: Callable[[], object]) -> Growth:
    """Call `act` STEPS times. Return the memory in use before the first call and after each call."""
    found = Growth()
    for step in range(STEPS + 1):
        found.look(step)
        if step < STEPS:
            act()
    return found


@needs_counts
@pytest.mark.parametrize("nbytes", [24, 64, 1000, 5000, 1 << 25])
def test_blocks_of_the_heap_that_are_kept_are_counted(nbytes: int) -> None:
    kept: list[int] = []
    try:
        found = grown(lambda: kept.append(LIBRARY.malloc(nbytes)))
    finally:
        for each in kept:
            LIBRARY.free(each)
    assert nbytes <= found.per_step(found.heap) <= nbytes + 8192  # header; whole pages in a mapping
    assert found.per_step(found.mapped) == 0


@needs_counts
def test_blocks_that_are_freed_are_not_counted_whatever_the_c_library_keeps_of_them() -> None:
    def act() -> None:
        for each in [LIBRARY.malloc(100) for _ in range(1000)]:
            LIBRARY.free(each)

    found = grown(act)
    assert found.per_step(found.heap) == 0


def test_mappings_that_are_kept_are_counted() -> None:
    kept: list[mmap.mmap] = []
    found = grown(lambda: kept.append(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
    assert found.per_step(found.mapped) == 1 << 16


def test_what_grows_a_few_times_is_no_growth() -> None:
    kept: list[object] = []
    steps = iter(range(STEPS))
    found = grown(lambda: kept.append([bytes(100) for _ in range(500)]) if next(steps) in (1, 4, 6) else None)
    assert found.objects[-1] - found.objects[0] >= 1500
    assert found.per_step(found.objects) < 10
