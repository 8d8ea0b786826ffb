"""Tests of commits of two nodes against every crash: each leaves a commit whose rank commits are all whole.

Runs of two ranks are recorded, each on a node with a disk of its own. The nodes lose power, each at a moment
of its own, and what their disks may hold then is read as a restart reads it. It must be the last commit of
which any rank has known that it counts, or one that was begun after it. All arrays, checksums and scalars are
compared with those of a run of one rank without commits. Some states are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from crash_cuts import Cuts
from crash_states import Disk
from rank_commits import RanksLoader
from ranked_commits import MORE, Job, undisturbed
from recorded_ranks import Recorded, Run, record, resume

RUNS: dict[str, Run] = {
    "parameters divided, nvme": Run(Job()),
    "parameters divided, ram": Run(Job(home="ram", compute="bf16")),
    "optimizer divided": Run(Job(stage=1)),
    "refused": Run(parts=("refused",)),
    "unsynced": Run(parts=("unsynced",)),
    "killed before a rename": Run(parts=("killed before the rename", "resumed")),
    "killed before a sync": Run(parts=("killed before the sync", "resumed")),
    "streamed from ram to nvme": Run(parts=("resumed",), before=Job(home="ram")),
    "moved to each other's nodes": Run(parts=("resumed",), before=Job(), nodes=(1, 0)),
}
MORE_RUNS = {
    "nothing divided": Run(Job(stage=0)),
    "gradients divided, eager, bf16": Run(Job(stage=2, update="eager", compute="bf16")),
    "parameters divided, eager, ram": Run(Job(home="ram", update="eager")),
    "parameters divided, speculative": Run(Job(update="speculative", compute="bf16")),
    "refused, ram": Run(Job(home="ram"), parts=("refused",)),
    "refused, optimizer divided": Run(Job(stage=1), parts=("refused",)),
    "unsynced, optimizer divided": Run(Job(stage=1), parts=("unsynced",)),
    "killed before a rename, ram": Run(Job(home="ram"), parts=("killed before the rename", "resumed")),
    "streamed, eager, bf16": Run(
        Job(update="eager", compute="bf16"), parts=("resumed",), before=Job(home="ram", compute="bf16")
    ),
    "moved, optimizer divided": Run(Job(stage=1), parts=("resumed",), before=Job(stage=1), nodes=(1, 0)),
}
ORDERS = (True, False)
"""Whether the names that survive are the first n operations, or any."""
STATES = 400 // (len(RUNS) * len(ORDERS))
QUICK = tuple(RUNS)[::2]
"""The runs that are no sweep."""
MANY = 40_000 // (len(RUNS) * len(ORDERS))


def look(run: Run, made: Sequence[Recorded], root: Path, *, count: int, every: int) -> list[RanksLoader]:
    """Look at crash states of a run, and keep one of every so many. root: of the run's directory."""
    loaders = []
    for ordered in ORDERS:
        cuts = Cuts([Disk(each.events, each.base, ordered_names=ordered) for each in made])
        kept = root / f"kept, {ordered}"
        loader = RanksLoader(run.job, run.nodes, root=root / "run", keeps=kept, every=every)
        assert cuts.first_violation(loader, root / "state", count=count, seed=ordered) is None
        assert loader.looked >= 0.9 * count
        loaders.append(loader)
    return loaders


def train_on(kept: Sequence[tuple[Run, RanksLoader, Path, int]]) -> None:
    """Resume runs from states that were kept, and compare what they train with the undisturbed run."""
    found = resume([(run, root) for run, _, root, _ in kept])
    for losses, (run, loader, root, step) in zip(found, kept, strict=True):
        wanted = [
            loss for more in range(1, MORE + 1) for loss in undisturbed(run.job.compute)[step + more][0]
        ]
        assert losses == wanted
        assert loader.wrong_at_the_end(root, step + MORE) is None


def test_every_crash_leaves_a_commit_of_all_ranks(tmp_path: Path) -> None:
    loaders, kept = [], []
    recorded = record([(RUNS[name], tmp_path / name / "run", None) for name in QUICK])
    for name, made in zip(QUICK, recorded, strict=True):
        found = look(RUNS[name], made, tmp_path / name, count=STATES, every=STATES * 2 // 3)
        kept += [(RUNS[name], found[0], *each) for each in found[0].kept]
        loaders += found
    assert len(kept) == len(QUICK)
    train_on(kept)
    # Commits were met that had been begun and were there, and that were not, and ranks with different ones.
    there = {loaded > counted for each in loaders for counted, loaded, begun in each.found if begun > counted}
    assert there == {False, True}
    assert any(each.apart for each in loaders)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, *MORE_RUNS])
def test_many_crashes_leave_a_commit_of_all_ranks(name: str, tmp_path: Path) -> None:
    run = {**RUNS, **MORE_RUNS}[name]
    (made,) = record([(run, tmp_path / "run", None)])
    loaders = look(run, made, tmp_path, count=MANY, every=MANY // 10)
    train_on([(run, loader, *each) for loader in loaders for each in loader.kept])
    assert all(loader.apart for loader in loaders)
