"""The covers that stand in for full products hold every pair of values, and are small."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cover import pairwise, product
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
    ("sizes", "most"), [((13, 6, 2, 2, 2, 2), 78), ((6, 2, 2, 2, 2), 12), ((3, 3, 3, 3), 12), ((2,) * 8, 8)]
)
def test_a_cover_is_hardly_larger_than_its_two_largest_factors_need(
    sizes: tuple[int, ...], most: int
) -> None:
    factors = {f"factor {at}": range(size) for at, size in enumerate(sizes)}
    cases = pairwise(factors)
    check_every_pair(factors, cases)
    assert len(cases) <= most


def test_a_factor_alone_or_none() -> None:
    assert product({}) == [{}] and pairwise({}) == []
    assert pairwise({"a": (1, 2)}) == []
