"""Tests of records of volumes: what no volume can be is refused before a path is made of it."""

from __future__ import annotations

import dataclasses

import pytest

from infinity.errors import CorruptState
from infinity.tiers import SlabRecord, VolumeRecord

PAGE = 4096
GOOD = SlabRecord("ab" * 16, 4 * PAGE, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uuid", "../../../etc/passwd"),
        ("uuid", "AB" * 16),
        ("nbytes", 0),
        ("nbytes", -PAGE),
        ("nbytes", 100),
        ("nbytes", 1 << 63),
        ("nbytes", True),
        ("nbytes", 4096.0),
        ("weight", 0),
        ("weight", -1),
        ("weight", 65537),
        ("weight", True),
        ("weight", "1"),
    ],
)
def test_records_of_impossible_slabs(field: str, value: object) -> None:
    with pytest.raises(CorruptState):
        dataclasses.replace(GOOD, **{field: value})


@pytest.mark.parametrize(
    ("stripe", "slabs"),
    [
        (0, (GOOD,)),
        (100, (GOOD,)),
        (1 << 41, (GOOD,)),
        (True, (GOOD,)),
        (PAGE, ()),
        (PAGE, (GOOD, GOOD)),
        (PAGE, (dataclasses.replace(GOOD, weight=65536), dataclasses.replace(GOOD, uuid="cd" * 16))),
        (8 * PAGE, (GOOD, dataclasses.replace(GOOD, uuid="cd" * 16))),
    ],
)
def test_records_of_impossible_volumes(stripe: int, slabs: tuple[SlabRecord, ...]) -> None:
    with pytest.raises(CorruptState):
        VolumeRecord(stripe, slabs)
