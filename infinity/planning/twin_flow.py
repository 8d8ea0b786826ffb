"""Twin flow: chooses the units that the device updates, as in ZeRO-Offload++, and the units that the CPU
updates while a copy of their parameters stays on the device. Pure.

A device that has update kernels and memory of its own updates the units whose pages all rest on it. No byte
of these units crosses the link. Their share follows from the device's room for pages; in ZeRO-Offload++
(DeepSpeed, 2023) the user gives it as a ratio.

[Note: whole units] The placement fills the device kind by kind. So gradients may rest on the device while the
optimizer states of the same unit do not. The CPU adds to such a gradient and updates with it, so it crosses
the link once to be stored and again to be used, which costs more than a gradient in host RAM. The gradients
and states that the placement has put on the device are therefore exchanged for those of whole units, as many
as fit. A device that updates no unit keeps none of them, as far as host RAM has room.

[Note: mirrors] ZeRO-Offload (Ren et al., 2021) keeps parameters on the device and optimizer states in host
RAM, where the CPU runs the updates. An update needs the whole fp32 master in host RAM. For a bf16 parameter
the low half of the master lies beside the moments, and the high half is the parameter itself. Where host RAM
has room left for the parameters too, a unit can be mirrored: its parameter page is at home in host RAM,
updates change the page in place, and the result is copied to the device. Then only gradients have to be
copied from the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from infinity.device_update import kernels
from infinity.planning.placement import Homes, Kind
from infinity.tiers import Tier

_DISK_AGAINST_LINK = 16
"""Number of bytes that can cross the link between host and device in the time in which one byte is written
to a disk and read back.
"""


def has_kernels(device: torch.device) -> bool:
    """Whether the device has memory of its own and can run updates with kernels that are compiled for it.
    Tests replace this function to run updates on the device without a GPU.
    """
    return device.type == "cuda" and kernels.can_compile()


def updated_there(homes: Homes) -> frozenset[int]:
    """Indices of the trainable units whose pages all rest on the device."""
    near = (Tier.DEVICE, None)
    return frozenset(
        unit
        for unit, home in enumerate(homes)
        if home[Kind.GRADIENT] is Tier.DEVICE and all(tier in near for tier in home.values())
    )


def gathered(
    homes: Homes,
    sizes: Mapping[Kind, Sequence[int]],
    host_free: int,
    *,
    whole_units: bool = True,
    in_backward: bool = False,
) -> Homes:
    """Return homes in which the gradients and optimizer states on the device are those of whole units, as
    many as fit; see [Note: whole units]. Those of other units rest in host RAM, as far as it has room.

    These pages take no more device memory than before. Parameter pages and pages on NVMe keep their homes.
    sizes: bytes of every page, by kind and unit. host_free: bytes of host RAM that no page takes. The homes
    are returned unchanged if the pages that would leave the device need more. whole_units: False if the
    device updates no unit, so that all of these pages are better in host RAM. in_backward: True if the device
    updates its units in the backward, so that of their gradients only one unit's take room at a time.
    """
    kinds = (Kind.GRADIENT, Kind.OPTIMIZER)
    near = [(unit, kind) for unit, home in enumerate(homes) for kind in kinds if home[kind] is Tier.DEVICE]
    reachable = [
        unit
        for unit, home in enumerate(homes)
        if home[Kind.GRADIENT] is not None
        and home[Kind.PARAMETER] is Tier.DEVICE
        and Tier.NVME not in home.values()
    ]
    leaving = room = sum(sizes[kind][unit] for unit, kind in near)
    if in_backward:
        room -= max((sizes[Kind.GRADIENT][unit] for unit in reachable), default=0)
    chosen: set[tuple[int, Kind]] = set()
    for unit in reachable if whole_units else ():
        gradients = sizes[Kind.GRADIENT][unit]
        there = sizes[Kind.OPTIMIZER][unit] + gradients * (not in_backward)
        if there <= room:
            room, leaving = room - there, leaving - sizes[Kind.OPTIMIZER][unit] - gradients
            chosen |= {(unit, kind) for kind in kinds if homes[unit][kind] is not None}
    for unit, kind in near:
        if leaving <= host_free:
            break
        nbytes = sizes[kind][unit]
        if (unit, kind) not in chosen and nbytes <= room:
            room, leaving = room - nbytes, leaving - nbytes
            chosen.add((unit, kind))
    if leaving > host_free:
        return homes
    moved = [dict(home) for home in homes]
    for unit, kind in near:
        moved[unit][kind] = Tier.HOST
    for unit, kind in chosen:
        moved[unit][kind] = Tier.DEVICE
    return tuple(moved)


def pays(spared: int, before: Mapping[Tier, int], after: Mapping[Tier, int]) -> bool:
    """Whether updates on the device save more time than is lost because their workspace displaces pages.

    spared: bytes of all pages of the units that the device would update, which then no longer cross the link.
    before, after: bytes of the pages at home in each tier, without and with updates on the device.
    """
    moved = before[Tier.DEVICE] - after[Tier.DEVICE]
    sunk = max(0, after[Tier.NVME] - before[Tier.NVME])
    return spared > moved + _DISK_AGAINST_LINK * sunk


def mirrored(
    homes: Homes,
    pages: Sequence[int],
    host_free: int,
    *,
    updated_on_device: Collection[int],
) -> tuple[Homes, frozenset[int]]:
    """Choose the units to mirror (see [Note: mirrors]), as many as host RAM has room for. Returns the new
    homes and the indices of the chosen units. pages: bytes that each unit's parameters take in RAM.
    host_free: as in `gathered`.

    The copy on the device takes the room of the page's old home. Units without pages on NVMe are chosen
    first, because their updates then read nothing from disk.
    """
    found = [
        unit
        for unit, home in enumerate(homes)
        if home[Kind.PARAMETER] is Tier.DEVICE
        and home[Kind.GRADIENT] is not None
        and unit not in updated_on_device
    ]
    chosen = set()
    for unit in sorted(found, key=lambda each: Tier.NVME in homes[each].values()):
        if pages[unit] <= host_free:
            host_free -= pages[unit]
            chosen.add(unit)
    moved = (
        {**home, Kind.PARAMETER: Tier.HOST} if unit in chosen else home for unit, home in enumerate(homes)
    )
    return tuple(moved), frozenset(chosen)
