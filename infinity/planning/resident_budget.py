"""Resident budget: the budget with which given parameters can be resident at the same time. Pure.

A larger budget does not simply enlarge the pool of resident pages. The planner may take larger units, give
more pages a home where the model computes, and choose other working buffers. So the budget is found by making
the plans of other budgets, and is one whose plan has room for the parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from infinity.config import round_up
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT

_GRID = 16
"""Number of budgets that are tried first, at equal distances. A budget is taken only if all larger ones of
these have room too, so that a user who rounds the budget up is not refused.
"""

_PRECISION = 512
"""The budget that is found is too large by at most its bytes divided by this number, where the plans of
larger budgets have more room.
"""


def resident_budget(plan: Plan, names: Collection[str] | None) -> int | None:
    """A budget, in bytes, of the tier in which the model computes, with which the parameters `names` can be
    resident at the same time, and any others whose units are as many. All other budgets are as in `plan`.

    names: names of parameters; None: all parameters, however views of them are held. The result is larger
    than the plan's budget, and None if there is no such budget, or if the plan cannot be made again.
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
    """Whether a plan has room for parameters that are resident at the same time. names: as in
    `resident_budget`.
    """
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
