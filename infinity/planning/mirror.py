"""Mirrors: copies, kept on the device, of parameters that are at home in host RAM. Pure.

ZeRO-Offload (Ren et al., 2021) keeps parameters on the device. The optimizer states are in host RAM, where
the CPU runs the updates. An update needs the whole fp32 master parameter in host RAM. For a bf16 parameter
the low half of the master lies beside the moments, and the high half is the parameter itself. Where host
RAM has room left for the parameters too (2 bytes per parameter in bf16), a unit can be mirrored. The
parameter page of a mirrored unit is at home in host RAM, updates change the page in place, and the result
is copied to the device. Then only gradients have to be copied from the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from infinity.planning.placement import Homes, Kind
from infinity.tiers import Tier


def mirrored(
    homes: Homes,
    sizes: Mapping[Kind, Sequence[int]],
    host_free: int,
    *,
    updated_on_device: Collection[int],
) -> tuple[Homes, frozenset[int]]:
    """Choose the units to mirror, as many as host RAM has room for. Returns the new homes and the indices
    of the chosen units.

    A unit can be mirrored if its parameters are at home on the device and the CPU updates the unit. The
    unit's parameter page then gets a home in host RAM, and the copy on the device takes the room of the
    page's old home. Units without pages on NVMe are chosen first, because their updates then read nothing
    from disk. homes: the tier of every page. sizes: for each kind of page, the bytes of each unit's page, by
    index of the unit. host_free: bytes of host RAM that no page takes. updated_on_device: indices of the
    units that the device updates, which are not mirrored.
    """
    pages = sizes[Kind.PARAMETER]
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
    moved = tuple(
        {**home, Kind.PARAMETER: Tier.HOST} if unit in chosen else home for unit, home in enumerate(homes)
    )
    return moved, frozenset(chosen)
