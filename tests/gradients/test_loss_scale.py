"""Tests of the loss scale as a number: how it changes, and what it is with several ranks."""

from __future__ import annotations

import pytest

from infinity.gradients.loss_scale import LossScale


def test_without_scaling_it_stays_one() -> None:
    scale = LossScale(dynamic=False)
    for finite in (True, False):
        scale.step_was(finite=finite)
    assert scale.value == 1.0


@pytest.mark.parametrize("ranks", [1, 4])
def test_with_a_loss_in_fp16_it_stays_within_fp16(ranks: int) -> None:
    """65504 is the largest number of fp16, so that 2^15 is the largest power of two."""
    scale = LossScale(dynamic=True, ranks=ranks)
    scale.limit_to_fp16()
    for _ in range(3 * 2000):
        scale.step_was(finite=True)
    assert scale.of_one_rank == 2.0**15
    scale.of_one_rank = 2.0**18  # a commit's, whose losses were in fp32
    for _ in range(2000):
        scale.step_was(finite=True)
    assert scale.of_one_rank == 2.0**18


@pytest.mark.parametrize(("ranks", "smaller"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_the_scale_of_several_ranks_is_that_of_one_divided_by_their_number(ranks: int, smaller: int) -> None:
    one, several = LossScale(dynamic=True), LossScale(dynamic=True, ranks=ranks)
    for finite, steps in ((True, 20 * 2000), (False, 60)):
        for _ in range(steps):
            one.step_was(finite=finite)
            several.step_was(finite=finite)
            assert several.value == one.value / smaller
            assert several.of_one_rank == one.of_one_rank == one.value
    one.of_one_rank = several.of_one_rank = 64.0
    assert (one.value, several.value) == (64.0, 64.0 / smaller)
