"""Tests that every rank ends: with a typed error or with the right bits, whatever one of them does wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import rank_processes
from hang_plans import CALLS, ENDS, HARMLESS, READING, Plan, plan_of

from infinity.distributed.failure_event import TIMEOUT_VARIABLE

BOUND = 60.0
"""Seconds after which a rank hangs. Plans that no time-out may end have one that is far beyond."""
TYPED = ("RankFailure", "RankDivergence")
IN_CI = 3


def outcomes(
    plan: Plan, function: str = "train", **environment: str
) -> tuple[list[rank_processes.Outcome], list[str]]:
    """How each rank ended, and the files that are left in the directory of the NVMe tier."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        text = json.dumps(dataclasses.asdict(dataclasses.replace(plan, directory=directory)))
        found = rank_processes.run(
            "hang_ranks.py",
            function,
            size=plan.size,
            timeout=BOUND,
            environment={"PLAN": text, TIMEOUT_VARIABLE: f"{plan.timeout:g}", **environment},
        )
        return found, sorted(each.name for each in Path(directory).iterdir())


@functools.cache
def unharmed(size: int, partition: str | None) -> Any:
    """What every rank returns if none does anything wrong."""
    found, _ = outcomes(Plan("none", size=size, partition=partition, host="64MiB"))
    assert [each.code for each in found] == [0] * size, found
    return found[0].result


def check(plan: Plan) -> None:
    found, left = outcomes(plan)
    survivors = [each for rank, each in enumerate(found) if rank != plan.rank]
    check_culprit(plan, found[plan.rank])
    for each in survivors:
        assert each.code == 0, f"{plan}: {each}"
        assert each.result is not None or each.error in TYPED, f"{plan}: {each}"
        assert "Traceback" not in each.written, f"{plan}: {each}"
        if plan.fault in (*ENDS, "read", "write") and each.error:
            assert f"ank {plan.rank} " in each.text or "could not be connected" in each.text, (
                f"{plan}: {each}"
            )
    done = [each.result for each in found if each.result is not None]
    if plan.fault in ENDS and plan.point not in READING:
        assert not done, f"{plan}: {found}"
    if plan.fault in HARMLESS:
        assert done == [unharmed(plan.size, plan.partition)] * plan.size, f"{plan}: {found}"
    elif plan.fault != "a backward more":
        assert all(each == unharmed(plan.size, plan.partition) for each in done), f"{plan}: {found}"
    assert done[1:] == done[:-1]
    # A rank that was killed, or is stopped until it is, leaves its own slab, which the next run removes.
    dead = f"infinity-rank{plan.rank}." if plan.fault in ("kill", "stop") else "\0"
    assert [each for each in left if not each.startswith(dead)] == [], f"{plan}: {left}"


def check_culprit(plan: Plan, culprit: rank_processes.Outcome) -> None:
    """Check how the rank ended that did something wrong."""
    codes = {"kill": -9, "stop": -9, "raise": 1, "interrupt": -2, "exit": 3}
    assert culprit.code == codes.get(plan.fault, 0), f"{plan}: {culprit}"
    if plan.fault in ("raise", "interrupt"):
        error = {"raise": "Planted: by the plan", "interrupt": "KeyboardInterrupt"}[plan.fault]
        assert error in culprit.written and culprit.written.count("Traceback") == 1, f"{plan}: {culprit}"
    elif plan.fault in ("read", "write"):
        assert culprit.result is not None or culprit.error == "StorageError", f"{plan}: {culprit}"
    elif plan.fault not in ENDS:
        assert culprit.result is not None or culprit.error in (*TYPED, "ConfigError"), f"{plan}: {culprit}"


@pytest.mark.parametrize("number", range(IN_CI))
def test_every_rank_ends(number: int) -> None:
    check(plan_of(number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(IN_CI, IN_CI + 43))
def test_every_rank_ends_in_many_plans(number: int) -> None:
    check(plan_of(number))


def refused(function: str, size: int = 2, **options: Any) -> list[rank_processes.Outcome]:
    """The outcomes of ranks that call offload() with bad input: each ends with a typed error of its own."""
    given = {"timeout": 300.0, "size": size, "host": "64MiB", **options}
    found, left = outcomes(Plan("none", **given), function)
    for each in found:
        assert each.code == 0 and each.error, each
        assert "Traceback" not in each.written
    assert left == []
    return found


@pytest.mark.parametrize(
    ("function", "differs"),
    [
        ("other_models", "model"),
        ("other_optimizers", "optimizer"),
        ("other_versions", "version"),
    ],
)
def test_ranks_that_differ_are_refused(function: str, differs: str) -> None:
    for each in refused(function):
        assert each.error == "RankDivergence"
        assert f"the {differs} of rank 1 and of rank 0 differ" in each.text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("wrong_mesh", "The mesh has 2 dimensions"),
        ("data_parallel", "DistributedDataParallel, which handles its parameters by itself"),
        ("unknown_partition", "The partition is 'everything'"),
    ],
)
def test_what_no_rank_can_do_is_refused_on_all(function: str, text: str) -> None:
    for each in refused(function, size=4 if function == "wrong_mesh" else 2):
        assert (each.error, text in each.text) == ("ConfigError", True), each


def test_a_model_of_fully_shard_is_refused() -> None:
    for each in refused("sharded"):
        assert (each.error, "The model is sharded by fully_shard" in each.text) == ("ConfigError", True)


@pytest.mark.parametrize("function", ["no_directory", "directory_of_root"])
def test_a_directory_that_one_rank_cannot_use_ends_all(function: str) -> None:
    zero, one = refused(function, host="760KiB")
    assert one.error in ("StorageError", "ConfigError")
    assert zero.error == "RankFailure" and "Rank 1 failed: " in zero.text


def test_budgets_that_do_not_fit_together_are_refused_on_all() -> None:
    for each in refused("too_much_together"):
        assert each.error == "BudgetError" and "Ranks 0, 1 together want" in each.text


def test_ranks_with_different_budgets_divide_the_model_alike() -> None:
    found, left = outcomes(Plan("none", host="64MiB"), "other_budgets")
    assert [each.result for each in found] == [unharmed(2, "parameters")] * 2, found
    assert left == []


def test_a_rank_that_is_never_started_is_waited_for_until_the_time_out() -> None:
    (one,), _ = outcomes(Plan("none", size=1, timeout=1.0), "train", WORLD_SIZE="2")
    assert (one.code, one.error) == (0, "RankFailure")
    assert "The ranks could not be connected" in one.text


def test_calls_that_differ_are_all_tried() -> None:
    """The plans of CI and of the slow sweep have every kind of fault, so that none is forgotten."""
    tried = {plan_of(number).fault for number in range(IN_CI + 43)}
    assert tried >= {*ENDS, *CALLS, *HARMLESS, "sleep", "read", "write"}
