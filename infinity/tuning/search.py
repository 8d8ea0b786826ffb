"""Search by trials: finds the best settings, although rates vary from trial to trial. Pure, except for the
clock.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from infinity.aio import BACKENDS
from infinity.system.io_settings import IoSettings

TIE = 0.03
"""The relative difference up to which two scores count as equal, because measurements are noisy."""

_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of the median of n values with normal noise, divided by MAD / sqrt(n), where MAD is their
median absolute deviation.
"""

_MOST_THREADS = 16
"""The most threads of the backend "threads". A deeper queue gets no more threads."""
_FIRST_PASS = 0.6
"""The fraction of the time of `search` after which the first pass tries no further points."""

Point = TypeVar("Point", bound=Hashable)
Rates = Mapping[str, float]
"""Bytes per second in one trial, by mode ("read", "write" or "mixed")."""
Pass = Mapping[Point, Rates]


def grid(
    backends: Sequence[str], blocks: Sequence[int], depths: Sequence[int], bytes_in_flight: int
) -> list[IoSettings]:
    """All combinations that have at most `bytes_in_flight` bytes in flight and, with the backend "threads", a
    depth of at most _MOST_THREADS.
    """
    return [
        settings
        for backend in backends
        for block in blocks
        for depth in depths
        if (settings := IoSettings(backend, block, depth)).bytes_in_flight <= bytes_in_flight
        and (backend != "threads" or depth <= _MOST_THREADS)
    ]


def search(
    points: Sequence[Point],
    trial: Callable[[Point], Rates],
    *,
    seconds: float,
    finalists: int,
    order: random.Random,
    always: Collection[Point] = (),
    clock: Callable[[], float] = time.monotonic,
) -> list[Pass[Point]]:
    """Try the points (candidates, such as IoSettings) in passes, and return the rates of each pass.

    After each pass the half of the points with the better `scores` stays, until `finalists` points are left,
    which are tried until the time is over. The best point of each mode and the points in `always` stay, too.
    Points that the first pass has no time for are dropped.

    trial: measures the rates of a point in every mode. seconds: for all passes. order: shuffles the points
    for each pass.
    """
    passes: list[Pass[Point]] = []
    left, start = list(dict.fromkeys([*points, *always])), clock()
    while True:
        begun, found = clock(), dict[Point, Rates]()
        for point in order.sample(left, len(left)):
            if not passes and len(found) >= 2 and clock() >= start + _FIRST_PASS * seconds:
                break
            found[point] = trial(point)
        passes.append(found)
        end = clock()
        if end + (end - begun) >= start + seconds:  # another pass would end too late
            return passes
        ranked = scores(passes)
        better = sorted(ranked, key=ranked.__getitem__, reverse=True)
        kept = {*better[: max(finalists, -(-len(left) // 2))], *always}
        kept.update(best_of(passes, mode) for mode in modes_of(passes))
        left = [point for point in better if point in kept]


def modes_of(passes: Sequence[Pass[Point]]) -> list[str]:
    return list(next(iter(passes[0].values())))


def standing(passes: Sequence[Pass[Point]], mode: str) -> dict[Point, float]:
    """Return the relative rate of each point that was tried in all passes.

    In each pass a point's rate is divided by the median rate of these points in the pass. The relative rate
    is the median of these quotients over all passes. So no point gains from a pass in which the disk happens
    to be fast.
    """
    common = [point for point in passes[0] if all(point in each for each in passes)]
    shares: dict[Point, list[float]] = {point: [] for point in common}
    for each in passes:
        middle = statistics.median(each[point][mode] for point in common)
        for point in common:
            shares[point].append(each[point][mode] / middle)
    return {point: statistics.median(found) for point, found in shares.items()}


def scores(passes: Sequence[Pass[Point]]) -> dict[Point, float]:
    """Return a score, at most 1, for each point that was tried in all passes. A point's `standing` in each
    mode is divided by the best standing in this mode; the score is the harmonic mean of these quotients.
    """
    shares: dict[Point, list[float]] = {}
    for mode in modes_of(passes):
        found = standing(passes, mode)
        best = max(found.values())
        for point, value in found.items():
            shares.setdefault(point, []).append(value / best)
    return {point: statistics.harmonic_mean(each) for point, each in shares.items()}


def choose(passes: Sequence[Pass[IoSettings]], usual: IoSettings | None = None) -> IoSettings:
    """Choose the cheapest settings among those whose score is within 3% of the best.

    The cheapest are those with the backend that takes the least CPU time. Among these, the fewest bytes in
    flight are best, because an urgent request has to wait for them.

    usual: the settings without tuning. They are returned if they were tried and the best settings are not
    clearly faster. The best of many noisy scores is too high by chance: without this rule, one run in ten
    would choose settings that are slower than the usual ones.
    """
    found = scores(passes)
    best = max(found, key=found.__getitem__)
    if usual in found and not _beats(passes, best, usual):
        return usual
    equal = [settings for settings, score in found.items() if score >= found[best] * (1 - TIE)]
    return min(
        equal,
        key=lambda each: (BACKENDS.index(each.backend), each.bytes_in_flight, -found[each]),
    )


def _beats(passes: Sequence[Pass[Point]], one: Point, other: Point) -> bool:
    """Whether `one` is faster than `other` by more than TIE and the noise: the median over passes of the
    logarithm of their ratio of speeds exceeds log(1 + TIE) by more than the median's standard error.
    """
    times = [
        math.log(statistics.harmonic_mean([each[one][mode] / each[other][mode] for mode in each[one]]))
        for each in passes
        if one in each and other in each
    ]
    median = statistics.median(times)
    deviation = statistics.median(abs(each - median) for each in times)
    return median > math.log1p(TIE) + _ERROR_OF_MEDIAN * deviation / math.sqrt(len(times))


def best_of(passes: Sequence[Pass[Point]], mode: str | None = None) -> Point:
    """Return the point with the best `standing` in `mode`, or, if `mode` is None, with the best of the
    `scores`, which cover all modes.
    """
    found = scores(passes) if mode is None else standing(passes, mode)
    return max(found, key=found.__getitem__)


def median_rate(passes: Sequence[Pass[Point]], point: Point, mode: str) -> float:
    return statistics.median(each[point][mode] for each in passes if point in each)
