"""Tests of ranks that are killed (SIGKILL) and started again: no commit is lost, and no bit differs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from commit_plans import Plan
from committing_ranks import POINTS
from continued_runs import Continued


def test_killed_ranks_go_on_from_what_was_committed(tmp_path: Path) -> None:
    run = Continued(Plan(str(tmp_path), homes=("unified", "nvme")))
    assert run.process(rank=1, point="slab sync", nth=3)
    assert run.process(rank=0, point="before the vote", nth=1)
    assert run.process(rank=1, point="after the vote", nth=1)
    assert run.process(rank=0, point="votes heard", nth=1)
    assert run.process(rank=1, point="after the rename", nth=2)
    assert run.durable >= 3
    assert not run.process()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_ranks_killed_anywhere_go_on_from_what_was_committed(seed: int, tmp_path: Path) -> None:
    """Five kills or more each, at all points and at any time."""
    draw = random.Random(seed)
    stage = draw.randrange(4)
    home = draw.choice(("unified", "nvme", "host", "device"))
    plan = Plan(
        str(tmp_path),
        size=draw.choice((2, 2, 3)),
        stage=stage,
        homes=draw.choice(((home,), (home,), ("unified", "nvme"))),
        update=draw.choice(("lazy", "speculative" if stage >= 2 else "lazy", "eager", "sync")),
        last=24,
    )
    run = Continued(plan)
    while run.kills < 5:
        point = draw.choice((*POINTS, *["any time"] * 6, *["step"] * 3))
        run.process_at_random(draw, point)
    run.process()
