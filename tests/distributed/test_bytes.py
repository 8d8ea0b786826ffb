"""Tests of bytes: what a rank's homes and pools hold, and what crosses the wire in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import training_ranks
from ranked_cases import Case

from infinity.distributed.windows import VARIABLE

STAGES = (0, 1, 2, 3)
STEPS = 3
ITEMSIZE = 4
"""Bytes of an element of parameters and gradients in float32."""
UNPLANNED = 96 << 20
"""Bytes for what no plan has: activations, gradients until they are taken, holes in the heap between them,
stacks and buffers of threads. They do not depend on the size of the model. On two CPUs for six ranks of
several runs they were 21 to 45 MiB.
"""
each_size = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])


def launched(
    function: str, cases: list[Case], size: int, directory: Path
) -> dict[Case, list[dict[str, Any]]]:
    """What each rank returned for each case."""
    found = training_ranks.launch(function, cases, size, directory, timeout=300.0)
    broken = [one for each in found for one in each if not isinstance(one, dict)]
    assert not broken, broken[0]
    return dict(zip(cases, found, strict=True))


@each_size
def test_homes_and_pools_have_the_planned_bytes(size: int, tmp_path: Path) -> None:
    cases = [Case("large", stage, home="host") for stage in STAGES]
    cases += [Case("frozen", 3, home="nvme"), Case("dtypes", 2, home="nvme", compute="bf16")]
    for case, ranks in launched("bytes_of_homes_and_pools", cases, size, tmp_path).items():
        for found in ranks:
            assert found["homes"] == found["planned"], case
            regions = [region for unit in found["regions"] for region in unit]
            parameters = sum(elements * itemsize for elements, itemsize, _ in regions)
            trained = [(elements, itemsize) for elements, itemsize, trainable in regions if trainable]
            # Two moments of 4 bytes each, and for a bf16 parameter the 2 bytes that its master has more.
            states = sum(elements * (8 if itemsize == 4 else 10) for elements, itemsize in trained)
            whole = {
                "PARAMETER": (parameters, case.stage < 3),
                "GRADIENT": (4 * sum(elements for elements, _ in trained), case.stage < 2),
                "OPTIMIZER": (states, case.stage < 1),
            }
            for kind, (nbytes, everything) in whole.items():
                assert sum(found["homes"][kind]) == (nbytes if everything else nbytes // size), (case, kind)
            plan, pools = found["plan"], found["pools"]
            assert all(peak <= nbytes for peak, nbytes in pools.values())
            assert pools["homes"] == [plan["host"], plan["host"]]
            assert pools["device homes"] == [plan["device"], plan["device"]]
            assert pools["resident"] == [plan["resident_bytes"], plan["resident_bytes"]]
            assert pools["staging"][1] == plan["staging_bytes"]
            assert pools["transit"][1] == plan["transit_bytes"]
            assert pools["outgoing"][1] + pools["incoming"][1] == plan["exchange_bytes"]


@each_size
def test_each_gradient_goes_once_to_its_owner(size: int, tmp_path: Path) -> None:
    cases = [Case("large", stage, accumulate=accumulate) for stage in STAGES for accumulate in (1, 2)]
    for case, ranks in launched("bytes_over_the_wire", cases, size, tmp_path).items():
        # Stages 0 and 1 add a rank's own gradients up before one exchange; a byte goes with each piece there.
        times, flag = (STEPS * case.accumulate, 0) if case.stage > 1 else (STEPS, 1)
        for found in ranks:
            owned, others = found["owned"], found["trained"] - found["owned"]
            theirs = found["all pieces"] - found["pieces"]
            own = times * (owned * ITEMSIZE + flag * found["pieces"])
            away = times * (others * ITEMSIZE + flag * theirs)
            summed = (own, away) if case.stage == 0 else (0, 0)  # the sums then go to all ranks
            assert found["received"]["gradients"] == (size - 1) * own + summed[1], case
            if case.stage < 2:  # else owners may read them by themselves
                assert found["sent"]["gradients"] == away + (size - 1) * summed[0], case
        total = sum(found["received"]["gradients"] for found in ranks)
        read = sum(found["copied"].get("gradients", 0) for found in ranks)
        assert total == read + sum(found["sent"].get("gradients", 0) for found in ranks)
        if case.stage > 1:
            assert total == times * (size - 1) * ranks[0]["trained"] * ITEMSIZE


@each_size
def test_each_page_is_gathered_as_often_as_it_comes(size: int, tmp_path: Path) -> None:
    divided = Case("even", 3, home="host")
    more = replace(divided, accumulate=3)
    cases = [divided, more, replace(more, together=True)]
    cases += [Case("even", stage, home=home) for stage in STAGES[:3] for home in ("host", "unified")]
    by_case = launched("bytes_over_the_wire", cases, size, tmp_path)
    for case, ranks in by_case.items():
        for found in ranks:
            assert found["received"].get("parameters", 0) == sum(found["fetches"]), case
            gathers = [
                nbytes / ((size - 1) * page / size)
                for nbytes, page in zip(found["fetches"], found["pages"], strict=True)
            ]
            if case.stage == 3:
                # Each page comes for the forward and for the backward. But the forward's last page stays for
                # the backward, which needs no first page: the inputs have no gradient. That page is fetched
                # ahead after every step.
                passes = STEPS * (1 if case.together else case.accumulate)
                assert gathers == [passes + 1, *[2 * passes] * (len(gathers) - 2), passes], case
            elif case.stage == 0:
                assert not any(gathers)
            else:  # once after each step, but nobody may need what the last one brought
                assert set(gathers) <= {STEPS - 1, STEPS}, case
        sent, received, copied = (
            sum(found[way].get("parameters", 0) for found in ranks) for way in ("sent", "received", "copied")
        )
        assert sent + copied == received
        assert sent == 0 or case.home in ("device", "nvme"), "ranks copy what is at home in RAM"
    assert [each["fetches"] for each in by_case[cases[2]]] == [each["fetches"] for each in by_case[divided]]


@each_size
def test_a_step_takes_the_planned_messages(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without windows, which make the number depend on who is ahead of whom. Beside the planned ones, there
    are two agreements a step and one at the end, each rank tells each other one of the ends of backwards,
    of its pauses and clears, and that it leaves, and the pages for a further step may come.
    """
    monkeypatch.setenv(VARIABLE, "0")
    cases = [Case(name, 3, accumulate=n) for name in ("large", "decoder") for n in (1, 2)]
    for case, ranks in launched("bytes_over_the_wire", cases, size, tmp_path).items():
        sent = sum(found["messages"] for found in ranks) / size
        planned = ranks[0]["planned messages"]
        agreements = 2 * STEPS + 1
        told = (size - 1) * (STEPS * (2 + case.accumulate) + 3 + agreements * 2 / size)
        assert STEPS * planned <= sent - told <= (STEPS + 1) * planned, case


def test_rank_0_s_values_come_once(tmp_path: Path) -> None:
    cases = [Case("large", stage, steps=0) for stage in STAGES]
    for case, ranks in launched("bytes_over_the_wire", cases, 2, tmp_path).items():
        wanted = ranks[1]["owned" if case.stage == 3 else "trained"] * ITEMSIZE
        assert ranks[0]["sent"] == ranks[1]["received"] == {"initial values": wanted}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_resident_memory_stays_near_the_plan(size: int, tmp_path: Path) -> None:
    """From offload to close, with initialisers and three steps. A rank that held all parameters in bf16 would
    be above the limit, and so would one that held its part of the gradients in fp32.
    """
    outcomes = rank_processes.run(
        "memory_ranks.py", "growth", size=size, timeout=200.0, environment={"DIRECTORY": str(tmp_path)}
    )
    for each in outcomes:
        assert each.result, each.text
        assert each.result["parameters"] > UNPLANNED
        assert each.result["grown"] <= each.result["plan"] + UNPLANNED, each.result
