"""Which settings are best, from rates that swing: halving, in turns, by medians. Pure but for its clock."""

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
"""Points whose scores are this close are equally good, as far as noise lets anybody say."""

_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Of normal noise: its standard deviation by the median absolute one, and by it a median's error, times the
root of their number."""

_MOST_THREADS = 16
"""Of the threads backend: a deeper queue has no more of them."""
_FIRST_PASS = 0.6
"""Of the time, before the first pass is cut short."""

Point = TypeVar("Point", bound=Hashable)
Rates = Mapping[str, float]
"""Mode -> bytes per second, of one trial."""
Pass = Mapping[Point, Rates]
"""One trial of each point, taken one after the other."""


def grid(
    backends: Sequence[str], blocks: Sequence[int], depths: Sequence[int], bytes_in_flight: int
) -> list[IoSettings]:
    """Every combination with no more than `bytes_in_flight` under way, nor threads that would not exist."""
    return [
        settings
        for backend in backends
        for block in blocks
        for depth in depths
        if (settings := IoSettings(backend, block, depth)).bytes_in_flight <= bytes_in_flight
        and (backend != "threads" or depth <= _MOST_THREADS)
    ]


class Halving(Generic[Point]):
    """Successive halving (Jamieson and Talwalkar, 2016) of points by several rates at once.

    Rounds take equal time: the first tries all points once, the next ones fewer points more often. The better
    half by `scores` stays each time, until `finalists` are left; so does whoever is best in a mode, and
    `always`. What the first pass has no time for is left out, at random.

    trial: the rates of a point in every mode, now. order: of the points within a pass, anew each time.
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
        """The points that are left, the best first."""
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
        """Passes over the finalists, one at least, until the next would end too late."""
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
    """The modes of the rates in passes."""
    return list(next(iter(passes[0].values())))


def standing(passes: Sequence[Pass[Point]], mode: str) -> dict[Point, float]:
    """Rates relative to the others': each point's median, over passes, of its share of the pass's median.

    A disk that is twice as fast a second later so favours nobody. Of the points that all passes have.
    """
    common = [point for point in passes[0] if all(point in each for each in passes)]
    shares: dict[Point, list[float]] = {point: [] for point in common}
    for each in passes:
        middle = statistics.median(each[point][mode] for point in common)
        for point in common:
            shares[point].append(each[point][mode] / middle)
    return {point: statistics.median(found) for point, found in shares.items()}


def scores(passes: Sequence[Pass[Point]]) -> dict[Point, float]:
    """The speed of moving equal bytes in every mode, each mode relative to its best; 1 is the most.

    The harmonic mean, over modes, of each point's `standing` as a share of the mode's best.
    """
    shares: dict[Point, list[float]] = {}
    for mode in modes_of(passes):
        found = standing(passes, mode)
        best = max(found.values())
        for point, value in found.items():
            shares.setdefault(point, []).append(value / best)
    return {point: statistics.harmonic_mean(each) for point, each in shares.items()}


def choose(passes: Sequence[Pass[IoSettings]], usual: IoSettings | None = None) -> IoSettings:
    """The settings with the best score, or of those within 3% the cheapest; `usual` if none beats it.

    The cheapest is the first backend in the order of choice, which costs the least CPU time, and there the
    fewest bytes in flight, since what is wanted next waits behind them. usual: what is used without tuning.
    The best of many noisy figures is too good, and the cheapest near it is lucky: one run in ten would end
    with settings that are slower than no tuning at all.
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
    """Whether `one` moves equal bytes in every mode faster than `other` by more than a tie and the noise.

    That is the standard error of the median, over passes, of the logarithm of how many times as fast it is,
    from the median absolute deviation as of normal noise.
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
    """The point that stands best in a mode, or by `scores` in all of them."""
    found = scores(passes) if mode is None else standing(passes, mode)
    return max(found, key=found.__getitem__)


def median_rate(passes: Sequence[Pass[Point]], point: Point, mode: str) -> float:
    """Bytes per second, over the passes that had the point."""
    return statistics.median(each[point][mode] for each in passes if point in each)
