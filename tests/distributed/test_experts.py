"""Tests of ranks that take different ways through the model: other experts, and forwards alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranked_cases import Case
from training_ranks import check_bits

FEW = (
    Case("experts", 3, steps=6),
    Case("experts", 2, home="nvme", accumulate=2, steps=5),
    Case("experts", 3, home="host", accumulate=3, clip=0.05, steps=5),
    Case("experts", 2, compute="bf16", states="int8", optimizer="sgd", accumulate=2, declared=True, steps=5),
)


def test_ranks_choose_different_experts(tmp_path: Path) -> None:
    check_bits(FEW[::2], 2, tmp_path)


def test_gradients_come_to_a_unit_whose_last_update_is_still_due(tmp_path: Path) -> None:
    """A rank of stage 0 that does not use an expert updates it, and nobody asks for the outcome."""
    check_bits((Case("experts", 0, home="nvme"),), 2, tmp_path)


def test_ranks_generate_texts_of_different_lengths(tmp_path: Path) -> None:
    cases = (
        Case("decoder", 3, home="host", generates=True),
        Case("decoder", 3, home="nvme", compute="bf16", generates=True),
    )
    check_bits(cases, 2, tmp_path)


@pytest.mark.slow
def test_ranks_choose_different_experts_in_every_case(tmp_path: Path) -> None:
    check_bits(FEW, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_choose_different_experts_for_long(size: int, tmp_path: Path) -> None:
    cases = (
        Case("experts", 3, steps=200),
        Case("experts", 2, home="nvme", accumulate=2, clip=0.05, steps=200),
        Case("experts", 3, home="nvme", compute="bf16", states="int8", steps=200),
    )
    check_bits(cases, size, tmp_path, timeout=600.0)
