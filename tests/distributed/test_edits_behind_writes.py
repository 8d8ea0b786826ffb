"""Tests that no rank sees an edit that it has not made, even while an update is being written."""

from __future__ import annotations

from pathlib import Path

import rank_processes
from editing_ranks import ROOT, STAGES
from ranked_commits import RANKS, undisturbed


def test_an_update_is_written_without_the_edit_behind_it(tmp_path: Path) -> None:
    found = rank_processes.run(
        "editing_ranks.py", "edits", size=RANKS, timeout=120.0, environment={ROOT: str(tmp_path)}
    )
    wanted = (undisturbed("fp32")[1][1].parameters["first.bias"] + 0.125).tolist()
    for each in found:
        assert (each.code, each.error) == (0, ""), each.text
        for stage, values in zip(STAGES, each.result, strict=True):
            assert values == wanted, stage
