"""Tests of autograd on a model whose pages rest on NVMe or in RAM.

Whatever users do with autograd gives the bits that the plain model gives, or raises the same error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import needs_cuda, places
from parity import differences
from small_runtime import TIED, WIDE, Gradients, in_both, loss_of, opened, train_step
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from zoo import entry

from infinity.errors import ConfigError

both_homes = places("nvme", "unified", cuda=("nvme", "host"))

Outcome = Any


def ids_for(model: nn.Module) -> Tensor:
    """Token ids of a batch for `model`, on its device. model: a model of the zoo's entry TIED."""
    return TIED.batch(0, 0)[0].to(model.norm.weight.device)


def inference(model: nn.Module, gradients: Gradients) -> Outcome:
    with torch.inference_mode():
        first = loss_of(model).item()
    with torch.no_grad():
        second = loss_of(model, 1).item()
    loss_of(model).backward()  # a graph can be recorded after inference
    return first, second, gradients()


def another_thread(model: nn.Module, gradients: Gradients) -> Outcome:
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(loss_of(model))

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    losses[0].backward()
    return losses[0].item(), gradients()


def whole_loop_in_another_thread(model: nn.Module, gradients: Gradients) -> Outcome:
    losses: list[float] = []

    def work() -> None:
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return losses, gradients()


def repeated_forwards(model: nn.Module, gradients: Gradients) -> Outcome:
    losses = [loss_of(model, step) for step in range(3)]
    (losses[0] + losses[2]).backward()
    return [loss.item() for loss in losses], gradients()


def two_losses(model: nn.Module, gradients: Gradients) -> Outcome:
    first, second = loss_of(model, 0), loss_of(model, 1)
    second.backward()
    between = gradients()
    first.backward()
    return between, gradients()


def two_losses_of_one_graph(model: nn.Module, gradients: Gradients) -> Outcome:
    outputs = model(ids_for(model))
    outputs[0].square().mean().backward(retain_graph=True)
    outputs[1].sin().sum().backward()
    return gradients()


def retained_graph(model: nn.Module, gradients: Gradients) -> Outcome:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once = gradients()
    loss.backward()
    return once, gradients()


def forward_without_backward(model: nn.Module, gradients: Gradients) -> Outcome:
    for step in range(3):
        loss_of(model, step)
    loss_of(model, 3).backward()
    return gradients()


def forward_that_raises(model: nn.Module, gradients: Gradients) -> Outcome:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].attention.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    handle.remove()
    loss_of(model).backward()
    return gradients()


def backward_that_raises(model: nn.Module, gradients: Gradients) -> Outcome:
    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    # The hook fails at the end of the backward pass, so that nothing of the pass is left undone.
    handle = model.embedding.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        loss_of(model).backward()
    handle.remove()
    return loss_of(model).item()


def grad_of_some(model: nn.Module, gradients: Gradients) -> Outcome:
    wanted = [model.get_parameter(WIDE), model.embedding.weight]
    first = torch.autograd.grad(loss_of(model), wanted)
    nothing = gradients()
    loss_of(model, 1).backward()
    return [each.detach().clone() for each in first], nothing, gradients()


def backward_into_some(model: nn.Module, gradients: Gradients) -> Outcome:
    loss_of(model).backward(inputs=[model.get_parameter(WIDE)])
    return gradients()


def other_peoples_hooks(model: nn.Module, gradients: Gradients) -> Outcome:
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.get_parameter(WIDE).register_hook(lambda gradient: gradient * 2)
    loss_of(model).backward()
    return seen, gradients()


def used_outside_the_model(model: nn.Module, gradients: Gradients) -> Outcome:
    penalty = sum(each.square().sum() for each in model.parameters())
    (loss_of(model) + 1e-3 * penalty).backward()
    return penalty.item(), gradients()


def one_block_alone(model: nn.Module, gradients: Gradients) -> Outcome:
    inputs = torch.linspace(-1, 1, 2 * 5 * 40, device=model.norm.weight.device)
    inputs = inputs.view(2, 5, 40).requires_grad_()
    model.blocks[0](inputs).square().mean().backward()
    assert inputs.grad is not None
    return inputs.grad.clone(), gradients()


