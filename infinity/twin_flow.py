"""Which units the device updates, and what that takes: the share of ZeRO-Offload++'s "Twin-Flow". Pure.

A unit whose parameters, gradients and optimizer states all rest on a device with kernels and memory of its
own is updated there: none of its bytes cross the link. No placement is made for it; the share follows from
where pages rest, where ZeRO-Offload++ (DeepSpeed, 2023) is told a ratio.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.cpu_adam import BLOCK
from infinity.layout import UnitLayout
from infinity.placement import Homes, Kind
from infinity.tiers import Tier

_DISK_AGAINST_LINK = 16
"""Bytes over the link that take as long as one to and from a disk."""


def has_kernels(device: torch.device) -> bool:
    """Whether a device of its own memory updates what rests there.

    The CPU does not: its updates are those of infinity.cpu_adam, whose bits depend on no placement. Tests put
    a function here that says yes, so that the path runs without a GPU.
    """
    return device.type == "cuda"


def updated_there(homes: Homes) -> frozenset[int]:
    """The units of which all that an update takes rests on the device; none of frozen ones."""
    near = (Tier.DEVICE, None)
    return frozenset(
        unit
        for unit, home in enumerate(homes)
        if home[Kind.GRADIENT] is Tier.DEVICE and all(tier in near for tier in home.values())
    )


def blocks_of(unit: UnitLayout) -> int:
    """Blocks of gradients that are measured by themselves."""
    return sum(-(-piece.count // BLOCK) for chunk in unit.chunks for piece in chunk.pieces)


def pays(spared: int, before: Mapping[Tier, int], after: Mapping[Tier, int]) -> bool:
    """Whether updates on the device are worth the room that their workspace takes from pages there.

    spared: bytes of the pages that no longer cross the link. before, after: bytes at home in each tier
    without the workspace and with it.
    """
    moved = before[Tier.DEVICE] - after[Tier.DEVICE]
    sunk = max(0, after[Tier.NVME] - before[Tier.NVME])
    return spared > moved + _DISK_AGAINST_LINK * sunk
