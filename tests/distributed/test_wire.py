"""Tests of the wire and of the ranks that speak over it: bytes, counters, refusals, deaths, ends."""

from __future__ import annotations

import sys

import pytest
import rank_processes
import wire_ranks
from warm_python import Popen

from infinity.distributed.windows import VARIABLE


def results(function: str, size: int = 2, windows: str = "1") -> list:
    """What each rank returned; none may have failed."""
    outcomes = rank_processes.run("wire_ranks.py", function, size=size, environment={VARIABLE: windows})
    assert [each.code for each in outcomes] == [0] * size, [each.text for each in outcomes]
    assert [each.error for each in outcomes] == [""] * size, [each.text for each in outcomes]
    return [each.result for each in outcomes]


@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize("size", [2, 3])
def test_pulls_bring_the_right_bytes_and_are_counted_exactly(size: int, windows: str) -> None:
    found = results("pulls", size, windows)
    for rank, each in enumerate(found):
        assert each["right"] == [True] * (2 * wire_ranks.PULLS)
        assert each["received"] == {"states": sum(each["asked"].values())}
        assert each["sent"] == {"states": sum(other["asked"].get(str(rank), 0) for other in found)}
        assert each["ended"] and each["failure"] == "None"
    assert sum(each["messages"][0] for each in found) == sum(each["messages"][1] for each in found)
    pulled = size * 2 * wire_ranks.PULLS
    assert sum(each["messages"][0] for each in found) == 2 * pulled + 2 * size * (size - 1), "CLEARED, BYE"


def test_ranks_of_a_node_have_no_connections() -> None:
    assert results("sockets", 3) == [1] * 3, "which listens"
    assert min(results("sockets", 3, windows="0")) > 4


def test_deliveries_that_do_not_come_say_why() -> None:
    refused, diverged, sizes, left, late = results("refusals")[0]
    assert refused == [
        "RankFailure",
        "Rank 1 could not deliver parameters: InfinityError: It is gone. Look.",
    ]
    assert diverged == ["RankDivergence", "It is older."]
    assert sizes == ["RankDivergence", "Rank 1 sent pieces of [3] bytes instead of [8]."]
    assert left == ["RankFailure", "Rank 1 has closed its runtime."]
    assert late == [True, True], "a rank that has left is no failure of the run"


@pytest.mark.parametrize("windows", ["0", "1"])
def test_a_rank_that_is_killed_amid_a_delivery_is_lost(windows: str) -> None:
    survivor, victim = rank_processes.run("wire_ranks.py", "killed", size=2, environment={VARIABLE: windows})
    assert victim.code == -9
    assert survivor.code == 0, survivor.text
    assert survivor.result[:4] == ["RankFailure"] * 4
    ended = ("the connection to it broke", "its process has ended")[int(windows)]
    assert survivor.result[4] == f"Rank 1 is gone: {ended}."
    assert survivor.result[5:7] == [1, "FAILED"]


def test_runtimes_follow_each_other_and_close_in_any_order() -> None:
    zero, one = results("in_turn")
    closes_first, closes_last = [True, False, True], [True, True]
    assert zero == [*closes_first, *closes_last, *closes_first]
    assert one == [*closes_last, *closes_first, *closes_last]


def test_a_rank_that_does_not_come_is_named_and_may_come_later() -> None:
    zero, one = results("late_rank")
    assert zero == ["Rank 1 did not come to offload() within 0.05 s.", [2, [1]]]
    assert one == [[2, [0]]]


def test_a_mesh_may_leave_ranks_out() -> None:
    zero, one, two = results("part_of_the_ranks", 3)
    assert zero == [[0, 2, True], True] * 2
    assert one == []
    assert two == [[1, 2, True], True] * 2


@pytest.mark.parametrize("function", ["host_gone_before", "host_gone_meanwhile"])
def test_a_rank_whose_store_is_gone_does_not_meet_the_others(function: str) -> None:
    host, other = rank_processes.run("wire_ranks.py", function, size=2)
    assert (host.code, other.code) == (-9, 0), other.text
    assert other.result == [
        "RankFailure",
        "The store of the ranks is gone, so rank 0 of the default group, which keeps it, is dead, stopped "
        "or cut off.",
    ]


def test_one_rank_imports_nothing_of_it_and_starts_no_thread_for_it() -> None:
    code = """
import sys, threading, torch, infinity
model = torch.nn.Linear(8, 8)
budget = infinity.Budget(host="64MiB")
with infinity.offload(model, torch.optim.SGD(model.parameters()), budget=budget, device="cpu") as runtime:
    model(torch.ones(2, 8)).sum().backward()
    runtime.optimizer.step()
    threads = {each.name for each in threading.enumerate()} - {"MainThread"}
    sys.exit(any(each.startswith("infinity.distributed") for each in sys.modules) or bool(threads))
"""
    assert Popen([sys.executable, "-c", code], cwd=rank_processes.PROGRAMS).wait() == 0