ACTS: tuple[Callable[[nn.Module, Gradients], Outcome], ...] = (
    inference,
    another_thread,
    whole_loop_in_another_thread,
    repeated_forwards,
    two_losses,
    two_losses_of_one_graph,
    retained_graph,
    forward_without_backward,
    forward_that_raises,
    backward_that_raises,
    grad_of_some,
    backward_into_some,
    other_peoples_hooks,
    used_outside_the_model,
    one_block_alone,
)


@both_homes
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.replace("_", " "))
def test_as_in_plain_pytorch(
    act: Callable[[nn.Module, Gradients], Outcome], home: str, device: str, tmp_path: Path
) -> None:
    got, expected = in_both(act, tmp_path, home=home, device=device)
    assert differences(got, expected) == []


@places("device", "unified", cuda=("device", "nvme"))
def test_threads_may_evaluate_at_once(home: str, device: str, tmp_path: Path) -> None:
    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        losses: dict[int, float] = {}

        def evaluate(step: int) -> None:
            with torch.no_grad():
                losses[step] = loss_of(model, step).item()

        threads = [threading.Thread(target=evaluate, args=(step,)) for step in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return losses

    got, expected = in_both(act, tmp_path, home=home, device=device)
    assert differences(got, expected) == []


def test_a_page_that_came_in_inference_mode_serves_a_graph_later(tmp_path: Path) -> None:
    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        with torch.inference_mode():
            first = loss_of(model).item()
        loss_of(model).backward()  # the pages are still there
        return first, gradients()

    got, expected = in_both(act, tmp_path, device_factor=4)
    assert differences(got, expected) == []


@both_homes
@pytest.mark.parametrize("where", ["around the model", "inside it", "after it"])
def test_other_peoples_saved_tensors_hooks(where: str, home: str, device: str, tmp_path: Path) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> bytes | Tensor:
        packed.append(tensor.numel())
        return tensor.detach().clone()

    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        packed.clear()
        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        if where == "around the model":
            with hooks:
                loss_of(model).backward()
        elif where == "after it":
            outputs = model(ids_for(model))
            with hooks:
                outputs.square().mean().backward()
        else:
            mlp = model.blocks[0].mlp
            inside = mlp.forward

            def forward(x: Tensor) -> Tensor:
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    return inside(x)

            mlp.forward = forward
            loss_of(model).backward()
        assert packed
        return gradients()

    got, expected = in_both(act, tmp_path, home=home, device=device)
    assert differences(got, expected) == []


@both_homes
@pytest.mark.parametrize("name", ["convnet", "custom"])
def test_gradients_of_gradients(name: str, home: str, device: str, tmp_path: Path) -> None:
    model_of = entry(name)

    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        loss = loss_of(model, of=model_of)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(each.square().sum() for each in first)
        assert isinstance(penalty, Tensor)
        penalty.backward()
        return penalty.item(), gradients()

    # A graph of gradients keeps views of all weights that its operations take, so all of these need room.
    got, expected = in_both(
        act, tmp_path, home=home, device=device, of=model_of, device_factor=8 if home == "nvme" else 1
    )
    assert differences(got, expected) == []
    assert any(gradient is not None and bool(gradient.any()) for gradient in got[1].values())


@both_homes
def test_torch_func_on_another_model_while_a_runtime_is_open(home: str, device: str, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(device)
    weights = dict(other.named_parameters())
    rows = torch.randn(6, 5).to(device)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(other, weights, (row,)).sum()

    def per_row() -> dict[str, Tensor]:
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)

    expected = per_row()
    model = TIED.make(device)
    with opened(model, tmp_path, home=home) as runtime:
        assert differences(per_row(), expected) == []
        train_step(model, runtime)
        pending = loss_of(model, 1)
        assert differences(per_row(), expected) == []
        pending.backward()


@both_homes
def test_functional_call_of_the_model_itself_is_right_or_refused(
    home: str, device: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(4)
    plain, model = TIED.make(device), TIED.make(device)
    weights = {
        name: torch.randn(each.shape, generator=generator).to(device) / 10
        for name, each in plain.named_parameters()
    }
    inputs = ids_for(plain)
    expected = torch.func.functional_call(plain, weights, (inputs,))
    with opened(model, tmp_path, home=home) as runtime:
        with contextlib.suppress(ConfigError):
            assert torch.equal(torch.func.functional_call(model, weights, (inputs,)), expected)
        assert train_step(model, runtime) == loss_of(plain).item()


@both_homes
def test_evaluation_between_steps_sees_the_update_and_changes_nothing(
    home: str, device: str, tmp_path: Path
) -> None:
    losses: list[list[float]] = []
    for evaluates in (False, True):
        model = TIED.make(device)
        with opened(model, tmp_path, home=home) as runtime:
            losses.append([])
            seen = None
            for step in range(3):
                loss = train_step(model, runtime, step)
                assert seen is None or seen == loss
                losses[-1].append(loss)
                if evaluates:
                    with torch.no_grad():
                        model.eval()
                        seen = loss_of(model, step + 1).item()
                        model.train()
    assert losses[0] == losses[1]


class Product(torch.autograd.Function):
    """The product of a vector and a number. Both are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.scale)


def test_hooks_of_leaves_that_a_function_saves_stay(tmp_path: Path) -> None:
    def calls(model: nn.Module) -> Outcome:
        found: list[Any] = []
        x = torch.arange(3.0, requires_grad=True)
        model.scale.register_hook(lambda gradient: found.append(("parameter", gradient.item())))
        x.register_hook(lambda gradient: found.append(("input", gradient.tolist())))
        node = get_gradient_edge(x).node
        node.register_prehook(lambda gradients: found.append(("node", gradients[0].tolist())))
        for _ in range(2):
            model(x).sum().backward()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.sum().backward()
        return sorted(found), x.grad

    expected = calls(Scaled())
    assert len(expected[0]) == 8
    model = Scaled()
    with opened(model, tmp_path, home="unified"):
        assert differences(calls(model), expected) == []


def edit_in_place(model: nn.Module) -> None:
    model.get_parameter(WIDE).mul_(2)


def edit_a_view(model: nn.Module) -> None:
    model.get_parameter(WIDE)[3].zero_()


def edit_many(model: nn.Module) -> None:
    torch._foreach_add_([model.get_parameter(WIDE), model.norm.weight], 1.0)


@pytest.mark.parametrize(
    "edit, home, device",
    [
        (edit_in_place, "nvme", "cpu"),
        (edit_in_place, "unified", "cpu"),
        (edit_a_view, "nvme", "cpu"),
        (edit_a_view, "unified", "cpu"),
        (edit_many, "unified", "cpu"),  # one operation on two pages: no room where the budget is smallest
        pytest.param(edit_in_place, "nvme", "cuda", marks=needs_cuda),
        pytest.param(edit_a_view, "host", "cuda", marks=needs_cuda),
        pytest.param(edit_many, "device", "cuda", marks=needs_cuda),
    ],
)
def test_editing_between_forward_and_backward_is_pytorchs_error(
    edit: Callable[[nn.Module], None], home: str, device: str, tmp_path: Path
) -> None:
    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        loss = loss_of(model)
        with torch.no_grad():
            edit(model)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            loss.backward()
        return loss_of(model).item()

    got, expected = in_both(act, tmp_path, home=home, device=device)
    assert got == expected


@both_homes
def test_a_changed_activation_is_pytorchs_error(home: str, device: str, tmp_path: Path) -> None:
    def act(model: nn.Module, gradients: Gradients) -> Outcome:
        kept: list[Tensor] = []
        handle = model.blocks[0].mlp[1].register_forward_hook(lambda _, inputs, __: kept.append(inputs[0]))
        loss = loss_of(model)
        handle.remove()
        with torch.no_grad():
            kept[0].sin_()
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            loss.backward()
        return loss.item()

    got, expected = in_both(act, tmp_path, home=home, device=device)
    assert got == expected
