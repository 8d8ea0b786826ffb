"""Tests of the bytes that a plan gives to gradients on their way from a device with memory of its own: device
memory that they keep, landings in host RAM, and room there for their sums of squares.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_device import planned_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import Rule
from infinity.planning.planner import Available, make_plan
from infinity.tiers import Tier

LANDING = 8 * BLOCK
"""Bytes of the smallest landings that a plan can have: two of BLOCK float32 elements (4 bytes each)."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    "budget, leaving, landing",
    [
        ({"device": "1MiB", "host": "8MiB"}, 16 << 10, LANDING),
        ({"device": "4GiB", "host": "8GiB"}, 64 << 20, 32 << 20),
        ({"device": "64GiB", "host": "64GiB"}, 512 << 20, 32 << 20),
    ],
)
def test_a_plan_has_room_for_gradients_on_their_way(
    budget: dict[str, str], leaving: int, landing: int
) -> None:
    model = nn.Linear(300, 300, device="meta")
    rule = Rule.of(adamw(model))

    def made(**changed: Any) -> infinity.Plan:
        return make_plan(
            model,
            changed.get("rule", rule),
            budget=infinity.Budget(**{**budget, **changed.get("budget", {})}),
            precision=infinity.Precision(),
            device=torch.device("cpu"),
            available=Available(device=1 << 36, host=1 << 36),
        )

    direct = made()
    with planned_apart():
        apart, unified, inference = made(), made(budget={"device": None}), made(rule=None)
    for each in (direct, unified, inference):
        assert each.leaving_bytes == each.landing_bytes == each.squares_bytes == 0
    assert apart.leaving_bytes == leaving and apart.landing_bytes == landing
    assert apart.squares_bytes == 4096 >= 8 * (-(-300 * 300 // BLOCK) + 1)
    pages = apart.home_bytes[Tier.DEVICE] + apart.mirror_bytes
    assert apart.device_bytes == pages + apart.resident_bytes + leaving
    assert apart.device_tier_bytes == apart.device_bytes - leaving
    assert apart.smallest[Tier.DEVICE] == direct.smallest[Tier.DEVICE]
    assert apart.smallest[Tier.HOST] == direct.smallest[Tier.HOST] + LANDING + apart.squares_bytes


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.sampled_from([3, 64, 130]), min_size=1, max_size=4),
    device=st.integers(1, 600_000),
    host=st.integers(1, 2_000_000),
    nvme=st.none() | st.integers(1, 2_000_000),
)
def test_what_a_plan_needs_for_them_is_exact(
    widths: list[int], device: int, host: int, nvme: int | None
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, 2 * width) for width in widths))

    def made(**budget: Any) -> infinity.Plan:
        paths = {"/nowhere": budget.pop("nvme")} if budget["nvme"] else budget.pop("nvme")
        with planned_apart():
            return make_plan(
                model,
                Rule.of(adamw(model)),
                budget=infinity.Budget(**budget, nvme=paths),
                precision=infinity.Precision(),
                device=torch.device("cpu"),
                available=Available(device=1 << 26, host=1 << 26),
            )

    budget = {"device": device, "host": host, "nvme": nvme}
    for _ in range(4):
        try:
            plan = made(**budget)
        except infinity.BudgetError as error:
            assert error.tier is not None and error.needed is not None
            with pytest.raises(infinity.BudgetError):
                made(**{**budget, error.tier: max(1, error.needed - 4096)})
            budget[error.tier] = error.needed
        else:
            break
    assert plan.landing_bytes >= LANDING
    assert plan.device_bytes <= plan.budgets[Tier.DEVICE] and plan.host_bytes <= plan.budgets[Tier.HOST]
