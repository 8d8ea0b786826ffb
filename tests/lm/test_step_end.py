"""Tests of what is kept at the end of a step: buffers and generators, for a step that is not finished."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from infinity.lm.loop import StepEnd


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def forward(model: nn.Module) -> None:
    model(torch.randn(8, 4))


def test_buffers_and_generators_go_back_to_the_last_end(model: nn.Module) -> None:
    kept = StepEnd(model)
    forward(model)
    kept.keep()
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    tensors = dict(model.named_buffers())
    assert int(buffers["1.num_batches_tracked"]) == 1
    expected = None
    for _ in range(2):
        forward(model)
        assert int(model[1].num_batches_tracked) == 2  # type: ignore[index]
        kept.restore()
        assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
        assert all(each is tensors[name] for name, each in model.named_buffers())
        found = draws()
        expected = expected or found
        assert found == expected
        kept.restore()


def test_a_buffer_that_was_replaced_is_the_former_tensor_again(model: nn.Module) -> None:
    former = model[1].running_mean  # type: ignore[index]
    kept = StepEnd(model)
    model[1].running_mean = torch.full((4,), 7.0)  # type: ignore[index]
    kept.restore()
    assert model[1].running_mean is former  # type: ignore[index]
    model[1].running_mean = torch.full((4,), 7.0)  # type: ignore[index]
    kept.keep()
    model[1].running_mean.add_(1)  # type: ignore[index]
    kept.restore()
    assert torch.equal(model[1].running_mean, torch.full((4,), 7.0))  # type: ignore[index]


def test_a_buffer_of_two_places_is_in_both_of_them_again() -> None:
    shared = torch.zeros(3)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for module in model:
        module.register_buffer("count", shared)
    kept = StepEnd(model)
    for value, module in enumerate(model):
        module.count = torch.full((3,), float(value))
    kept.restore()
    assert all(module.count is shared for module in model)
    shared.fill_(5)
    kept.keep()
    shared.fill_(6)
    kept.restore()
    assert shared.tolist() == [5.0] * 3
