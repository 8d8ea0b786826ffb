"""Schedule: the units to fetch and the units to evict, given the order of coming uses.

The functions are pure, and a unit is a number. Prefetching is near-optimal under four rules (Cao, Felten,
Karlin, Li: A Study of Integrated Prefetching and Caching Strategies, 1995). Fetch units in the order of their
use. Evict the unit whose next use is furthest in the future (Belady, 1966). Never evict a unit that is used
before the fetched unit. Do each fetch and each eviction as soon as the other rules allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

LOOKAHEAD = 256
"""The most coming uses among which `schedule` looks for units to fetch."""

HORIZON = 1024
"""The most coming uses among which the next use of a unit is searched; a later one counts as never."""


class Schedule(NamedTuple):
    fetch: tuple[int, ...]
    """Units to fetch, in the order of their use."""

    evict: tuple[int, ...]
    """Units to evict for the fetches, the furthest next use first."""


def schedule(
    upcoming: Iterable[int],
    sizes: Sequence[int],
    resident: Collection[int],
    pinned: Collection[int],
    capacity: int,
    *,
    reserve: int = 0,
) -> Schedule:
    """Choose the units to fetch for the coming uses, as many as fit, and the units to evict for them.

    upcoming: units in the order of their use, beginning with the current unit; they may repeat. Consumed as
    far as needed. sizes: bytes of each unit's page; 0 for a permanent page, which is neither fetched nor
    evicted. resident: units whose pages are present or arriving, each once, least recently used first.
    pinned: units that may not be evicted. capacity: bytes that all pages may take together. reserve: bytes of
    `capacity` to leave free.

    The units to fetch are the missing units in the longest prefix of `upcoming` that fits beside the pinned
    units. The prefix has at most LOOKAHEAD uses, and none of its units is evicted. If no unit is missing,
    nothing is evicted. With sets or dictionaries for `resident` and `pinned`, the time is linear in the
    length of `resident` and in the number of uses that are searched, at most HORIZON + LOOKAHEAD.
    """
    uses = iter(upcoming)
    limit = capacity - reserve
    room = limit - sum(sizes[unit] for unit in pinned)
    window: set[int] = set()
    fetch: list[int] = []
    for unit in islice(uses, LOOKAHEAD):
        if unit in window or sizes[unit] == 0:
            continue
        cost = 0 if unit in pinned else sizes[unit]
        if cost > room:
            uses = chain((unit,), uses)
            break
        room -= cost
        window.add(unit)
        if unit not in resident:
            fetch.append(unit)
    if not fetch:
        return Schedule((), ())
    taken = sum(sizes[unit] for unit in {*resident, *pinned, *fetch})
    if taken <= limit:
        return Schedule(tuple(fetch), ())
    spare = (unit for unit in resident if unit not in window and unit not in pinned)
    return Schedule(tuple(fetch), _free(taken - limit, _furthest_first(spare, uses), sizes))


def victims(
    needed: int,
    upcoming: Iterable[int],
    sizes: Sequence[int],
    resident: Collection[int],
    pinned: Collection[int],
) -> tuple[int, ...]:
    """Choose units to evict, to free `needed` bytes, in the order in which to evict them.

    Units that are not in `upcoming` come first, in the order of `resident`, then the others, furthest next
    use first. If all units that may be evicted have fewer bytes than `needed` together, all of them are
    returned. upcoming, sizes, resident, pinned: as in `schedule`.
    """
    if needed <= 0:
        return ()
    spare = (unit for unit in resident if unit not in pinned)
    return _free(needed, _furthest_first(spare, iter(upcoming)), sizes)


def _furthest_first(units: Iterable[int], uses: Iterator[int]) -> Iterator[int]:
    unused = dict.fromkeys(units)
    by_use: list[int] = []
    for unit in islice(uses, HORIZON):
        if not unused:
            break
        if unit in unused:
            del unused[unit]
            by_use.append(unit)
    return chain(unused, reversed(by_use))


def _free(needed: int, candidates: Iterator[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Choose units from `candidates`, in their order, with at least `needed` bytes in sum, or all of them.

    A unit that is not needed for the sum, given the units after it, is left out. sizes: bytes of each unit's
    page; units with 0 bytes are never chosen.
    """
    chosen: list[int] = []
    excess = -needed
    for unit in candidates:
        if excess >= 0:
            break
        if sizes[unit]:
            chosen.append(unit)
            excess += sizes[unit]
    kept: list[int] = []
    for unit in reversed(chosen):
        if sizes[unit] <= excess:
            excess -= sizes[unit]
        else:
            kept.append(unit)
    return tuple(reversed(kept))
