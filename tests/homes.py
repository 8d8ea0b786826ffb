"""Budgets that put a model's pages where a test wants them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers import Tier
from infinity.tiers.tier import usable_device

ROOMY = 64 << 20
"""Bytes. More than any model of the tests needs in any tier."""


def room_on(device: str | torch.device) -> int:
    """ROOMY bytes for a model on this device, and what torch takes there besides."""
    at = usable_device(device)
    if at.type == "cpu":
        return ROOMY
    # Not above: benchmarks/bits.py trains with packages of other commits, too, on the CPU.
    from infinity.planning.headroom import Headroom

    return ROOMY + Headroom.of(at).beside(ROOMY)


CUDA_HOMES = ("device", "host", "nvme", "mixed")
"""Those of them with a device of its own memory."""

HOMES = ("device", "host", "nvme", "unified", "unified-nvme", "mixed")
"""Where pages rest. "unified" is a CPU as its own device; in the others the CPU has a device tier apart."""

both_homes = pytest.mark.parametrize("home", ["nvme", "unified"])
"""Pages on NVMe below a device apart, and in the one memory of a CPU that is its own device."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def places(*homes: str, cuda: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrises `home` and `device`: the homes with the CPU as the device, and those on a CUDA device."""
    found: list[Any] = [pytest.param(home, "cpu", id=home) for home in homes]
    found += [pytest.param(home, "cuda", id=f"{home} with cuda", marks=needs_cuda) for home in cuda]
    return pytest.mark.parametrize("home, device", found)


each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def evict_all(engine: Any) -> None:
    """Send away every page that can leave, as the engine does for a page that needs all of the room."""
    engine._evict_others(set())


def budget_for(
    home: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    directory: Path,
    precision: Any,
    *,
    device: str | torch.device = "cpu",
    accumulation: int | None = None,
) -> Any:
    """The infinity.Budget with which every page of the model rests at `home`, working room at its smallest.

    accumulation: as it will be declared. "mixed" has room for half of the pages of each kind of memory, and
    the disk takes the rest. "mirrored" is ZeRO-Offload's: parameters on the device and in RAM, gradients and
    states in RAM.
    """
    nvme = {str(directory): ROOMY}
    if home == "unified":
        return infinity.Budget(host=ROOMY)
    apart = None if home == "unified-nvme" else room_on(device)
    roomy = infinity.Budget(device=apart, host=ROOMY, nvme=nvme)
    planned = functools.partial(
        infinity.plan, model, optimizer, precision=precision, device=device, accumulation=accumulation
    )
    smallest = planned(budget=roomy).smallest
    host = smallest[Tier.HOST]
    if home == "unified-nvme":
        return infinity.Budget(host=host, nvme=nvme)
    near = smallest[Tier.DEVICE]
    if home == "device":
        return infinity.Budget(device=apart, host=host)
    if home in ("host", "mirrored"):
        pages = [unit.nbytes for unit in planned(budget=roomy).layout.units]
        # Where all are on the device, none has to be resident besides.
        more = sum(pages) - max(pages) if home == "mirrored" else 0
        return infinity.Budget(device=near + more, host=ROOMY)
    tight = infinity.Budget(device=near, host=host, nvme=nvme)
    if home == "nvme":
        return tight
    assert home == "mixed", home
    plan = planned(budget=tight)
    parameters = sum(unit.nbytes for unit in plan.layout.units)
    others = sum(plan.home_bytes.values()) - parameters
    return infinity.Budget(device=near + parameters // 2, host=host + others // 2, nvme=nvme)


def check_homes(home: str, plan: Any) -> None:
    """Assert that the plan's pages rest where `budget_for(home, ...)` wants them."""
    tiers = {tier for unit in plan.homes for tier in unit.values() if tier is not None}
    if home == "mixed":
        assert Tier.NVME in tiers
        assert len(tiers) > 1
        return
    if home == "mirrored":
        assert plan.mirrored
        assert tiers == {Tier.HOST}
        return
    if home == "host":
        # Room for the largest page to be resident can be more than the other pages need of it.
        assert Tier.HOST in tiers
        assert {tier for unit in plan.homes for kind, tier in unit.items() if kind.name != "PARAMETER"} <= {
            Tier.HOST,
            None,
        }
        return
    wanted = {
        "device": Tier.DEVICE,
        "nvme": Tier.NVME,
        "unified": Tier.HOST,
        "unified-nvme": Tier.NVME,
    }
    assert tiers == {wanted[home]}
