"""Tests of the helper `cover`, which chooses combinations of test parameters (factors) to run.

Any two values of different factors must occur together in some combination, and there must be hardly more
combinations than the two factors with the most values need.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cover import covered, drawn, pairwise, product
from hypothesis import given
from hypothesis import strategies as st

FACTORS = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=5
)


def check_every_pair(factors: Mapping[str, Sequence[Any]], cases: list[dict[str, Any]]) -> None:
    for (name, values), (other, others) in itertools.combinations(factors.items(), 2):
        found = {(case[name], case[other]) for case in cases}
        assert found == set(itertools.product(values, others))


@given(FACTORS)
def test_every_pair_comes_and_no_case_twice(factors: dict[str, list[int]]) -> None:
    cases = pairwise(factors)
    check_every_pair(factors, cases)
    every = {tuple(case.items()) for case in product(factors)}
    assert {tuple(case.items()) for case in cases} <= every
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    assert pairwise(factors) == cases


@pytest.mark.parametrize(
    ("sizes", "most"), [((13, 6, 2, 2, 2, 2), 78), ((6, 2, 2, 2, 2), 12), ((3, 3, 3, 3), 15), ((2,) * 8, 8)]
)
def test_a_cover_is_hardly_larger_than_its_two_largest_factors_need(
    sizes: tuple[int, ...], most: int
) -> None:
    factors = {f"factor {at}": range(size) for at, size in enumerate(sizes)}
    cases = pairwise(factors)
    check_every_pair(factors, cases)
    assert len(cases) <= most


@given(FACTORS, st.integers(0, 3), st.integers(0, 12))
def test_drawn_combinations_have_every_pair(factors: dict[str, list[int]], seed: int, least: int) -> None:
    least = min(least, len(product(factors)))
    cases = drawn(factors, lambda case: True, seed=seed, least=least)
    if len(factors) > 1:
        check_every_pair(factors, cases)
    assert len(cases) >= least
    assert all(list(case) == list(factors) for case in cases)
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    assert drawn(factors, lambda case: True, seed=seed, least=least) == cases


def test_drawn_combinations_fit() -> None:
    """Pairs of values that occur together in an allowed combination are there, and no others."""

    def fits(case: dict[str, Any]) -> bool:
        return case.get("a", 9) >= case.get("b", 1) and not (case.get("b") == 3 and case.get("c") == 2)

    factors: dict[str, Sequence[Any]] = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2)}
    allowed = [case for case in product(factors) if fits(case)]
    cases = drawn(factors, fits, seed=0)
    assert all(case in allowed for case in cases)
    for pair in itertools.combinations(factors, 2):
        assert {tuple(case[name] for name in pair) for case in cases} == {
            tuple(case[name] for name in pair) for case in allowed
        }


def test_pairs_that_nothing_allowed_has_are_left_out() -> None:
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2)}
    cases = pairwise(factors, lambda case: case["a"] >= case["b"])
    assert all(case["a"] >= case["b"] for case in cases)
    assert {(case["a"], case["b"]) for case in cases} == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)}
    assert {(case["a"], case["c"]) for case in cases} == set(itertools.product((1, 2, 3), (1, 2)))
    assert {(case["b"], case["c"]) for case in cases} == set(itertools.product((1, 2, 3), (1, 2)))


def test_what_a_cover_leaves_out_is_slow() -> None:
    factors = {"a": (1, 2, 3), "b": "xy", "c": (False, True)}
    (parameters,) = (mark.args[1] for mark in [covered(factors).mark])
    quick = [each for each in parameters if not each.marks]
    assert [each.id for each in quick] == [
        "1-x-False",
        "1-y-True",
        "2-x-False",
        "2-y-True",
        "3-x-True",
        "3-y-False",
    ]
    assert len(parameters) == 12
