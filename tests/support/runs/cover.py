"""Covers of all pairs: small sets of combinations that test many factors in few runs.

A factor is an argument of a test, with a list of values. A combination has one value of each factor. For
any two values of different factors, a cover has a combination with both.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return every combination of the factors' values, each as a dict from factor to value."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return few of the allowed combinations, chosen so that any two values that occur together in an
    allowed combination occur together in a returned one.

    factors, allowed: as in `covered`. The same arguments give the same combinations. The search is greedy:
    it takes the combination that adds the most new pairs, and among equals the one whose values were used
    least.
    """
    numbers = list(itertools.product(*(range(len(values)) for values in factors.values())))
    named = product(factors)
    pairs: dict[Any, int] = {}
    masks = {}
    for at, chosen in enumerate(numbers):
        if allowed(named[at]):
            both = itertools.combinations(enumerate(chosen), 2)
            masks[at] = sum(1 << pairs.setdefault(pair, len(pairs)) for pair in both)
    missing = (1 << len(pairs)) - 1
    used: Counter[tuple[int, int]] = Counter()
    found = []
    while missing:
        most = max((mask & missing).bit_count() for mask in masks.values())
        equals = (at for at, mask in masks.items() if (mask & missing).bit_count() == most)
        best = min(equals, key=lambda at: sum(used[value] for value in enumerate(numbers[at])))
        missing &= ~masks[best]
        used.update(enumerate(numbers[best]))
        found.append(named[best])
    return found


def drawn(
    factors: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool], *, seed: int, least: int = 0
) -> list[Case]:
    """Return combinations that have all pairs, of factors whose product is too large for `pairwise`.

    Any two values of different factors that occur together in an allowed combination occur together in a
    returned one. fits: tells whether an incomplete combination may be part of an allowed one. It gets dicts
    with some of the factors; if it refuses one, it refuses every completion of it, too. seed: decides which
    combinations are drawn; the same arguments give the same ones. least: the fewest combinations that are
    returned. Those beyond the pairs are drawn at random, none comes twice, and there must be so many.
    """
    drawing = _Drawing(factors, fits, random.Random(seed))
    pairs = list(itertools.combinations(range(len(drawing.items)), 2))
    drawing.draw.shuffle(pairs)
    found: list[Case] = []
    for one, other in pairs:
        if drawing.missing[one] >> other & 1:
            case = drawing.completed(
                dict(drawing.items[each] for each in (one, other)), 1 << one | 1 << other
            )
            if case is not None:
                found.append(case)
    while len(found) < least:
        case = drawing.completed({}, 0)
        if case is not None and case not in found:
            found.append(case)
    return found


class _Drawing:
    """Draws combinations that have as many as possible of the pairs that no drawn combination has."""

    def __init__(
        self, factors: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool], draw: random.Random
    ) -> None:
        self.draw = draw
        self.items = [(name, value) for name, values in factors.items() for value in values]
        """All pairs (factor, value)."""
        self._of = {name: [at for at, item in enumerate(self.items) if item[0] == name] for name in factors}
        everything = (1 << len(self.items)) - 1
        self.missing = [everything & ~sum(1 << at for at in self._of[name]) for name, _ in self.items]
        """Item -> bits of the items with which it occurs in no drawn combination."""
        self._fits = fits

    def completed(self, begun: Case, chosen: int) -> Case | None:
        """Complete a combination; None if `fits` refuses every completion. chosen: bits of its items."""
        if not self._fits(begun):
            return None
        left = [name for name in self._of if name not in begun]
        if not left:
            for at in range(len(self.items)):
                if chosen >> at & 1:
                    self.missing[at] &= ~chosen
            return {name: begun[name] for name in self._of}
        name = self.draw.choice(left)
        values = self.draw.sample(self._of[name], len(self._of[name]))
        values.sort(key=lambda at: (self.missing[at] & chosen).bit_count(), reverse=True)
        found = (self.completed({**begun, name: self.items[at][1]}, chosen | 1 << at) for at in values)
        return next((case for case in found if case is not None), None)


def each_value(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the combinations, the first ones chosen so that they have all values that occur.

    Raises AssertionError if `count` is too few for the greedy choice.
    """
    missing = {item for case in cases for item in case.items()}
    chosen: list[Case] = []
    left = list(cases)
    while len(chosen) < count:
        best = max(left, key=lambda case: len(missing & set(case.items())))
        missing -= set(best.items())
        left.remove(best)
        chosen.append(best)
    assert not missing, f"{count} combinations lack {missing}"
    return chosen


def chosen_of(cases: Sequence[Mapping[str, int]], strength: int, most: int | None) -> list[int]:
    """Return the indices of few of the cases, in order, for the mark `sweep` (tests/conftest.py).

    cases: a case has a number for each factor's value. strength: any so many values of different factors that
    occur together in a case occur together in a chosen one. most: the chosen ones are thinned out to so many,
    at equal distances; None: they are not.
    """
    parts = [set(itertools.combinations(case.items(), min(strength, len(case)))) for case in cases]
    missing = set().union(*parts)
    found: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda at: len(missing & parts[at]))
        missing -= parts[best]
        found.append(best)
    found.sort()
    if most is None or most >= len(found):
        return found
    return [found[at * len(found) // most] for at in range(most)]


def covered(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> pytest.MarkDecorator:
    """Parametrise a test by all allowed combinations. Those that `pairwise` leaves out are marked `slow`.

    factors: the values of each of the test's arguments, by the argument's name. allowed: tells whether a
    combination (a dict from argument to value) makes sense.
    """
    quick = pairwise(factors, allowed)
    found = [
        pytest.param(
            *case.values(),
            id="-".join(getattr(value, "__name__", str(value)) for value in case.values()),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in filter(allowed, product(factors))
    ]
    return pytest.mark.parametrize(tuple(factors), found)
