"""What to fetch and what to evict, from the order of the uses to come. Pure: units are numbers here.

The rules are those under which prefetching is near-optimal (Cao, Felten, Karlin, Li: A Study of Integrated
Prefetching and Caching Strategies, 1995): fetch in the order of use, evict what is used furthest in the
future (Belady, 1966), never evict what is used before the unit fetched, and do each as soon as that allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

LOOKAHEAD = 256
"""Most uses to come that one window is built from."""

HORIZON = 1024
"""Most uses to come searched for the next use of a unit that may leave; later ones count as never."""


class Schedule(NamedTuple):
    """What to do now. Evictions make the room for the fetches."""

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
    """The fetches that the uses to come deserve and that fit, and the evictions which those need.

    upcoming: units in the order of use, the current one first, repeats allowed; consumed as far as needed.
    sizes: bytes of each unit; 0 for one that lives there anyway, which is neither fetched nor evicted.
    resident: units that are there or in flight, each once, least recently used first. pinned: units that may
    not be evicted. capacity: bytes that all may take together, of which prefetch leaves `reserve` free.

    The window is the longest prefix of `upcoming` that fits beside the pinned units; its units are never
    evicted. Where nothing is to be fetched, nothing is evicted. Given hashed collections (sets, dicts) this
    takes time linear in `resident` and in the uses looked at, at most HORIZON and LOOKAHEAD.
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
    """The units to evict, in order, to free `needed` bytes for one that has to come in now.

    Furthest next use first; of those not in `upcoming`, the least recently used first, which is the order of
    `resident`. All that may leave, if those are not enough. Arguments as of `schedule`.
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
    """The first of `candidates` that free `needed` bytes, less those that later ones made needless."""
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
