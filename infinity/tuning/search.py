"""Search by trials: finds the best settings although measured rates vary from trial to trial, by successive
halving and medians. Pure, except that `Halving` asks how much time has passed.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from infinity.aio import BACKENDS
from infinity.system.io_settings import IoSettings

TIE = 0.03
"""The relative difference up to which two scores count as equal, because measurements are noisy."""

_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""The factor by which MAD / sqrt(n) is multiplied to get the standard error of the median of n values with
normal noise, where MAD is the median absolute deviation of the values. 1.4826 turns MAD into the standard
deviation. 1.2533 turns the standard error of the mean into the standard error of the median.
"""

_MOST_THREADS = 16
"""The most threads that the backend "threads" has. A deeper queue gets no more threads."""
_FIRST_PASS = 0.6
"""The fraction of Halving's `seconds` after which the first pass tries no further points."""

Point = TypeVar("Point", bound=Hashable)
Rates = Mapping[str, float]
"""Bytes per second in one trial, by mode ("read", "write" or "mixed")."""
Pass = Mapping[Point, Rates]
"""Point (candidate) -> its rates in one pass of `Halving`. A pass tries every point that has not been dropped
before, each once.
"""


def grid(
    backends: Sequence[str], blocks: Sequence[int], depths: Sequence[int], bytes_in_flight: int
) -> list[IoSettings]:
    """All combinations of backends, block sizes (bytes) and queue depths that have at most
    `bytes_in_flight` bytes in flight.

    Depths above the largest number of threads are left out for the backend "threads".
    """
    return [
        settings
        for backend in backends
        for block in blocks
        for depth in depths
        if (settings := IoSettings(backend, block, depth)).bytes_in_flight <= bytes_in_flight
        and (backend != "threads" or depth <= _MOST_THREADS)
    ]


class Halving(Generic[Point]):
    """Successive halving (Jamieson and Talwalkar, 2016). It finds the best of many points (candidates, such
    as IoSettings), each of which has a measured rate in several modes.

    The constructor runs the whole search; `passes` and `finalists` then have its results. A pass tries every
    point that has not been dropped yet, each once, in random order. The time is divided into rounds of equal
    length, with one or more passes. The first round tries all points, and each later round tries fewer points
    more often. After each round the half of the points with the better `scores` stays, until `finalists`
    points are left. In addition, the best point of each mode and the points in `always` stay. Points that the
    first pass has no time for are dropped.

    points: the points to try. trial: measures the rates of a point in every mode. seconds: seconds for all
    rounds. finalists: number of points down to which their number is halved. order: the random number
    generator that shuffles the points for each pass. always: points that are never dropped for their scores.
    clock: returns the present time in seconds.
    """

    def __init__(
        self,
        points: Sequence[Point],
        trial: Callable[[Point], Rates],
        *,
        seconds: float,
        finalists: int,
        order: random.Random,
        always: Collection[Point] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.passes: list[dict[Point, Rates]] = []
        self.finalists: list[Point] = list(dict.fromkeys([*points, *always]))
        """The points that have not been dropped. After each round they are sorted by `scores`, best first."""
        self._trial, self._order, self._clock = trial, order, clock
        start = clock()
        self._cut = start + _FIRST_PASS * seconds
        rounds = max(1, 1 + math.ceil(math.log2(max(1.0, len(self.finalists) / finalists))))
        for number in range(1, rounds + 1):
            until = start + seconds * number / rounds
            if self.passes and clock() >= start + seconds:
                break
            self._try_until(until)
            wanted = max(finalists, -(-len(self.finalists) // 2)) if number < rounds else finalists
            self.finalists = self._best(wanted, always)

    def _try_until(self, until: float) -> None:
        """Try all points of `finalists` once in each pass, until another pass would end too late.

        At least one pass is made. until: the time, as `clock` gives it, by which passes should have ended.
        """
        while True:
            start = self._clock()
            self.passes.append(self._one_pass())
            end = self._clock()
            if end + (end - start) >= until:
                return

    def _one_pass(self) -> dict[Point, Rates]:
        found: dict[Point, Rates] = {}
        for point in self._order.sample(self.finalists, len(self.finalists)):
            if not self.passes and len(found) >= 2 and self._clock() >= self._cut:
                break
            found[point] = self._trial(point)
        return found

    def _best(self, wanted: int, always: Collection[Point]) -> list[Point]:
        found = scores(self.passes)
        ranked = sorted(found, key=found.__getitem__, reverse=True)
        kept = {*ranked[:wanted], *always}
        kept.update(best_of(self.passes, mode) for mode in modes_of(self.passes))
        return [point for point in ranked if point in kept]


def modes_of(passes: Sequence[Pass[Point]]) -> list[str]:
    """The modes ("read", "write" or "mixed") in which the points of these passes were measured."""
    return list(next(iter(passes[0].values())))


def standing(passes: Sequence[Pass[Point]], mode: str) -> dict[Point, float]:
    """The relative rate in `mode` of each point that is in all passes; about 1 for the median point.

    In each pass, a point's rate is divided by the median rate of the pass. The point's relative rate is the
    median of these quotients over all passes. So no point gains from a pass in which the disk happens to be
    fast.
    """
    common = [point for point in passes[0] if all(point in each for each in passes)]
    shares: dict[Point, list[float]] = {point: [] for point in common}
    for each in passes:
        middle = statistics.median(each[point][mode] for point in common)
        for point in common:
            shares[point].append(each[point][mode] / middle)
    return {point: statistics.median(found) for point, found in shares.items()}


def scores(passes: Sequence[Pass[Point]]) -> dict[Point, float]:
    """The score of each point, at most 1: its speed over all modes, as a fraction of the best rates.

    In each mode, the point's `standing` is divided by the best standing of all points. The score is the
    harmonic mean of these quotients over all modes. A point that is the best in every mode has the score 1.
    Only points that are in all passes have a score.
    """
    shares: dict[Point, list[float]] = {}
    for mode in modes_of(passes):
        found = standing(passes, mode)
        best = max(found.values())
        for point, value in found.items():
            shares.setdefault(point, []).append(value / best)
    return {point: statistics.harmonic_mean(each) for point, each in shares.items()}


def choose(passes: Sequence[Pass[IoSettings]], usual: IoSettings | None = None) -> IoSettings:
    """Choose the cheapest settings whose score is within 3% of the best score.

    The cheapest settings are those whose backend comes first in BACKENDS, because that backend takes the
    least CPU time. With equal backends, settings with fewer bytes in flight are cheaper, because the next
    urgent request has to wait for these bytes.

    passes: those of a `Halving`. usual: the settings that are used without tuning. They are returned if they
    were tried and the best settings are not clearly faster. The best of many noisy figures is too high by
    chance, so without this rule one run in ten would choose settings that are slower than the usual settings.
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
    """Whether `one` is faster than `other` by more than TIE and the noise.

    In each pass that has both points, the rate of `one` is divided by the rate of `other` in every mode. The
    harmonic mean of these quotients over the modes is the pass's ratio of speeds. The median of the ratios'
    logarithms over the passes must exceed log(1 + TIE) by more than the median's standard error, which is
    computed from the median absolute deviation.
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
    """The point with the best `standing` in `mode`. If mode is None, the point with the best score (`scores`)
    over all modes.
    """
    found = scores(passes) if mode is None else standing(passes, mode)
    return max(found, key=found.__getitem__)


def median_rate(passes: Sequence[Pass[Point]], point: Point, mode: str) -> float:
    """The median of a point's bytes per second in `mode`, over the passes that have the point."""
    return statistics.median(each[point][mode] for each in passes if point in each)
