"""Tests of commits over ranks: a run that is broken off goes on to the bits of one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranked_cases import HOMES, MODELS, ON_FOUR, SOME, Case, Place, pairwise, train
from resumed_cases import begin, go_on, left_over
from training_ranks import check_bits, launch

BREAK = "training_with_a_break"
MATRIX: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "home": HOMES,
    "states": ("fp32", "bf16", "int8"),
    "compute": ("fp32", "bf16", "fp16"),
    "optimizer": ("adamw", "sgd"),
    "update": ("lazy", "eager", "speculative", "sync"),
}


def with_steps(case: Case) -> Case:
    return replace(case, steps=4)


@SOME
def test_a_resumed_run_has_the_bits_of_one_rank(every: int, tmp_path: Path) -> None:
    declared = ("eager", "speculative")
    cases = [Case(**each, steps=4, declared=each["update"] in declared) for each in pairwise(MATRIX)]
    check_bits(
        tuple(filter(_is_possible, cases))[:: every // 2 or 1],
        2,
        tmp_path,
        function=BREAK,
    )


def _is_possible(case: Case) -> bool:
    if case.update == "speculative":
        return case.stage >= 2
    return case.update != "eager" or case.compute != "fp16"


LARGE = Case("large", 3, home="nvme", compute="bf16")
"""A case whose parameters have more states than a buffer of the exchange has room for."""


@SOME
def test_slabs_that_were_moved_are_streamed(every: int, tmp_path: Path) -> None:
    options = {name: MATRIX[name] for name in ("stage", "home", "states", "compute")}
    cases = [*(Case(**each) for each in pairwise(options)), *MODELS, LARGE]
    lazy = tuple(with_steps(each) for each in cases if each.exact and each.update == "lazy")
    check_bits(lazy[::every], 2, tmp_path, function="training_with_a_move")


@SOME
def test_parts_on_other_nodes_are_sent(every: int, tmp_path: Path) -> None:
    options = {name: MATRIX[name] for name in ("stage", "home", "states", "compute")}
    cases = [*(Case(**each) for each in pairwise(options)), Case("frozen", 3, home="nvme"), Case("groups", 3)]
    check_bits(tuple(map(with_steps, cases))[::every], 2, tmp_path, function="training_on_other_nodes")


CUT_OTHERWISE = (
    Case("adapted", 3, accumulate=2, clip=0.05),
    Case("decoder", 2, home="nvme", compute="fp16", states="bf16"),
    # The shards of its untiled layer are longer than a buffer of the exchange.
    Case("tiled", 0, clip=0.05),
)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pages_that_are_cut_otherwise(some: bool, tmp_path: Path) -> None:
    options = {name: MATRIX[name] for name in ("stage", "home", "states", "compute")}
    all_cases = [*(Case(**each) for each in pairwise(options)), *MODELS]
    cases = (
        CUT_OTHERWISE[1:] if some else [each for each in all_cases if each.exact and each.subject != "tiny"]
    )
    lazy = tuple(with_steps(each) for each in cases if each.update == "lazy")
    check_bits(lazy, 2, tmp_path, function="training_cut_otherwise")


def test_other_layers_are_frozen(tmp_path: Path) -> None:
    cases = Case("adapted", 3), Case("mlp", 3, home="nvme"), Case("frozen", 2)
    found = launch("resuming_with_other_frozen_layers", cases, 2, tmp_path, timeout=90.0)
    assert found == [[True, True]] * len(cases)


@pytest.mark.parametrize("home", ["unified", "nvme"])
def test_a_node_keeps_nothing_of_older_commits(home: str, tmp_path: Path) -> None:
    check_bits((Case("mlp", 3, home=home),), 2, tmp_path, function="training_back_and_forth")


def test_parts_on_other_nodes_that_are_cut_otherwise(tmp_path: Path) -> None:
    cases = Case("large", 3, states="int8"), Case("adapted", 3, accumulate=2)
    check_bits(tuple(map(with_steps, cases)), 2, tmp_path, function="training_on_other_nodes_cut_otherwise")


@SOME
def test_models_of_all_kinds(every: int, tmp_path: Path) -> None:
    exact = tuple(with_steps(each) for each in MODELS if each.exact)
    check_bits(exact[::every], 2, tmp_path, function=BREAK)


@SOME
def test_four_ranks(every: int, tmp_path: Path) -> None:
    check_bits(tuple(map(with_steps, ON_FOUR))[::every], 4, tmp_path, function=BREAK)


GLOBAL = 4
"""Number of micro-batches of all ranks in a step, for runs whose numbers of ranks change."""


def _one_step(function: str, cases: list[Case], ranks: int, directory: Path) -> list[list[Any]]:
    if ranks > 1:
        return launch(function, cases, ranks, directory, timeout=200.0)
    run = begin if function == "beginning" else go_on
    return [[run(each, Place(0, GLOBAL, alone=True), directory)] for each in cases]


@pytest.mark.parametrize(
    "ranks",
    [(2, 1, 2), *(pytest.param(each, marks=pytest.mark.slow) for each in ((4, 2, 4), (1, 4, 1), (2, 4, 1)))],
    ids=str,
)
def test_another_number_of_ranks_goes_on(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Each number of ranks takes a step, with the same micro-batches: the bits are those of one rank."""
    subjects = [
        Case("mlp", 3, home="nvme"),
        Case("decoder", 2, compute="bf16", states="int8"),
        Case("adapted", 3, home="host", clip=0.05, optimizer="sgd"),
    ]
    for number, count in enumerate(ranks):
        stages = [each.stage if number % 2 == 0 or each.stage == 2 else 2 for each in subjects]
        cases = [
            replace(each, accumulate=GLOBAL // count if count > 1 else 1, stage=stage, first=number)
            for each, stage in zip(subjects, stages, strict=True)
        ]
        found = _one_step("going_on" if number else "beginning", cases, count, tmp_path)
        assert all(isinstance(each, dict) for of_case in found for each in of_case), found
        if number:
            assert [left_over(each, count, tmp_path) for each in cases] == [[]] * len(cases)
            assert len(list(tmp_path.rglob("*.slab"))) == count * len(cases)
    alone = Place(0, GLOBAL, alone=True)
    straight = [train(replace(each, steps=len(ranks)), alone, tmp_path) for each in subjects]
    for of_case, truth in zip(found, straight, strict=True):
        assert all(each["digests"] == truth["digests"] for each in of_case)
