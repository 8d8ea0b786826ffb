"""Tests of ranks that are killed (SIGKILL) and started again: no commit is lost, and no bit differs."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commit_plans import Plan, generations, launch, results, told
from committing_ranks import POINTS
from rank_processes import Outcome

from infinity.checkpoint import commit_files
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab_header import slab_name

Lines = list[list[str]]


def lines_of(outcome: Outcome) -> Lines:
    """The lines that a rank has printed, as words."""
    kinds = ("begins", "step", "durable")
    return [line.split() for line in outcome.written.splitlines() if line.startswith(kinds)]


@functools.cache
def undisturbed(size: int, last: int) -> tuple[list[dict[str, str]], list[Any]]:
    """Of a run without a death: each rank's losses by step, and what each rank returns."""
    with tempfile.TemporaryDirectory() as directory:
        found = launch(Plan(directory, size=size, last=last), "train")
    losses = [{line[1]: line[2] for line in lines_of(each) if line[0] == "step"} for each in found]
    return losses, results(found)


class Killed:
    """A run in a directory whose ranks are killed, one after the other, and all started again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.durable = self.kills = 0
        self.anew = 0
        """How often all ranks began anew, because not all had a commit. Slabs may stay then."""
        self.losses, self.ends = undisturbed(plan.size, plan.last)

    def process(self, **options: Any) -> bool:
        """Start all ranks, of which one dies as the options of the plan say. Returns whether it has."""
        plan = dataclasses.replace(self.plan, resume=self._resumes(), **options)
        found = launch(plan, "train")
        self._check_lines([lines_of(each) for each in found], told(found))
        killed = plan.rank >= 0 and found[plan.rank].code == -signal.SIGKILL
        self.kills += killed
        for rank, each in enumerate(found):
            if killed and rank == plan.rank:
                continue
            assert each.code == 0 and "Traceback" not in each.written, told(found)
            # A rank that closes its runtime may need the dead one no more.
            assert each.error == ("RankFailure" if killed and each.result is None else ""), told(found)
            if plan.last == self.plan.last:
                assert each.result in (None, self.ends[rank]), told(found)
        if not killed:
            self._check_files()
        return killed

    def _resumes(self) -> bool:
        """Whether there is a commit. Where some ranks have one and others have not, none was durable."""
        there = generations(self.plan)
        if all(there):
            return True
        assert not self.durable
        self.anew += any(there)
        shutil.rmtree(self.plan.commits, ignore_errors=True)
        return False

    def _check_lines(self, lines: list[Lines], text: str) -> None:
        begun = {each[0][1] for each in lines if each}
        assert len(begun) < 2 and all(int(each) >= self.durable for each in begun), (
            f"a commit is lost\n{text}"
        )
        for rank, mine in enumerate(lines):
            for kind, step, *loss in mine[1:]:
                if kind == "step":
                    assert loss == [self.losses[rank][step]], text
                else:
                    self.durable = max(self.durable, int(step))

    def _check_files(self) -> None:
        """Check that ranks that have ended well leave the last commit, and nothing that nobody needs."""
        ((newest,),) = {tuple(each) for each in generations(self.plan)}
        for rank in range(self.plan.size):
            directory = self.plan.commits / f"rank-{rank}"
            slabs = commit_files.read(directory, newest, DiskFiles()).manifest.volume.slabs
            there = {each.name for where in (directory, directory.parents[1]) for each in where.iterdir()}
            wanted = {f"commit-{newest}", f"commit-{newest}.data", *(slab_name(rank, e.uuid) for e in slabs)}
            others = {each for each in there - wanted if f"rank{rank}-" in each or "commit-" in each}
            assert wanted <= there and (self.anew or not others), others


def test_killed_ranks_go_on_from_what_was_committed(tmp_path: Path) -> None:
    run = Killed(Plan(str(tmp_path), homes=("unified", "nvme")))
    assert run.process(rank=1, point="slab sync", nth=3)
    assert run.process(rank=0, point="before the vote", nth=1)
    assert run.process(rank=1, point="after the vote", nth=1)
    assert run.process(rank=0, point="votes heard", nth=1)
    assert run.process(rank=1, point="after the rename", nth=2)
    assert run.durable >= 3
    assert not run.process()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_ranks_killed_anywhere_go_on_from_what_was_committed(seed: int, tmp_path: Path) -> None:
    """Five kills or more each, at all points and at any time."""
    draw = random.Random(seed)
    home = draw.choice(("unified", "nvme", "host", "device"))
    plan = Plan(
        str(tmp_path),
        size=draw.choice((2, 2, 3)),
        stage=draw.randrange(4),
        homes=draw.choice(((home,), (home,), ("unified", "nvme"))),
        update=draw.choice(("lazy", "lazy", "eager", "sync")),
        last=24,
    )
    run = Killed(plan)
    while run.kills < 5:
        point = draw.choice((*POINTS, *["any time"] * 6, *["step"] * 3))
        run.process(
            rank=draw.randrange(plan.size),
            point=point,
            nth=draw.randint(1, 150 if point == "any time" else 4),
            pause=draw.choice((0.0, 0.2)),
            waits=draw.choice(("all", "zero", "none")),
            last=min(run.durable + 4, plan.last),
        )
    run.process()
