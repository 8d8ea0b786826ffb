"""Tests that exact sums equal sums of fractions, however the values are divided, ordered and merged."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.gradients.exact_sum import ExactSum

LARGEST = float(np.finfo(np.float64).max)
TINIEST = 5e-324
finite = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, TINIEST, 2.0**-1022, 1.0, 1.0 + 2.0**-52, 2.0**-53, LARGEST, -LARGEST]
)
HALF_A_STEP = Fraction(2) ** 970
"""Half of the distance from LARGEST to 2**1024, the next number of 53 bits."""


def of(*values: float) -> ExactSum:
    found = ExactSum()
    found.add(np.array(values, np.float64))
    return found


def rounded(exact: Fraction) -> float:
    """The float64 nearest to `exact`, or an infinity beyond the range of float64."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@settings(deadline=None)
@given(values=st.lists(finite), data=st.data())
def test_a_sum_is_exact_for_any_split_and_order(values: list[float], data: st.DataObject) -> None:
    exact = sum(map(Fraction, values), Fraction(0))
    whole = of(*values)
    assert Fraction(whole.units, 2**1074) == exact and whole.nonfinite == 0.0
    assert whole.value() == rounded(exact)

    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = [0, *cuts, len(values)]
    parts = [of(*shuffled[a:b]) for a, b in pairwise(bounds)]
    merged = ExactSum()
    for part in data.draw(st.permutations(parts)):
        merged.merge(part)
    assert merged == whole


@pytest.mark.parametrize("exponents", [4, 300, 1000])
def test_a_sum_of_many_values_is_rounded_once(exponents: int) -> None:
    random = np.random.default_rng(exponents)
    values = np.ldexp(random.random(20_000), random.integers(-exponents, exponents, 20_000))
    assert of(*values).value() == math.fsum(values)
    assert of(*values[::-1]) == of(*values)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_equal_values_with_all_bits_is_exact(sign: int) -> None:
    """Each value has 53 bits of 1, so that each digit of the sum grows as fast as it can."""
    count = (1 << 20) + 3
    found = ExactSum()
    found.add(np.full(count, sign * (2.0 - 2.0**-52)), np.array([sign * TINIEST]))
    expected = count * Fraction(2.0 - 2.0**-52) + Fraction(TINIEST)
    assert Fraction(found.units, 2**1074) == sign * expected


def test_the_sum_of_nothing_is_zero() -> None:
    assert of().value() == ExactSum().value() == 0.0


def test_strided_values_are_added_like_others() -> None:
    values = np.arange(20, dtype=np.float64)
    found = ExactSum()
    found.add(values[1::3])
    assert found == of(*values[1::3])


def test_a_sum_beyond_the_range_is_infinite_only_when_it_is_rounded() -> None:
    assert of(LARGEST, LARGEST).value() == math.inf
    assert of(-LARGEST, -LARGEST).value() == -math.inf
    assert of(LARGEST, LARGEST, -LARGEST).value() == LARGEST
    half = float(HALF_A_STEP)
    assert of(LARGEST, half).value() == math.inf  # a tie goes to the even number, which is out of range
    assert of(LARGEST, math.nextafter(half, 0)).value() == LARGEST


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, LARGEST, LARGEST], -math.inf),
        ([math.inf, math.inf], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([math.inf, 0.0, math.nan], math.nan),
    ],
)
def test_values_that_are_not_finite_are_never_lost(values: list[float], expected: float) -> None:
    merged = of(2.0)
    for each in values:
        merged.merge(of(each))
    for found in (of(*values).value(), of(*values[::-1]).value(), merged.value()):
        assert found == expected or (math.isnan(found) and math.isnan(expected))
