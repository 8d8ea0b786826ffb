"""Tests of copies of runs over ranks: any number of ranks makes a copy, and any number goes on from it. Rank
commits that are streamed into new slabs are restored in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import rank_processes
import torch
from ranked_cases import HOMES, MODELS, SOME, Case, Place, differences, pairwise
from resumed_cases import train_and_copy, train_from_copy, train_in_turns
from run_copies import bits_of, opened
from training_ranks import launch

from infinity.distributed.failure_event import TIMEOUT_VARIABLE

ELSEWHERE = {"unified": "nvme", "nvme": "unified", "device": "host", "host": "device"}
"""Where pages rest in the run that goes on from a copy."""


def cases() -> tuple[Case, ...]:
    """Cases whose runs are copied."""
    options = {
        "stage": (0, 1, 2, 3),
        "home": HOMES,
        "states": ("fp32", "bf16", "int8"),
        "compute": ("fp32", "bf16", "fp16"),
        "optimizer": ("adamw", "sgd"),
    }
    kinds = ("frozen", "convolutions", "dtypes", "groups", "meta", "odd", "tiny", "tiled")
    models = {(each.subject, each.stage): each for each in MODELS if each.subject in kinds}
    eager = [Case(stage=stage, update="eager", declared=True) for stage in range(4)]
    found = [*(Case(**each) for each in pairwise(options)), *models.values(), *eager]
    return tuple(replace(each, steps=4, accumulate=1, copy=f"{number}") for number, each in enumerate(found))


def elsewhere(case: Case) -> Case:
    """A case that goes on from another one's copy, with pages cut and kept in another way."""
    # One rank keeps the frozen parameters of the model "tiny" in RAM, whatever its budget is.
    home = case.home if case.subject == "tiny" else ELSEWHERE[case.home]
    return replace(case, stage=3 - case.stage, home=home)


def told(function: str, cases: tuple[Case, ...], size: int, copied_by: int, directory: Path) -> list[str]:
    """What is not the same on `size` ranks that run a function and on one rank that has trained all along."""
    places = Place(0, copied_by, alone=True), Place(0, size, alone=True)
    found, said = launch(function, cases, size, directory, timeout=300.0), []
    for case, each in zip(cases, found, strict=True):
        if function == "training_and_copying":
            alone = train_and_copy(case, places[0], directory / "alone")
        else:
            alone = train_in_turns(case, places, directory)
        said += differences(case, size, each, alone)
        if said and not all(isinstance(one, dict) for one in each):
            break  # later cases did not run
    return said


def content(copy: Path) -> list[Any]:
    """What a copy holds of parameters and of the run, but for the generators, others in each process."""
    manifest = opened(copy)[0].manifest
    parameters = [replace(each, ranges=()) for each in manifest.parameters]
    bits = {name: each.view(torch.uint8).numpy().tobytes() for name, each in bits_of(copy).items()}
    return [
        manifest.rule,
        replace(manifest.run, rng={}),
        sorted(parameters, key=lambda each: each.names),
        bits,
    ]


@SOME
def test_copies_of_two_ranks(every: int, tmp_path: Path) -> None:
    """Two ranks make copies, and train on. One, two and four ranks go on from them."""
    (tmp_path / "alone").mkdir()
    copied = cases()[::every]
    assert told("training_and_copying", copied, 2, 2, tmp_path) == []
    assert told("training_from_copies", tuple(map(elsewhere, copied)), 2, 2, tmp_path) == []
    lazy = tuple(
        each for each in copied if each.update == "lazy"
    )  # one rank declares one number of backwards
    assert told("training_from_copies", lazy[::3], 4, 2, tmp_path) == []
    for case in copied:
        place = Place(0, 2, alone=True)
        alone = train_in_turns(case, (place, place), tmp_path)
        assert train_from_copy(case, place, tmp_path) == alone
        assert content(tmp_path / "copies" / case.copy) == content(tmp_path / "alone" / "copies" / case.copy)


