"""Tests of the ways in which programs of several ranks use commits: no rank hangs, and the bits are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commit_plans import Plan, launch, results
from committing_ranks import everything
from ranked_cases import Case, Place, backwards, digest, opened

PATTERNS = {
    "rank 0 waits while experts are not used": Plan("", subject="experts", homes=("nvme",), waits="zero"),
    "rank 0 waits, in RAM": Plan("", stage=2, subject="experts", waits="zero"),
    "rank 0 waits, each rank with another home": Plan("", stage=0, homes=("unified", "nvme"), waits="zero"),
    "nobody waits for lazy updates on NVMe": Plan("", subject="experts", homes=("nvme",), waits="none"),
    "rank 0 exports before it waits": Plan(
        "", stage=1, subject="decoder", homes=("nvme",), waits="zero", exports=True
    ),
    "eager updates on a device apart": Plan("", homes=("device",), update="eager", waits="none"),
    "eager updates beside a device": Plan("", stage=2, homes=("host",), update="eager", waits="none"),
}


def alone(plan: Plan, directory: Path) -> tuple[list[list[str]], dict[str, str], list[dict[str, str]]]:
    """What one rank has with the micro-batches of all: losses of each rank, `everything` at the end, and the
    model's values after each step.
    """
    case, place = Case(plan.subject, update=plan.update, declared=plan.update == "eager"), Place(0, 2, True)
    losses: list[list[str]] = [[], []]
    values: list[dict[str, str]] = []
    with opened(case, place, directory) as (model, runtime):
        for step in range(plan.last):
            for mine, loss in zip(losses, backwards(case, place, model, runtime, step), strict=True):
                mine.append(loss.hex())
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            values.append({name: digest(each) for name, each in model.state_dict().items()})
        return losses, everything(model, runtime), values


@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("name", PATTERNS)
def test_ways_to_commit(name: str, tmp_path: Path) -> None:
    plan = replace(PATTERNS[name], directory=str(tmp_path))
    found: list[Any] = results(launch(plan, "train_in_halves"))
    losses, end, values = alone(plan, tmp_path)
    for rank, each in enumerate(found):
        assert each["losses"] == losses[rank]
        assert each["end"] == end
    for step, exported in enumerate(found[0]["exported"]):
        assert exported and exported.items() <= values[step].items()
