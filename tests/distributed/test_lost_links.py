"""Tests of two nodes whose link is lost, for a while or for good, and of a slow node and a bad disk."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import two_nodes
from commit_plans import Plan as CommitPlan
from commit_plans import launch, told
from committing_ranks import POINTS as COMMIT_POINTS
from continued_runs import Continued
from hang_plans import CONNECTING, POINTS, READING, Plan
from link_faults import BLINK, CUT

from infinity.distributed.failure_event import TIMEOUT_VARIABLE

WHY_NOT = two_nodes.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
Nodes = list[Mapping[str, str]]
Outcomes = list[rank_processes.Outcome]
BOUND = 60.0
"""Seconds after which a rank hangs."""
BUDGET = "64MiB"
RESUMING = ("resume", "re-layout", "after a re-layout")
"""Points that ranks that do not resume never reach."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes.two_nodes() as found:
        yield found


def outcomes(plan: Plan, directory: Path, nodes: Nodes, function: str = "train") -> Outcomes:
    """How each rank of a plan ended that ran a function of hang_ranks.py. The link is up then."""
    text = json.dumps(dataclasses.asdict(dataclasses.replace(plan, directory=str(directory))))
    environment = {"PLAN": text, TIMEOUT_VARIABLE: f"{plan.timeout:g}"}
    found = rank_processes.run(
        "hang_ranks.py", function, size=2, timeout=BOUND, environment=environment, nodes=nodes
    )
    for each in nodes:
        two_nodes.set_link(True, each)
    return found


@functools.cache
def undisturbed(partition: str | None) -> Any:
    """What every rank returns if nothing goes wrong."""
    text = json.dumps(dataclasses.asdict(Plan("none", partition=partition, host=BUDGET)))
    zero, one = rank_processes.run("hang_ranks.py", "train", size=2, environment={"PLAN": text})
    assert zero.result is not None and zero.result == one.result, (zero, one)
    return zero.result


def check_unchanged(plan: Plan, directory: Path, nodes: Nodes) -> None:
    found = outcomes(plan, directory, nodes)
    assert [each.result for each in found] == [undisturbed(plan.partition)] * 2, told(found)


def check_ended(plan: Plan, directory: Path, nodes: Nodes) -> None:
    """Check that a lost link ends both ranks with a typed error that says which rank is missed."""
    found = outcomes(plan, directory, nodes)
    for rank, each in enumerate(found):
        assert each.code == 0 and "Traceback" not in each.written, f"{plan}:\n{told(found)}"
        if plan.point in READING and each.result is not None:  # it needs the other rank no more
            assert each.result == undisturbed(plan.partition)
            continue
        if plan.point in (*CONNECTING, "meeting"):
            kinds, text = ("RankFailure", "RankDivergence"), "ank"
        else:
            kinds, text = ("RankFailure",), f"ank {1 - rank} "
        assert each.error in kinds and text in each.text, f"{plan}:\n{told(found)}"


# --- a link that is lost for a while --------------------------------------------------------------------


