"""Budgets by a word: how many of a model's pages rest in RAM decides the host budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace

import infinity
from infinity.config import round_up
from infinity.planning.working_room import AMPLE_PAGES
from infinity.tiers import PAGE_ALIGNMENT, Tier

WORDS = ("all-host", "half", "all-nvme")
"""No page on NVMe; about half of the pages' bytes; every page."""

_STAGING_SHARE = 4
"""One in so many bytes of room at the most is taken by staging in a placement with room to work in."""


def host_budget(
    word: str,
    draft: Callable[[infinity.Budget], infinity.Plan],
    *,
    device: str | None,
    nvme: Mapping[str, str | int] | None,
    reserved: int,
) -> int:
    """Bytes of the host budget by which as many pages rest in RAM as `word` says, with room to work in.

    draft: a plan that measures nothing. reserved: bytes of that budget that no page may take, which a draft
    does not know. Pages at home under the device budget are not counted.
    """
    whole = draft(infinity.Budget(device=device, nvme=nvme))
    total = sum(whole.home_bytes.values()) - whole.home_bytes[Tier.DEVICE]
    # In as much RAM some pages rest on NVMe, so that the draft has staging.
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
    """The same plan with every page at home on NVMe. What rested in RAM leaves its room empty."""
    homes = tuple(
        {kind: None if tier is None else Tier.NVME for kind, tier in unit.items()} for unit in plan.homes
    )
    moved = replace(plan, homes=homes, resident_bytes=max(plan.resident_bytes, _resident_bytes(plan)))
    return replace(moved, prediction=moved.predict())


def _resident_bytes(plan: infinity.Plan) -> int:
    return sum(heapq.nlargest(AMPLE_PAGES, (unit.nbytes for unit in plan.layout.units)))
