"""Homes of pages in the resume matrix, and the budgets that put pages there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from homes import ROOMY
from torch import nn

import infinity
from infinity.formats.optimizer_rules import Rule
from infinity.planning.placement import Kind
from infinity.planning.planner import Available, make_plan
from infinity.tiers import Tier

CPU = torch.device("cpu")

HOMES = ("no disk", "ram", "nvme", "half", "gradients", "apart", "device", "mixed")
"""Where pages rest. "no disk": in RAM, without an nvme budget. "ram": in RAM, and the images of commits in
the directories of the nvme budget. "nvme": all on NVMe. "half": in RAM and on NVMe. "gradients": gradients
on NVMe, and as many other pages in RAM as there can be then. With the others the device has memory of its
own. "apart": all on NVMe. "device": all on the device. "mixed": on the device, in RAM and on NVMe.
"""
APART = ("apart", "device", "mixed")

_STEP = 16 << 10
"""Bytes between the host budgets that are tried in search of one that divides pages between RAM and NVMe."""


def budget_of(
    home: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    disks: Sequence[Path],
    planning: dict[str, Any],
) -> infinity.Budget:
    """The budget under which pages rest at `home`. disks: the directories of the nvme budget. planning: other
    arguments of `make_plan`.
    """
    rule = Rule.of(optimizer, planning["precision"].states)
    room = dict.fromkeys(map(str, disks), ROOMY)
    if home == "no disk":
        return infinity.Budget(host=ROOMY)
    if home == "ram":
        return infinity.Budget(host=ROOMY, nvme=room)
    device = ROOMY if home in APART else None

    def planned(host: int, device: int | None) -> Any:
        budget = infinity.Budget(device=device, host=host, nvme=room)
        return make_plan(
            model, rule, budget=budget, device=CPU, available=Available.now(CPU), commits=True, **planning
        )

    smallest = planned(ROOMY, device).smallest
    host, near = smallest[Tier.HOST], smallest.get(Tier.DEVICE)
    if home == "device":
        return infinity.Budget(device=ROOMY, host=host, nvme=room)
    if home in ("nvme", "apart"):
        return infinity.Budget(device=near, host=host, nvme=room)
    tight = planned(host, near)
    sizes = {
        kind: sum(tight.page_bytes(unit, kind) for unit in range(len(tight.layout.units))) for kind in Kind
    }
    if home in ("half", "gradients"):
        fitness = _mixture if home == "half" else _in_ram
        tried = range(host, host + sum(sizes.values()), _STEP)
        return infinity.Budget(host=max(tried, key=lambda each: fitness(planned(each, None))), nvme=room)
    others = sizes[Kind.GRADIENT] + sizes[Kind.OPTIMIZER]
    assert near is not None
    return infinity.Budget(device=near + sizes[Kind.PARAMETER] // 2, host=host + others // 2, nvme=room)


def _mixture(plan: Any) -> int:
    """How many pages rest in the tier in which the fewest of them rest."""
    tiers = [tier for unit in plan.homes for tier in unit.values()]
    return min(tiers.count(Tier.HOST), tiers.count(Tier.NVME))


def _in_ram(plan: Any) -> int:
    """How many pages other than gradients rest in RAM; -1 if no gradient rests on NVMe."""
    if all(unit[Kind.GRADIENT] is not Tier.NVME for unit in plan.homes):
        return -1
    return sum(
        tier is Tier.HOST for unit in plan.homes for kind, tier in unit.items() if kind is not Kind.GRADIENT
    )


def check_homes(home: str, plan: Any) -> None:
    """Assert that pages rest where `home` says."""
    tiers = {
        kind: {unit[kind] for unit in plan.homes if unit[kind] is not None}
        for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER)
    }
    found = set().union(*tiers.values())
    if home in ("no disk", "ram"):
        assert found == {Tier.HOST}
    elif home in ("nvme", "apart"):
        assert found == {Tier.NVME}
    elif home == "device":
        assert found == {Tier.DEVICE}
    elif home == "half":
        assert found == {Tier.HOST, Tier.NVME}
    elif home == "gradients":
        assert Tier.NVME in tiers[Kind.GRADIENT]
        assert Tier.HOST in found
    else:
        assert Tier.NVME in found and len(found) > 1
