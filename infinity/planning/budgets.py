"""Budgets: finds the smallest budget that would be enough, for a model that does not fit, or for parameters
that have to be resident at the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace

from infinity.config import format_size, round_up
from infinity.errors import BudgetError
from infinity.planning.headroom import Reserve
from infinity.planning.homes import Search
from infinity.planning.placement import Room
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT, Tier

_ENDLESS = 1 << 62
_WORTH_NAMING = 8
"""An error mentions buffers or activations if they take at least the needed bytes divided by this number."""
_STRIPING = (33, 32)
"""The ratio 33 to 32: on several paths, 33 bytes of NVMe budget hold 32 bytes of pages. Some 3% of the
budget is lost because every path holds whole periods of the pattern in which pages are striped over the
paths (infinity/tiers/striping.py).
"""


def usable_nvme(budgets: Mapping[str, int]) -> int:
    """Bytes of pages that the directories of the NVMe tier can hold together. budgets: bytes by directory."""
    nbytes = sum(limit // PAGE_ALIGNMENT * PAGE_ALIGNMENT for limit in budgets.values())
    return nbytes if len(budgets) < 2 else nbytes * _STRIPING[1] // _STRIPING[0]


def nvme_budget_for(nbytes: int, paths: int) -> int:
    """The smallest budget with which `paths` directories together can hold `nbytes` bytes of pages."""
    return nbytes if paths < 2 else -(-nbytes * _STRIPING[0] // _STRIPING[1])


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
) -> BudgetError:
    """Make the error for a model that has no placement in `room`.

    The error names one tier: the device, if its budget would be too small even with unlimited host and NVMe
    budgets; otherwise NVMe, if the host budget would be enough with an unlimited NVMe budget; otherwise the
    host. `needed` of the error is the exact budget, in bytes, that this tier needs with the other budgets as
    they are. If no budget of the tier is enough with these, `needed` is what the device needs with unlimited
    host and NVMe budgets, or what the host needs with an unlimited NVMe budget.

    search: the search that found no placement. budgets: each tier's, in bytes. paths: number of NVMe
    directories. what: the start of the message, such as "309M parameters". reserves: what was taken off the
    budgets to get `room`.
    """
    nothing = Reserve(0)

    def error(tier: Tier, pages: int, with_nvme: int | None = None) -> BudgetError:
        reserve = reserves.get(tier, nothing)
        return _error(tier, pages, what, budgets[tier], reserve, with_nvme=with_nvme)

    if room.device is not None:
        alone = search.needed(Tier.DEVICE, replace(room, host=_ENDLESS, nvme=_ENDLESS))
        if alone is not None and alone > room.device:
            exact = search.needed(Tier.DEVICE, room)
            return error(Tier.DEVICE, alone if exact is None else exact)
    host = search.needed(Tier.HOST, replace(room, nvme=_ENDLESS))
    nvme = search.needed(Tier.NVME, room)
    if paths and nvme is not None and host is not None and host <= room.host:
        return error(Tier.NVME, nvme_budget_for(nvme, paths))
    pages = search.needed(Tier.HOST, room)
    pages = host if pages is None else pages
    assert pages is not None  # host memory alone can hold everything, and endless NVMe what commits need
    return error(Tier.HOST, pages, None if Tier.NVME in budgets else host)


def _error(
    tier: Tier, pages: int, what: str, budget: int, reserve: Reserve, *, with_nvme: int | None = None
) -> BudgetError:
    """Make the error for a tier that needs `pages` bytes beside `reserve`.

    with_nvme: the bytes that the tier would need instead of `pages` if the user added an nvme budget; None if
    there is an nvme budget already, or if one would not help.
    """
    needed = reserve.budget_for(pages)
    others = [
        f"{format_size(nbytes)} are {name}"
        for nbytes, name in (
            (reserve.buffers, "buffers, which go to no other tier"),
            (reserve.activations, "activations"),
        )
        if nbytes * _WORTH_NAMING >= needed
    ]
    of = f", of which {' and '.join(others)}" if others else ""
    cure = f"Give a {tier.value} budget of {format_size(needed)} ({needed} bytes)"
    less = None if with_nvme is None else reserve.budget_for(with_nvme)
    if less is not None and less <= budget:
        less = 0
        cure += ", or add an nvme budget, to which pages can go"
    elif less is not None and less * _WORTH_NAMING <= needed * (_WORTH_NAMING - 1):
        cure += f", or one of {format_size(less)} ({less} bytes) and an nvme budget, to which pages can go"
    else:
        less = None
    without = replace(reserve, nbytes=reserve.least)
    smaller_batch = reserve.activations > 0 and without.budget_for(pages) <= budget
    if smaller_batch:
        cure += ", or lower the batch size or the length of sequences"
    return BudgetError(
        f"{what} need at least {format_size(needed)} in the {tier.value} tier{of}; the budget is "
        f"{format_size(budget)}.",
        f"{cure}.",
        needed=needed,
        tier=tier.value,
        with_nvme=less,
        smaller_batch=smaller_batch,
    )


_GRID = 16
"""Number of equally spaced budgets that are tried first. One is taken only if all larger ones among them are
enough, too, so that a user who rounds the budget up is not refused.
"""

_PRECISION = 512
"""The budget that is found is too large by at most its bytes divided by this number, provided that a larger
budget never gives a plan with less room.
"""


def resident_budget(plan: Plan, names: Collection[str] | None) -> int | None:
    """Find a budget, in bytes, of the tier that computes with which the parameters `names` can be resident at
    the same time, as can the parameters of any other units of the same number. All other budgets are as in
    `plan`.

    names: None for all parameters, even if views that the user holds fragment the pool. The result is larger
    than the plan's budget. It is None if no budget is enough, or if the plan has no `replan`.
    """
    replan = plan.replan
    if replan is None:
        return None

    def enough(budget: int) -> bool:
        made = replan(budget)
        return made is not None and _has_room(made, names)

    low = plan.budgets[plan.computes_in]
    whole = sum(unit.nbytes for unit in plan.layout.units)
    high = round_up(low + 1, PAGE_ALIGNMENT)
    step = round_up(whole, PAGE_ALIGNMENT)
    while not enough(high):
        if step > 1 << 62:
            return None
        low, high, step = high, high + step, 2 * step
    low = plan.budgets[plan.computes_in]
    step = round_up(max(1, (high - low) // _GRID), PAGE_ALIGNMENT)
    while high - step > low and enough(high - step):
        high -= step
    low = max(low, high - step)
    while high - low > max(PAGE_ALIGNMENT, high // _PRECISION):
        middle = round_up((low + high) // 2, PAGE_ALIGNMENT)
        if middle >= high:
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _has_room(plan: Plan, names: Collection[str] | None) -> bool:
    """Whether the parameters `names`, or all if None, can be resident at the same time."""
    moving = [unit for unit in range(len(plan.homes)) if not plan.stays(unit)]
    sizes = {unit: plan.layout.units[unit].nbytes for unit in moving}
    if names is None:
        # Views keep pages of a pool apart from each other, so that the free bytes are not in one piece.
        return not moving or (not plan.share.whole_parameters and sum(sizes.values()) <= plan.resident_bytes)
    taken = [
        sizes[unit]
        for unit in moving
        if any(name in names for each in plan.layout.units[unit].parameters for name in each.names)
    ]
    most = sum(heapq.nlargest(len(taken), sizes.values()))
    return max(sum(taken), most) <= plan.resident_bytes
