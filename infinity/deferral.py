"""Which units eager updates leave to the next forward, so that the disk has work under it too. Pure.

Updates that all run under the backward leave the disk idle for the forward, a third of a step's operations or
a little less. So one in four of the bytes of states on disk waits for `step()`, which updates it lazily. Of
its gradients, a sixth of that or less, each byte goes to disk and comes back. The units are evenly apart in
the order of the backward, for the disk is to be as busy in all parts of it; and never the last one there,
which the next forward would wait for at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.placement import Homes, Kind
from infinity.tiers import Tier

_ONE_IN = 4
"""Of the bytes of states on disk."""


def deferred(homes: Homes, states: Sequence[int]) -> frozenset[int]:
    """Units in the order of the forward whose updates wait. states: bytes of every unit's optimizer page."""
    found = []
    owed = 0
    for unit in reversed(range(len(homes))):
        if homes[unit][Kind.OPTIMIZER] is not Tier.NVME:
            continue
        owed += states[unit]
        if owed >= (_ONE_IN - 1) * states[unit]:  # the first of them in the middle of the first so many
            found.append(unit)
            owed -= _ONE_IN * states[unit]
    return frozenset(found)
