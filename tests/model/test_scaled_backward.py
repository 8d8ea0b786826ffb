"""Tests of gradients in fp16: every way from parameters to a loss gives the gradients of plain fp32.

Losses are multiplied by TINY, so that in fp16 the gradients of activations underflow to zero without a loss
scale. A loss that bypasses the scale gives gradients that are zero, or that are wrong by the scale.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runtime import opened
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from infinity.model.unscaled_hooks import current

TINY = 2.0**-20
WIDTH = 16


@dataclass
class Output:
    logits: Tensor
    rest: Any


class Holder:
    """An object that no container walk looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Net(nn.Module):
    """Two linear layers. `kind` is the form of what forward returns, or "loss"."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        y = self.head(hidden).float()
        self.kept = [hidden]
        if self.kind == "edited":
            return y  # which no operation has saved
        self.auxiliary = loss(y)
        return {
            "tensor": y,
            "dict": {"first": [y]},
            "dataclass": Output(y, None),
            "object": Holder(y),
            "distribution": torch.distributions.Normal(y, 1.0),
            "loss": loss(y),
        }[self.kind]


def loss(y: Tensor) -> Tensor:
    return y.float().square().mean() * TINY


class Twice(torch.autograd.Function):
    """Multiplies by two, in a backward whose gradients are made by a further backward inside of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (leaf * 2).backward(gradient)
        assert leaf.grad is not None
        return leaf.grad


def _checkpointed(reentrant: bool) -> Callable[[Net, Tensor], None]:
    def way(model: Net, x: Tensor) -> None:
        hidden = checkpoint(model.body, x.requires_grad_(reentrant), use_reentrant=reentrant)
        y = checkpoint(lambda h: model.head(torch.tanh(h)), hidden, use_reentrant=reentrant)
        loss(y).backward()

    return way


def _whole_checkpointed(model: Net, x: Tensor) -> None:
    """The root module and its loss in a reentrant checkpoint: the outer graph reaches no parameter."""
    checkpoint(lambda value: loss(model(value)), x.requires_grad_(), use_reentrant=True).backward()


def _hooked_child(model: Net, x: Tensor) -> None:
    found: list[Tensor] = []
    with model.body.register_forward_hook(lambda *args: found.append(args[2])):
        model(x)
    loss(found[0]).backward()


def _edited(model: Net, x: Tensor) -> None:
    model.kind = "edited"
    y = model(x)
    y *= 0.5
    total = loss(y)
    total /= 2
    total.backward()


def _edited_output(model: Net, x: Tensor) -> None:
    total = model(x)
    total /= 3
    total *= 2
    total.backward()


def _penalty(model: Net, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).sum(), [model.kept[0]], create_graph=True)
    (loss(gradient) + loss(model.kept[0])).backward()


def _double(model: Net, x: Tensor) -> None:
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    loss(gradient).backward()


def _twice_retained(model: Net, x: Tensor) -> None:
    total = loss(model(x))
    total.backward(retain_graph=True)
    total.backward()


def _some(model: Net, x: Tensor) -> None:
    torch.autograd.backward([loss(model(x))], inputs=[model.body.weight, model.head.bias])


def _edge(model: Net, x: Tensor) -> None:
    y = model(x)
    torch.autograd.backward([get_gradient_edge(y)], [torch.full_like(y, TINY)])


def _several_roots(model: Net, x: Tensor) -> None:
    y = model(x)
    torch.autograd.backward(
        [loss(y), model.auxiliary, y], [None, torch.tensor(0.5), torch.full_like(y, TINY)]
    )


def _inside_of_a_hook(model: Net, x: Tensor) -> None:
    other = loss(model(x))
    trigger = torch.ones(1, requires_grad=True)
    doubled = trigger * 2
    doubled.register_hook(lambda _: other.backward())
    doubled.sum().backward()


def _inside_of_a_hook_of_the_model(model: Net, x: Tensor) -> None:
    other = loss(model(x))
    y = model(-x)
    y.register_hook(lambda _: other.backward())
    loss(y).backward()


def _second_graph(model: Net, x: Tensor) -> None:
    loss(model(x)).backward(create_graph=True)


