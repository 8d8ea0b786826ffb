"""Covers of all pairs: small sets of combinations that test many factors in few runs.

A factor is an argument of a test, with a list of values. A combination has one value of each factor. For
any two values of different factors, a cover has a combination with both.
"""

from __future__ import annotations

import itertools
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
