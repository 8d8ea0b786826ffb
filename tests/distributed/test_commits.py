"""Tests of commits over ranks: a run that is broken off goes on to the bits of one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ranked_cases import HOMES, MODELS, ON_FOUR, Case, pairwise
from training_ranks import check_bits

BREAK = "training_with_a_break"
MATRIX: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "home": HOMES,
    "states": ("fp32", "bf16", "int8"),
    "compute": ("fp32", "bf16", "fp16"),
    "optimizer": ("adamw", "sgd"),
    "update": ("lazy", "eager", "sync"),
}


def with_steps(case: Case) -> Case:
    return replace(case, steps=4)


def test_a_resumed_run_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    cases = [Case(**each, steps=4, declared=each["update"] == "eager") for each in pairwise(MATRIX)]
    check_bits(
        tuple(each for each in cases if each.update != "eager" or each.compute != "fp16"),
        2,
        tmp_path,
        function=BREAK,
    )


def test_slabs_that_were_moved_are_streamed(tmp_path: Path) -> None:
    options = {name: MATRIX[name] for name in ("stage", "home", "states", "compute")}
    cases = [*(Case(**each) for each in pairwise(options)), *MODELS]
    lazy = tuple(with_steps(each) for each in cases if each.exact and each.update == "lazy")
    check_bits(lazy, 2, tmp_path, function="training_with_a_move")


def test_parts_on_other_nodes_are_sent(tmp_path: Path) -> None:
    options = {name: MATRIX[name] for name in ("stage", "home", "states", "compute")}
    cases = [*(Case(**each) for each in pairwise(options)), Case("frozen", 3, home="nvme"), Case("groups", 3)]
    check_bits(tuple(map(with_steps, cases)), 2, tmp_path, function="training_on_other_nodes")


def test_models_of_all_kinds(tmp_path: Path) -> None:
    check_bits(tuple(with_steps(each) for each in MODELS if each.exact), 2, tmp_path, function=BREAK)


def test_four_ranks(tmp_path: Path) -> None:
    check_bits(tuple(map(with_steps, ON_FOUR)), 4, tmp_path, function=BREAK)
