"""Search for the best settings by rates that vary: successive halving, by medians. Pure but for its clock."""

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
"""The share by which two scores may differ and still count as equal, because of noise."""

_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""The standard error of a median of n trials with normal noise, as a multiple of their median absolute
deviation divided by sqrt(n): 1.4826 makes it a standard deviation, and 1.2533 that a median's error."""

_MOST_THREADS = 16
"""The most threads of the threads backend, however deep its queue."""
_FIRST_PASS = 0.6
"""The share of the time after which the first pass is cut short."""

Point = TypeVar("Point", bound=Hashable)
Rates = Mapping[str, float]
"""Bytes per second of one trial, by mode."""
Pass = Mapping[Point, Rates]
"""One trial of each point, made one after the other."""


def grid(
    backends: Sequence[str], blocks: Sequence[int], depths: Sequence[int], bytes_in_flight: int
) -> list[IoSettings]:
    """Every combination with at most `bytes_in_flight` in flight, and no more threads than there can be."""
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

    Rounds take equal time: the first tries all points once, the next ones fewer points more often. After each
    round the better half by `scores` stays, until `finalists` points are left. The best point of each mode
    and the points in `always` stay too. Points that the first pass has no time for are left out; its order is
    random.

    trial: measures the rates of a point in every mode. seconds: for all rounds. order: shuffles the points
    anew for each pass.
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
        """Make passes over the finalists, at least one, until another one would end after `until`."""
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
    """The modes that the passes have rates of."""
    return list(next(iter(passes[0].values())))


def standing(passes: Sequence[Pass[Point]], mode: str) -> dict[Point, float]:
    """Relative rates of the points that all passes have: 1 is as fast as the middle one.

    A point's is the median, over passes, of its rate divided by the pass's median rate. So no point gains if
    the disk is twice as fast a second later.
    """
    common = [point for point in passes[0] if all(point in each for each in passes)]
    shares: dict[Point, list[float]] = {point: [] for point in common}
    for each in passes:
        middle = statistics.median(each[point][mode] for point in common)
        for point in common:
            shares[point].append(each[point][mode] / middle)
    return {point: statistics.median(found) for point, found in shares.items()}


def scores(passes: Sequence[Pass[Point]]) -> dict[Point, float]:
    """The points' relative speeds of moving equal bytes in every mode; at most 1.

    A point's is the harmonic mean, over modes, of its `standing` divided by the mode's best one.
    """
    shares: dict[Point, list[float]] = {}
    for mode in modes_of(passes):
        found = standing(passes, mode)
        best = max(found.values())
        for point, value in found.items():
            shares.setdefault(point, []).append(value / best)
    return {point: statistics.harmonic_mean(each) for point, each in shares.items()}


def choose(passes: Sequence[Pass[IoSettings]], usual: IoSettings | None = None) -> IoSettings:
    """The cheapest settings whose score is within 3% of the best; `usual` where the best does not beat it.

    The cheapest settings have the first backend in the order of choice, which costs the least CPU time, and
    among these the fewest bytes in flight, since the next urgent request waits behind them.

    usual: the settings without tuning. They are kept in case of doubt, because the best of many noisy figures
    is too high by chance: without this, one run in ten would choose settings slower than no tuning at all.
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
    """Whether `one` moves equal bytes in every mode faster than `other`, by more than a tie and the noise.

    Each pass that has both gives the logarithm of the ratio of their speeds. The median of these must exceed
    a tie plus its own standard error, which follows from the median absolute deviation.
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
    """The point with the best `standing` in a mode, or with the best of `scores` for None."""
    found = scores(passes) if mode is None else standing(passes, mode)
    return max(found, key=found.__getitem__)


def median_rate(passes: Sequence[Pass[Point]], point: Point, mode: str) -> float:
    """The median of a point's bytes per second in a mode, over the passes that have it."""
    return statistics.median(each[point][mode] for each in passes if point in each)
