"""Schedule: which units to fetch and which to evict, given the order of coming uses. Pure; units are numbers.

The rules are those under which prefetching is near-optimal (Cao, Felten, Karlin, Li: A Study of Integrated
Prefetching and Caching Strategies, 1995): fetch in the order of use, evict the unit that is used furthest in
the future (Belady, 1966), never evict one that is used before the fetched unit, and do each as soon as these
rules allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

LOOKAHEAD = 256
"""Most coming uses from which one window is built."""

HORIZON = 1024
"""Most coming uses that are searched for the next use of a unit; one used later counts as never used."""


class Schedule(NamedTuple):
    """The fetches to start now, and the evictions that make room for them."""

    fetch: tuple[int, ...]
    """Units to fetch, in the order of their use."""

    evict: tuple[int, ...]
    """Units to evict, furthest next use first."""


def schedule(
    upcoming: Iterable[int],
    sizes: Sequence[int],
    resident: Collection[int],
    pinned: Collection[int],
    capacity: int,
    *,
    reserve: int = 0,
) -> Schedule:
    """The fetches for the coming uses that fit, and the evictions that these fetches need.

    upcoming: units in the order of use, the current one first, repeats allowed; consumed as far as needed.
    sizes: bytes of each unit; 0 for a permanent one, which is neither fetched nor evicted. resident: units
    that are there or in flight, each once, least recently used first. pinned: units that may not be evicted.
    capacity: bytes that all may take together, of which prefetch leaves `reserve` free.

    The window is the longest prefix of `upcoming` that fits beside the pinned units; its units are never
    evicted. Without a fetch nothing is evicted. Given hashed collections (sets, dicts) this takes time linear
    in `resident` and in the uses searched, at most HORIZON and LOOKAHEAD.
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
    """The units to evict, in order, to free `needed` bytes for a unit that is needed now.

    Units that are not in `upcoming` come first, in the order of `resident`, least recently used first; then
    the others, furthest next use first. If not enough may leave, all that may. Other arguments as in
    `schedule`.
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
    """The first of `candidates` that free `needed` bytes, without those that later ones make unnecessary."""
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
