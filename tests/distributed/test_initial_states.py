"""Tests of optimizers that have states before offload: on all ranks, those of rank 0 count."""

from __future__ import annotations

import rank_processes


def test_states_of_rank_0_are_those_of_all_ranks() -> None:
    (alone,) = rank_processes.run("state_ranks.py", "states_and_bits", size=1)
    assert alone.result is not None, alone.text
    for each in rank_processes.run("state_ranks.py", "states_and_bits", size=2, timeout=180.0):
        assert each.result is not None, each.text
        for mine, wanted in zip(each.result, alone.result, strict=True):
            assert mine == wanted


def test_ranks_take_only_the_states_that_they_keep() -> None:
    zero, one = rank_processes.run("state_ranks.py", "bytes_taken", size=2)
    assert zero.result and one.result, (zero.text, one.text)
    assert zero.result[0] == 0 < zero.result[1]
    assert one.result[0] == one.result[1] > 0


def test_a_rank_that_fails_while_it_takes_states_ends_all() -> None:
    zero, one = rank_processes.run("state_ranks.py", "rank_1_fails", size=2)
    assert (zero.error, one.error) == ("RankFailure", "ConfigError"), (zero, one)
    assert "Rank 1 failed: Planted" in zero.text


def test_a_state_of_a_frozen_parameter_on_rank_0_ends_all() -> None:
    zero, one = rank_processes.run("state_ranks.py", "frozen_state", size=2)
    assert (zero.error, one.error) == ("ConfigError", "RankFailure"), (zero, one)
    assert "frozen.weight, which was frozen" in zero.text and "frozen.weight" in one.text


def test_a_rank_may_go_on_while_rank_0_still_serves_others() -> None:
    for each in rank_processes.run("state_ranks.py", "early_rank_1", size=3):
        assert each.result is True, each.text
