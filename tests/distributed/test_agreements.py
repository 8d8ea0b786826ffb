"""Tests of agreements and of liveness: ranks that agree, diverge, stay away, are stopped, killed or leave."""

from __future__ import annotations

import pytest
import rank_processes

from infinity.distributed.failure_event import TIMEOUT_VARIABLE, FailureEvent, rank_timeout
from infinity.errors import ConfigError, InfinityError, rank_failure


def results(function: str, size: int, victim: int | None = None) -> list:
    """What each rank but the victim returned; none of these may have failed."""
    outcomes = rank_processes.run("agreeing_ranks.py", function, size=size)
    if victim is not None:
        assert outcomes.pop(victim).code == -9
    assert [(each.code, each.error) for each in outcomes] == [(0, "")] * len(outcomes), outcomes
    return [each.result for each in outcomes]


def test_ranks_agree_and_notice_that_they_do_not() -> None:
    for good, differ in results("agreements", 3):
        assert good == [True] * 20
        kind, cause = differ
        assert kind == "RankDivergence"
        assert "ank 1 is in clip_grad_norm_()" in cause
        assert "ank 0 is in step()" in cause or "ank 2 is in step()" in cause


def test_a_rank_that_does_not_come_is_named_with_its_last_call() -> None:
    (_, late, again, left, healthy), _ = results("absence", 2)
    assert late == [
        "RankDivergence",
        "Rank 1 did not come to step() within 0.3 s: it was last in save().",
    ]
    assert again == late, "what rank 1 makes of the agreement that failed here is not known"
    assert left == ["RankFailure", "Rank 1 closed its runtime while rank 0 was in close()."]
    assert healthy


def test_runtimes_that_are_closed_in_different_orders_do_not_wait_for_ever() -> None:
    outcomes = rank_processes.run(
        "agreeing_ranks.py", "crosswise", size=2, environment={TIMEOUT_VARIABLE: "1"}
    )
    assert [(each.code, each.result) for each in outcomes] == [(0, ["closed"])] * 2, outcomes


def test_a_stopped_rank_is_noticed_by_its_silence() -> None:
    found = results("stopped", 3, victim=2)
    assert (
        found
        == [
            [
                "RankFailure",
                "Rank 2 has given no sign of life for 0.5 s: it is dead, stopped, cut off, or its GIL is "
                "held.",
            ]
        ]
        * 2
    )


def test_a_stopped_host_of_the_store_is_noticed() -> None:
    for kind, cause in results("host_stopped", 2, victim=0):
        assert kind == "RankFailure"
        assert cause.startswith("Rank 0 has given no sign")


def test_a_killed_host_of_the_store_is_noticed() -> None:
    ((kind, cause),) = results("host_killed", 2, victim=0)
    assert kind == "RankFailure"
    assert cause.startswith("Rank 0 is gone: its process has ended")


def test_a_declared_failure_ends_the_waits_of_all_ranks() -> None:
    zero, one, two = results("declared", 3)
    text = "Rank 1 failed: BudgetError: It does not fit. Give more."
    assert zero == ["RankFailure", text, text]
    assert one == ["BudgetError", "It does not fit."]
    assert two == ["RankFailure", text]


def test_a_rank_that_leaves_is_not_missed() -> None:
    assert results("leaving", 2) == [True, True]


def test_the_first_failure_ends_all_waits() -> None:
    failure_event = FailureEvent(60.0)
    assert failure_event.fail(rank_failure(1, "is gone"))
    assert not failure_event.fail(rank_failure(2, "is gone"))
    with pytest.raises(InfinityError, match="Rank 1 is gone"):
        failure_event.wait_for(lambda: False)
    assert failure_event.wait_for(lambda: True), "what has come has come"


def test_a_wait_ends_with_its_time() -> None:
    assert not FailureEvent(60.0).wait_for(lambda: False, 0.001)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_time_out_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
        rank_timeout()


def test_the_time_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2.5")
    assert FailureEvent().timeout == 2.5
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    assert FailureEvent().timeout == 600
