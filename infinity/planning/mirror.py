"""Mirrors: parameters that rest in host RAM and stay on the device as well. Pure.

ZeRO-Offload (Ren et al., 2021) keeps parameters on the device, and states and the update in host RAM. What a
chunk's update takes there is the whole master: of bf16 parameters the remainder lies beside the moments, and
the high half is the parameter itself. Where host RAM has room left for the parameters too (2 bytes each of
bf16), a mirrored unit's parameter page is at home there, the updates change it in place, and the outcome goes
up: nothing comes down but gradients.
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
    """The homes with as many parameter pages in host RAM as it has room for, and the units of these.

    sizes: bytes of every page, by kind and unit. host_free: bytes of host RAM that no page has. Such a unit's
    parameters are on the device, where they keep their room, and its updates run elsewhere. Units without
    pages on NVMe come first: their updates then need no staging at all.
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
