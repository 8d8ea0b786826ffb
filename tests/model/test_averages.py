"""Averages of the fp32 masters of a paged model: torch's AveragedModel, and averages of one's own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import differences
from small_runtime import TIED, loss_of, opened, train_step
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import infinity
from infinity.system import machine

AVERAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, heavy": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.3)},
    "ema, one by one": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "swa": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "default": dict,
}


def masters(runtime: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the fp32 masters of all parameters, by name; the values in fp32 of those without one."""
    state = runtime.optimizer.state
    return {
        name: state.get(each, {}).get("master", each.detach().clone().float())
        for name, each in model.named_parameters()
    }


def updated(average: AveragedModel, plain: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Update an average over a plain fp32 model, which gets these values before."""
    plain.load_state_dict(values, strict=False)
    average.update_parameters(plain)


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "compute", "home"),
    [
        ("ema", "bf16", "host"),
        ("ema, heavy", "fp16", "host"),
        ("ema, one by one", "bf16", "unified"),
        ("swa", "fp16", "unified"),
        ("default", "bf16", "host"),
        ("ema", "fp32", "nvme"),
    ],
)
def test_torchs_averages_are_those_of_the_masters(
    kind: str, compute: str, home: str, when: str, tmp_path: Path
) -> None:
    model, plain = TIED.make(), TIED.make()
    average = AveragedModel(model, **AVERAGES[kind]()) if when == "before" else None
    with opened(model, tmp_path, home=home, compute=compute) as runtime:
        train_step(model, runtime)
        plain.load_state_dict(masters(runtime, model), strict=False)
        expected = AveragedModel(plain, **AVERAGES[kind]())
        average = average or AveragedModel(model, **AVERAGES[kind]())
        if when == "after":
            assert differences(dict(average.module.state_dict()), dict(plain.state_dict())) == []
        for step in range(1, 5):
            updated(expected, plain, masters(runtime, model))
            average.update_parameters(model)
            train_step(model, runtime, step)
    assert {each.dtype for each in average.parameters()} == {torch.float32}
    assert differences(dict(average.state_dict()), dict(expected.state_dict())) == []
    # The average outlives the runtime, and is a plain model that can be copied and evaluated.
    twin = copy.deepcopy(average)
    assert loss_of(twin).item() == loss_of(expected).item()


class Mixed(nn.Module):
    """A model with a frozen layer, and a layer and a batch normalization that are kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.kept, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.kept(self.frozen(x).to(self.kept.weight.dtype)).to(self.last.weight.dtype)
        found: torch.Tensor = self.last(self.norm(hidden))
        return found


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_averages_of_frozen_and_kept_parameters_and_of_buffers(when: str, use_buffers: bool) -> None:
    torch.manual_seed(0)
    model = Mixed()
    plain = copy.deepcopy(model)
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": use_buffers}
    average, expected = AveragedModel(model, **how), AveragedModel(plain, **how)
    batch = torch.randn(16, 8)
    with infinity.offload(
        model,
        torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2),
        budget=infinity.Budget(host="64MiB"),
        precision=infinity.Precision(compute="bf16", keep=("kept.*", "norm.*")),
        device="cpu",
    ) as runtime:
        if when == "after":
            average = AveragedModel(model, **how)
        for _ in range(3):
            model(batch).float().square().mean().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            average.update_parameters(model)
            for name, buffer in plain.named_buffers():
                buffer.copy_(model.get_buffer(name))
            updated(expected, plain, masters(runtime, model))
    assert {each.dtype for each in average.parameters()} == {torch.float32}
    assert differences(dict(average.state_dict()), dict(expected.state_dict())) == []
    update_bn([batch], average)
    update_bn([batch], expected)
    assert differences(dict(average.state_dict()), dict(expected.state_dict())) == []


def test_an_average_in_bf16_stays_one_of_the_parameters() -> None:
    model = nn.Linear(16, 4).to(torch.bfloat16)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with infinity.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), budget=infinity.Budget(host="64MiB"), device="cpu"
    ) as runtime:
        model(torch.ones(2, 16)).sum().backward()
        runtime.optimizer.step()
        average.update_parameters(model)
        assert differences(dict(average.module.state_dict()), dict(model.state_dict())) == []


