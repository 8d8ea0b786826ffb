"""Which units the device updates, and what that takes: the share of ZeRO-Offload++'s "Twin-Flow". Pure.

A unit whose parameters, gradients and optimizer states all rest on a device with kernels and memory of its
own is updated there: none of its bytes cross the link. The share follows from the room that pages have there,
where ZeRO-Offload++ (DeepSpeed, 2023) is told a ratio.

[Note: whole units]
A gradient that rests on the device while its states do not is worse off than in host RAM: the CPU adds to it
and updates with it, so it crosses the link to get there and again to be used. The placement fills the device
kind by kind. What it has put there of gradients and states is exchanged for those of whole units, of which as
many are on the device as fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.device_update import kernels
from infinity.planning.placement import Homes, Kind
from infinity.tiers import Tier

_DISK_AGAINST_LINK = 16
"""Bytes over the link that take as long as one to and from a disk."""


def has_kernels(device: torch.device) -> bool:
    """Whether a device of its own memory updates what rests there.

    The CPU does not: there is nothing to gain. Tests put a function here that says yes, so that the path runs
    without a GPU.
    """
    return device.type == "cuda" and kernels.can_compile()


def updated_there(homes: Homes) -> frozenset[int]:
    """The units of which all that an update takes rests on the device; none of frozen ones."""
    near = (Tier.DEVICE, None)
    return frozenset(
        unit
        for unit, home in enumerate(homes)
        if home[Kind.GRADIENT] is Tier.DEVICE and all(tier in near for tier in home.values())
    )


def gathered(homes: Homes, sizes: Mapping[Kind, Sequence[int]], host_free: int) -> Homes:
    """The homes with as many whole units on the device as its gradients and states have room for.

    sizes: bytes of every page, by kind and unit. host_free: bytes of host RAM that no page has. Pages on NVMe
    and parameters stay, and so does everything where host RAM would not do. See the note.
    """
    kinds = (Kind.GRADIENT, Kind.OPTIMIZER)
    near = [(unit, kind) for unit, home in enumerate(homes) for kind in kinds if home[kind] is Tier.DEVICE]
    room = sum(sizes[kind][unit] for unit, kind in near)
    chosen: set[tuple[int, Kind]] = set()
    for unit, home in enumerate(homes):
        nbytes = sum(sizes[kind][unit] for kind in kinds)
        within_reach = home[Kind.PARAMETER] is Tier.DEVICE and Tier.NVME not in home.values()
        if home[Kind.GRADIENT] is not None and within_reach and nbytes <= room:
            room -= nbytes
            chosen |= {(unit, kind) for kind in kinds if home[kind] is not None}
    for unit, kind in near:
        if (unit, kind) not in chosen and sizes[kind][unit] <= room:
            room -= sizes[kind][unit]
            chosen.add((unit, kind))
    if room > host_free:  # what is left of it now is what host RAM has more
        return homes
    moved = [dict(home) for home in homes]
    for unit, kind in near:
        moved[unit][kind] = Tier.HOST
    for unit, kind in chosen:
        moved[unit][kind] = Tier.DEVICE
    return tuple(moved)


def pays(spared: int, before: Mapping[Tier, int], after: Mapping[Tier, int]) -> bool:
    """Whether updates on the device are worth the room that their workspace takes from pages there.

    spared: bytes of the pages that no longer cross the link. before, after: bytes at home in each tier
    without the workspace and with it.
    """
    moved = before[Tier.DEVICE] - after[Tier.DEVICE]
    sunk = max(0, after[Tier.NVME] - before[Tier.NVME])
    return spared > moved + _DISK_AGAINST_LINK * sunk
