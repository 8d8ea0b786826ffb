"""Tests of gradients of zeros, which zero_grad(set_to_none=False) leaves: parameters that a step does not use
are updated, as in plain PyTorch.
"""

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
from parity import OPTIMIZERS, copied, differences, tensors_copied
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError

WIDTH, WIDE = 40, 120


class Branches(nn.Module):
    """A layer of two branches, of which a forward takes one, and a layer whose bias may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH)) for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        bias = self.last.bias if branch else None
        return nn.functional.linear(self.branches[branch](inputs), self.last.weight, bias)

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        return self(inputs, step % 2).float().pow(2).mean()


Zero = Callable[[nn.Module, torch.optim.Optimizer], Any]


def each_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_().zero_()


ZEROS: dict[str, Zero] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "children": lambda model, optimizer: [each.zero_grad(set_to_none=False) for each in model.children()],
    "each gradient": each_gradient,
}


@contextlib.contextmanager
def opened(
    directory: Path, *, optimizer: str = "adamw", home: str = "unified", compute: str = "fp32", **options: Any
) -> Iterator[tuple[Branches, Any]]:
    model = Branches()
    theirs = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2, weight_decay=0.1)
    precision = infinity.Precision(compute=compute)
    budget = budget_for(home, model, theirs, directory, precision, accumulation=options.get("accumulation"))
    with infinity.offload(
        model, theirs, budget=budget, precision=precision, device="cpu", **options
    ) as runtime:
        yield model, runtime


def trained(directory: Path, zero: Zero = ZEROS["optimizer"], steps: int = 5, **options: Any) -> list[Any]:
    """What a training comes to: the model's and the optimizer's state_dict."""
    with opened(directory, **options) as (model, runtime):
        for step in range(steps):
            model.loss(step).backward()
            runtime.optimizer.step()
            zero(model, runtime.optimizer)
        runtime.optimizer.step()
        return [copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())]


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("who", ZEROS)
def test_unused_parameters_are_updated_as_in_torch(who: str, optimizer: str, tmp_path: Path) -> None:
    plain = Branches()
    theirs = OPTIMIZERS[optimizer](plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        plain.loss(step).backward()
        theirs.step()
        ZEROS[who](plain, theirs)
    theirs.step()
    got = trained(tmp_path, ZEROS[who], optimizer=optimizer)
    expected = [plain.state_dict(), theirs.state_dict()]
    torch.testing.assert_close(got[0], dict(expected[0]), rtol=1e-5, atol=1e-6)
    assert got[1]["state"].keys() == expected[1]["state"].keys()
    for key, state in expected[1]["state"].items():
        assert got[1]["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(got[1]["state"][key][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("home", [home for home in HOMES if home != "unified"])
def test_the_same_bits_in_every_home(home: str, compute: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, compute=compute)
    assert differences(trained(tmp_path, home=home, compute=compute), expected) == []


@pytest.mark.usefixtures("kernels")
def test_the_same_bits_where_the_device_updates(updated: list[int], tmp_path: Path) -> None:  # noqa: F811
    expected = trained(tmp_path)
    assert updated == []
    assert differences(trained(tmp_path, home="device"), expected) == []
    assert updated


@pytest.mark.parametrize("home", ["unified", "nvme"])
def test_the_same_bits_with_eager_updates(home: str, tmp_path: Path) -> None:
    expected = trained(tmp_path)
    for who in ("optimizer", "model"):
        got = trained(tmp_path, ZEROS[who], home=home, update="eager", accumulation=1)
        assert differences(got, expected) == []


@pytest.mark.parametrize("home", ["unified", "nvme"])
def test_which_parameters_have_a_gradient_and_its_values(home: str, tmp_path: Path) -> None:
    plain = Branches()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    with opened(tmp_path, optimizer="plain_sgd", home=home) as (model, runtime):
        ours = runtime.optimizer

        def check() -> None:
            for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                copy = runtime.grad(mine)
                assert (copy is None, mine.grad is None) == (other.grad is None,) * 2, name
                if copy is not None:
                    assert torch.equal(copy, other.grad) and copy.stride() == other.grad.stride(), name

        def both(act: Callable[[Any, Any, Any], object]) -> None:
            act(model, ours, runtime.clip_grad_norm_)
            act(plain, theirs, lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm))
            check()

        both(lambda model, optimizer, clip: optimizer.zero_grad(set_to_none=False))
        both(lambda model, optimizer, clip: model.loss(0).backward())
        both(lambda model, optimizer, clip: optimizer.zero_grad(set_to_none=False))
        both(lambda model, optimizer, clip: model.loss(1).backward())
        both(lambda model, optimizer, clip: setattr(model.branches[0][0].weight, "grad", None))
        both(lambda model, optimizer, clip: model.branches[1][0].weight.grad.zero_())
        assert runtime.clip_grad_norm_(1e9).item() == pytest.approx(
            nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item(), rel=1e-6
        )
        both(lambda model, optimizer, clip: model.zero_grad(set_to_none=False))
        both(lambda model, optimizer, clip: model.loss(1).backward())
        both(lambda model, optimizer, clip: optimizer.zero_grad(set_to_none=False))
        assert runtime.clip_grad_norm_(1.0) == 0
        both(lambda model, optimizer, clip: optimizer.step())
        both(lambda model, optimizer, clip: optimizer.zero_grad(set_to_none=False))
        both(lambda model, optimizer, clip: optimizer.zero_grad())
        with pytest.raises(ConfigError, match="no parameter has a gradient"):
            ours.step()


def test_micro_batches_that_run_together(tmp_path: Path) -> None:
    results = []
    for together in (False, True):
        with opened(tmp_path) as (model, runtime):
            for step in range(4):
                if together:
                    runtime.accumulate([step, step + 2], lambda number: model.loss(number) / 2)
                else:
                    for number in (step, step + 2):
                        (model.loss(number) / 2).backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad(set_to_none=False)
            results.append(copied(model.state_dict()))
    assert differences(*results) == []


def test_a_skipped_step_of_fp16(tmp_path: Path) -> None:
    with opened(tmp_path, compute="fp16") as (model, runtime):
        weight = model.branches[0][0].weight
        before = model.state_dict()["branches.0.0.weight"]
        (model.loss(0) * torch.inf).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad(set_to_none=False)
        assert len(runtime.optimizer.state) == 0
        assert not runtime.grad(weight).any()
        model.loss(1).backward()  # at another loss scale
        runtime.optimizer.step()
        assert runtime.optimizer.state[weight]["step"] == 1
        assert not runtime.optimizer.state[weight]["exp_avg"].any()
        decayed = before.float() * (1 - 1e-2 * 0.1)
        torch.testing.assert_close(
            model.state_dict()["branches.0.0.weight"].float(), decayed, rtol=2e-3, atol=0
        )


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_gradients_set_to_none_end_a_step(update: str, tmp_path: Path) -> None:
    def set_to_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    options: dict[str, Any] = {"update": update, "accumulation": 1, "optimizer": "adamw"}
    ends: list[Zero] = [
        lambda model, optimizer: optimizer.zero_grad(),
        set_to_none,
        lambda model, optimizer: model.zero_grad(),
    ]
    results = []
    for end, zeros in itertools.product(ends, (False, True)):
        with opened(tmp_path, **options) as (model, runtime):
            for step in range(4):
                model.loss(step).backward()
                if update == "lazy":
                    runtime.clip_grad_norm_(0.01)
                runtime.optimizer.step()
                if zeros:
                    model.zero_grad(set_to_none=False)
                end(model, runtime.optimizer)
                assert all(each.grad is None for each in model.parameters())
            results.append(copied(model.state_dict()))
    for each in results[1:]:
        assert differences(each, results[0]) == []
