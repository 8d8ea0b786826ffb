"""Tests of divisions of a model into units and chunks, told by the names of parameters."""

from dataclasses import replace

import pytest
from meta_models import Tied, on_meta
from planned_models import stack

from infinity.config import Precision
from infinity.layout.chunks import Division, build
from infinity.layout.units import survey


@pytest.mark.parametrize("unit_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("make", [lambda: stack([64] * 4, frozen=[2]), lambda: on_meta(Tied)])
def test_a_division_gives_back_the_units_that_it_was_made_of(make, unit_bytes: int) -> None:
    surveyed = survey(make(), Precision())
    grouping = surveyed.group(unit_bytes)
    division = Division.of(build(surveyed, grouping, 8192))
    assert division.chunk_elements == 8192
    assert division.grouping(surveyed) == grouping
    assert [path for path, _ in division.units] == [path for path, _ in grouping]


def test_another_order_and_other_units_are_kept() -> None:
    surveyed = survey(stack([64] * 2), Precision())
    division = Division((("b", ("1.weight", "0.bias", "0.weight")), ("a", ("1.bias",))), 4096)
    assert division.grouping(surveyed) == (("b", (2, 1, 0)), ("a", (3,)))


NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
WHOLE = Division((("", NAMES),), 4096)


@pytest.mark.parametrize(
    "other",
    [
        replace(WHOLE, units=()),
        replace(WHOLE, units=(("", NAMES[:3]),)),
        replace(WHOLE, units=(("", (*NAMES, "2.weight")),)),
        replace(WHOLE, units=(("", (*NAMES[:3], "2.weight")),)),
        replace(WHOLE, units=(("", (*NAMES[:3], NAMES[0])),)),
        replace(WHOLE, units=(("", NAMES), ("0", NAMES[:2]))),
        replace(WHOLE, units=(("", NAMES), ("0", ()))),
        replace(WHOLE, chunk_elements=0),
        replace(WHOLE, chunk_elements=-4096),
        replace(WHOLE, chunk_elements=4097),
    ],
)
def test_a_division_of_another_model_has_no_grouping(other: Division) -> None:
    surveyed = survey(stack([64] * 2), Precision())
    assert WHOLE.grouping(surveyed) is not None
    assert other.grouping(surveyed) is None
