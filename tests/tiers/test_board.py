"""Tests of boards: bytes of a process's shared memory that others copy by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from infinity import _tiers
from infinity.tiers.pool import tensor_over

PAGE = 4096
NBYTES = 256 * PAGE
OWNER = """
import os, sys, torch
from infinity import _tiers
from infinity.tiers.pool import tensor_over
regions = [_tiers.map_host(nbytes, huge_pages=False, shared=True) for nbytes in (4096, 2 * 256 * 4096)]
board, memory = _tiers.Board(regions[0]), tensor_over(regions[1])
print(os.getpid(), *(each.descriptor for each in regions), flush=True)
step = 0
while os.getppid() == int(sys.argv[1]):
    board.close(3)
    memory.fill_(1 + step % 250)
    board.open(3, (5, 0, 7), 256 * 4096)
    step += 1
    for _ in range(step % 5000):
        pass
"""


def window(pid: int, descriptor: int, nbytes: int) -> _tiers.Window:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    try:
        return _tiers.map_window(opened, nbytes)
    finally:
        os.close(opened)


def mine() -> tuple[_tiers.Board, torch.Tensor, _tiers.Window]:
    """A board, a tensor over shared memory, and this process's window to it."""
    region = _tiers.map_host(8 * PAGE, huge_pages=False, shared=True)
    board = _tiers.Board(_tiers.map_host(PAGE, huge_pages=False, shared=True))
    return board, tensor_over(region), window(os.getpid(), region.descriptor, 8 * PAGE)


def test_an_entry_is_copied_while_it_is_open_with_the_wanted_stamp() -> None:
    board, memory, region = mine()
    into = torch.zeros(PAGE, dtype=torch.uint8)

    def copy(stamp: tuple[int, int, int], start: int = 0) -> bool:
        return board.copy(1, stamp, region, start, into.data_ptr(), PAGE)

    assert board.entries == PAGE // _tiers.BOARD_ENTRY_BYTES
    assert not copy((0, 0, 0)), "all entries are closed at first"
    memory[3 * PAGE :] = 5
    board.open(1, (1, 2, 3), 2 * PAGE)
    assert not copy((1, 2, 4)) and not copy((0, 2, 3)) and not copy((1, 0, 3))
    assert copy((1, 2, 3)) and not into.any()
    assert copy((1, 2, 3), PAGE) and bool((into == 5).all())
    board.open(1, (1, 2, 4), 2 * PAGE)
    assert copy((1, 2, 4)) and not copy((1, 2, 3))
    board.close(1)
    board.close(1)
    assert not copy((1, 2, 4))


def test_copies_stay_inside_the_window_and_the_board() -> None:
    board, _, region = mine()
    into = torch.zeros(2 * PAGE, dtype=torch.uint8)
    board.open(0, (0, 0, 0), 7 * PAGE)
    for start, nbytes in ((0, PAGE + 1), (PAGE, 1), (1 << 63, PAGE), (0, 1 << 63)):
        with pytest.raises(IndexError):
            board.copy(0, (0, 0, 0), region, start, into.data_ptr(), nbytes)
    for entry in (PAGE // _tiers.BOARD_ENTRY_BYTES, 1 << 60):
        for call in (board.close, lambda each: board.open(each, (0, 0, 0), 0)):
            with pytest.raises(IndexError):
                call(entry)


def test_a_copy_during_which_the_bytes_change_does_not_count() -> None:
    """Another process changes the bytes all the time, and dies in the end: its memory stays readable."""
    arguments = [sys.executable, "-c", OWNER, str(os.getpid())]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            pid, *descriptors = map(int, owner.stdout.readline().split())
            board = _tiers.Board(window(pid, descriptors[0], PAGE))
            memory = window(pid, descriptors[1], 2 * NBYTES)
            into = torch.zeros(NBYTES, dtype=torch.uint8)
            copied, tries = 0, 0
            while copied < 100:
                tries += 1
                if board.copy(3, (5, 0, 7), memory, 0, into.data_ptr(), NBYTES):
                    assert bool((into == into[0]).all()), "the copy has bytes of two steps"
                    copied += 1
            assert tries > copied
        finally:
            owner.kill()
    assert tensor_over(memory).any() and not board.copy(3, (0, 0, 0), memory, 0, into.data_ptr(), NBYTES)


def test_copies_do_not_count_as_resident_memory() -> None:
    board, memory, seen = mine()
    memory.fill_(1)
    board.open(0, (0, 0, 0), 0)
    into = torch.zeros(8 * PAGE, dtype=torch.uint8)
    assert board.copy(0, (0, 0, 0), seen, 0, into.data_ptr(), 8 * PAGE) and bool(into.all())
    assert resident(seen) == 0
    assert tensor_over(seen)[PAGE] == 1 and resident(seen) > 0
    seen.forget(0, 8 * PAGE)
    seen.forget(8 * PAGE, PAGE)  # is not in the window
    assert resident(seen) == 0


def resident(region: _tiers.Region) -> int:
    """KiB of a mapping that are in this process's page table."""
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"{region.address:08x}-"))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])
