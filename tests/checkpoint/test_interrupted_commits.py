"""Tests of Ctrl-C before single lines of `save`, `Commit.wait`, `load`, of a step that lands a commit, and of
an `offload` that continues a run. tests/interrupted_runs.py says what must follow.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commit_states import continued
from committed_runs import Job, opened, take_step, user_state
from faulty import HANG, watchdog, watched
from interrupted_lines import Place, places
from interrupted_runs import CALLS, interrupt, interrupt_resume

from infinity.errors import ConfigError
from infinity.pages.ledger import Ledger
from infinity.pages.store import Store

__all__ = ["watchdog"]

NVME, RAM, DEVICE, EAGER = Job(), Job(home="ram"), Job(home="device"), Job(update="eager")
JOBS = {"nvme": NVME, "ram": RAM, "device": DEVICE, "eager": EAGER}
FEW = [("save", "nvme", 2), ("save", "device", 1), ("wait", "nvme", 2), ("load", "nvme", 1)]
FEW += [("landing", "nvme", 2)]
"""(call, key of JOBS, number of places) of the tests that are not slow."""
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


def interrupt_all(call: str, home: str, chosen: list[Place], directory: Path) -> int:
    """Interrupt a call at each of these places. Returns how many were reached."""
    raised = 0
    for number, place in enumerate(chosen):
        root = directory / str(number)
        root.mkdir()
        with watched(HANG):
            outcome = interrupt(call, JOBS[home], place, root)
        raised += outcome.lines.raised
    return raised


@pytest.mark.parametrize(("call", "home", "count"), FEW)
def test_a_call_that_is_interrupted(call: str, home: str, count: int, tmp_path: Path) -> None:
    assert interrupt_all(call, home, spread(lines_of(call, home), count), tmp_path)


def test_a_wait_that_is_interrupted_before_it_finishes_a_write(tmp_path: Path) -> None:
    """The write keeps its staging until a later call finishes it."""
    source, start = inspect.getsourcelines(Store._finish_write)
    at = next(index for index, line in enumerate(source) if "home.finish(request)" in line)
    assert interrupt_all("wait", "nvme", [Place("pages/store.py", start + at, 1)], tmp_path)


@pytest.mark.parametrize(("name", "count"), [("adopted", 2), ("streamed", 1)])
def test_an_offload_that_is_interrupted_while_it_continues_a_run(
    name: str, count: int, tmp_path: Path
) -> None:
    assert interrupt_resumes(name, spread(lines_of_resume(name), count), tmp_path)


def interrupt_resumes(name: str, chosen: list[Place], directory: Path) -> int:
    """Interrupt an `offload` at each of these places. Returns how many were reached."""
    raised = 0
    for number, place in enumerate(chosen):
        root = directory / str(number)
        root.mkdir()
        with watched(HANG):
            raised += interrupt_resume(*RESUMES[name], place, root).raised
    return raised


def test_a_write_that_is_interrupted_at_the_place_of_a_commit_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Ledger.written

    def interrupted(*arguments: Any) -> None:
        written(*arguments)
        raise KeyboardInterrupt

    directories = NVME.directories(tmp_path)
    with opened(NVME, directories) as (model, runtime):
        take_step(model, runtime, 1)
        runtime.save(state=user_state(1)).wait()
        take_step(model, runtime, 2)
        commit = runtime.save(state=user_state(2))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Ledger, "written", interrupted)
            commit.wait()
        with pytest.raises(ConfigError, match="interrupted half way"):
            commit.wait()
        with pytest.raises(ConfigError, match="interrupted half way"):
            take_step(model, runtime, 3)
    assert continued(NVME, directories, 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("home", JOBS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("part", range(8))
def test_a_call_that_is_interrupted_at_every_line(call: str, home: str, part: int, tmp_path: Path) -> None:
    if (call, home) == ("landing", "eager"):
        pytest.skip("its updates begin in a backward, which cannot be repeated")
    chosen = lines_of(call, home)[part::8]
    assert interrupt_all(call, home, chosen, tmp_path) or len(chosen) < MANY


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMES)
@pytest.mark.parametrize("part", range(8))
def test_an_offload_that_is_interrupted_at_every_fifth_line(name: str, part: int, tmp_path: Path) -> None:
    assert interrupt_resumes(name, lines_of_resume(name)[part * EVERY :: 8 * EVERY], tmp_path)
