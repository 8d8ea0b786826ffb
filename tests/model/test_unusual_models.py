"""Tests of unusual models and losses: each has the result that it has in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from homes import both_homes
from parity import copied, differences, tensors_copied
from small_runtime import opened, two_layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Read = Callable[[nn.Parameter], "Tensor | None"]


class Nothing(nn.Module):
    """A model with a linear layer, a frozen layer, and a module whose only parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.holder = nn.Module()
        self.holder.empty = nn.Parameter(torch.zeros(0, 5))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.layer(x)).square().sum() + self.holder.empty.sum()


@both_homes
def test_units_that_are_frozen_or_empty_have_no_gradients_and_states(home: str, tmp_path: Path) -> None:
    model = Nothing()
    with opened(model, tmp_path, home=home) as runtime:
        for _ in range(2):
            model.frozen.zero_grad()
            model(torch.ones(1, 64)).backward()
            assert model.frozen.weight.grad is None
            assert runtime.grad(model.frozen.weight) is None
            assert runtime.grad(model.holder.empty).shape == (0, 5)
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        assert runtime.optimizer.state[model.frozen.weight] == {}
        assert float(runtime.optimizer.state[model.holder.empty]["step"]) == 2
        state = runtime.optimizer.state_dict()
        runtime.optimizer.load_state_dict(state)
        del runtime.optimizer.state[model.frozen.weight]
        assert differences(state, runtime.optimizer.state_dict()) == []


class Negated(torch.autograd.Function):
    """The identity function, with a backward that returns the negated gradient as a view that torch negates
    lazily. Torch's own gradients of imaginary parts are such views.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        return torch._neg_view(grad.clone())


def test_a_gradient_that_is_negated_lazily(tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path) as runtime:
        Negated.apply(model[0].weight).sum().backward()
        assert torch.equal(runtime.grad(model[0].weight), -torch.ones(64, 64))


class Spectral(nn.Module):
    """A model that uses a real parameter as complex numbers, conjugated and negated lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 48).view(24, 2))
        self.other = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        other = self.other(torch.ones(64)).sum()
        numbers = torch.view_as_complex(self.weight).conj()
        squares = (numbers * numbers).imag.sum() * x.sum()
        return other + squares + (numbers.imag * self.weight[:, 0]).sum()


@both_homes
def test_saved_views_that_are_conjugated_or_negated_lazily(home: str, tmp_path: Path) -> None:
    plain, model = Spectral(), Spectral()
    x = torch.linspace(0, 2, 24)
    plain(x).backward()
    with opened(model, tmp_path, home=home) as runtime:
        model(x).backward()
        assert torch.equal(runtime.grad(model.weight), plain.weight.grad)


