"""What the runtime itself takes: counted for a model without data, and measured on tiny ones."""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import infinity
from infinity import rehearsal
from infinity.config import Precision
from infinity.estimate import StepEstimate, estimate_step
from infinity.rehearsal import Overhead, overhead

CPU = torch.device("cpu")


def estimated(model: nn.Module, x: torch.Tensor, *, train: bool) -> StepEstimate:
    found = estimate_step(model, (x,), precision=Precision(compute="fp32"), device=CPU, train=train)
    assert found is not None
    return found


def packed(model: nn.Module, x: torch.Tensor) -> int:
    """How often autograd calls the hooks of saved tensors in a real forward."""
    calls = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        model(x)
    return len(calls)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x).exp())


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)), Tied()])
def test_an_estimate_counts_what_autograd_saves(model: nn.Module) -> None:
    x = torch.ones(2, 4)
    found = estimated(model, x, train=True)
    assert found.saved == packed(model, x) > 0
    assert estimated(model, x, train=False).saved == 0


def test_an_estimate_counts_uses_not_parameters() -> None:
    x = torch.ones(2, 4)
    assert estimated(Tied(), x, train=True).uses == estimated(Tied(), x, train=False).uses == 2
    unused = nn.Sequential(nn.Linear(4, 4, bias=False))
    unused.register_parameter("never", nn.Parameter(torch.ones(3)))
    assert estimated(unused, x, train=True).uses == 1


def test_counting_leaves_activations_alone() -> None:
    """Saved tensors share the storages of those that the forward made."""
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(5))), torch.ones(16, 16, requires_grad=True)
    found = estimated(model, x, train=True)
    # Five outcomes, the gradient of the last one, and the two between which a backward passes on.
    assert 5 * 1024 <= found.activations <= 8 * 1024


def test_an_overhead_is_linear_in_the_counts() -> None:
    found = Overhead(step=1.0, use=0.1, saved=0.01)
    assert found.seconds(0, 0) == 1.0
    assert found.seconds(20, 300) == pytest.approx(6.0)


@pytest.mark.parametrize("train", [True, False])
def test_a_rehearsal_leaves_no_trace(train: bool) -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    found = overhead(train=train)
    assert found.use >= 0 and found.saved >= 0 and found.step >= 0
    assert found.use > 0 or found.step > 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "region",
    [
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu"),
        functools.partial(torch.device, "meta"),
        FakeTensorMode,
    ],
    ids=["no_grad", "inference_mode", "autocast", "meta", "fake"],
)
def test_a_plan_is_made_in_any_region(region: Callable[[], AbstractContextManager[object]]) -> None:
    with region():
        found = overhead(train=True)
    assert found.use > 0 or found.step > 0


def test_differences_of_rounds_give_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds made up by a known rule, a few rounds slowed by others, are taken apart again."""
    costs = Overhead(step=0.002, use=0.0005, saved=0.0001)
    rounds = iter(range(10_000))

    def made_up(self: rehearsal._Rehearsal) -> float:
        burst = 0.5 if next(rounds) // 3 % 4 == 0 else 0.0
        return costs.seconds(self.uses, self.saved) + burst

    monkeypatch.setattr(rehearsal._Rehearsal, "seconds", made_up)
    found = overhead(train=True)
    assert found.use == pytest.approx(costs.use)
    assert found.saved == pytest.approx(costs.saved)
    assert found.step == pytest.approx(costs.step)


def test_only_a_plan_for_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    budget, x = infinity.Budget(host="64MiB"), (torch.ones(2, 4),)

    def compute(**more: float) -> float:
        calls = importlib.import_module("infinity.offload")  # the name in the package is the function
        monkeypatch.setattr(calls, "overhead", lambda *, train: Overhead(**more))
        monkeypatch.setattr(calls, "seconds_of", lambda *_: 1.0)
        found = infinity.plan(model, optimizer, budget=budget, example_inputs=x, device="cpu").prediction
        assert found is not None
        return found.compute

    assert compute() == pytest.approx(1.0, abs=1e-3)
    assert compute(step=0.5) == pytest.approx(1.5, abs=1e-3)
    assert compute(use=0.25) == pytest.approx(1.5, abs=1e-3)
