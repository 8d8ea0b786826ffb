"""Tests that the norm of gradients is the root of one sum, rounded once, of the sums of squares of blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from device_arrays import squares
from device_units import kernels
from homes import HOMES
from small_runtime import TIED, gradients, loss_of, opened
from torch import nn

from infinity.cpu_adam import BLOCK
from infinity.gradients.exact_sum import ExactSum
from infinity.planning import twin_flow

__all__ = ["kernels"]

TINY = 2.0**-27
"""A gradient whose square is a quarter of the distance from 1.0 to the next float64."""
LAYERS, BLOCKS = 3, 12
"""The number of parameters of `Rows`, and the number of blocks of each."""


class Rows(nn.Module):
    """Linear layers without bias, whose weights have one block in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(BLOCK, BLOCKS, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def norm_with_one_at(place: int, home: str, directory: Path) -> float:
    """Return the norm of gradients of `Rows` that have one element other than 0 in each block: 1.0 in the
    block number `place`, and TINY in the others.
    """
    elements = torch.full((LAYERS * BLOCKS,), TINY)
    elements[place] = 1.0
    first = torch.zeros(1, BLOCK)
    first[0, 0] = 1.0
    model = Rows()
    with opened(model, directory, home=home) as runtime:
        on_device = home == "device" and twin_flow.has_kernels(torch.device("cpu"))
        assert bool(runtime.plan.updated_on_device) == on_device
        (model(first) * elements).sum().backward()
        norm = runtime._components.gradients.norm()
        assert isinstance(norm, float)
        return norm


def check_order(home: str, directory: Path) -> None:
    """Check that the norm is right wherever the large element is. Added one after the other to a sum of 1.0,
    the small squares would all be lost.
    """
    small = LAYERS * BLOCKS - 1
    expected = math.sqrt(1.0 + small * TINY**2)
    assert expected > 1.0 == 1.0 + TINY**2
    for place in (0, small // 2, small):
        assert norm_with_one_at(place, home, directory) == expected


@pytest.mark.parametrize("home", HOMES)
def test_the_norm_does_not_depend_on_an_order(home: str, tmp_path: Path) -> None:
    check_order(home, tmp_path)


def test_the_norm_of_gradients_on_the_device_does_not_depend_on_an_order(
    kernels: None, tmp_path: Path
) -> None:
    check_order("device", tmp_path)


def test_the_norm_is_of_all_blocks_of_all_gradients(tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path) as runtime:
        loss_of(model).backward()
        found = [each for each in gradients(runtime, model).values() if each is not None]
        blocks = [each for gradient in found for each in squares([gradient.flatten()])]
        held = runtime._components.gradients
        assert len(blocks) > len(found)
        assert held.squares().value() == math.fsum(blocks)
        assert held.norm() == math.sqrt(math.fsum(blocks))
        held.clip(held.norm() / 2, held.norm())
        assert held.squares().value() == math.fsum(blocks)  # clipping changes `unscale` alone


def test_a_norm_is_added_up_once_until_a_gradient_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = TIED.make(), list[int]()
    add = ExactSum.add

    def adding(self: ExactSum, *arrays: Any) -> None:
        counted.append(len(arrays))
        add(self, *arrays)

    def added() -> int:
        found = len(counted)
        counted.clear()
        return found

    monkeypatch.setattr(ExactSum, "add", adding)
    with opened(model, tmp_path) as runtime:
        first, *_ = model.parameters()
        loss_of(model).backward()
        norm = runtime.clip_grad_norm_(1.0)
        assert runtime.clip_grad_norm_(1.0) <= min(1.0, norm)
        runtime.optimizer.step()
        assert added() == 1
        runtime.optimizer.zero_grad()
        loss_of(model).backward()
        again = runtime.clip_grad_norm_(1e9)
        assert added() == 1 and again != norm
        for _ in range(2):
            assert first.grad.norm() < again
        assert added() == 1, "of one parameter"
        first.grad = None
        without = runtime.clip_grad_norm_(1e9)
        assert added() == 1 and without < again
        runtime.optimizer.zero_grad()
        norms = set()
        for number in range(2):
            loss_of(model, number).backward()
            norms.add(runtime._components.gradients.norm())
            assert added() == 1
        assert len(norms) == 2


@pytest.mark.parametrize("home", ["host", "unified"])
def test_gradients_whose_squares_exceed_float32_are_measured_and_used(home: str, tmp_path: Path) -> None:
    model = nn.Linear(5, 3, bias=False)
    before = model.weight.detach().clone()
    factors = torch.tensor([[1e37], [-2e37], [3e36]]).expand(3, 5)
    with opened(model, tmp_path, home=home) as runtime:
        (model.weight * factors).sum().backward()
        expected = factors.double().norm().item()
        assert runtime.clip_grad_norm_(1.0).item() == pytest.approx(expected, rel=1e-6)
        runtime.optimizer.step()
        after = model.state_dict()["weight"]
    assert bool(after.isfinite().all())
    assert bool((after != before).all())
