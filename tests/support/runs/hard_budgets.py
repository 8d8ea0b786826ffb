"""Budgets from the smallest that will do to roomy ones, and checks of what must hold under every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from homes import ROOMY
from torch import nn

import infinity
from infinity.tiers import Tier

PLACES = ("unified", "unified-nvme", "apart", "apart-nvme")
"""Kinds of machine. "apart": the device has memory of its own. "unified": it has none, and computes in host
RAM. With "-nvme" the machine also has a disk for pages.
"""

FP32 = infinity.Precision(compute="fp32")


def roomy(place: str, directory: Path) -> infinity.Budget:
    return budget_of(
        {
            Tier.HOST: ROOMY,
            **({Tier.DEVICE: ROOMY} if place.startswith("apart") else {}),
            **({Tier.NVME: ROOMY} if place.endswith("nvme") else {}),
        },
        directory,
    )


def budget_of(sizes: dict[Tier, int], directory: Path) -> infinity.Budget:
    nvme = sizes.get(Tier.NVME)
    return infinity.Budget(
        device=sizes.get(Tier.DEVICE),
        host=sizes[Tier.HOST],
        nvme={str(directory): nvme} if nvme is not None else None,
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def offload(model: nn.Module, sizes: dict[Tier, int], directory: Path) -> Any:
    return infinity.offload(
        model, adamw(model), budget=budget_of(sizes, directory), precision=FP32, device="cpu"
    )


def smallest(model: nn.Module, place: str, directory: Path) -> dict[Tier, int]:
    """Plan the model's training, and return by tier the smallest budget in bytes that will do.

    place: one of PLACES. directory: for the pages on NVMe.
    """
    budget = roomy(place, directory)
    found = infinity.plan(model, adamw(model), budget=budget, precision=FP32, device="cpu").smallest
    return dict(found)


def check_budgets(runtime: Any, sizes: dict[Tier, int], directory: Path) -> None:
    """Assert that no tier holds more than its budget, and that no pool ever did hold more than its size.

    sizes: budget of each tier in bytes. directory: that of the pages on NVMe.
    """
    store = runtime._components.store
    for name, pool in store.pools.items():
        counters = pool.counters
        assert 0 <= counters.leased <= counters.peak <= pool.nbytes, name
    assert sum(pool.nbytes for pool in store.host.pools.values()) <= store.host.budget <= sizes[Tier.HOST]
    assert store.host.region.resident_bytes() <= sizes[Tier.HOST]
    if Tier.DEVICE in sizes:
        device = store.device
        assert sum(pool.nbytes for pool in device.pools.values()) <= device.budget <= sizes[Tier.DEVICE]
        assert device.region.resident_bytes() <= sizes[Tier.DEVICE]
    # Not st_blocks, in which ext4 also counts a block of its own for the tree of a file's extents.
    assert sum(path.stat().st_size for path in directory.glob("*.slab")) <= sizes.get(Tier.NVME, 0)
