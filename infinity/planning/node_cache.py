"""Node cache: how many bytes of RAM a rank takes to keep parameters of other nodes for its node. Pure.

With room for all that it brings, each parameter crosses the link between nodes once a step and node. With
less, what was used longest ago is brought again.
"""

from __future__ import annotations

from collections.abc import Iterator

from infinity.config import round_up
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT

_SHARES = (4, 8, 16)
"""Where pages are on NVMe for lack of RAM, the cache takes at most the host budget divided by one of these:
the first with which the model is divided as without a cache, and as many pages are present.
"""
_LEAST_BLOCKS = 4
"""The fewest exchange buffers' worth of bytes that a cache is made for."""


def wanted_bytes(plan: Plan) -> int:
    """Bytes of all parameters that this rank brings for its node; 0 if no bytes would be spared.

    They are spared where several ranks of the node ask for the same ones, or where pages come more than once
    a step.
    """
    share = plan.share
    if share.stage == 0 or (share.on_node == 1 and share.stage < 3):
        return 0
    return plan.relayed_bytes


def least_bytes(plan: Plan) -> int:
    """Bytes below which no cache is made: all that is wanted, or some exchange buffers' worth."""
    return min(wanted_bytes(plan), _LEAST_BLOCKS * plan.exchange_block_bytes)


def shares_of_budget(wanted: int, budget: int) -> Iterator[int]:
    """Yield bytes, multiples of 4096, that a cache may take of a host budget at the expense of pages."""
    for share in _SHARES:
        yield min(round_up(wanted, PAGE_ALIGNMENT), budget // share // PAGE_ALIGNMENT * PAGE_ALIGNMENT)
