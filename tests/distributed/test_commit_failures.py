"""Tests of commits that fail on one of several ranks: all ranks hear of it, and none hangs."""

from __future__ import annotations

import errno
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commit_plans import Plan, generations, launch, results, told
from failing_commits import FILES, INTERRUPTS
from rank_processes import Outcome

SCRIPT = "failing_commits.py"
SLOW = pytest.mark.slow


@functools.cache
def undisturbed() -> list[list[str]]:
    """The losses of each rank, by step from 1."""
    with tempfile.TemporaryDirectory() as directory:
        found = launch(Plan(directory, last=24), "train")
    results(found)
    return [
        [line.split()[2] for line in each.written.splitlines() if line.startswith("step")] for each in found
    ]


def check(plan: Plan, function: str) -> list[list[Any]]:
    """Run a function in which ranks go on after errors. Returns the errors that each rank met."""
    found = results(launch(plan, function, SCRIPT))
    for each, losses in zip(found, undisturbed(), strict=True):
        assert each["losses"] == losses[: len(each["losses"])]
    return [each["errors"] for each in found]


def check_resumed(plan: Plan, step: int) -> None:
    """Check that the ranks of a plan go on from the commit after a step, to the right losses."""
    found = launch(replace(plan, resume=True, last=step + 2, rank=-1), "train")
    results(found)
    for each, losses in zip(found, undisturbed(), strict=True):
        lines = [line.split() for line in each.written.splitlines()]
        assert ["begins", str(step)] in lines, told(found)
        assert [line[2] for line in lines if line[0] == "step"] == losses[step : step + 2]


@pytest.mark.parametrize("homes", [pytest.param(("unified",), marks=SLOW), ("unified", "nvme")], ids=str)
def test_every_operation_on_the_files_of_a_commit(homes: tuple[str, ...], tmp_path: Path) -> None:
    """All ranks raise the error, which names the rank, the commit before stays, and the next is made."""
    plan = Plan(str(tmp_path), homes=homes, rank=1)
    zero, one = check(plan, "full_disk")
    assert len(zero) == len(one) == len(FILES)
    for theirs, mine, (operation, _, code) in zip(zero, one, FILES, strict=True):
        kind = "StorageFull" if code in (errno.ENOSPC, errno.EDQUOT) else "StorageError"
        assert (theirs[0], theirs[2]) == (mine[0], mine[2]) == (kind, code), (operation, theirs, mine)
        assert "Rank 1 could not make its part of commit" in theirs[1]
        assert "rank-1" in theirs[1] and "rank-1" in mine[1]
    check_resumed(plan, 16)  # the commit of step 17 is the last that failed


@pytest.mark.parametrize("homes", [pytest.param(("unified",), marks=SLOW), ("nvme",)], ids=str)
def test_a_run_whose_commits_failed_leaves_nothing(homes: tuple[str, ...], tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), homes=homes, rank=0)
    for each in check(plan, "first_commit_fails"):
        assert [error[0] for error in each] == ["StorageFull", "StorageFull"]
    left = [each.name for each in tmp_path.rglob("*") if each.is_file() and each.suffix != ".lock"]
    assert left == []


def test_a_commit_after_a_first_one_that_failed(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1)
    for each in check(plan, "first_commit_fails_once"):
        assert [error[0] for error in each] == ["StorageFull"]
    check_resumed(plan, 2)


def test_a_page_in_ram_that_cannot_be_written(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1)
    for each in check(plan, "pages_not_written"):
        assert [(error[0], error[2]) for error in each] == [("StorageError", errno.EIO)]
    check_resumed(plan, 3)


def ended(found: list[Outcome], plan: Plan, error: str) -> None:
    """Check that the rank that fails ended with an error, and that the others ended because of it."""
    for rank, each in enumerate(found):
        mine = rank == plan.rank
        assert (each.code, each.error) == (0, error if mine else "RankFailure"), told(found)
        assert mine or f"Rank {plan.rank} " in each.text, told(found)
        assert "Traceback" not in each.written, told(found)


