"""Budgets by name: finds the host budget with which all, half or none of a model's pages rest in RAM."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace

import infinity
from infinity.config import round_up
from infinity.planning.placement import AMPLE_PAGES
from infinity.tiers import PAGE_ALIGNMENT, Tier

WORDS = ("all-host", "half", "all-nvme")
"""Part of the pages' bytes that rests on NVMe: nothing ("all-host"), about half, everything ("all-nvme")."""

_STAGING_SHARE = 4
"""If there is ample memory, staging (the RAM in which updates of pages on NVMe are computed) takes at most
the bytes of the host tier divided by this number.
"""


def host_budget(
    word: str,
    draft: Callable[[infinity.Budget], infinity.Plan],
    *,
    device: str | None,
    nvme: Mapping[str, str | int] | None,
    reserved: int,
) -> int:
    """Find the host budget, in bytes, with which the part of the pages that `word` names rests on NVMe.

    The other pages rest in RAM. The budget includes the room for moving and updating pages. Pages that rest
    under the device budget are not counted. word: one of WORDS. draft: function that makes a plan for a
    budget without measuring. device, nvme: the other budgets, as infinity.Budget takes them. reserved: bytes
    to add to the budget for what the drafts do not take into account, such as activations.
    """
    whole = draft(infinity.Budget(device=device, nvme=nvme))
    total = sum(whole.home_bytes.values()) - whole.home_bytes[Tier.DEVICE]
    # With this budget some pages rest on NVMe, so that the draft has staging.
    room = total * 3 // 4 if word == "all-nvme" else total // 2
    enough = whole.smallest[Tier.HOST] + room
    some = draft(infinity.Budget(device=device, host=enough, nvme=nvme))
    working = _STAGING_SHARE * some.staging_bytes + some.transit_bytes + _resident_bytes(some)
    if word == "all-nvme":  # of a small model all pages may fit the budget that has ample staging
        return round_up(reserved + min(working, enough), PAGE_ALIGNMENT)
    low, high = whole.smallest[Tier.HOST], working + total
    while word == "half" and high - low > max(PAGE_ALIGNMENT, total >> 8):
        middle = (low + high) // 2
        found = draft(infinity.Budget(device=device, host=middle, nvme=nvme))
        low, high = (middle, high) if 2 * found.home_bytes[Tier.NVME] > total else (low, middle)
    return round_up(reserved + high, PAGE_ALIGNMENT)


def all_on_nvme(plan: infinity.Plan) -> infinity.Plan:
    """Return a copy of `plan` in which the home of every page is on NVMe, with a new prediction.

    The pool of resident parameter pages gets room for the AMPLE_PAGES largest pages, if it has less. All
    other pools and buffers of the plan keep their sizes.
    """
    homes = tuple(
        {kind: None if tier is None else Tier.NVME for kind, tier in unit.items()} for unit in plan.homes
    )
    moved = replace(plan, homes=homes, resident_bytes=max(plan.resident_bytes, _resident_bytes(plan)))
    return replace(moved, prediction=moved.predict())


def _resident_bytes(plan: infinity.Plan) -> int:
    return sum(heapq.nlargest(AMPLE_PAGES, (unit.nbytes for unit in plan.layout.units)))
