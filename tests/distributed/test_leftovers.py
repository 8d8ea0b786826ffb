"""Tests of a directory that several ranks share for pages on NVMe: the next run removes what killed ranks
left there, and leaves alone what living ranks have there.

The ranks train the model of hang_ranks.py, and rank 0 pauses in a backward of its second step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_processes
from hang_plans import Plan

Outcomes = list[rank_processes.Outcome]
SECONDS = 60.0
"""After which ranks are killed. They take some 2 s."""


def plan_in(directory: Path, size: int = 2, fault: str = "none") -> Plan:
    """A plan of a training whose pages are mostly on NVMe in the directory. fault: "none" or "pause"."""
    partition = "parameters" if size > 1 else None
    return Plan(
        fault,
        "in backward",
        nth=4,
        size=size,
        partition=partition,
        timeout=SECONDS,
        directory=os.fspath(directory),
    )


def train(plan: Plan) -> Outcomes:
    """How the ranks of a plan ended."""
    environment = {"PLAN": json.dumps(dataclasses.asdict(plan))}
    return rank_processes.run(
        "hang_ranks.py", "train", size=plan.size, timeout=SECONDS, environment=environment
    )


def results(found: Outcomes) -> list[Any]:
    """What each rank returned; none may have failed."""
    assert [each.code for each in found] == [0] * len(found), found
    assert None not in [each.result for each in found], found
    return [each.result for each in found]


@contextlib.contextmanager
def paused(plan: Plan) -> Iterator[Future[Outcomes]]:
    """Run ranks beside the block, in which rank 0 pauses. They go on when the block ends."""
    with ThreadPoolExecutor(1) as beside:
        run = beside.submit(train, plan)
        try:
            while not plan.mark.exists():
                assert not run.done(), run.result()
                time.sleep(0.01)
            yield run
        finally:
            plan.mark.unlink(missing_ok=True)


def files_of(*ranks: int) -> list[str]:
    """Names of the files that ranks have in their directory as long as they train."""
    return sorted(f"infinity-rank{rank}.{kind}" for rank in ranks for kind in ("lock", "slab"))


def inodes(directory: Path) -> dict[str, int]:
    """The files of a directory, by name. A file that was removed and made anew has another inode."""
    return {each.name: each.stat().st_ino for each in directory.iterdir()}


def owner(directory: Path, rank: int) -> int:
    """Id of the process that has locked the directory for a rank."""
    asked = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with (directory / f"infinity-rank{rank}.lock").open("r+b") as file:
        kind, *_, process = struct.unpack("hhqqi0q", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    assert kind != fcntl.F_UNLCK
    return int(process)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Number of ranks -> what each returns, with a digest of all parameters, if the directory was clean."""
    plans = [plan_in(tmp_path_factory.mktemp("clean"), size) for size in (1, 2)]
    return {plan.size: results(train(plan)) for plan in plans}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "pages"
    made.mkdir()
    return made


@pytest.mark.parametrize(
    "killed", [(0, 1), *(pytest.param((rank,), marks=pytest.mark.slow) for rank in (0, 1))], ids=str
)
def test_the_next_run_removes_what_killed_ranks_left(
    killed: tuple[int, ...], directory: Path, trained: dict[int, list[Any]]
) -> None:
    with paused(plan_in(directory, fault="pause")) as run:
        assert sorted(inodes(directory)) == files_of(0, 1)
        for rank in reversed(killed):  # rank 0 last: as it pauses, it does not end because of the other one
            os.kill(owner(directory, rank), signal.SIGKILL)
    for rank, each in enumerate(run.result()):
        if rank in killed:
            assert each.code == -signal.SIGKILL, each
        else:
            assert (each.code, each.error) == (0, "RankFailure"), each
            assert f"ank {killed[0]} " in each.text
    assert sorted(inodes(directory)) == files_of(*killed)
    for rank in killed:
        assert any((directory / f"infinity-rank{rank}.slab").read_bytes()), "pages were written"

    assert results(train(plan_in(directory))) == trained[2]
    assert inodes(directory) == {}


@pytest.mark.parametrize(
    ("size", "second"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 2), (1, 2)))]
)
def test_a_second_run_is_refused_and_harms_nothing(
    size: int, second: int, directory: Path, trained: dict[int, list[Any]]
) -> None:
    with paused(plan_in(directory, size, fault="pause")) as run:
        owners = [owner(directory, rank) for rank in range(size)]
        before = inodes(directory)
        assert sorted(before) == files_of(*range(size))
        refused = train(plan_in(directory, second))
        assert inodes(directory) == before
    for each in refused:
        # A rank for which the directory is free, or that comes later, is told of the one that was refused.
        assert each.code == 0 and each.error in ("StorageError", "RankFailure"), each
        assert any(f"are in use by process {owner}." in each.text for owner in owners), each
    assert "StorageError" in [each.error for each in refused]
    assert results(run.result()) == trained[size]
    assert inodes(directory) == {}
