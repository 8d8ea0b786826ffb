"""Budget errors: tell which tier is too small for a model, and the smallest budget that would be enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infinity.config import format_size
from infinity.errors import BudgetError
from infinity.planning.placement import Room
from infinity.planning.reserve import Reserve
from infinity.planning.search import Search
from infinity.tiers import PAGE_ALIGNMENT, Tier

_ENDLESS = 1 << 62
_STRIPING = (33, 32)
"""The ratio 33 to 32: on several paths, 33 bytes of NVMe budget hold 32 bytes of pages. Some 3% of the
budget is lost because every path holds whole periods of the pattern in which pages are striped over the
paths (infinity/tiers/striping.py).
"""


def usable_nvme(budgets: Mapping[str, int], header: int = 0) -> int:
    """Bytes of pages that the directories of the NVMe tier can hold together.

    budgets: the most bytes that may be used in each directory. header: bytes of each directory's slab file
    that hold no page.
    """
    whole = (limit // PAGE_ALIGNMENT * PAGE_ALIGNMENT for limit in budgets.values())
    nbytes = sum(max(0, limit - header) for limit in whole)
    return nbytes if len(budgets) < 2 else nbytes * _STRIPING[1] // _STRIPING[0]


def nvme_budget_for(nbytes: int, paths: int, header: int = 0) -> int:
    """The smallest budget of the NVMe tier, in bytes, with which `paths` directories together can hold
    `nbytes` bytes of pages, and a header of `header` bytes each.
    """
    striped = nbytes if paths < 2 else -(-nbytes * _STRIPING[0] // _STRIPING[1])
    return striped + paths * header


def format_count(number: int) -> str:
    """Text for a large number, such as "309M" for 309 million."""
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return str(number)


def shortage(
    search: Search,
    room: Room,
    budgets: Mapping[Tier, int],
    paths: int,
    what: str,
    *,
    reserves: Mapping[Tier, Reserve],
    header: int = 0,
) -> BudgetError:
    """Make the error for a model that has no placement in `room`.

    The error names the tier that is too small. It names the device if the device budget would be too small
    even with unlimited host and NVMe budgets. Otherwise it names NVMe if the host budget is large enough,
    else the host. The error's `needed` is the exact number of bytes that this tier needs with the other
    budgets as they are. If no device budget is enough with the other budgets, `needed` assumes that the
    other budgets are unlimited. If no host budget is enough, because NVMe cannot hold what commits need,
    `needed` assumes that the NVMe budget is unlimited.

    search: the search that found no placement. room: the bytes of each tier that it could use. budgets:
    each tier's budget in bytes. paths: number of NVMe directories. what: the start of the error message,
    such as "309M parameters". reserves: by tier, what was subtracted from the budget to get `room`. header:
    bytes of each NVMe directory's slab file that hold no page, and that `room` does not contain.
    """
    nothing = Reserve(0)
    if room.device is not None:
        alone = search.needed(Tier.DEVICE, replace(room, host=_ENDLESS, nvme=_ENDLESS))
        if alone is not None and alone > room.device:
            exact = search.needed(Tier.DEVICE, room)
            needed = reserves[Tier.DEVICE].budget_for(alone if exact is None else exact)
            return _error(Tier.DEVICE, needed, what, budgets)
    host = search.needed(Tier.HOST, replace(room, nvme=_ENDLESS))
    nvme = search.needed(Tier.NVME, room)
    if paths and nvme is not None and host is not None and host <= room.host:
        return _error(Tier.NVME, nvme_budget_for(nvme, paths, header), what, budgets)
    pages = search.needed(Tier.HOST, room)
    pages = host if pages is None else pages
    assert pages is not None  # host memory alone can hold everything, and endless NVMe what commits need
    return _error(Tier.HOST, reserves.get(Tier.HOST, nothing).budget_for(pages), what, budgets)


def _error(tier: Tier, needed: int, what: str, budgets: Mapping[Tier, int]) -> BudgetError:
    cure = f"Give a {tier.value} budget of {format_size(needed)} ({needed} bytes)."
    if tier is Tier.HOST and Tier.NVME not in budgets:
        cure = f"{cure[:-1]}, or add an nvme budget, to which pages can go."
    return BudgetError(
        f"{what} need at least {format_size(needed)} in the {tier.value} tier; the budget is "
        f"{format_size(budgets[tier])}.",
        cure,
        needed=needed,
        tier=tier.value,
    )
