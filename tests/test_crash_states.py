"""Tests of recorded runs and of their crash states: the right protocol survives, and each mistake shows."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from crash_states import Disk
from toy_commits import STAGES, STEPS_PER_COMMIT, TRANSFERS_PER_STEP, ToyRun, check, load

from infinity.errors import StorageError

STATES = 1500
"""Crash states within which each mistake must show. The best hidden one shows in 1 of 100."""
FEWER = 400
"""Crash states of runs without a mistake, all of which are looked at."""


Survey = tuple[str | None, set[tuple[int, int]]]


def without(stage: str) -> list[str]:
    return [other for other in STAGES if other != stage]


def moved(stage: str, *, before: str) -> list[str]:
    order = without(stage)
    order.insert(order.index(before), stage)
    return order


def replaced(stage: str, *stages: str, order: Sequence[str] = STAGES) -> list[str]:
    at = list(order).index(stage)
    return [*order[:at], *stages, *order[at + 1 :]]


BUGS = {
    "slabs not synced": without("sync slabs"),
    "one slab of two synced": replaced("sync slabs", "sync one slab"),
    "synced before the writes completed": replaced(
        "wait for writes", "sync slabs", "release writes", "wait for writes", order=without("sync slabs")
    ),
    "synced after the rename": moved("sync slabs", before="sync directory"),
    "headers not synced": replaced("write headers", "write headers unsynced"),
    "headers after the report": moved("write headers", before="free old places"),
    "checksums not synced": replaced("checksums", "checksums unsynced"),
    "manifest not synced": replaced("manifest", "manifest unsynced"),
    "directory not synced": without("sync directory"),
    "directory synced before the rename": moved("sync directory", before="rename"),
    "reported before the directory was synced": moved("report", before="sync directory"),
    "places reused when the commit begins": [
        "free old places",
        "wait for writes",
        "write next step",
        *STAGES,
    ],
    "places reused before the slabs are synced": replaced(
        "sync slabs", "free old places", "write next step", "wait for writes", "sync slabs"
    ),
    "places reused before the directory is synced": replaced(
        "sync directory", "free old places", "write next step", "wait for writes", "sync directory"
    ),
    "old commit removed before the rename": moved("remove old", before="rename"),
}
"""Mistakes in the order of a commit's stages."""


def survey(run: ToyRun, where: Path, *, count: int = STATES, ordered_names: bool = True) -> Survey:
    """Check `count` crash states of a run that began with empty slabs.

    Returns what is wrong, and the pairs (loaded generation, begun generation) that were seen.
    """
    base = {
        str(run.directory): {path.name: bytes(path.stat().st_size) for path in run.directory.glob("slab-*")}
    }
    seen = set()

    def look(places: dict[str, Path], marks: list[str]) -> str | None:
        seen.add((load(places[str(run.directory)])[0], sum(mark.startswith("begun") for mark in marks)))
        return check(places[str(run.directory)], marks)

    disk = Disk(run.recording.events(), base, ordered_names=ordered_names)
    return disk.first_violation(look, where, count=count), seen


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("ordered_names", [True, False])
def test_the_right_order_survives_every_crash(home: Path, tmp_path: Path, ordered_names: bool) -> None:
    with ToyRun(home) as run:
        run.run()
        wrong, seen = survey(run, tmp_path / "state", count=FEWER, ordered_names=ordered_names)
    assert wrong is None
    # Each commit was met both as the pending one that is not there and as one that is.
    assert seen >= {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_order_is_caught(home: Path, tmp_path: Path, bug: str) -> None:
    with ToyRun(home, stages=BUGS[bug]) as run:
        if "release writes" in BUGS[bug]:
            # Of the second commit: in the first one the sync of the headers makes the slabs durable, too.
            run.run(STEPS_PER_COMMIT)
            run.faults.hold("write", nth=TRANSFERS_PER_STEP + 1, times=None)  # those of its last step
        run.run()
        assert survey(run, tmp_path / "state")[0] is not None


def test_the_old_commit_removed_before_the_new_name_is_durable_is_caught_without_a_journal(
    home: Path, tmp_path: Path
) -> None:
    with ToyRun(home, stages=moved("remove old", before="sync directory")) as run:
        run.run()
        assert survey(run, tmp_path / "state", count=FEWER)[0] is None
        assert survey(run, tmp_path / "state", ordered_names=False)[0] is not None


def test_a_state_without_twins_is_caught(home: Path, tmp_path: Path) -> None:
    with ToyRun(home, twins=False) as run:
        run.run()
        assert "other bytes" in str(survey(run, tmp_path / "state")[0])


def test_scalars_read_late_are_caught(home: Path, tmp_path: Path) -> None:
    late = ["wait for writes", "sync slabs", "write next step", *STAGES[2:]]
    with ToyRun(home, stages=late, late_scalars=True) as run:
        run.run()
        assert survey(run, tmp_path / "state")[0] is not None


def test_a_sync_that_failed_is_not_made_good_by_another(home: Path, tmp_path: Path) -> None:
    with ToyRun(home, stages=replaced("sync slabs", "sync again if it fails")) as run:
        run.faults.fail("sync", nth=3, errno=errno.EIO)  # the first slab's, in the second commit
        run.run()
        assert "other bytes" in str(survey(run, tmp_path / "state")[0])


def test_a_run_that_ends_at_a_failed_sync_keeps_its_last_commit(home: Path, tmp_path: Path) -> None:
    with ToyRun(home) as run:
        run.faults.fail("sync", nth=1, errno=errno.EIO, path=str(home / "slab-1"))
        with pytest.raises(StorageError):
            run.run()
        wrong, seen = survey(run, tmp_path / "state", count=FEWER)
    assert wrong is None
    assert seen == {(0, 0), (0, 1)}


def test_a_run_that_ends_at_any_failed_operation_keeps_its_last_commit(home: Path, tmp_path: Path) -> None:
    failed = 0
    while True:
        directory = tmp_path / f"run-{failed}"
        directory.mkdir()
        with ToyRun(directory) as run:
            run.recording.fail("any", failed + 1, errno.EIO)
            try:
                run.run(2 * STEPS_PER_COMMIT)
            except StorageError:
                failed += 1
            else:
                break
            assert survey(run, tmp_path / "state", count=20)[0] is None
    assert failed == run.recording.calls["any"]