WAYS: dict[str, tuple[str, Callable[[Net, Tensor], None]]] = {
    "output": ("tensor", lambda m, x: loss(m(x)).backward()),
    "container": ("dict", lambda m, x: loss(m(x)["first"][0]).backward()),
    "dataclass": ("dataclass", lambda m, x: loss(m(x).logits).backward()),
    "object": ("object", lambda m, x: loss(m(x).value).backward()),
    "distribution": (
        "distribution",
        lambda m, x: (m(x).log_prob(torch.ones(WIDTH)).mean() * TINY).backward(),
    ),
    "loss in forward": ("loss", lambda m, x: m(x).backward()),
    "edited loss": ("loss", _edited_output),
    "edited output": ("tensor", _edited),
    "attribute": ("tensor", lambda m, x: (m(x), m.auxiliary.backward())[1]),
    "list attribute": ("tensor", lambda m, x: (m(x), loss(m.kept[0]).backward())[1]),
    "attribute and output": ("tensor", lambda m, x: (loss(m(x)) + m.auxiliary).backward()),
    "forward hook": ("tensor", _hooked_child),
    "child alone": ("tensor", lambda m, x: loss(m.head(torch.tanh(m.body(x)))).backward()),
    "into itself": ("tensor", lambda m, x: loss(m(m(x))).backward()),
    "weight decay": ("tensor", lambda m, x: (loss(m(x)) + loss(m.body.weight)).backward()),
    "weight alone": ("tensor", lambda m, x: m.body.weight.backward(torch.full_like(m.body.weight, TINY))),
    "tied head": ("tensor", lambda m, x: loss(functional.linear(m.body(x), m.body.weight)).backward()),
    "gradient penalty": ("tensor", _penalty),
    "gradient penalty of inputs": ("tensor", _double),
    "checkpoint": ("tensor", _checkpointed(False)),
    "reentrant checkpoint": ("tensor", _checkpointed(True)),
    "all in a reentrant checkpoint": ("tensor", _whole_checkpointed),
    "Function with a backward": ("tensor", lambda m, x: loss(m.head(Twice.apply(m.body(x)))).backward()),
    "two backwards": ("tensor", _twice_retained),
    "some parameters": ("tensor", _some),
    "gradient edge": ("tensor", _edge),
    "several roots": ("tensor", _several_roots),
    "in a hook": ("tensor", _inside_of_a_hook),
    "in a hook of the model": ("tensor", _inside_of_a_hook_of_the_model),
    "create_graph": ("tensor", _second_graph),
}
"""Name -> (form of the model's output, function that runs the model and a backward)."""


def batch(model: nn.Module) -> Tensor:
    """Inputs (4, WIDTH) in the dtype of the model's parameters, so that its children can be called alone."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)


def check(got: Tensor | None, expected: Tensor | None) -> None:
    """Assert that a gradient in fp16 is that of fp32, within fp16's rounding of the sums in it."""
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        atol = 5e-3 * expected.detach().abs().max().item()
        assert atol > 0
        torch.testing.assert_close(got.float(), expected.detach(), rtol=2e-2, atol=atol)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_every_way_to_a_loss(name: str, tmp_path: Path) -> None:
    kind, way = WAYS[name]
    plain, model = Net(kind), Net(kind)
    way(plain, batch(plain))
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        way(model, batch(model))
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            check(runtime.grad(mine), other.grad)
    for other in plain.parameters():
        other.grad = None  # create_graph makes a cycle


def test_without_a_scale_these_losses_underflow() -> None:
    half = Net().half()
    loss(half(batch(half))).backward()
    assert half.body.weight.grad is not None and not half.body.weight.grad.any()


def test_micro_batches_together(tmp_path: Path) -> None:
    plain, model = Net(), Net()
    parts = batch(plain).chunk(2)
    for part in parts:
        loss(plain(part)).backward()
    with opened(model, tmp_path, compute="fp16") as runtime:
        losses = runtime.accumulate(parts, lambda part: loss(model(part)), together=2)
        assert len(losses) == 2
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            check(runtime.grad(mine), other.grad)


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_two_runtimes_in_one_graph(compute: str, tmp_path: Path) -> None:
    """The second runtime has a smaller scale than the first, or none."""
    models = [Net(), Net(), Net(), Net()]
    loss(models[1](models[0](batch(models[0])))).backward()
    with (
        opened(models[2], tmp_path, home="unified", compute="fp16") as one,
        opened(models[3], tmp_path, home="unified", compute=compute) as two,
    ):
        if compute == "fp16":
            (models[3](batch(models[3])).sum() * float("inf")).backward()
            two.optimizer.step()
            two.optimizer.zero_grad()
            assert two.stats.loss_scale == one.stats.loss_scale / 2
        first, second = models[2:]
        loss(second(first(batch(first)))).backward()
        for runtime, paged, plain in ((one, first, models[0]), (two, second, models[1])):
            for mine, other in zip(paged.parameters(), plain.parameters(), strict=True):
                check(runtime.grad(mine), other.grad)


