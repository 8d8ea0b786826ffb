"""Tests of models that register one buffer under several names: a resumed model shares it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import on_meta
from torch import Tensor, nn

import infinity


class Counting(nn.Module):
    """A linear layer that counts its forwards in a buffer."""

    count: Tensor

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", count)

    def forward(self, values: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(values)


def counting() -> nn.Sequential:
    """Two layers with one count."""
    count = torch.zeros(3)
    return nn.Sequential(Counting(count), Counting(count))


def offload(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    precision = infinity.Precision(compute="fp32")
    budget = infinity.Budget(host="8MiB")
    return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu", **options)


def counts(model: nn.Module) -> list[Tensor]:
    found = [module.count for module in model.modules() if isinstance(module, Counting)]
    assert len(found) == 2
    return found


def step(model: nn.Module, runtime: Any) -> None:
    model(torch.ones(2, 16)).sum().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


@pytest.mark.parametrize("meta", [True, False], ids=["meta", "real"])
def test_a_resumed_model_shares_its_buffers(meta: bool, tmp_path: Path) -> None:
    model = counting()
    with offload(model, checkpoint=tmp_path) as runtime:
        step(model, runtime)
        runtime.save().wait()
    model = on_meta(counting) if meta else counting()
    with offload(model, resume=tmp_path) as runtime:
        first, last = counts(model)
        assert first is last
        assert first.tolist() == [2.0] * 3
        step(model, runtime)
        assert counts(model)[1].tolist() == [4.0] * 3
        runtime.save().wait()
