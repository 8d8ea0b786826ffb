"""Tests of param groups that users change between steps: they count as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from torch import nn

import infinity
from infinity.errors import ConfigError


def made() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def optimizer_of(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model[0].parameters()), "lr": 1e-3},
        {"params": list(model[2].parameters()), "lr": 3e-2, "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
    return model(inputs).square().mean()


def moved(optimizer: Any) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def assigned(optimizer: Any) -> None:
    optimizer.param_groups = [dict(group, lr=1e-2) for group in optimizer.param_groups]


EDITS: dict[str, Callable[[Any], object]] = {
    "options": lambda optimizer: optimizer.param_groups[0].update(lr=5e-2, betas=(0.8, 0.9)),
    "groups exchanged": lambda optimizer: optimizer.param_groups.reverse(),
    "group removed": lambda optimizer: optimizer.param_groups.pop(),
    "parameter removed": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "parameter moved": moved,
    "groups assigned": assigned,
}


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"update": "eager", "accumulation": 1}], ids=["lazy", "eager"])
@pytest.mark.parametrize("how", EDITS)
def test_changes_count_as_in_torch(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                EDITS[how](optimizer)

    plain, model = made(), made()
    train(plain, optimizer_of(plain))
    theirs, precision = optimizer_of(model), infinity.Precision(compute="fp32")
    budget = budget_for("unified", model, theirs, tmp_path, precision)
    with infinity.offload(
        model, theirs, budget=budget, precision=precision, device="cpu", **options
    ) as runtime:
        scheduler = torch.optim.lr_scheduler.ConstantLR(runtime.optimizer, factor=1.0)
        train(model, runtime.optimizer)
        scheduler.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    model = made()
    theirs, precision = optimizer_of(model), infinity.Precision(compute="fp32")
    budget = budget_for("unified", model, theirs, tmp_path, precision)
    with infinity.offload(model, theirs, budget=budget, precision=precision, device="cpu") as runtime:
        optimizer, before = runtime.optimizer, model.state_dict()["0.weight"].clone()
        loss(model, 0).backward()
        with pytest.raises(ConfigError, match="another mapping"):
            optimizer.state = {}
        for wrong, said in ((model[2].bias, "2.bias is in .* twice"), (torch.ones(3), "no parameter of")):
            optimizer.param_groups[0]["params"].append(wrong)
            with pytest.raises(ConfigError, match=said):
                optimizer.step()
            optimizer.param_groups[0]["params"].pop()
        assert torch.equal(model.state_dict()["0.weight"], before)
        optimizer.step()
        assert not torch.equal(model.state_dict()["0.weight"], before)


def test_changes_in_a_step_of_eager_updates(tmp_path: Path) -> None:
    model = made()
    theirs, precision = optimizer_of(model), infinity.Precision(compute="fp32")
    budget = budget_for("unified", model, theirs, tmp_path, precision)
    with infinity.offload(
        model, theirs, budget=budget, precision=precision, device="cpu", update="eager", accumulation=1
    ) as runtime:
        loss(model, 0).backward()
        moved(runtime.optimizer)
        with pytest.raises(ConfigError, match="options were changed after"):
            runtime.optimizer.step()
