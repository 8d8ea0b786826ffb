"""Mirrors: parameters that rest in host RAM and stay on the device as well. Pure.

ZeRO-Offload (Ren et al., 2021) keeps parameters on the device, and states and the update in host RAM. The
update needs the whole master parameter there: for bf16 that is the remainder, which lies beside the moments,
and the high half, which is the parameter itself. Where host RAM has room left for the parameters too (2 bytes
each in bf16), a mirrored unit's parameter page is at home there, updates change it in place, and the result
is copied to the device: only gradients come down.
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
    """The homes with as many parameter pages moved to host RAM as it has room for, and the units of these.

    sizes: bytes of every page, by kind and unit. host_free: bytes of host RAM that no page has.
    updated_on_device: units that stay as they are. A unit can be mirrored if its parameters are at home on
    the device, where they keep their room, and the CPU updates them. Units without pages on NVMe come first:
    their updates then need no staging at all.
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
