"""Ranks at different speeds have the bits of one rank: delays are put where the order of events was wrong."""

from __future__ import annotations

import pytest
import rank_processes


@pytest.mark.parametrize(
    "program",
    [
        "idle_rank",
        "idle_rank_with_shards",
        "late_first_backward",
        "eager_updates_of_parts",
        "edits_while_sending",
        "states_after_loading",
    ],
)
def test_slow_ranks_do_not_change_bits(program: str) -> None:
    (alone,) = rank_processes.run("racing_ranks.py", program, size=1)
    assert alone.code == 0, alone.text
    for each in rank_processes.run("racing_ranks.py", program, size=2):
        assert each.result == alone.result, each.text
