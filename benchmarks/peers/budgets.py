"""Budgets by a word: the host budget with which a given part of a model's pages rests in RAM."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace

import infinity
from infinity.config import round_up
from infinity.planning.working_room import AMPLE_PAGES
from infinity.tiers import PAGE_ALIGNMENT, Tier

WORDS = ("all-host", "half", "all-nvme")
"""Part of the pages' bytes that rests on NVMe: nothing ("all-host"), about half, everything ("all-nvme")."""

_STAGING_SHARE = 4
"""Where working room is ample, staging takes at most the bytes of the host tier divided by this number."""


def host_budget(
    word: str,
    draft: Callable[[infinity.Budget], infinity.Plan],
    *,
    device: str | None,
    nvme: Mapping[str, str | int] | None,
    reserved: int,
) -> int:
    """Bytes of the host budget with which the part of the pages that `word` names rests in RAM.

    The budget includes working room. Pages that rest under the device budget are not counted. word: one of
    WORDS. draft: function that makes a plan for a budget without measuring. reserved: bytes of the host
    budget that pages cannot take, and that the drafts do not take into account.
    """
    whole = draft(infinity.Budget(device=device, nvme=nvme))
    total = sum(whole.home_bytes.values()) - whole.home_bytes[Tier.DEVICE]
    # With this budget some pages rest on NVMe, so that the draft has staging.
    room = total * 3 // 4 if word == "all-nvme" else total // 2
    some = draft(infinity.Budget(device=device, host=whole.smallest[Tier.HOST] + room, nvme=nvme))
    working = _STAGING_SHARE * some.staging_bytes + some.transit_bytes + _resident_bytes(some)
    if word == "all-nvme":
        return round_up(reserved + working, PAGE_ALIGNMENT)
    low, high = whole.smallest[Tier.HOST], working + total
    while word == "half" and high - low > max(PAGE_ALIGNMENT, total >> 8):
        middle = (low + high) // 2
        found = draft(infinity.Budget(device=device, host=middle, nvme=nvme))
        low, high = (middle, high) if 2 * found.home_bytes[Tier.NVME] > total else (low, middle)
    return round_up(reserved + high, PAGE_ALIGNMENT)


def all_on_nvme(plan: infinity.Plan) -> infinity.Plan:
    """A copy of `plan` with the home of every page on NVMe, and a new prediction.

    The working room is kept, except that room for resident parameter pages grows to AMPLE_PAGES of them.
    """
    homes = tuple(
        {kind: None if tier is None else Tier.NVME for kind, tier in unit.items()} for unit in plan.homes
    )
    moved = replace(plan, homes=homes, resident_bytes=max(plan.resident_bytes, _resident_bytes(plan)))
    return replace(moved, prediction=moved.predict())


def _resident_bytes(plan: infinity.Plan) -> int:
    return sum(heapq.nlargest(AMPLE_PAGES, (unit.nbytes for unit in plan.layout.units)))
