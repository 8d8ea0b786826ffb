"""Runs that are continued: ranks are killed or cut off, and all started again from their commits."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import link_faults
import two_nodes
from commit_plans import Plan, generations, launch, results, told
from rank_processes import Outcome

from infinity.checkpoint import commit_files
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import slab_name

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


class Continued:
    """A run in a directory whose ranks end by the fault of one of them, again and again, and go on."""

    def __init__(self, plan: Plan, nodes: Sequence[Mapping[str, str]] = ()) -> None:
        """nodes: those of the ranks, whose links are up again before ranks are started."""
        self.plan = plan
        self._nodes = nodes
        self.durable = 0
        """The last step whose commit a rank knew to be durable."""
        self.kills = 0
        """How often a fault has ended a rank."""
        self.anew = 0
        """How often all ranks began anew, because not all had a commit. Slabs may stay then."""
        self.losses, self.ends = undisturbed(plan.size, plan.last)

    def process(self, **options: Any) -> bool:
        """Start all ranks, of which one dies or loses its link as the options of the plan say.

        Returns whether that has ended a rank.
        """
        plan = dataclasses.replace(self.plan, resume=self._resumes(), **options)
        found = launch(plan, "train", nodes=self._nodes)
        for each in self._nodes:
            two_nodes.set_link(True, each)
        self._check_lines([lines_of(each) for each in found], told(found))
        killed = plan.rank >= 0 and found[plan.rank].code == -signal.SIGKILL and plan.fault == "kill"
        cut = plan.fault == link_faults.CUT and any(each.error for each in found)
        self.kills += killed or cut
        for rank, each in enumerate(found):
            if killed and rank == plan.rank:
                continue
            assert each.code == 0 and "Traceback" not in each.written, told(found)
            # A rank that closes its runtime may need the others no more.
            ended = (killed or cut) and each.result is None
            assert each.error == ("RankFailure" if ended else ""), told(found)
            assert not cut or not ended or "ank " in each.text, told(found)
            if plan.last == self.plan.last:
                assert each.result in (None, self.ends[rank]), told(found)
        if not killed and not cut:
            self._check_files()
        return killed or cut

    def process_at_random(self, draw: random.Random, point: str) -> bool:
        """Do as `process`, with a fault at a point of which all else is drawn."""
        return self.process(
            rank=draw.randrange(self.plan.size),
            point=point,
            nth=draw.randint(1, 150 if point == "any time" else 4),
            pause=draw.choice((0.0, 0.2)),
            waits=draw.choice(("all", "zero", "none")),
            last=min(self.durable + 4, self.plan.last),
        )

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
            wanted = {
                f"commit-{newest}",
                f"commit-{newest}.safetensors",
                *(slab_name(rank, e.uuid) for e in slabs),
            }
            others = {each for each in there - wanted if f"rank{rank}-" in each or "commit-" in each}
            assert wanted <= there and (self.anew or not others), others
