"""Tests that a resumed run goes on with the bits of the run without a break, whatever differs between them.

[Note: which cases]
The cases of the matrix have every pair of values of its factors. Some of them, which have every value, always
run; the others are slow.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cover import drawn, each_value
from emulated_device import EmulatedDevice
from parity import differences
from resume_matrix import FACTORS, Case, fits, resumed, undisturbed

from infinity import aio

QUICK = 20
"""Number of cases that always run."""

CASES = drawn(FACTORS, fits, seed=23, least=140)
CHOSEN = each_value(CASES, QUICK)


def parameters() -> list[Any]:
    found = []
    for number, case in enumerate(CASES):
        what = "-".join(str(case[name]).replace(" ", "_") for name in ("model", "before", "after", "rule"))
        marks = () if case in CHOSEN else (pytest.mark.slow,)
        found.append(pytest.param(Case(**case), id=f"{number}-{what}", marks=marks))
    return found


PLAIN = Case(
    model="tied",
    meta="never",
    before="nvme",
    after="nvme",
    disks_before="here",
    disks_after="here",
    cut="kept",
    states="fp32",
    compute="bf16",
    rule="adamw",
    update="lazy",
    accumulation="1",
    engine_before="threads",
    engine_after="threads",
    groups=1,
    commits=1,
)
SPECIAL = {
    "nothing differs": PLAIN,
    "moments that begin after the resume": replace(PLAIN, model="late"),
    "slabs larger than without an nvme budget": replace(PLAIN, after="no disk", commits=2),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_a_special_case(what: str, tmp_path: Path) -> None:
    """The pages of these cases are cut as before, so that the slabs are adopted."""
    case = SPECIAL[what]
    wanted = undisturbed(case, tmp_path / "undisturbed")
    found = resumed(case, tmp_path / "resumed")
    assert differences(vars(replace(found, adopted=[])), vars(wanted)) == []
    assert found.adopted == [True] * case.commits


LATE = [("device", "mixed"), ("apart", "device"), ("mixed", "apart"), ("ram", "device"), ("device", "nvme")]


@pytest.mark.parametrize(
    ("before", "after"), [LATE[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in LATE[1:])]
)
def test_a_device_whose_streams_are_late(before: str, after: str, tmp_path: Path) -> None:
    """Every access to the device's memory has an order, and the bits are those of a run without a break."""
    case = replace(
        PLAIN,
        model="unusual",
        before=before,
        after=after,
        disks_before="one",
        disks_after="two",
        commits=2,
    )
    with EmulatedDevice(1).in_use():
        wanted = undisturbed(case, tmp_path / "undisturbed")
    with EmulatedDevice(2).in_use():
        found = resumed(case, tmp_path / "resumed")
    assert differences(vars(replace(found, adopted=[])), vars(wanted)) == []


@pytest.mark.sweep(most=8)
@pytest.mark.parametrize("case", parameters())
def test_a_resumed_run_has_the_bits_of_one_without_a_break(case: Case, tmp_path: Path) -> None:
    working = {report.name for report in aio.probe(tmp_path).backends if report.ok}
    if not {case.engine_before, case.engine_after} <= working:
        pytest.skip("needs an I/O engine that does not work here")
    wanted = undisturbed(case, tmp_path / "undisturbed")
    found = resumed(case, tmp_path / "resumed")
    assert differences(vars(replace(found, adopted=[])), vars(wanted)) == []
    assert len(set(wanted.losses)) > 1
