"""Tests of calls that the runtime refuses: each raises a typed error, changes nothing and leaves no files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import both_homes, budget_for
from parity import copied, differences, tensors_copied
from small_runtime import TIED, WIDE, files, loss_of, opened, train_step
from torch import nn

import infinity
from infinity.errors import BudgetError, ConfigError, InfinityError


def offload(model: nn.Module, optimizer: Any, directory: Path, **options: Any) -> Any:
    """Offload the model to the CPU in fp32, with 64 MiB of each tier, and return its runtime.

    directory: for pages on NVMe. options: arguments of infinity.offload that replace these or are added.
    """
    sizes = infinity.Budget(device="64MiB", host="64MiB", nvme={str(directory): "64MiB"})
    given: dict[str, Any] = {
        "budget": sizes,
        "precision": infinity.Precision(compute="fp32"),
        "device": "cpu",
    }
    return infinity.offload(model, optimizer, **(given | options))


def check_refused(
    error: type[InfinityError], model: nn.Module, optimizer: Any, directory: Path, **options: Any
) -> None:
    """Assert that `offload` raises `error` with a text for its `cure`, and leaves no file in the directory.

    Values and types of the model's parameters must be as before. options: see `offload` above.
    """
    before = copied(model.state_dict())
    kinds = [type(each) for each in model.parameters()]
    with pytest.raises(error) as caught:
        offload(model, optimizer, directory, **options)
    assert caught.value.cure
    assert files(directory) == []
    assert [type(each) for each in model.parameters()] == kinds
    assert differences(copied(model.state_dict()), before) == []


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_smallest_budget_that_is_named_works_and_a_page_less_does_not(tier: str, tmp_path: Path) -> None:
    precision = infinity.Precision(compute="fp32")
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    smallest = budget_for("nvme", model, optimizer, tmp_path, precision)
    sizes = {"device": smallest.device_bytes, "host": smallest.host_bytes, "nvme": {str(tmp_path): "64MiB"}}

    def budget(nbytes: int) -> Any:
        return infinity.Budget(**(sizes | {tier: nbytes}))

    with pytest.raises(BudgetError) as caught:
        offload(model, optimizer, tmp_path, budget=budget(4096))
    needed = caught.value.needed
    assert needed is not None
    assert needed % 4096 == 0
    assert str(needed) in caught.value.cure
    check_refused(BudgetError, model, optimizer, tmp_path, budget=budget(needed - 4096))
    with offload(model, optimizer, tmp_path, budget=budget(needed)) as runtime:
        first = train_step(model, runtime)
        assert train_step(model, runtime) < first
    assert files(tmp_path) == []


def test_a_disk_budget_too_small_names_what_would_do(tmp_path: Path) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    smallest = budget_for("nvme", model, optimizer, tmp_path, infinity.Precision(compute="fp32"))

    def budget(nbytes: int) -> Any:
        return infinity.Budget(
            device=smallest.device_bytes, host=smallest.host_bytes, nvme={str(tmp_path): nbytes}
        )

    with pytest.raises(BudgetError) as caught:
        offload(model, optimizer, tmp_path, budget=budget(4096))
    needed = caught.value.needed
    assert needed is not None
    check_refused(BudgetError, model, optimizer, tmp_path, budget=budget(needed - 4096))
    with offload(model, optimizer, tmp_path, budget=budget(needed)) as runtime:
        train_step(model, runtime)
    assert files(tmp_path) == []


@pytest.mark.sweep
@both_homes
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_stops_the_step_and_changes_nothing(
    value: float, clip: bool, home: str, tmp_path: Path
) -> None:
    results = []
    for stumbles in (False, True):
        model = TIED.make()
        with opened(model, tmp_path, home=home) as runtime:
            losses = [train_step(model, runtime)]
            if stumbles:
                (loss_of(model, 1) * value).backward()
                with pytest.raises(infinity.NonFiniteGradient):
                    if clip:
                        runtime.clip_grad_norm_(1.0)
                    runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            losses += [train_step(model, runtime, step) for step in (2, 3)]
            results.append(
                [losses, copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())]
            )
    assert differences(results[1], results[0]) == []


class OwnAdamW(torch.optim.AdamW):
    """A subclass of AdamW, which may do anything differently, so that the runtime cannot support it."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RMSprop": torch.optim.RMSprop,
    "LBFGS": torch.optim.LBFGS,
    "subclass": OwnAdamW,
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "differentiable": lambda parameters: torch.optim.AdamW(parameters, differentiable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unsupported_optimizers(name: str, tmp_path: Path) -> None:
    model = TIED.make()
    check_refused(infinity.UnsupportedOptimizer, model, OPTIMIZERS[name](model.parameters()), tmp_path)


def overlapping() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.detach()[:])
    return model


