"""Tests of SIGINT before single lines of `save`, `Commit.wait`, `load`, of updates that land a commit, and of
an `offload` that continues a run. interrupted_runs.py says what must follow.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from committed_runs import Job
from faulty import HANG, watchdog, watched
from interrupted_lines import Place, places
from interrupted_runs import CALLS, interrupt, interrupt_resume

__all__ = ["watchdog"]

NVME, RAM, DEVICE, EAGER = Job(), Job(home="ram"), Job(home="device"), Job(update="eager")
JOBS = {"nvme": NVME, "ram": RAM, "device": DEVICE, "eager": EAGER}
FEW = [("save", "nvme", 1, 2), ("save", "device", 1, 1), ("wait", "nvme", 1, 1), ("load", "nvme", 1, 1)]
FEW += [("landing", "nvme", 1, 1), ("save", "nvme", 2, 2), ("wait", "nvme", 2, 2), ("landing", "nvme", 2, 1)]
"""(call, key of JOBS, number of signals, number of places) of the tests that are not slow."""
RESUMES = {"adopted": (NVME, NVME), "to memory": (RAM, DEVICE), "streamed": (RAM, NVME)}
"""Resume -> (the run that commits, the one that continues it)."""
EVERY = 5
"""From every how many-th place of the lines of `offload` a slow test interrupts: it has 4000."""
MANY = 10
"""From this number of places on, at least one must be reached: which last visits of lines that wait are
reached depends on threads.
"""
OPENING = ("system/disk_files.py", "tiers/path_lock.py", "tiers/slab.py")
"""Files that open descriptors. Ctrl-C before the line after that leaves one open until the process ends, and
with it the lock, so these lines of `offload` are left out.
"""


@functools.cache
def lines_of(call: str, home: str) -> list[Place]:
    with tempfile.TemporaryDirectory() as root:
        outcome = interrupt(call, JOBS[home], None, Path(root))
    assert outcome.refused is None
    return places(outcome.lines)


@functools.cache
def lines_of_resume(name: str) -> list[Place]:
    with tempfile.TemporaryDirectory() as root:
        found = places(interrupt_resume(*RESUMES[name], None, Path(root)))
    return [each for each in found if each.file not in OPENING]


def spread(found: list[Place], count: int) -> list[Place]:
    """Some first visits, which are reached whatever waits take, at equal distances."""
    found = [each for each in found if each.visit == 1]
    step = len(found) / count
    return [found[int((at + 0.5) * step)] for at in range(count)]


def interrupt_all(call: str, home: str, times: int, chosen: list[Place], directory: Path) -> int:
    """Interrupt a call at each of these places. Returns how many were reached."""
    sent = 0
    for number, place in enumerate(chosen):
        root = directory / str(number)
        root.mkdir()
        with watched(HANG):
            outcome = interrupt(call, JOBS[home], place, root, times)
        sent += outcome.lines.sent
    return sent


@pytest.mark.parametrize(("call", "home", "times", "count"), FEW)
def test_a_call_in_which_signals_come(call: str, home: str, times: int, count: int, tmp_path: Path) -> None:
    assert interrupt_all(call, home, times, spread(lines_of(call, home), count), tmp_path)


@pytest.mark.parametrize(("name", "count"), [("adopted", 2), ("streamed", 1)])
def test_an_offload_that_is_interrupted_while_it_continues_a_run(
    name: str, count: int, tmp_path: Path
) -> None:
    assert interrupt_resumes(name, spread(lines_of_resume(name), count), tmp_path)


def interrupt_resumes(name: str, chosen: list[Place], directory: Path) -> int:
    """Interrupt an `offload` at each of these places. Returns how many were reached."""
    sent = 0
    for number, place in enumerate(chosen):
        root = directory / str(number)
        root.mkdir()
        with watched(HANG):
            sent += interrupt_resume(*RESUMES[name], place, root).sent
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("home", JOBS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("part", range(8))
def test_a_call_in_which_signals_come_at_many_lines(
    call: str, home: str, times: int, part: int, tmp_path: Path
) -> None:
    chosen = lines_of(call, home)[part :: 8 * EVERY]
    assert interrupt_all(call, home, times, chosen, tmp_path) or len(chosen) < MANY


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMES)
@pytest.mark.parametrize("part", range(8))
def test_an_offload_that_is_interrupted_at_every_fifth_line(name: str, part: int, tmp_path: Path) -> None:
    assert interrupt_resumes(name, lines_of_resume(name)[part * EVERY :: 8 * EVERY], tmp_path)
