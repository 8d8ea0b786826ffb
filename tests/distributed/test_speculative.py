"""Tests of speculative updates on several ranks, each of which confirms or undoes those of its own parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_cases import Case, Place, differences, train
from torch import nn
from training_ranks import launch

from infinity.api import plan_for
from infinity.distributed.windows import VARIABLE
from infinity.errors import ConfigError
from infinity.layout.shards import Share
from infinity.ranks import SingleRank

TRAINED = {"update": "speculative", "declared": True, "steps": 4}
CASES = (
    Case("mlp", 3, home="nvme", accumulate=2, clip=1e6, **TRAINED),
    Case("decoder", 3, home="host", compute="bf16", **TRAINED),
    Case("mlp", 2, home="mirrored", accumulate=2, compute="bf16", clip=0.05, **TRAINED),
)
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "windows": {},
    "messages": {"nodes": [{VARIABLE: "0"}] * 2},
    "devices": {"function": "training_on_devices"},
    "a break": {"function": "training_with_a_break"},
}


def check(cases: tuple[Case, ...], directory: Path, environment: str) -> None:
    """Assert that two ranks and one train the cases to the same bits, and that updates were confirmed, and
    some undone where gradients were clipped.

    Which rank began them is not certain: an update begins in a backward, so the rank that is ahead of the
    other, whose gradients come when this backward has ended, leaves it to `step()`.
    """
    options = {"function": "training", **ENVIRONMENTS[environment]}
    found = launch(options.pop("function"), cases, 2, directory, timeout=600.0, **options)
    told, counted = [], (0, 0)
    for case, each in zip(cases, found, strict=True):
        told += differences(case, 2, each, train(case, Place(0, 2, alone=True), directory))
        for one in each if not told else ():
            confirmed, undone = one["speculative"]
            counted = counted[0] + confirmed, counted[1] + undone
    assert not told, "\n".join(told)
    assert min(counted) > 0, counted


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    check(CASES, tmp_path, "windows")


def many() -> Iterator[Case]:
    subjects = (
        ("mlp", {"accumulate": 2}),
        ("decoder", {"compute": "bf16"}),
        ("odd", {"compute": "bf16", "states": "int8"}),
        ("frozen", {"compute": "bf16", "accumulate": 2}),
        ("groups", {"accumulate": 2}),
        ("experts", {"states": "bf16"}),
        ("decoder", {"compute": "fp16"}),
    )
    for home, stage, clip in itertools.product(("host", "nvme", "mirrored"), (2, 3), (None, 1e6, 0.05)):
        for subject, options in subjects:
            if home != "mirrored" or (stage == 2 and subject in ("mlp", "decoder")):
                yield Case(subject, stage, home=home, clip=clip, **options, **TRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_all_of_them_have_the_bits_of_one_rank(environment: str, tmp_path: Path) -> None:
    check(tuple(many()), tmp_path, environment)


def test_ranks_that_add_gradients_up_in_step_refuse_them() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"budget": None, "precision": None, "example_inputs": None}
    for stage in range(4):
        ranks = SingleRank("cpu", share=Share(0, 2, stage))
        with pytest.raises(ConfigError, match='partition="gradients"') if stage < 2 else nullcontext():
            plan_for(ranks, model, optimizer, **options, update="speculative", accumulation=1)
