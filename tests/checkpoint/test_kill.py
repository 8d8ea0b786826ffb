"""Tests of runs that are killed (SIGKILL) and resumed: no commit is lost, and no bit differs."""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import killed_run
import pytest
from committed_runs import ROOMY, Job, after, make, take_step
from warm_python import Popen

import infinity
from infinity.checkpoint import commit_files
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import slab_name

LAST = 240
"""Steps of the undisturbed run."""
RAM, NVME = Job(home="ram"), Job()
EAGER = Job(update="eager")
SPECULATIVE = Job(update="speculative")

Kill = tuple[Job, str, int]
"""(job, point of killed_run.POINTS or "any time", the number of the visit that kills, or milliseconds after
the first line).
"""

KILLS: list[Kill] = [
    (RAM, "flush", 20),
    (RAM, "slab sync", 2),
    (RAM, "resume", 1),
    (NVME, "re-layout", 5),  # the slab was in the directory of commits, and is made anew elsewhere
    (NVME, "update", 9),
    (EAGER, "manifest", 2),
    (SPECULATIVE, "update", 30),
    (NVME, "after the rename", 3),
    (NVME, "any time", 40),
]


@functools.cache
def losses() -> list[float]:
    """The losses of the undisturbed run: those of step 1 to LAST."""
    model, optimizer = make()
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host=ROOMY),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
    ) as runtime:
        found = []
        for step in range(1, LAST + 1):
            found.append(take_step(model, runtime, step))
            after(model, runtime, step)
    return found


class Killed:
    """A run in a directory whose processes are killed one after the other. Checks what each of them says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.durable = self.kills = 0
        self.orphans: set[Path] = set()
        """Slabs of killed processes that count as committed and that no commit names; see `_look`."""

    def process(self, job: Job, point: str, visit: int, *, last: int = LAST) -> bool:
        """Run a process and kill it. Returns whether it was killed; otherwise it has ended before."""
        at_any_time = point == "any time"
        asked = {
            "root": str(self.root),
            "job": asdict(job),
            "point": "" if at_any_time else point,
            "nth": visit,
            "last": last,
        }
        child = Popen(
            [sys.executable, killed_run.__file__, json.dumps(asked)], stdout=subprocess.PIPE, text=True
        )
        try:
            lines = []
            if at_any_time:
                lines.append(child.stdout.readline())
                time.sleep(visit / 1000)
                child.kill()
            lines += child.communicate(timeout=60)[0].splitlines()
        finally:
            child.kill()
            child.wait()
        self._check([line.split() for line in lines if line])
        assert child.returncode in (-signal.SIGKILL, 0)
        killed = child.returncode != 0
        self.kills += killed
        self._look(killed)
        return killed

    def _check(self, lines: list[list[str]]) -> None:
        if lines:
            assert lines[0][0] == "begins"
            assert int(lines[0][1]) >= self.durable, "a commit that was waited for is lost"
        for kind, number, text in lines[1:]:
            if kind == "step":
                assert float.fromhex(text) == losses()[int(number) - 1]
            else:
                assert kind == "durable"
                self.durable = int(text)

    def _look(self, killed: bool) -> None:
        """Look for files that nobody needs, after a process that made a commit of its own and ended."""
        commits, *others = (each for each in (self.root / "commits", self.root / "pages-0") if each.exists())
        saved = commit_files.newest(commits, DiskFiles())
        named = set() if saved is None else {slab_name(0, each.uuid) for each in saved.manifest.volume.slabs}
        slabs = {each for directory in (commits, *others) for each in directory.glob("*.slab")}
        assert named <= {each.name for each in slabs}
        if killed:
            # A process that is killed between the rename of its slabs and that of the first manifest leaves
            # slabs of no commit, and the next one, which may be given other directories, may not find them.
            self.orphans |= {path for path in slabs if path.name not in {*named, slab_name(0)}}
            return
        assert saved is not None
        generation = saved.manifest.generation
        assert {each.name for each in commits.glob("*commit*")} == {
            f"commit-{generation}",
            f"commit-{generation}.safetensors",
        }
        assert {each.name for each in slabs - self.orphans} <= named
        assert not saved.skipped


def test_a_killed_run_is_resumed_from_what_was_committed(tmp_path: Path) -> None:
    run = Killed(tmp_path)
    for job, point, visit in KILLS:
        assert run.process(job, point, visit), f"the point {point!r} was not reached"
    assert run.kills == len(KILLS)
    assert run.durable >= 4
    assert not run.orphans
    assert not run.process(NVME, "", 0, last=run.durable + 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_runs_killed_anywhere_are_resumed_from_what_was_committed(tmp_path: Path, seed: int) -> None:
    """20 runs of 15 kills or more each, at every point and at any time."""
    draw = random.Random(seed)
    run = Killed(tmp_path)
    while run.kills < 15:
        job = RAM if run.kills < 7 else draw.choice((NVME, EAGER))
        point = draw.choice((*killed_run.POINTS, *["any time"] * 4))
        run.process(job, point, draw.randint(1, 60 if point == "any time" else 9), last=run.durable + 4)
    run.process(job, "", 0, last=run.durable + 3)