def test_ranks_outlast_five_seconds_without_a_link(nodes: Nodes, tmp_path: Path) -> None:
    check_unchanged(Plan(BLINK, "in backward", 2, rank=1), tmp_path, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("point", [*CONNECTING, *POINTS])
def test_ranks_outlast_five_seconds_at_any_point(point: str, nodes: Nodes, tmp_path: Path) -> None:
    rank = 1 if point == "taking values" else len(point) % 2  # rank 0 takes none
    check_unchanged(plan_at(BLINK, point, rank), tmp_path, nodes)


# --- a link that is lost for good -----------------------------------------------------------------------


def plan_at(fault: str, point: str, rank: int) -> Plan:
    """A plan by which rank `rank` loses its link at a point; what else it does is drawn."""
    draw = random.Random(f"{fault} {point} {rank}")
    return Plan(
        fault,
        point,
        draw.randint(1, {**POINTS, **CONNECTING}[point]),
        rank=rank,
        partition=draw.choice(("parameters", "parameters", "gradients", "optimizer", None)),
        host=draw.choice(("760KiB", BUDGET)),
        # No heartbeat shows a lost link before ranks have met.
        timeout=3.0 if fault == CUT and point in (*CONNECTING, "meeting") else 300.0,
    )


def test_a_lost_link_ends_all_ranks_in_a_step(nodes: Nodes, tmp_path: Path) -> None:
    check_ended(plan_at(CUT, "in forward", 0), tmp_path, nodes)


def test_a_link_lost_while_ranks_meet_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    check_ended(plan_at(CUT, "waiting for others", 1), tmp_path, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", [*CONNECTING, *POINTS])
def test_a_lost_link_ends_all_ranks_at_any_point(point: str, rank: int, nodes: Nodes, tmp_path: Path) -> None:
    if point == "taking values" and rank == 0:
        pytest.skip("rank 0 takes none")
    check_ended(plan_at(CUT, point, rank), tmp_path, nodes)


def test_an_error_is_reported_without_a_link(nodes: Nodes, tmp_path: Path) -> None:
    found = outcomes(Plan("none"), tmp_path, nodes, "reported_without_a_link")
    text = "ConfigError: It is broken. Mend it."
    assert [(each.code, each.result) for each in found] == [(0, [0, text]), (0, [1, text])], told(found)


# --- commits --------------------------------------------------------------------------------------------


def test_ranks_whose_link_was_lost_go_on_from_what_was_committed(nodes: Nodes, tmp_path: Path) -> None:
    run = Continued(CommitPlan(str(tmp_path), homes=("unified", "nvme"), fault=CUT, last=3), nodes)
    assert run.process(rank=1, point="after the vote", nth=2)
    assert not run.process()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_ranks_whose_link_is_lost_anywhere_go_on(seed: int, nodes: Nodes, tmp_path: Path) -> None:
    """Five losses or more each, at all points and at any time."""
    draw = random.Random(seed)
    stage = draw.randrange(4)
    plan = CommitPlan(
        str(tmp_path),
        stage=stage,
        homes=draw.choice((("unified",), ("nvme",), ("unified", "nvme"))),
        update=draw.choice(("lazy", "speculative" if stage >= 2 else "lazy", "eager", "sync")),
        last=24,
        fault=CUT,
    )
    run = Continued(plan, nodes)
    points = iter(draw.sample(COMMIT_POINTS, len(COMMIT_POINTS)))
    while run.kills < 5:
        point = next(points, "any time")
        run.process_at_random(draw, point)
    run.process()


@pytest.mark.slow
@pytest.mark.parametrize("point", [each for each in COMMIT_POINTS if each not in RESUMING])
def test_commits_outlast_five_seconds_without_a_link(point: str, nodes: Nodes, tmp_path: Path) -> None:
    run = Continued(CommitPlan(str(tmp_path), homes=("unified", "nvme"), fault=BLINK), nodes)
    assert not run.process(rank=len(point) % 2, point=point, nth=1)


# --- a disk of one node ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind", "rank"),
    [
        ("first_commit_fails", "StorageFull", 1),
        pytest.param("pages_not_written", "StorageError", 1, marks=pytest.mark.slow),
        pytest.param("first_commit_fails", "StorageFull", 0, marks=pytest.mark.slow),
        pytest.param("pages_not_written", "StorageError", 0, marks=pytest.mark.slow),
    ],
)
def test_a_commit_that_fails_on_one_node(
    function: str, kind: str, rank: int, nodes: Nodes, tmp_path: Path
) -> None:
    """All ranks raise the error of the disk, and go on."""
    found = launch(CommitPlan(str(tmp_path), rank=rank), function, "failing_commits.py", nodes=nodes)
    for each in found:
        assert each.code == 0 and each.result is not None, told(found)
        assert {error[0] for error in each.result["errors"]} == {kind}, told(found)
    assert found[0].result["losses"] and f"Rank {rank} " in found[1 - rank].result["errors"][0][1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_of_one_node_that_loses_pages_ends_all_ranks(rank: int, nodes: Nodes, tmp_path: Path) -> None:
    plan = CommitPlan(str(tmp_path), rank=rank, homes=("nvme",))
    found = launch(plan, "pages_lost", "failing_commits.py", nodes=nodes)
    assert [each.error for each in found] == (
        ["RankFailure", "StorageError"] if rank else ["StorageError", "RankFailure"]
    ), told(found)
    assert f"Rank {rank} " in found[1 - rank].text


# --- slow nodes, slow networks --------------------------------------------------------------------------


def test_messages_that_are_late_change_no_bit(nodes: Nodes, tmp_path: Path) -> None:
    check_unchanged(Plan("delays", nth=1, rank=1, host=BUDGET, latest=0.01), tmp_path, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_messages_that_are_late_in_many_ways_change_no_bit(seed: int, nodes: Nodes, tmp_path: Path) -> None:
    partition = ("parameters", "gradients", "optimizer", None)[seed // 2 % 4]
    plan = Plan("delays", nth=seed, rank=seed % 2, partition=partition, latest=0.1)
    check_unchanged(plan, tmp_path, nodes)


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        pytest.param("slow disk", 1, marks=pytest.mark.slow),
        pytest.param("slow disk", 0, marks=pytest.mark.slow),
        pytest.param("slow computation", 0, marks=pytest.mark.slow),
        pytest.param("slow computation", 1, marks=pytest.mark.slow),
    ],
)
def test_a_slow_node_changes_no_bit(fault: str, rank: int, nodes: Nodes, tmp_path: Path) -> None:
    latest = 0.01 if fault == "slow disk" else 1.0
    check_unchanged(Plan(fault, rank=rank, latest=latest), tmp_path, nodes)


def test_a_node_that_is_slower_than_the_time_out_ends_all_ranks(nodes: Nodes, tmp_path: Path) -> None:
    plan = CommitPlan(str(tmp_path), rank=0)
    found = launch(plan, "saved_by_one_rank_while_others_sleep", "failing_commits.py", nodes=nodes)
    errors = {each.error for each in found}
    assert "RankDivergence" in errors and errors <= {"RankDivergence", "RankFailure"}, told(found)
    assert "did not come to save() within 1 s" in found[0].text, told(found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["in forward", "clip_grad_norm_()", "step()", "zero_grad()"])
def test_a_node_that_is_slower_than_the_time_out_at_any_point(
    point: str, rank: int, nodes: Nodes, tmp_path: Path
) -> None:
    found = outcomes(Plan("sleep", point, rank=rank, timeout=5.0), tmp_path, nodes)
    assert found[1 - rank].error == "RankDivergence", told(found)
    assert found[rank].error in ("RankFailure", "RankDivergence"), told(found)
