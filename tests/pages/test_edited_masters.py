"""Tests of the fp32 masters of parameters that users edit: what an edit leaves as it was keeps its master."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_units import kernels, updated  # noqa: F401
from homes import HOMES, budget_for
from parity import copied, differences, tensors_copied
from torch import Tensor, nn

import infinity


def made(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 8))


@contextlib.contextmanager
def opened(
    directory: Path, *, home: str = "unified", compute: str = "bf16", seed: int = 3, **options: Any
) -> Iterator[tuple[nn.Sequential, Any]]:
    model = made(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute)
    checkpoint = options.get("checkpoint")
    budget = budget_for(home, model, optimizer, directory, precision, checkpoint=checkpoint)
    with infinity.offload(
        model, optimizer, budget=budget, precision=precision, device="cpu", **options
    ) as runtime:
        yield model, runtime


def train(model: nn.Module, runtime: Any, *steps: int) -> None:
    for step in steps:
        inputs = torch.randn(4, 48, generator=torch.Generator().manual_seed(step))
        model(inputs).float().square().mean().backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()


def states(model: nn.Module, runtime: Any) -> list[Any]:
    return [copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())]


def master(runtime: Any, parameter: nn.Parameter) -> Tensor:
    found: Tensor = runtime.optimizer.state[parameter]["master"]
    return found


def by_data(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])


def by_views(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.detach().copy_(values[name])


def by_new_data(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = values[name].clone()


def by_copies(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def by_vector(model: nn.Module, values: dict[str, Tensor]) -> None:
    vector = nn.utils.parameters_to_vector([values[name] for name, _ in model.named_parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())


LOADS: dict[str, Callable[[Any, dict[str, Tensor]], object]] = {
    "load_state_dict": lambda model, values: model.load_state_dict(values),
    "copy_": by_copies,
    "data =": by_new_data,
    "data.copy_": by_data,
    "detach().copy_": by_views,
    "vector_to_parameters": by_vector,
}
HOME_CASES = [("unified", compute, how) for compute in ("bf16", "fp16") for how in LOADS] + [
    (home, compute, how)
    for home, (compute, how) in zip(
        [home for home in HOMES if home != "unified"] * 2,
        itertools.cycle(itertools.product(("bf16", "fp16"), ("load_state_dict", "data.copy_", "data ="))),
        strict=False,
    )
]


@pytest.mark.sweep
@pytest.mark.parametrize("home, compute, how", HOME_CASES)
def test_an_optimizer_that_is_loaded_before_its_model(
    home: str, compute: str, how: str, tmp_path: Path
) -> None:
    with opened(tmp_path, home=home, compute=compute) as (model, runtime):
        train(model, runtime, 0, 1, 2)
        values, optimizer = states(model, runtime)
        train(model, runtime, 3, 4)
        expected = states(model, runtime)
    for model_first in (False, True):
        with opened(tmp_path, home=home, compute=compute, seed=4) as (model, runtime):
            if model_first:
                LOADS[how](model, values)
            runtime.optimizer.load_state_dict(optimizer)
            LOADS[how](model, values)  # of the second order this is an edit that changes nothing
            assert differences(states(model, runtime), [values, optimizer]) == []
            train(model, runtime, 3, 4)
            assert differences(states(model, runtime), expected) == []


def test_masters_that_no_values_followed_are_forgotten_by_a_step(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        train(model, runtime, 0, 1)
        values, optimizer = states(model, runtime)
    with opened(tmp_path, seed=4) as (model, runtime):
        train(model, runtime, 0)
        before = master(runtime, model[0].weight)
        runtime.optimizer.load_state_dict(optimizer)
        assert torch.equal(master(runtime, model[0].weight), before)
        train(model, runtime, 1)
        model.load_state_dict(values)
        kept = master(runtime, model[0].weight) == optimizer["state"][0]["master"]
        assert kept.float().mean() < 0.1


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_edits_that_change_nothing(home: str, compute: str, tmp_path: Path) -> None:
    with opened(tmp_path, home=home, compute=compute) as (model, runtime):
        train(model, runtime, 0, 1)
        expected = states(model, runtime)
        for load in LOADS.values():
            load(model, expected[0])
            with runtime.full_parameters(model[0]), torch.no_grad():
                model[0].weight.copy_(expected[0]["0.weight"])
                model[0].bias.data.add_(0)
            assert differences(states(model, runtime), expected) == []


def test_an_edit_that_changes_nothing_in_a_new_model(tmp_path: Path) -> None:
    results = []
    for edits in (False, True):
        with opened(tmp_path) as (model, runtime):
            if edits:
                model.load_state_dict(model.state_dict())
            train(model, runtime, 0)
            results.append(states(model, runtime))
    assert differences(*results) == []


def loaded_with_one_changed(model: nn.Module) -> None:
    state = model.state_dict()
    state["0.weight"][5, 7] = 0.75
    model.load_state_dict(state)


def setitem(model: Any) -> None:
    with torch.no_grad():
        model[0].weight[3:5] = 0.125


def clamp(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def in_full_parameters(model: Any) -> None:
    model[0].weight.data[2].zero_()


def data_then_others(model: Any) -> None:
    data = model[0].weight.data
    data[1] = 0.5
    assert model[0].bias.data.sum() != 0  # a view of another parameter
    with torch.no_grad():
        model[0].weight.sub_(0.25 * (model[0].weight == 0.5))


PARTIAL: dict[str, Callable[[Any], object]] = {
    "load_state_dict": loaded_with_one_changed,
    "setitem": setitem,
    "clamp_": clamp,
    "data.clamp_": lambda model: model[0].weight.data.clamp_(-0.1, 0.1),
    "view": lambda model: model[0].weight.detach().view(-1)[:9].mul_(2),
    "data": in_full_parameters,
    "data, then others": data_then_others,
}


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("home", ["nvme", "unified", "device"])
@pytest.mark.parametrize("how", PARTIAL)
def test_only_what_an_edit_changes_gets_new_masters(
    how: str, home: str, compute: str, tmp_path: Path
) -> None:
    with opened(tmp_path, home=home, compute=compute) as (model, runtime):
        weight = model[0].weight
        train(model, runtime, 0, 1)
        values, masters = model.state_dict()["0.weight"].clone(), master(runtime, weight)
        PARTIAL[how](model)
        now = model.state_dict()["0.weight"].clone()
        assert 0 < (now != values).sum() < 0.7 * now.numel()
        expected = torch.where(now == values, masters, now.float())
        assert torch.equal(master(runtime, weight), expected)
        assert not torch.equal(expected, now.float())


@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_an_edit_through_a_view_that_was_kept(home: str, tmp_path: Path) -> None:
    with opened(tmp_path, home=home) as (model, runtime):
        train(model, runtime, 0, 1)
        kept = model[0].weight.data
        assert model[0].bias.data.sum() != 0
        kept[0] = 0.5
        del kept  # it takes room that state_dict() needs
        now = model.state_dict()["0.weight"]
        assert bool((now[0] == 0.5).all())
        assert torch.equal(master(runtime, model[0].weight), now.float())


def test_an_edit_through_a_view_over_an_eager_update(tmp_path: Path) -> None:
    """The update comes between the view and the edit, which writes back some values from before."""
    with opened(tmp_path, update="eager", accumulation=1) as (model, runtime):
        train(model, runtime, 0, 1)
        data = model[0].weight.data
        before = data.clone()
        model(torch.ones(4, 48)).float().square().mean().backward()
        data[:80] = before[:80]
        runtime.optimizer.step()
        now = model.state_dict()["0.weight"]
        assert torch.equal(master(runtime, model[0].weight), now.float())


@pytest.mark.parametrize("home", ["nvme", "unified", "device"])
def test_edits_while_a_commit_is_pending(home: str, tmp_path: Path) -> None:
    results = []
    for commits in (False, True):
        options = {"checkpoint": tmp_path / "commits"} if commits else {}
        with opened(tmp_path, home=home, **options) as (model, runtime):
            train(model, runtime, 0, 1)
            for edit in PARTIAL.values():
                commit = runtime.save() if commits else None
                edit(model)
                if commit is not None:
                    commit.wait()
            expected = states(model, runtime)
            if commits:
                runtime.save().wait()
            train(model, runtime, 2)
            results.append(states(model, runtime))
    assert differences(*results) == []
    with opened(
        tmp_path, home=home, seed=5, checkpoint=tmp_path / "commits", resume=tmp_path / "commits"
    ) as (
        model,
        runtime,
    ):
        assert differences(states(model, runtime), expected) == []
        train(model, runtime, 2)
        assert differences(states(model, runtime), results[0]) == []


@pytest.mark.usefixtures("kernels")
def test_edits_of_what_the_device_updates(updated: list[int], tmp_path: Path) -> None:  # noqa: F811
    results = []
    for home in ("unified", "device"):
        with opened(tmp_path, home=home) as (model, runtime):
            train(model, runtime, 0, 1)
            for edit in PARTIAL.values():
                edit(model)
            train(model, runtime, 2)
            results.append(states(model, runtime))
    assert updated
    assert differences(*results) == []
