"""Tests that training on several ranks has the bits of one rank with the same micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranked_cases import HOMES, MODELS, ON_FOUR, Case, pairwise
from training_ranks import check_bits

STAGES = (0, 1, 2, 3)
MATRIX: dict[str, tuple[Any, ...]] = {
    "stage": STAGES,
    "home": HOMES,
    "states": ("fp32", "bf16", "int8"),
    "accumulate": (1, 3),
    "clip": (None, 0.05),
    "compute": ("fp32", "bf16"),
    "optimizer": ("adamw", "sgd"),
    "declared": (False, True),
    "together": (False, True),
    "activations": ("keep", "recompute"),
    "subject": ("mlp", "decoder"),
}


def exact(options: dict[str, Any]) -> Case:
    """The case of these options. At stages 0 and 1 a step has one backward; else the last bits may differ."""
    case = Case(**options)
    return case if case.exact else replace(case, accumulate=1)


SOME = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
"""For tests of many cases: every third of them, or all."""


@SOME
def test_pairwise_matrix(every: int, tmp_path: Path) -> None:
    check_bits(tuple(exact(each) for each in pairwise(MATRIX))[::every], 2, tmp_path)


@SOME
def test_models_of_all_kinds(every: int, tmp_path: Path) -> None:
    check_bits(MODELS[::every], 2, tmp_path)


@SOME
def test_four_ranks(every: int, tmp_path: Path) -> None:
    check_bits(ON_FOUR[::every], 4, tmp_path)


@pytest.mark.slow
def test_eight_ranks(tmp_path: Path) -> None:
    check_bits(ON_FOUR, 8, tmp_path, timeout=600.0)


def test_stages_that_add_a_rank_s_gradients_first_are_close(tmp_path: Path) -> None:
    cases = [
        Case(subject, stage, optimizer="sgd", accumulate=3, clip=0.5, steps=10)
        for subject, stage in (("mlp", 0), ("decoder", 1))
        if stage in STAGES
    ]
    check_bits(tuple(cases), 2, tmp_path)


AWAY = (
    Case("dropping", 3, accumulate=2, home="nvme", activations="offload", clip=0.05),
    Case("dropping", 2, home="unified", activations="recompute+offload", compute="bf16"),
    Case("decoder", 3, accumulate=3, home="host", activations="offload", together=True),
    Case("dropping", 3, home="uneven", activations="auto", accumulate=2),
    Case("dropping", 1, home="host", activations="offload"),
    Case("dropping", 0, home="nvme", activations="offload"),
    Case("dropping", 2, home="host", activations="recompute+offload", accumulate=2),
    Case("decoder", 2, home="nvme", activations="offload", compute="bf16", states="int8"),
    Case("decoder", 3, accumulate=3, home="nvme", activations="offload", together=True),
    Case("dropping", 2, activations="offload", update="eager", declared=True, accumulate=2),
    Case("dropping", 2, activations="recompute", update="eager", declared=True, accumulate=2),
)
"""Cases whose activations leave, or are computed again in some ranks only."""


@pytest.mark.parametrize(
    ("some", "ranks"), [(True, 2), *(pytest.param(False, each, marks=pytest.mark.slow) for each in (2, 4))]
)
def test_activations_that_leave(some: bool, ranks: int, tmp_path: Path) -> None:
    check_bits(AWAY[:1] if some else AWAY[1:], ranks, tmp_path, function="training_with_activations_away")


def test_ranks_that_choose_other_policies_go_on_from_a_commit(tmp_path: Path) -> None:
    cases = (Case("dropping", 3, home="uneven", activations="auto", steps=3),)
    check_bits(cases, 2, tmp_path, function="training_with_activations_away_and_a_break")


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("stage", STAGES)
def test_whole_matrix(stage: int, home: str, tmp_path: Path) -> None:
    options = {**MATRIX, "stage": (stage,), "home": (home,), "subject": ("mlp",)}
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    check_bits(tuple(dict.fromkeys(exact(each) for each in every)), 2, tmp_path, timeout=600.0)
