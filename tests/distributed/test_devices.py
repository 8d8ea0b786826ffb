"""Tests of ranks whose devices have memory of their own: the bits of one rank, and orders of accesses."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranked_cases import Case
from training_ranks import check_bits, launch

CASES = (
    Case("decoder", 3, home="host", accumulate=2, clip=0.05),
    Case("odd", 3, home="nvme", accumulate=2, states="int8"),
    Case("mlp", 2, home="host", accumulate=2, together=True),
    Case("mlp", 2, home="device", accumulate=3, clip=0.05, compute="bf16"),
    Case("frozen", 3, home="device", accumulate=2, states="int8", compute="bf16"),
    Case("mlp", 3, home="device", update="eager", declared=True, accumulate=2),
    Case("tiny", 3, home="device"),
    Case("mlp", 1, home="device", compute="bf16"),
    Case("mlp", 0, home="device", clip=0.05),
    Case("mlp", 2, home="mirrored", accumulate=2, clip=0.05, compute="bf16"),
    Case("odd", 1, home="mirrored", optimizer="sgd"),
)


def test_bits_of_one_rank(tmp_path: Path) -> None:
    check_bits(CASES, 2, tmp_path, function="training_on_devices")


def test_a_resumed_run_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Also with mirrors, whose first copies read homes that then get bytes of other ranks."""
    cases = (
        Case("mlp", 2, home="mirrored", compute="bf16", steps=4),
        Case("odd", 3, home="device", states="int8", steps=4),
    )
    check_bits(cases, 2, tmp_path, function="training_on_devices_with_a_break")


def test_a_lost_gradient_ends_the_step_on_all_ranks_and_no_later_one(tmp_path: Path) -> None:
    case = Case("mlp", 3, home="device", accumulate=2)
    (found,) = launch("losing_gradients", (case,), 2, tmp_path, timeout=200.0)
    told = [each["told"] for each in found]
    assert told == [[error, "stepped"] * 2 for error in ("DeviceError", "RankFailure")]


def test_zero_grad_gives_nothing_back_that_another_rank_copies(tmp_path: Path) -> None:
    case = Case("mlp", 3, home="device")
    (found,) = launch("clearing_on_devices", (case,), 2, tmp_path, timeout=200.0)
    assert found[0] == [True, False, False, False]
    assert found[1][1::2] == [False, False]


def test_gradients_are_not_offered_before_they_have_come(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"where one rank has|NonFiniteGradient"):
        check_bits(CASES[:1], 2, tmp_path, function="training_without_waits_for_gradients")


@pytest.mark.slow
def test_each_order_that_is_missing_is_seen(tmp_path: Path) -> None:
    """On the way of gradients to RAM, of those and of gradients in device memory to sums on a device, and of
    parameters from an update to another device.
    """
    cases = (CASES[0], Case("mlp", 3, home="device"))
    down = ["HOST_WAITS: fresh gradient", "LAST_WRITER: fresh gradient"]
    up = ["ARRIVAL: gradient of a rank", "LAST_USE: gradient of a rank", "LAST_USE: update writes"]
    up += ["HOST_ASKS: copied from a rank", "OFFER: gradient that is offered"]
    up += ["HOST_ASKS: gradient that is given back"]
    found = launch("orders_missed", cases, 2, tmp_path, timeout=200.0)
    for wanted, ranks in zip((down, up), found, strict=True):
        for each in ranks:
            assert set(wanted) <= set(each), each
