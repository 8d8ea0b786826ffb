"""Budgets that put a model's pages where a test wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.tiers import Tier

ROOMY = 64 << 20
"""Bytes. More than any model of the tests needs in any tier."""

HOMES = ("device", "host", "nvme", "unified", "unified-nvme", "mixed")
"""Where pages rest. "unified" is a CPU as its own device; in the others the CPU has a device tier apart."""


def budget_for(
    home: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path,
    precision: Any,
) -> Any:
    """The infinity.Budget with which every page of the model rests at `home`, working room at its smallest.

    "mixed" has room for half of the pages of each kind of memory, and the disk takes the rest.
    """
    nvme = {str(directory): ROOMY}
    if home == "unified":
        return infinity.Budget(host=ROOMY)
    apart = home != "unified-nvme"
    host = smallest("host", model, optimizer, directory, precision, apart=apart)
    if not apart:
        return infinity.Budget(host=host, nvme=nvme)
    device = smallest("device", model, optimizer, directory, precision, apart=True)
    if home == "device":
        return infinity.Budget(device=ROOMY, host=host)
    if home == "host":
        return infinity.Budget(device=device, host=ROOMY)
    if home == "nvme":
        return infinity.Budget(device=device, host=host, nvme=nvme)
    assert home == "mixed", home
    small = infinity.Budget(device=device, host=host, nvme=nvme)
    plan = infinity.plan(model, optimizer, budget=small, precision=precision, device="cpu")
    parameters = sum(unit.nbytes for unit in plan.layout.units)
    others = sum(plan.home_bytes.values()) - parameters
    return infinity.Budget(device=device + parameters // 2, host=host + others // 2, nvme=nvme)


def smallest(
    tier: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path,
    precision: Any,
    *,
    apart: bool,
) -> int:
    """Bytes: the smallest budget of "device" or "host" that works where a disk has room for all pages.

    apart: the CPU has a device tier of its own.
    """
    sizes: dict[str, Any] = {"host": ROOMY, "nvme": {str(directory): ROOMY}}
    if apart:
        sizes["device"] = ROOMY
    sizes[tier] = 4096
    try:
        infinity.plan(model, optimizer, budget=infinity.Budget(**sizes), precision=precision, device="cpu")
    except infinity.BudgetError as error:
        assert error.needed is not None
        return error.needed
    return 4096


def check_homes(home: str, plan: Any) -> None:
    """Assert that the plan's pages rest where `budget_for(home, ...)` wants them."""
    tiers = {tier for unit in plan.homes for tier in unit.values() if tier is not None}
    if home == "mixed":
        assert Tier.NVME in tiers
        assert len(tiers) > 1
        return
    wanted = {
        "device": {Tier.DEVICE},
        "host": {Tier.HOST},
        "nvme": {Tier.NVME},
        "unified": {Tier.HOST},
        "unified-nvme": {Tier.NVME},
    }
    assert tiers == wanted[home]