def partly_overlapping() -> nn.Module:
    memory = torch.randn(20)
    model = nn.Sequential(nn.Linear(4, 4))
    model.extra = nn.ParameterList([nn.Parameter(memory[:12]), nn.Parameter(memory[8:])])
    return model


def expanded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].bias = nn.Parameter(torch.zeros(1).expand(8))
    return model


def with_gaps() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
    return model


def uninitialised() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))


@pytest.mark.parametrize("build", [overlapping, partly_overlapping, expanded, with_gaps])
def test_parameters_that_cannot_be_paged(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    check_refused(ConfigError, model, torch.optim.AdamW(model.parameters()), tmp_path)


@pytest.mark.parametrize(
    "build", [uninitialised, lambda: nn.Sequential(nn.ReLU())], ids=["uninitialised", "without parameters"]
)
def test_models_that_cannot_be_paged(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        offload(build(), None, tmp_path)
    assert files(tmp_path) == []


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    check_refused(ConfigError, TIED.make(), torch.optim.AdamW(TIED.make().parameters()), tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"budget": "64MiB"}, {"precision": "bf16"}, {"device": "floppy"}],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], tmp_path: Path) -> None:
    model = TIED.make()
    check_refused(ConfigError, model, torch.optim.AdamW(model.parameters()), tmp_path, **options)


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    smallest = budget_for("nvme", model, optimizer, tmp_path, infinity.Precision(compute="fp32"))
    missing = infinity.Budget(
        device=smallest.device_bytes, host=smallest.host_bytes, nvme={str(tmp_path / "no"): "64MiB"}
    )
    check_refused(infinity.StorageError, model, optimizer, tmp_path, budget=missing)


def test_offloading_twice(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        with pytest.raises(ConfigError):
            offload(model, torch.optim.AdamW(model.parameters()), tmp_path)
        with pytest.raises(ConfigError):
            offload(nn.Sequential(model.blocks[0]), None, tmp_path)
        train_step(model, runtime)


@both_homes
def test_a_step_without_a_backward(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, home=home) as runtime:
        with pytest.raises(ConfigError):
            runtime.optimizer.step()
        loss = train_step(model, runtime)
        assert loss == loss_of(TIED.make()).item()
        with pytest.raises(ConfigError):
            runtime.optimizer.step()


@both_homes
def test_a_second_backward_on_one_graph_is_pytorchs_error(home: str, tmp_path: Path) -> None:
    results = []
    for twice in (False, True):
        model = TIED.make()
        with opened(model, tmp_path, home=home) as runtime:
            loss = loss_of(model)
            loss.backward()
            if twice:
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    loss.backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            losses = [train_step(model, runtime, step) for step in (1, 2)]
            results.append([losses, copied(model.state_dict())])
    assert differences(results[1], results[0]) == []


USES: dict[str, Callable[[nn.Module, Any], object]] = {
    "forward": lambda model, _: loss_of(model),
    "step": lambda _, runtime: runtime.optimizer.step(),
    "clip": lambda _, runtime: runtime.clip_grad_norm_(1.0),
    "grad": lambda model, runtime: runtime.grad(model.get_parameter(WIDE)),
    "arithmetic": lambda model, _: model.get_parameter(WIDE) + 1,
    "data": lambda model, _: model.get_parameter(WIDE).data.sum(),
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict(TIED.make().state_dict()),
}


@pytest.mark.sweep
@both_homes
@pytest.mark.parametrize("use", USES)
def test_a_closed_runtime_is_named(use: str, home: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, home=home) as runtime:
        loss_of(model).backward()
    runtime.close()  # a second close does nothing
    with pytest.raises(ConfigError, match="closed"):
        USES[use](model, runtime)
    assert model.get_parameter(WIDE).shape == (120, 40)


@both_homes
def test_a_graph_that_outlives_the_runtime_raises(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, home=home):
        loss = loss_of(model)
    with pytest.raises(InfinityError, match="closed"):
        loss.backward()


@both_homes
def test_closing_with_an_update_and_a_graph_pending_leaves_nothing(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, home=home) as runtime:
        train_step(model, runtime)
        loss_of(model).backward()
        runtime.optimizer.step()
    assert files(tmp_path) == []


def test_an_error_inside_the_block_closes_the_runtime(tmp_path: Path) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    smallest = budget_for("nvme", model, optimizer, tmp_path, infinity.Precision(compute="fp32"))
    with pytest.raises(ZeroDivisionError), offload(model, optimizer, tmp_path, budget=smallest) as runtime:
        train_step(model, runtime)
        assert files(tmp_path) != []
        raise ZeroDivisionError
    assert files(tmp_path) == []
