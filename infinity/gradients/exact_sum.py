"""Exact sums: sums of float64 values without rounding, so that they do not depend on any order.

Every finite float64 is a multiple of 2**-1074, the smallest subnormal number. So a sum of such values is an
integer number of these units. The native core adds such integers, and Python's integers hold the sum. Only
the conversion of the whole sum to a float rounds, once. Values may thus be divided among partial sums in any
way and merged in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinity import _cpu_adam

_UNITS_OF_ONE = 1 << 1074
"""The number of units in 1.0."""


@dataclass(slots=True)
class ExactSum:
    """A sum of float64 values that holds all bits of the result."""

    units: int = 0
    """The sum of the finite values, in units of 2**-1074."""
    nonfinite: float = 0.0
    """The sum of the values that are not finite, as IEEE 754 adds them: inf, -inf or nan. 0.0 if there are
    no such values.
    """

    def add(self, *arrays: npt.NDArray[np.float64]) -> None:
        """Add each element of all `arrays`, float64 (n,)."""
        units, nonfinite = _cpu_adam.add_exactly(arrays)
        self.units += int.from_bytes(units, "little", signed=True)
        self.nonfinite += nonfinite

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