@SOME
def test_a_copy_of_one_rank(every: int, tmp_path: Path) -> None:
    copied = cases()[every - 1 :: every]
    for case in copied:
        train_and_copy(case, Place(0, 2, alone=True), tmp_path)
    assert told("training_from_copies", copied, 2, 2, tmp_path) == []


# --- programs -------------------------------------------------------------------------------------------


def results(function: str, directory: Path, size: int = 2) -> list[Any]:
    """What each rank returned; none may have failed."""
    environment = {"COPIES": str(directory), TIMEOUT_VARIABLE: "30"}
    found = rank_processes.run(
        "copying_ranks.py", function, size=size, timeout=100.0, environment=environment
    )
    assert [(each.code, each.error) for each in found] == [(0, "")] * size, found
    return [each.result for each in found]


def test_edits_and_views_around_copies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (alone,) = results("edits_and_copies", tmp_path / "one", 1)
    first, second = results("edits_and_copies", tmp_path / "two")
    assert first == alone
    for mine, others in zip(second, alone, strict=True):
        assert mine == [*others[:6], *others[8:]]  # without what rank 0 alone has read


def test_copies_that_fail_end_alike_on_all_ranks(tmp_path: Path) -> None:
    for mine, others in zip(*results("refused", tmp_path), strict=True):
        (start, *saves), (*_, twice, again) = mine[:9], mine
        assert saves[1::2] == others[2:9:2] == [0] * 4, "nothing is left"
        for first, second in zip(saves[::2], others[1:9:2], strict=True):
            assert first.startswith("StorageFull: Could not ") and "(ENOSPC)" in first
            assert second == first.replace(": ", ": Rank 0 failed in the writing of a copy: ", 1)
        assert mine[9].startswith("ConfigError: ") and mine[9].endswith("occupied is not empty.")
        assert others[9].startswith("ConfigError: Rank 0 failed in the writing of a copy: ")
        assert mine[10].startswith("ConfigError: ")
        assert others[10].startswith("ConfigError: Rank 0 failed in save(path): ")
        assert mine[11].startswith("ConfigError: Rank 1 failed in load(path): ")
        assert others[11].endswith("elsewhere holds no copy of a run.")
        assert mine[12] == others[12]
        assert mine[12].startswith("RankDivergence: At load(path) the copy of rank 1 and of rank 0 differ")
        assert twice == again != start
        assert others[-2:] == [twice, again]


def test_a_load_that_fails_half_way_ends_all_ranks(tmp_path: Path) -> None:
    first, second = results("half_way", tmp_path)
    assert second == ["StorageError: A planted failure."] * 3
    assert first == ["StorageError: Rank 1 failed in the reading of a copy: A planted failure."] * 3


def test_copies_and_commits(tmp_path: Path) -> None:
    found = results("with_commits", tmp_path)
    assert found[0] == found[1]
    for start, stepped, done, loaded, state, resumed, again in found[0]:
        assert (done, state) == (True, "loaded")
        assert start == loaded == resumed
        assert again == stepped != start


def test_one_rank_streams_its_part_of_a_commit_and_another_one_adopts_its_own(tmp_path: Path) -> None:
    for rank, told in enumerate(results("one_rank_moves", tmp_path)):
        for start, stepped, streamed, resumed, again, streams, last in told:
            assert (streamed, streams) == (rank == 1, False)
            assert start == resumed
            assert stepped == again == last != start


def test_inference(tmp_path: Path) -> None:
    assert results("inference", tmp_path) == [[True, True]] * 2


def test_a_rank_that_dies_while_another_one_writes(tmp_path: Path) -> None:
    first, second = rank_processes.run(
        "copying_ranks.py", "killed_in_save", size=2, environment={"COPIES": str(tmp_path)}
    )
    assert second.code == 7
    assert first.result == ["RankFailure", 0]


def test_parameters_leave_a_device_in_parts(tmp_path: Path) -> None:
    (of_copy, of_export), (of_other,) = results("parts_from_a_device", tmp_path)
    assert 0 < of_copy <= 4 << 12
    assert 0 < of_export <= 4 << 12
    assert of_other == 0
