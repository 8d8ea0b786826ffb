"""Tests of what user code does over ranks: it reads, drops and watches gradients, and makes edits."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes

from infinity.distributed.failure_event import TIMEOUT_VARIABLE

SIZE = 2


_MORE = [pytest.param(each, marks=pytest.mark.slow) for each in ("02", "13 tiled", "02 tiled")]


@pytest.fixture(scope="module", params=["13", *_MORE])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    stages, _, tiled = request.param.partition(" ")
    return {"STAGES": stages, "TILED": tiled}


@pytest.fixture(scope="module")
def stages(environment: dict[str, str]) -> str:
    """The stages of ZeRO at which the programs run, a digit each."""
    return environment["STAGES"]


@pytest.fixture(scope="module")
def alone(environment: dict[str, str]) -> Any:
    """What the programs return on one rank."""
    (found,) = rank_processes.run(
        "user_code_ranks.py", "every_program", size=1, timeout=120.0, environment=environment
    )
    assert found.code == 0, found.text
    return found.result


@pytest.fixture(scope="module")
def ranks(environment: dict[str, str]) -> list[Any]:
    """What the programs return on each of several ranks."""
    found = rank_processes.run(
        "user_code_ranks.py",
        "every_program",
        size=SIZE,
        timeout=180.0,
        environment={TIMEOUT_VARIABLE: "60", **environment},
    )
    for each in found:
        assert (each.code, each.error) == (0, ""), each
    return [each.result for each in found]


@pytest.mark.parametrize(
    "program",
    [
        "dropped",
        "read_when_cleared",
        "zeros",
        "edited_masters",
        "discarded",
        "not_finite",
        "failed_step",
        "kept",
        "torch_clips",
    ],
)
def test_ranks_see_what_one_rank_sees(program: str, ranks: list[Any], alone: Any) -> None:
    for each in ranks:
        assert each[program] == alone[program]


def test_an_optimizer_that_is_loaded_before_its_model(alone: Any) -> None:
    assert all(same for _, _, same in alone["edited_masters"])
    assert all(min(masters) > 0.5 for masters, _, _ in alone["edited_masters"])


def test_a_model_that_is_kept_has_the_masters(alone: Any) -> None:
    assert all(masters == kept for masters, kept in alone["kept"])


def test_a_dropped_gradient_is_gone(alone: Any) -> None:
    for first, _, clipped, *_, cause in alone["dropped"]:
        assert first is None and clipped is None
        assert cause == "step() was called and no parameter has a gradient."


def test_gradients_that_are_dropped_on_one_rank_are_refused_on_all(ranks: list[Any]) -> None:
    for each in ranks:
        for one_rank, another_backward, inside, eager in each["refused"]:
            assert one_rank == (
                "RankDivergence: At clip_grad_norm_ the gradient of last.bias was dropped (p.grad = None) on "
                "rank 1, and not on rank 0."
            )
            assert another_backward == (
                "ConfigError: A backward adds to the gradient of last.bias, which was dropped "
                "(p.grad = None) before other ranks have agreed to it."
            )
            told = "ConfigError: The gradient of last.bias was dropped (p.grad = None) inside of a backward"
            assert inside.startswith(told)
            assert eager.startswith("ConfigError: A gradient was dropped (p.grad = None), but step() was not")


def test_eager_updates_need_a_step(alone: Any, ranks: list[Any]) -> None:
    for each in (alone, *ranks):
        for *told, steps, unchanged in each["discarded"]:
            errors, digests = told[::2], told[1::2]
            assert all(
                error.startswith("ConfigError: zero_grad() was called, but step()") for error in errors
            )
            assert len(set(digests)) == len(digests) == 4 and set(steps) == {4.0} and unchanged


def test_parts_that_only_some_ranks_have_updated_end_all_ranks(ranks: list[Any]) -> None:
    told = "NonFiniteGradient: A gradient is infinite, NaN or lost, and eager updates have changed parts of "
    for each in ranks:
        for errors in each["half_updated"]:
            assert all(error.startswith(told) for error in errors), errors


def test_ranks_that_made_different_calls_get_the_same_error_again(ranks: list[Any]) -> None:
    for each in ranks:
        for errors in each["other_calls"]:
            assert set(errors) == {"RankDivergence: Rank 0 is in step(), rank 1 is in clip_grad_norm_."}


def test_factors_that_differ_are_refused(ranks: list[Any]) -> None:
    for each in ranks:
        for set_one, one_parameter, one_rank, after, inside in each["other_factors"]:
            assert set_one.startswith(
                "ConfigError: The gradient of last.weight was set, but it is a sum over"
            )
            assert one_parameter.startswith(
                "ConfigError: step() was called, and the gradients have different factors"
            )
            assert one_rank.startswith("RankDivergence: At step() the factor of the gradients of rank 1")
            assert after == "trained"
            assert inside.startswith(
                "ConfigError: The norm of the gradient of last.weight was asked for inside"
            )


def test_replaced_states_are_those_of_one_rank(ranks: list[Any], alone: Any) -> None:
    for each in ranks:
        for (*told, errors), (*wanted, _) in zip(
            each["replaced_states"], alone["replaced_states"], strict=True
        ):
            assert told == wanted
            at = "RankDivergence: At a change of optimizer states the state of"
            for error, name in zip(errors, ("last", "middle.0", "middle.0"), strict=True):
                assert error.startswith(f"{at} {name}.bias of rank 1 and of rank 0 differ: ")


def test_averages_of_masters_are_those_of_one_rank(ranks: list[Any], alone: Any) -> None:
    assert ranks[-1]["averages"] == alone["averages"]
    assert len({each for (each, _) in alone["averages"]}) == 1
    assert [each for (each, _) in ranks[0]["averages"]] == [each for (each, _) in alone["averages"]]


def test_hooks_see_the_gradients_of_the_own_rank(ranks: list[Any], alone: Any) -> None:
    assert [each["hooks"] for each in ranks] == [alone["hooks"][rank::SIZE] for rank in range(SIZE)]


def test_edits_that_differ_are_undone_where_values_from_before_are_left(
    ranks: list[Any], stages: str
) -> None:
    for each in ranks:
        for stage, (found, undone, trained) in zip(stages, each["differing_edits"], strict=True):
            error = found.replace("[0:32]", "")  # of the first tile
            told = "ConfigError: The parameter first.weight was edited with different values on the ranks; "
            if stage == "3":
                assert error == told + "the edits are undone. Edit parameters alike on all ranks."
                assert (undone, trained) == (True, False)
            else:
                assert error.startswith(told + "no values from before are left. ")
                assert error.endswith("This runtime cannot be used any more: start all ranks again.")
                assert undone == trained == found


def test_edits_outside_of_full_parameters_are_refused(ranks: list[Any]) -> None:
    for each in ranks:
        for in_place, data, loaded, unchanged, trained, through_view, after in each["edits_outside"]:
            told = "ConfigError: The parameter first.weight was to be edited on one of several ranks; it is "
            assert in_place == data
            assert in_place.replace("[0:32]", "") == told + "unchanged."
            assert loaded.startswith("ConfigError: The parameter first.")
            assert (unchanged, trained) == (True, "")
            assert through_view.startswith(
                "ConfigError: An edit of last.weight was noticed on one of several"
            )
            assert after == through_view
