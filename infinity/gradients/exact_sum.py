"""Exact sums: sums of float64 values without rounding, so that they do not depend on any order.

Every finite float64 is a multiple of 2**-1074, the smallest subnormal number. So a sum of such values is an
integer number of these units, and Python's integers hold it exactly. Only the conversion of the whole sum
to a float rounds, once. Values may thus be divided among partial sums in any way and merged in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_UNITS_OF_ONE = 1 << 1074
"""The number of units in 1.0."""
_AT_ONCE = 1 << 20
"""Number of values whose halves are added at once. At most 2**26 sums of halves, each below 2**27, are exact
in float64; fewer values at once also keep the temporary arrays small.
"""
_HALF = 26
"""Number of bits in the lower half of a significand of 53 bits."""


@dataclass(slots=True)
class ExactSum:
    """A sum of float64 values that holds all bits of the result."""

    units: int = 0
    """The sum of the finite values, in units of 2**-1074."""
    nonfinite: float = 0.0
    """The sum of the values that are not finite, as IEEE 754 adds them: inf, -inf or nan. 0.0 if there are
    no such values.
    """

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add each element of `values`, float64 (n,)."""
        for start in range(0, len(values), _AT_ONCE):
            some = values[start : start + _AT_ONCE]
            finite = np.isfinite(some)
            if not finite.all():
                with np.errstate(invalid="ignore"):  # the sum of inf and -inf is nan, without a warning
                    self.nonfinite += float(some[~finite].sum())
                some = some[finite]
            self.units += _units(some)

    def merge(self, other: ExactSum) -> None:
        """Add the values that `other` has added up."""
        self.units += other.units
        self.nonfinite += other.nonfinite

    def value(self) -> float:
        """The float64 nearest to the sum; of two that are equally near, the one whose last bit is 0.

        The result is nan if a value was nan or if values were infinite with both signs. Else it is inf or
        -inf if a value was, or if the sum is beyond the range of float64.
        """
        if self.nonfinite != 0.0:
            return self.nonfinite
        try:
            return self.units / _UNITS_OF_ONE  # Python divides integers with one correct rounding
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf


def _units(values: npt.NDArray[np.float64]) -> int:
    """The exact sum of `values`, at most _AT_ONCE finite values, in units of 2**-1074.

    A value is its significand, an integer below 2**53, times 2**shift units. The significands are added in
    halves, in float64, separately for each shift.
    """
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.int64) & 0x7FF
    significand = (bits & np.uint64((1 << 52) - 1)).astype(np.int64)
    significand |= (exponent > 0).astype(np.int64) << 52  # subnormal numbers have no leading 1
    shift = np.maximum(exponent, 1) - 1
    sign = np.where(np.signbit(values), -1, 1)
    low = np.bincount(shift, sign * (significand & ((1 << _HALF) - 1)))
    high = np.bincount(shift, sign * (significand >> _HALF))
    return sum(
        ((int(high[each]) << _HALF) + int(low[each])) << each
        for each in np.flatnonzero((low != 0) | (high != 0)).tolist()
    )