class Borrower(nn.Module):
    """A model whose forward calls another model. The other model is not registered as a submodule."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.others[0](self.first(x)).tanh())


def gradients_of_two(models: tuple[nn.Module, nn.Module], read: tuple[Read, Read]) -> list[Tensor | None]:
    """Run two backwards through two models, edit a weight, and return a list: the gradients of outer's
    parameters, then those of inner's parameters, then the edited weight.

    models: (outer, inner), where outer calls inner in its forward. read: for each model, the function that
    returns a parameter's gradient. The first backward starts from a loss of outer's output, the second from
    the product of a weight of outer and a weight of inner. The edit moves a weight of inner towards a weight
    of outer.
    """
    outer, inner = models
    outer(torch.linspace(-1, 1, 128).view(2, 64)).square().sum().backward()
    (inner[2].weight * outer.second.weight).square().sum().backward()
    with torch.no_grad():
        inner[0].weight.lerp_(outer.first.weight, 0.25)
    found = [read[0](each) for each in outer.parameters()] + [read[1](each) for each in inner.parameters()]
    return [*found, inner[0].weight.detach().clone()]


@both_homes
def test_two_runtimes_one_inside_of_the_other(home: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        inner = two_layers()
        return Borrower(inner), inner

    (tmp_path / "outer").mkdir()
    (tmp_path / "inner").mkdir()
    expected = gradients_of_two(make(), (lambda each: each.grad,) * 2)
    models = make()
    with (
        opened(models[0], tmp_path / "outer", home=home) as outer,
        opened(models[1], tmp_path / "inner", home=home) as inner,
    ):
        assert differences(gradients_of_two(models, (outer.grad, inner.grad)), expected) == []
        for runtime in (outer, inner):
            runtime.optimizer.step()


@both_homes
@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_what_torch_makes_by_default_changes_nothing(default: str, home: str, tmp_path: Path) -> None:
    results = []
    for given in (None, default):
        model, x = two_layers(), torch.linspace(-1, 1, 128).view(2, 64)
        if given == "meta":
            torch.set_default_device(given)
        elif given is not None:
            torch.set_default_dtype(getattr(torch, given))
        try:
            with opened(model, tmp_path, home=home, compute="bf16") as runtime:
                for _ in range(2):
                    model(x).square().sum().backward()
                    runtime.clip_grad_norm_(1.0)
                    runtime.optimizer.step()
                    gradient = runtime.grad(model[0].weight)
                    runtime.optimizer.zero_grad()
                states = tensors_copied(runtime.optimizer.state_dict())
                values = copied(model.state_dict())
            twin = two_layers()
            with opened(twin, tmp_path, home=home, compute="bf16") as runtime:
                twin.load_state_dict(values)
                runtime.optimizer.load_state_dict(states)
                loaded = tensors_copied(runtime.optimizer.state_dict())
        finally:
            torch.set_default_device(None)
            vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # torch 2.6 cannot read None
            torch.set_default_dtype(torch.float32)
        results.append([states, values, gradient, loaded])
    assert differences(*results) == []


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["the model", "a module"])
def test_torch_compile_leaves_the_runtime_alone(part: str, backend: str, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        return model(torch.linspace(-1, 1, 128).view(2, 64)).square().sum()

    torch.compiler.reset()
    plain, model = two_layers(), two_layers()
    loss_of(plain).backward()
    with opened(model, tmp_path) as runtime:
        compiled = model
        if part == "the model":
            compiled = torch.compile(model, backend=backend)
        else:
            model[0].forward = torch.compile(model[0].forward, backend=backend)
        loss = loss_of(compiled)
        loss.backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(runtime.grad(mine), other.grad)
        runtime.optimizer.step()
        after = loss_of(compiled).item()
        assert after != loss.item()
        assert after == pytest.approx(loss_of(model).item(), rel=1e-6)
    torch.compiler.reset()


def test_a_module_is_compiled_anew_while_there_are_gradients(tmp_path: Path) -> None:
    torch.compiler.reset()
    plain, model = two_layers(), two_layers()
    model.compile(backend="eager")
    with opened(model, tmp_path) as runtime:
        for rows in (4, 5):
            for each in (plain, model):
                each(torch.ones(rows, 64)).square().mean().backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                torch.testing.assert_close(runtime.grad(mine), other.grad)
    torch.compiler.reset()


def test_gradients_come_from_a_device_where_one_update_can_be_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = two_layers(), two_layers()
    monkeypatch.setattr("infinity.tiers.link.DeviceLink.direct", False)
    with opened(model, tmp_path) as runtime:
        assert runtime.plan.staging_bytes == runtime.plan.chunk_update_bytes
        for factor in (1.0, 2.0):
            for each in (plain, model):
                each(torch.full((2, 64), factor)).square().sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.grad(mine), other.grad)


@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
def test_parameters_larger_than_staging(home: str, tmp_path: Path) -> None:
    plain, model = two_layers(200), two_layers(200)
    before = copied(plain.state_dict())
    with opened(model, tmp_path, home=home, compute="bf16") as runtime:
        assert runtime.plan.staging_bytes == runtime.plan.chunk_update_bytes < model[0].weight.nbytes
        assert differences(copied(model.state_dict()), {k: v.bfloat16() for k, v in before.items()}) == []
        model.load_state_dict(model.state_dict())
        model(torch.ones(2, 200)).sum().backward()
        runtime.optimizer.step()
        states = tensors_copied(runtime.optimizer.state_dict())
        runtime.optimizer.load_state_dict(states)
        assert differences(tensors_copied(runtime.optimizer.state_dict()), states) == []


class Recomputing(nn.Module):
    """A model that uses its layers' weights without calling the layers, and recomputes in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def segment(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + 1]:
            x = torch.tanh(x @ layer.weight.t())
        return x

    def forward(self, x: Tensor) -> Tensor:
        for first in range(4):
            x = checkpoint(self.segment, x, first, use_reentrant=False)
        return x


@both_homes
def test_backward_into_some_while_it_recomputes(home: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = Recomputing()
    torch.manual_seed(3)
    model = Recomputing()
    x = torch.linspace(-1, 1, 128).view(2, 64)
    inputs = [each.layers[number].weight for each in (plain, model) for number in (0, 2)]
    plain(x).square().sum().backward(inputs=inputs[:2])
    with opened(model, tmp_path, home=home) as runtime:
        model(x).square().sum().backward(inputs=inputs[2:])
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert differences([runtime.grad(mine)], [other.grad]) == []
        torch.autograd.backward([model.layers[1].bias], torch.ones(64))
        assert torch.equal(runtime.grad(model.layers[1].bias), torch.ones(64))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() / 64 + model[0].weight.float().square().sum() / 8


def module_by_module(model: nn.Module, x: Tensor) -> Tensor:
    return model[2](torch.tanh(model[0](x))).float().square().mean() / 64


def into_the_model(model: nn.Module, x: Tensor) -> Tensor:
    return model(model[0](x)).float().square().mean() / 64


@both_homes
@pytest.mark.parametrize("loss", [penalty, module_by_module, into_the_model])
def test_parameters_used_outside_of_the_model_under_a_loss_scale(
    loss: Callable[[nn.Module, Tensor], Tensor], home: str, tmp_path: Path
) -> None:
    x = torch.linspace(-1, 1, 128).view(2, 64).half()
    plain, model = two_layers().half(), two_layers()
    loss(plain, x).backward()
    with opened(model, tmp_path, home=home, compute="fp16") as runtime:
        (alone,) = torch.autograd.grad(loss(model, x), [model[0].weight])
        torch.testing.assert_close(alone, plain[0].weight.grad, rtol=1e-2, atol=2e-5)
        loss(model, x).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(runtime.grad(mine), other.grad.float(), rtol=1e-2, atol=2e-5)
            assert bool(other.grad.any())
        with torch.no_grad():
            model[0].bias.detach().fill_(0.5)
        model[0].weight.detach().fill_(0.25)
        model[2].bias.data.fill_(0.125)
        model(x)
        state = model.state_dict()
        assert bool((state["0.weight"] == 0.25).all() and (state["0.bias"] == 0.5).all())
        assert bool((state["2.bias"] == 0.125).all())
