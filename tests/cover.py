"""Few combinations of many factors, among which every pair of values of any two factors comes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[str, int, str, int]
"""Two factors, each with the index of a value."""


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """A cover of all pairs, always the same one.

    Greedy, as AETG (Cohen et al., 1997): a combination begins with a pair that is missing, and every other
    factor gets the value with which most pairs are new; of equals, the one that came least.
    """
    sizes = {name: len(values) for name, values in factors.items()}
    missing = dict.fromkeys(
        pair
        for (a, size), (b, other) in itertools.combinations(sizes.items(), 2)
        for pair in itertools.product((a,), range(size), (b,), range(other))
    )
    order = {name: number for number, name in enumerate(factors)}
    used: Counter[tuple[str, int]] = Counter()
    found = []
    while missing:
        a, one, b, other = next(iter(missing))
        chosen = {a: one, b: other}
        for name in sorted(sizes.keys() - chosen.keys(), key=lambda name: (-sizes[name], order[name])):
            new = [
                sum(pair in missing for pair in _pairs({**chosen, name: value}, order) if name in pair)
                for value in range(sizes[name])
            ]
            chosen[name] = max(range(sizes[name]), key=lambda value: (new[value], -used[name, value]))
        for pair in _pairs(chosen, order):
            missing.pop(pair, None)
        used.update(chosen.items())
        found.append({name: factors[name][chosen[name]] for name in factors})
    return found


def _pairs(chosen: Mapping[str, int], order: Mapping[str, int]) -> Iterator[Pair]:
    """Of the values chosen so far."""
    for a, b in itertools.combinations(sorted(chosen, key=order.__getitem__), 2):
        yield a, chosen[a], b, chosen[b]
