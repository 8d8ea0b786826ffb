"""Tests of torch's transforms where pages are away, or leave before the transform has ended.

Expectations are those of the same functions on the same model in plain PyTorch. In
test_functional_transforms.py pages stay where the model computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import evict_all
from small_runtime import opened
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from infinity.errors import BudgetError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

WIDTH = 2048
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))


class Scale(nn.Module):
    """A module whose operation saves the Parameter itself for backward, as those of norms do, not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def scales() -> nn.Sequential:
    """A model of six pages. Three times the smallest device budget has room for three, and none stays."""
    torch.manual_seed(3)
    return nn.Sequential(*[Scale() for _ in range(6)])


@contextlib.contextmanager
def both(directory: Path, room: int = 3) -> Iterator[tuple[Any, nn.Sequential, nn.Sequential]]:
    """Yield a runtime with all pages on NVMe, its model, and the same model in plain PyTorch.

    room: factor by which the device budget is larger than the smallest.
    """
    plain, model = scales(), scales()
    with opened(model, directory, device_factor=room) as runtime:
        parts = runtime._components
        with parts.pager.lock:
            evict_all(parts.prefetch_engine)
        assert all(page.residency is None for page in parts.pages)
        yield runtime, model, plain


def total(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x: model(x).square().sum()


def of_parameters(model: nn.Module) -> Callable[..., Tensor]:
    return lambda given, x: functional_call(model, given, (x,)).square().sum()


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def dual(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X.cos()))).tangent.clone()


def check_trains_on(runtime: Any, model: nn.Module, plain: nn.Module, *, rtol: float = 0) -> None:
    """Check that the next forward and backward have the loss and the gradients of plain PyTorch.

    rtol: for gradients.
    """
    runtime.optimizer.zero_grad()
    plain.zero_grad()
    losses = [total(each)(X) for each in (model, plain)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(runtime.grad(parameter), right.grad, rtol=rtol, atol=rtol)


def check_equal(function: Callable[[Any], Any], model: nn.Module, plain: nn.Module) -> None:
    got, expected = (tree_leaves(function(each)) for each in (model, plain))
    assert expected
    for ours, right in zip(got, expected, strict=True):
        assert type(ours) is Tensor and torch.equal(ours, right)


FITS: dict[str, Callable[[nn.Sequential], Any]] = {
    "grad": lambda model: grad(total(model))(X),
    "vjp": lambda model: vjp(model, X)[1](X),
    "jvp of grad": lambda model: jvp(grad(total(model)), (X,), (X,)),
    "vmap of grad": lambda model: vmap(grad(total(model)))(X),
    "grad of grad": lambda model: grad(lambda x: grad(total(model))(x).square().sum())(X),
    "grad of parameters": lambda model: grad(of_parameters(model))(named(model), X),
    "vmap of grad of parameters": lambda model: vmap(grad(of_parameters(model)), (None, 0))(named(model), X),
    "jvp of parameters": lambda model: jvp(
        lambda given: of_parameters(model)(given, X),
        (named(model),),
        ({name: torch.ones_like(each) for name, each in named(model).items()},),
    ),
    "grad of one parameter": lambda model: grad(lambda weight: weight.square().sum())(model[0].weight),
    "grad in grad of one parameter": lambda model: grad(
        lambda x: (grad(lambda weight: (weight * x).square().sum())(model[0].weight)).sum()
    )(X[0]),
    "vmap of one parameter": lambda model: vmap(lambda each: each * 2)(model[0].weight),
}
"""Functions that three pages have room for."""

FORWARD: dict[str, Callable[[nn.Sequential], Any]] = {
    "vmap": lambda model: vmap(model)(X),
    "jvp": lambda model: jvp(model, (X,), (X.cos(),)),
    "forward_ad": dual,
    "jacfwd": lambda model: jacfwd(lambda scale: model(X * scale).sum())(torch.ones(2, 1, 1)),
}
"""Functions that save nothing for a backward."""


@pytest.mark.parametrize("case", FITS)
def test_pages_that_are_away_are_fetched(case: str, tmp_path: Path) -> None:
    with both(tmp_path) as (runtime, model, plain):
        check_equal(FITS[case], model[3:], plain[3:])
        check_trains_on(runtime, model, plain)


@pytest.mark.parametrize("case", FORWARD)
def test_forward_mode_needs_no_more_room_than_a_forward(case: str, tmp_path: Path) -> None:
    with both(tmp_path, room=1) as (runtime, model, plain):
        check_equal(FORWARD[case], model, plain)
        check_trains_on(runtime, model, plain)


REVERSE: dict[str, Callable[[nn.Sequential], Any]] = {
    "grad": FITS["grad"],
    "vjp": FITS["vjp"],
    "jacrev": lambda model: jacrev(lambda scale: total(model)(X * scale))(torch.ones(1)),
    "hessian": lambda model: hessian(lambda scale: total(model)(X * scale))(torch.ones(1)),
    "grad of parameters": FITS["grad of parameters"],
    "functional.hvp": lambda model: functional.hvp(total(model), X, X),
}


@pytest.mark.parametrize("case", REVERSE)
def test_a_page_that_cannot_stay_until_backward_is_refused(case: str, tmp_path: Path) -> None:
    with both(tmp_path) as (runtime, model, plain):
        with pytest.raises(BudgetError):
            REVERSE[case](model)
        check_trains_on(runtime, model, plain)


@pytest.mark.parametrize("outer", ["grad", "jvp"])
def test_a_loss_of_derivatives_has_gradients(outer: str, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        if outer == "grad":
            return grad(total(model))(X).square().sum()
        value, tangent = jvp(model, (X,), (X.cos(),))
        return (value + tangent).square().sum()

    with both(tmp_path) as (runtime, model, plain):
        for each in (model[3:], plain[3:]):
            loss(each).backward()
        for parameter, right in zip(model[3:].parameters(), plain[3:].parameters(), strict=True):
            assert torch.equal(runtime.grad(parameter), right.grad)
        check_trains_on(runtime, model, plain)


class Forces(nn.Module):
    """A model whose forward differentiates its own energy, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.energy = nn.Sequential(Scale(), Scale())

    def forward(self, x: Tensor) -> Tensor:
        forces: Tensor = vmap(grad(total(self.energy)))(x)
        return self.energy(x) + forces


def test_a_forward_may_call_transforms(tmp_path: Path) -> None:
    plain, model = Forces(), Forces()
    with opened(model, tmp_path, device_factor=8) as runtime:
        # A transform's operations have views of their own, whose gradients autograd adds in another order.
        check_trains_on(runtime, model, plain, rtol=1e-5)
        with pytest.raises(ZeroDivisionError):
            model(grad(lambda x: model(x).sum() / (1 // 0))(X))
        check_trains_on(runtime, model, plain, rtol=1e-5)


def test_functionalize_refuses_parameters(tmp_path: Path) -> None:
    with both(tmp_path) as (_, model, _):
        with pytest.raises(ConfigError, match=r"offloaded parameter 0\.weight"):
            functionalize(torch.neg)(model[0].weight)
        assert torch.equal(functionalize(torch.neg)(X), -X)