def test_threads_run_backwards_at_the_same_time(tmp_path: Path) -> None:
    """Both backwards reach one leaf outside of the models, and wait for each other in a hook."""
    shared = torch.ones(WIDTH, requires_grad=True)
    meeting = threading.Barrier(2, timeout=30)
    models = [Net(), Net()]
    failed: list[BaseException] = []

    def meet(_: Tensor) -> None:
        meeting.wait()

    def train(model: Net) -> None:
        try:
            y = model(shared * 1)
            y.register_hook(meet)
            loss(y).backward()
        except BaseException as error:  # the thread that waits for this one must hear of it
            failed.append(error)

    with (
        opened(models[0], tmp_path, home="unified", compute="fp16"),
        opened(models[1], tmp_path, home="unified", compute="fp16"),
    ):
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    plain = Net()
    inputs = torch.ones(WIDTH, requires_grad=True)
    loss(plain(inputs)).backward()
    assert inputs.grad is not None and shared.grad is not None
    check(shared.grad, 2 * inputs.grad)


def test_torch_is_as_before_when_the_last_runtime_is_closed(tmp_path: Path) -> None:
    def replaced() -> tuple[Any, ...]:
        return (
            torch.autograd.Variable._execution_engine,
            torch.Tensor.register_hook,
            torch.Tensor.retain_grad,
            torch.autograd.Function._register_hook,
        )

    before = replaced()
    attributes = set(vars(torch.Tensor)), set(vars(torch.autograd.Function))
    with opened(Net(), tmp_path, home="unified"):
        assert replaced() == before
    with opened(Net(), tmp_path, home="unified", compute="fp16"):
        with opened(Net(), tmp_path, home="unified", compute="fp16"):
            pass
        assert all(mine is not torchs for mine, torchs in zip(replaced(), before, strict=True))
    assert replaced() == before
    assert attributes == (set(vars(torch.Tensor)), set(vars(torch.autograd.Function)))


def test_another_engine_put_in_meanwhile_stays_and_works(tmp_path: Path) -> None:
    before = torch.autograd.Variable._execution_engine

    class Counting:
        def __init__(self, engine: Any) -> None:
            self.engine, self.calls = engine, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.engine.run_backward(*args, **kwargs)

    plain, model = Net(), Net()
    loss(plain(batch(plain))).backward()
    try:
        with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
            other = Counting(torch.autograd.Variable._execution_engine)
            torch.autograd.Variable._execution_engine = other
            loss(model(batch(model))).backward()
            check(runtime.grad(model.body.weight), plain.body.weight.grad)
        assert torch.autograd.Variable._execution_engine is other
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        assert other.calls == 2 and torch.equal(x.grad, torch.ones(2))
    finally:
        torch.autograd.Variable._execution_engine = before


def test_a_loss_in_fp16_loses_no_step(tmp_path: Path) -> None:
    model = Net()
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        model(batch(model)).half().square().mean().backward()
        assert torch.isfinite(runtime.grad(model.body.weight)).all()
        runtime.optimizer.step()
        assert runtime.stats.skipped_steps == 0


def test_nothing_of_a_backward_stays(tmp_path: Path) -> None:
    model, found = Net(), []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            found.append(weakref.ref(current()))
            return gradient

    x = torch.ones(WIDTH, requires_grad=True)
    with opened(model, tmp_path, home="unified", compute="fp16"):
        y = Looking.apply(model(x))
        y.retain_grad()
        loss(y).backward()
        assert current() is None and found[0]() is None and x.grad is not None


def test_a_backward_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model, plain = Net(), Net()
    expected, got = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)
    loss(plain(expected)).backward()

    def fail(_: Tensor) -> None:
        raise ValueError("a hook's")

    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        with got.register_hook(fail), pytest.raises(ValueError, match="a hook's"):
            loss(model(got)).backward()
        runtime.optimizer.zero_grad()
        assert got.grad is None
        loss(model(got)).backward()
        assert got.grad is not None and expected.grad is not None
        check(got.grad, expected.grad)
        check(runtime.grad(model.body.weight), plain.body.weight.grad)
