"""Tests of commits against every crash: each leaves the last durable commit, or the one begun after it.

A run of 6 steps with 3 commits is recorded. The states that a crash could leave are read by the loader, which
compares all arrays, their checksums and all scalars with those of a run without commits. Some are trained on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commit_states import Loader
from committed_runs import Job
from crash_states import Disk
from recorded_commits import Record, killed, refused, streamed, whole

from infinity.aio import Faults

RUNS: dict[str, Record] = {
    "nvme, lazy": whole(Job()),
    "nvme, eager, bf16, two paths": whole(Job(paths=2, update="eager", compute="bf16")),
    "nvme, speculative": whole(Job(update="speculative")),
    "ram, lazy, bf16": whole(Job(home="ram", compute="bf16")),
    "ram, eager": whole(Job(home="ram", update="eager")),
    "device apart": whole(Job(home="device")),
    "streamed from ram to nvme": streamed(Job(home="ram"), Job()),
    "streamed from ram to two paths": streamed(Job(home="ram"), Job(paths=2, update="eager")),
    "killed and resumed": killed(Job()),
    "a name refused": refused(Job(paths=2)),
}
ORDERS = (True, False)
"""Whether the names that survive are the first n operations, or any."""
STATES = 2000 // (len(RUNS) * len(ORDERS))
TRAINED_EVERY = 50
"""From every how many-th state a run is continued: from 2 or more in each order, so from 32 in all."""


def look(record: Record, root: Path, *, count: int, every: int) -> None:
    made = record(root / "run", Faults())
    found = set()
    for ordered in ORDERS:
        disk = Disk(made.events, made.base, ordered_names=ordered)
        loader = Loader(made.directories, made.job, trains_every=every, ordered_names=ordered)
        assert disk.first_violation(loader, root / "state", count=count, seed=ordered) is None
        assert loader.looked >= 0.9 * count
        assert loader.trained >= 0.6 * (count // every)  # in others nothing was committed yet
        found |= loader.found
    # Each commit was met as a durable one, and some as a pending one that is not there, and as one that is.
    first = min(durable for durable, _, _ in found)
    assert {durable for durable, _, _ in found} == set(range(first, 4))
    assert {loaded - durable for durable, loaded, begun in found if begun > durable} == {0, 1}


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("name", RUNS)
def test_every_crash_leaves_a_whole_commit(name: str, tmp_path: Path) -> None:
    look(RUNS[name], tmp_path, count=STATES, every=TRAINED_EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_many_crashes_leave_a_whole_commit(name: str, tmp_path: Path) -> None:
    count = 100_000 // (len(RUNS) * len(ORDERS))
    look(RUNS[name], tmp_path, count=count, every=count // 15)