@pytest.mark.parametrize(
    ("function", "rank", "home"),
    [
        pytest.param("pages_not_synced", 1, "unified", marks=SLOW),
        pytest.param("pages_not_synced", 0, "unified", marks=SLOW),
        ("name_not_synced", 0, "unified"),
        pytest.param("name_not_synced", 1, "unified", marks=SLOW),
        ("pages_lost", 1, "nvme"),
    ],
)
def test_a_loss_on_the_disk_of_one_rank_ends_all(function: str, rank: int, home: str, tmp_path: Path) -> None:
    """The ranks go on from the commit that all had."""
    plan = Plan(str(tmp_path), rank=rank, homes=(home,))
    ended(launch(plan, function, SCRIPT), plan, "StorageError")
    check_resumed(plan, 1)


def test_a_death_before_a_refused_commit_is_taken_back(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1)
    found = launch(plan, "refused_and_killed", SCRIPT)
    assert (found[0].code, found[1].error) == (-9, "RankFailure"), told(found)
    assert generations(plan) == [[1, 2], [1]]
    check_resumed(plan, 1)


def test_a_disk_that_is_slower_than_ranks_wait(tmp_path: Path) -> None:
    assert check(Plan(str(tmp_path), rank=1), "slow_disk") == [[], []]


def test_a_slow_disk_on_which_updates_need_places(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1, homes=("unified", "nvme"))
    assert check(plan, "slow_disk_without_places") == [[], []]


def test_a_state_that_one_rank_cannot_keep(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1)
    zero, one = check(plan, "state_of_one_rank")
    assert [each[0] for each in (*zero, *one)] == ["ConfigError"] * 5
    assert all("Rank 1 could not make its part of commit" in each[1] for each in zero)
    check_resumed(plan, 5)


@pytest.mark.parametrize("function", ["saved_by_one_rank", "saved_by_one_rank_while_others_sleep"])
def test_a_save_of_one_rank_alone(function: str, tmp_path: Path) -> None:
    """The rank that waits for too long says what it waits for, and the others end with it."""
    found = launch(Plan(str(tmp_path), rank=0), function, SCRIPT)
    errors = {each.error for each in found}
    assert "RankDivergence" in errors and errors <= {"RankDivergence", "RankFailure"}, told(found)
    assert all(each.code == 0 and "Traceback" not in each.written for each in found), told(found)


@pytest.mark.parametrize(
    "nth", [pytest.param(nth, marks=() if nth == 5 else SLOW) for nth in range(len(INTERRUPTS))]
)
def test_an_interrupt_in_save_ends_all_ranks(nth: int, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path), rank=1, nth=nth)
    zero, one = found = launch(plan, "interrupted", SCRIPT)
    assert one.code == -2 and "KeyboardInterrupt" in one.written, told(found)
    assert (zero.code, zero.error) == (0, "RankFailure") and "Rank 1 was interrupted" in zero.text, told(
        found
    )
    check_resumed(plan, generations(plan)[1][-1])


def test_an_interrupt_in_save_that_is_caught(tmp_path: Path) -> None:
    """It comes when save() is done, so all ranks make the commit."""
    plan = Plan(str(tmp_path), rank=1)
    assert check(plan, "interrupted_once") == [[], []]
    check_resumed(plan, 2 * len(INTERRUPTS))


def test_a_rank_that_hears_too_early_that_others_wait(tmp_path: Path) -> None:
    """A rank may hear that another one waits for a commit before it has begun the commit itself."""
    plan = Plan(str(tmp_path), rank=1, homes=("nvme",))
    assert check(plan, "waited_for_early") == [[], []]
    check_resumed(plan, 3)


def test_an_update_that_cannot_be_read_while_another_rank_waits(tmp_path: Path) -> None:
    """The commit fails on all ranks. The update is read again when it is needed."""
    plan = Plan(str(tmp_path), rank=1, homes=("nvme",))
    for each in check(plan, "updates_not_read"):
        assert [(error[0], error[2]) for error in each] == [("StorageError", errno.EIO)]
    check_resumed(plan, 3)
