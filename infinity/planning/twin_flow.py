"""Twin flow: the units that the device updates, as in ZeRO-Offload++, and whether that pays. Pure.

A unit whose parameters, gradients and optimizer states all rest on a device with kernels and memory of its
own is updated there: none of its bytes cross the link. The share of such units follows from the device's room
for pages; ZeRO-Offload++ (DeepSpeed, 2023) is told a ratio.

[Note: whole units]
A gradient that rests on the device without its states costs more than one in host RAM: the CPU adds to it and
updates with it, so it crosses the link once to be stored and again to be used. The placement fills the device
kind by kind. The gradients and states that it has put there are therefore exchanged for those of whole units,
as many as fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.device_update import kernels
from infinity.planning.placement import Homes, Kind
from infinity.tiers import Tier

_DISK_AGAINST_LINK = 16
"""Bytes that cross the link in the time that one byte goes to a disk and back."""


def has_kernels(device: torch.device) -> bool:
    """Whether a device has kernels for updates, and memory of its own.

    The CPU has not: nothing would be gained. Tests replace this function by one that says yes, so that the
    path runs without a GPU.
    """
    return device.type == "cuda" and kernels.can_compile()


def updated_there(homes: Homes) -> frozenset[int]:
    """The units whose parameters, gradients and states all rest on the device; without frozen units."""
    near = (Tier.DEVICE, None)
    return frozenset(
        unit
        for unit, home in enumerate(homes)
        if home[Kind.GRADIENT] is Tier.DEVICE and all(tier in near for tier in home.values())
    )


def gathered(homes: Homes, sizes: Mapping[Kind, Sequence[int]], host_free: int) -> Homes:
    """The homes with gradients and states of whole units on the device, in the room that those there had.

    sizes: bytes of every page, by kind and unit. host_free: bytes of host RAM that no page has. Parameters
    and pages on NVMe stay. All homes stay as they are where host RAM has no room for what leaves the device.
    See [Note: whole units].
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
    if room > host_free:  # bytes that the device's room has left are bytes that move to host RAM
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
