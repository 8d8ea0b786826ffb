"""Tests that crash states of two nodes show mistakes in how ranks commit (see rank_commit_bugs.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from crash_cuts import Cuts
from crash_states import Disk
from rank_commits import RanksLoader
from ranked_commits import Job
from recorded_ranks import Recorded, Run, record

from infinity.checkpoint import commit_files, continued_commit
from infinity.checkpoint.continued_commit import FoundCommit, no_commit
from infinity.system.disk_files import DiskFiles

ROUNDS, STATES = 20, 100
"""Numbers of rounds through a run, and of crash states in a round, within which each bug must show. The best
hidden one shows in 1 of 120 states.
"""
WHOLE, UNSYNCED = Run(), Run(parts=("unsynced",))
MOVED = Run(parts=("resumed",), before=Job(), nodes=(1, 0))
BUGS: Sequence[tuple[str, Run]] = (
    ("a commit counts at once", WHOLE),
    ("voted before the rank commit was written", WHOLE),
    ("voted before the name was synced", WHOLE),
    ("old rank commits removed before others voted", WHOLE),
    ("old rank commits removed before others voted", MOVED),
    ("refused rank commit left", UNSYNCED),
    ("refused rank commit taken back without a sync", UNSYNCED),
    ("resumed name not synced", Run(parts=("killed before the sync", "resumed"))),
)
"""(the bug, the run in which it shows)."""


def violation(run: Run, made: Sequence[Recorded], where: Path) -> str | None:
    """What is wrong first in the crash states of a run."""
    cuts, loader = (
        Cuts([Disk(each.events, each.base) for each in made]),
        RanksLoader(run.job, run.nodes),
    )
    rounds = (cuts.first_violation(loader, where, count=STATES, seed=seed) for seed in range(ROUNDS))
    return next((wrong for wrong in rounds if wrong is not None), None)


@pytest.mark.slow
def test_bugs_are_caught(tmp_path: Path) -> None:
    runs = [(run, tmp_path / str(at) / "run", bug) for at, (bug, run) in enumerate(BUGS)]
    missed = [
        bug
        for (run, root, bug), made in zip(runs, record(runs), strict=True)
        if violation(run, made, root.parent / "state") is None
    ]
    assert not missed


def test_a_restart_at_the_newest_rank_commit_of_each_rank_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(
        directories: Mapping[str, Path], given: Path, files: DiskFiles, rank: int, **_: Any
    ) -> FoundCommit:
        directory = directories[f"rank-{rank}"]
        saved = commit_files.newest(directory, files)
        if saved is None:
            raise no_commit(given)
        return FoundCommit(saved.manifest.name, (0, 1), {rank: (directory, saved)})

    (made,) = record([(WHOLE, tmp_path / "run", None)])
    monkeypatch.setattr(continued_commit, "find_commit", careless)
    assert "are of the commits" in str(violation(WHOLE, made, tmp_path / "state"))
