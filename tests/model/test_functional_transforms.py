"""Tests of torch's functional transforms over an offloaded model: the plain model's values, or a ConfigError.

After each transform, also after one that was refused or broken off, training goes on as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_runtime
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from infinity.activations import autograd_hooks
from infinity.errors import ConfigError

WIDTH = 12
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))


def dual(model: Any) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent.clone()


def dual_of_parameters(model: Any) -> Tensor:
    with forward_ad.dual_level():
        given = {
            name: forward_ad.make_dual(each.detach(), torch.ones(each.shape))
            for name, each in model.named_parameters()
        }
        return forward_ad.unpack_dual(functional_call(model, given, (X,))).tangent.clone()


def detached(model: Any) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters()}


def loss_of(model: Any) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().mean()


def of_parameters(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda parameters: functional_call(model, parameters, (X,)).square().mean()


def ones(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.ones(each.shape) for name, each in parameters.items()}


RIGHT: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda model: vmap(model)(X),
    "jvp": lambda model: jvp(model, (X,), (X,))[1],
    "jacfwd": lambda model: jacfwd(model)(X[0]),
    "forward_ad": dual,
    "forward_ad of parameters": dual_of_parameters,
    "jacrev": lambda model: jacrev(model)(X[0]),
    "jacfwd of jacrev": lambda model: jacfwd(jacrev(lambda x: model(x).sum()))(X[0]),
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "grad of a child": lambda model: grad(lambda x: model[0](x).sum())(X),
    "vjp": lambda model: vjp(model, X)[1](X)[0],
    "hessian": lambda model: hessian(lambda x: model(x).sum())(X[0]),
    "functionalize": lambda model: functionalize(model)(X),
    "functional_call": lambda model: functional_call(model, dict(model.named_parameters()), (X,)),
    "functional_call of other values": lambda model: functional_call(model, ones(detached(model)), (X,)),
    "functional_call of some": lambda model: functional_call(model, {"2.bias": torch.ones(WIDTH)}, (X,)),
    "gradients of parameters": lambda model: grad(loss_of(model))(dict(model.named_parameters()), X),
    "gradients of each sample": lambda model: vmap(grad(loss_of(model)), (None, 0))(detached(model), X),
    "vjp of parameters": lambda model: vjp(of_parameters(model), detached(model))[1](torch.tensor(1.0))[0],
    "jvp of parameters": lambda model: jvp(
        of_parameters(model), (detached(model),), (ones(detached(model)),)
    ),
    "stack_module_state": lambda model: stack_module_state([model, model])[0],
    "functional.jacobian": lambda model: functional.jacobian(model, X[0], vectorize=True),
    "functional.jvp": lambda model: functional.jvp(model, (X,), (X,))[1],
    "functional.hessian": lambda model: functional.hessian(lambda x: model(x).sum(), X[0]),
    "batched gradients": lambda model: torch.autograd.grad(
        model(X).sum(1), list(model.parameters()), torch.eye(4), is_grads_batched=True
    ),
    "symbolic_trace": lambda model: torch.fx.symbolic_trace(model)(X),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "linearize": lambda model: linearize(model, X),
    "export": lambda model: torch.export.export(model, (X,), strict=False),
    "trace": lambda model: torch.jit.trace(model, (X,)),
    "script": torch.jit.script,
    "make_fx": lambda model: make_fx(model)(X),
    "make_fx of a child": lambda model: make_fx(model[0])(X),
}


class Broken(Exception):
    """Raised inside of a transform."""


def broken(model: Any) -> None:
    def function(x: Tensor) -> Tensor:
        model(x)
        raise Broken

    grad(function)(X)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    model = made()
    with small_runtime.opened(model, tmp_path, device_factor=8) as runtime:  # torch.func.grad keeps views
        yield model, runtime


def check_training(model: Any, runtime: Any) -> None:
    """Check that the next backward has the gradients of plain PyTorch."""
    plain = made()
    for each in (plain, model):
        each(X).square().mean().backward()
    got = small_runtime.gradients(runtime, model)
    assert {name: each.grad for name, each in plain.named_parameters()}.keys() == got.keys()
    assert all(torch.equal(each.grad, got[name]) for name, each in plain.named_parameters())


@pytest.mark.parametrize("name", RIGHT)
def test_a_transform_has_the_plain_models_values(name: str, opened: tuple[Any, Any]) -> None:
    model, runtime = opened
    expected, got = (tree_leaves(RIGHT[name](each)) for each in (made(), model))
    assert expected
    for one, two in zip(expected, got, strict=True):
        assert torch.equal(one, two)
    check_training(model, runtime)


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_for_another_program_is_refused(name: str, opened: tuple[Any, Any]) -> None:
    model, runtime = opened
    with pytest.raises(ConfigError, match=r"Trace a plain copy \(copy.deepcopy\(model\)\)"):
        REFUSED[name](model)
    check_training(model, runtime)


def test_training_goes_on_after_a_broken_transform(opened: tuple[Any, Any]) -> None:
    model, runtime = opened
    with pytest.raises(Broken):
        broken(model)
    check_training(model, runtime)
    assert autograd_hooks.top() is None


def test_a_parameter_in_place_of_another_is_refused(opened: tuple[Any, Any]) -> None:
    model, _ = opened
    given = {"0.weight": nn.Parameter(torch.ones(24, WIDTH))}
    with pytest.raises(ConfigError, match=r"tensors that are no Parameters \(p.detach\(\)\)"):
        functional_call(model, given, (X,))