def test_a_model_without_an_optimizer_has_no_masters() -> None:
    model = nn.Linear(16, 4)
    average = AveragedModel(model)
    with infinity.offload(model, None, budget=infinity.Budget(host="64MiB"), device="cpu") as runtime:
        average.update_parameters(model)
        assert torch.equal(average.module.weight, model.weight.detach().float())
        assert AveragedModel(model).module.weight.dtype == torch.bfloat16
        with pytest.raises(infinity.ConfigError, match="without an optimizer"), runtime.masters():
            pass


def test_averages_see_edits_and_a_default_device(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, compute="bf16") as runtime:
        train_step(model, runtime)
        with torch.no_grad():
            model.norm.weight.add_(1)
        with torch.device("meta"):
            average = AveragedModel(model, device="cpu")
            average.n_averaged = torch.tensor(1, device="cpu")
            average.update_parameters(model)
        assert torch.equal(average.module.norm.weight, model.norm.weight.detach().float())
        assert average.module.head.weight is average.module.embedding.weight


def test_averages_of_ones_own_read_masters(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, compute="bf16") as runtime:
        train_step(model, runtime)
        exact = masters(runtime, model)
        assert copy.deepcopy(model).norm.weight.dtype == torch.bfloat16
        with runtime.masters():
            twin = copy.deepcopy(model)
            shadow = [parameter.clone().detach() for parameter in model.parameters()]
            state = model.state_dict()
        assert differences({name: state[name] for name in exact}, exact) == []
        assert differences(dict(twin.named_parameters()), exact) == []
        train_step(model, runtime, 1)
        later = masters(runtime, model)
        with torch.no_grad(), runtime.masters():
            for mine, parameter in zip(shadow, model.parameters(), strict=True):
                mine.sub_(0.25 * (mine - parameter))
            for name, mine in twin.named_parameters():
                expected = exact[name].lerp(later[name], 0.25)
                assert torch.equal(mine.lerp(model.get_parameter(name), 0.25), expected)
                mine.lerp_(model.get_parameter(name).data, 0.25)
        for mine, (name, values) in zip(shadow, later.items(), strict=True):
            assert torch.equal(mine, exact[name] - 0.25 * (exact[name] - values))
            assert torch.equal(twin.get_parameter(name), exact[name].lerp(values, 0.25))
        weight, average = model.norm.weight, twin.norm.weight
        assert weight.detach().dtype == torch.bfloat16
        with torch.no_grad():
            for update in (
                lambda: torch.lerp(average, weight, 0.25),
                lambda: average.lerp_(weight, 0.25),
                lambda: torch._foreach_lerp_([average], [weight], 0.25),
            ):
                with pytest.raises(infinity.ConfigError, match=r"within `with runtime\.masters"):
                    update()


def test_masters_are_copies_to_be_read(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, compute="bf16") as runtime:
        train_step(model, runtime)
        before = masters(runtime, model)

        def assign() -> None:
            model.norm.weight.data = torch.zeros_like(model.norm.weight)

        with runtime.masters():
            for edit in (lambda: model.norm.weight.add_(1), assign):
                with pytest.raises(infinity.ConfigError, match="is unchanged"):
                    edit()
            with pytest.raises(infinity.ConfigError, match=r"called in runtime\.masters"):
                loss_of(model)
        assert differences(masters(runtime, model), before) == []
        train_step(model, runtime, 1)


def test_a_master_that_does_not_fit_in_ram_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 512)
    average = AveragedModel(model)
    with infinity.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), budget=infinity.Budget(host="64MiB"), device="cpu"
    ):
        real = machine.memory
        monkeypatch.setattr(machine, "memory", lambda: dataclasses.replace(real(), available=1 << 20))
        with pytest.raises(infinity.BudgetError, match=r"2 MiB was asked for"):
            average.update_parameters(model)
        with pytest.raises(infinity.BudgetError):
            AveragedModel(model)
