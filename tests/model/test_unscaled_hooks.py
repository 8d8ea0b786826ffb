"""Tests of what user code sees of gradients in fp16: the values of plain fp32, in every hook and `.grad`.

Each function in SIGHTS runs a model and its backward, and returns the gradients that it has seen. It runs on
a plain model in fp32 and on an offloaded one in fp16. The gradients of the parameters are compared, too, as
hooks may change them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runtime import opened
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

WIDTH = 16
Seen = Sequence["Tensor | None"]
Log = list[Any]
LIMIT = 4e-3


class Net(nn.Module):
    """Two linear layers; `hidden` is the tensor between them in the last forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.before_hidden: Callable[[Tensor], Any] = lambda hidden: None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.act(self.body(x))
        self.before_hidden(self.hidden)
        return self.head(self.hidden).float()


def loss(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def noted(log: Log) -> Callable[..., None]:
    """A hook that appends copies of the gradients that it gets to `log`."""

    def hook(*gradients: Any) -> None:
        for each in gradients:
            if isinstance(each, Tensor):
                log.append(each.clone())
            elif isinstance(each, (tuple, list)):
                hook(*each)

    return hook


def with_hook(model: Net, hook: Callable[[Tensor], Any]) -> None:
    model.before_hidden = lambda hidden: hidden.register_hook(hook)


# --- hooks of tensors ----------------------------------------------------------------------------------


def parameter_hook(model: Net, x: Tensor) -> Seen:
    log: Log = []
    model.head.weight.register_hook(noted(log))
    loss(model, x).backward()
    return log


def clamped_parameter(model: Net, x: Tensor) -> Seen:
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
    model.body.weight.register_hook(lambda gradient: gradient * 0.5)
    model.body.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
    loss(model, x).backward()
    return []


def hidden_hook(model: Net, x: Tensor) -> Seen:
    log: Log = []
    with_hook(model, noted(log))
    loss(model, x).backward()
    return log


def clamped_hidden(model: Net, x: Tensor) -> Seen:
    with_hook(model, lambda gradient: gradient.clamp(-LIMIT, LIMIT))
    loss(model, x).backward()
    return []


def in_place(model: Net, x: Tensor) -> Seen:
    def hook(gradient: Tensor) -> None:
        gradient.clamp_(-LIMIT, LIMIT)

    with_hook(model, hook)
    loss(model, x).backward()
    return []


def same(model: Net, x: Tensor) -> Seen:
    with_hook(model, lambda gradient: gradient)
    loss(model, x).backward()
    return []


def loss_hook(model: Net, x: Tensor) -> Seen:
    log: Log = []
    total = loss(model, x)
    total.register_hook(noted(log))
    total.backward()
    return log


def input_hook(model: Net, x: Tensor) -> Seen:
    log: Log = []
    x = x.requires_grad_()
    x.register_hook(noted(log))
    loss(model, x).backward()
    return [*log, x.grad]


def several(model: Net, x: Tensor) -> Seen:
    log: Log = []
    y = model(x)
    register_multi_grad_hook([model.hidden, y, model.head.bias], noted(log))
    register_multi_grad_hook([model.hidden, y], noted(log), mode="any")
    y.square().mean().backward()
    return log


def after_accumulation(model: Net, x: Tensor) -> Seen:
    log: Log = []
    x = x.requires_grad_()
    x.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad.clone()))
    loss(model, x).backward()
    return log


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def inner_grad(model: Net, x: Tensor) -> Seen:
    """A hook on the output of a Function that differentiates something else by itself."""
    log: Log = []
    other = torch.full((3,), 0.5, requires_grad=True)

    def hook(gradient: Tensor) -> None:
        with torch.enable_grad():
            squared = other.square()
            squared.register_hook(noted(log))
            log.extend(torch.autograd.grad(squared.sum(), [other]))
            (other * 3).sum().backward()

    y = Identity.apply(model(x))
    y.register_hook(hook)
    y.square().mean().backward()
    return [*log, other.grad]


# --- hooks of nodes and modules ------------------------------------------------------------------------


def node_hooks(model: Net, x: Tensor) -> Seen:
    log: Log = []
    y = model(x)
    squared = y.square()
    for tensor in (model.hidden, squared):
        tensor.grad_fn.register_prehook(noted(log))
        tensor.grad_fn.register_hook(noted(log))
    squared.mean().backward()
    return log


def changing_node_hooks(model: Net, x: Tensor) -> Seen:
    model(x)
    y = model.head(model.hidden)
    model.hidden.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-LIMIT, LIMIT),))
    model.hidden.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 0.5,))
    y.float().square().mean().backward()
    return []


def leaf_node_hooks(model: Net, x: Tensor) -> Seen:
    log: Log = []
    x = x.requires_grad_()
    nodes = [get_gradient_edge(x).node]
    with torch._C.DisableTorchFunctionSubclass():
        nodes.append(get_gradient_edge(model.head.weight).node)
    for node in nodes:
        node.register_prehook(noted(log))
        node.register_hook(noted(log))
    loss(model, x).backward()
    return log


def module_hooks(model: Net, x: Tensor) -> Seen:
    log: Log = []
    for module in (model.body, model.act, model.head, model):
        module.register_full_backward_pre_hook(lambda _, gradients: noted(log)(gradients))
        module.register_full_backward_hook(lambda _, inputs, outputs: noted(log)(inputs, outputs))
    loss(model, x.requires_grad_()).backward()
    return [*log, x.grad]


def changing_module_hooks(model: Net, x: Tensor) -> Seen:
    model.head.register_full_backward_pre_hook(lambda _, gradients: (gradients[0].clamp(-LIMIT, LIMIT),))
    model.act.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0].clamp(-LIMIT, LIMIT),))
    loss(model, x).backward()
    return []


def global_module_hooks(model: Net, x: Tensor) -> Seen:
    log: Log = []
    with (
        nn.modules.module.register_module_full_backward_hook(lambda _, inputs, outputs: noted(log)(inputs)),
        nn.modules.module.register_module_full_backward_pre_hook(lambda _, gradients: noted(log)(gradients)),
    ):
        loss(model, x.requires_grad_()).backward()
    return log


def old_module_hooks(model: Net, x: Tensor) -> Seen:
    log: Log = []
    model.act.register_backward_hook(lambda _, inputs, outputs: noted(log)(inputs, outputs))
    loss(model, x).backward()
    return log


# --- gradients in .grad --------------------------------------------------------------------------------


def retained(model: Net, x: Tensor) -> Seen:
    model.before_hidden = lambda hidden: hidden.retain_grad()
    total = loss(model, x)
    total.backward(retain_graph=True)
    once = model.hidden.grad.clone()
    total.backward()
    return [once, model.hidden.grad]


def retained_and_read_in_a_hook(model: Net, x: Tensor) -> Seen:
    log: Log = []
    model.before_hidden = lambda hidden: hidden.retain_grad()
    model.body.bias.register_hook(lambda _: log.append(model.hidden.grad.clone()))
    loss(model, x).backward()
    return log


def retained_then_edited(model: Net, x: Tensor) -> Seen:
    y = model(x)
    scaled = y * 2
    scaled.retain_grad()
    scaled += 1
    scaled.square().mean().backward()
    return [scaled.grad]


def of_inputs(model: Net, x: Tensor) -> Seen:
    x = x.requires_grad_()
    loss(model, x).backward()
    once = x.grad.clone()
    loss(model, x).backward()
    return [once, x.grad]


def into_a_hidden_one(model: Net, x: Tensor) -> Seen:
    y = model(x)
    y.square().mean().backward(inputs=[model.hidden, model.head.weight])
    return [model.hidden.grad]


def of_plain_modules(model: Net, x: Tensor) -> Seen:
    """Plain modules before and behind the model, with a hook that reads what came."""
    torch.manual_seed(5)
    first, last, log = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), []
    first.weight.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad.clone()))
    for _ in range(2):
        last(model(first(x.float()).to(x.dtype))).square().mean().backward()
    return [*log, *(each.grad for each in (*first.parameters(), *last.parameters()))]


def of_what_a_checkpoint_uses(model: Net, x: Tensor) -> Seen:
    """Two leaves that the recomputed forward of a reentrant checkpoint reaches, one of them alone."""
    factor, addend = (torch.full((WIDTH,), each, requires_grad=True) for each in (0.5, 0.25))
    factor.grad = torch.ones(WIDTH)
    x = x.requires_grad_()

    def part(x: Tensor) -> Tensor:
        return model(x) * factor + addend

    (checkpoint(part, x, use_reentrant=True) + addend).square().mean().backward()
    return [factor.grad, addend.grad, x.grad]


def after_accumulation_in_a_checkpoint(model: Net, x: Tensor) -> Seen:
    """A hook of a leaf that only the recomputed forward of a reentrant checkpoint reaches."""
    log: Log = []
    factor, x = torch.full((WIDTH,), 0.5, requires_grad=True), x.requires_grad_()
    factor.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad.clone()))
    for _ in range(2):
        checkpoint(lambda value: model(value) * factor, x, use_reentrant=True).square().mean().backward()
    return [*log, factor.grad, x.grad]


def twice_differentiated(model: Net, x: Tensor) -> Seen:
    x = x.requires_grad_()
    loss(model, x).backward(create_graph=True)
    first, x.grad = x.grad, None
    first.float().square().sum().backward()
    return [first.detach(), x.grad]


# --- torch.autograd.grad and its like ------------------------------------------------------------------


def grad_of_hidden(model: Net, x: Tensor) -> Seen:
    log: Log = []
    with_hook(model, noted(log))
    total = loss(model, x)
    return [*torch.autograd.grad(total, [model.hidden, model.body.weight]), *log]


def jacobian_and_products(model: Net, x: Tensor) -> Seen:
    x = x.float()
    functional = torch.autograd.functional
    return [
        functional.jacobian(lambda value: model(value).mean(0), x),
        functional.hvp(lambda value: loss(model, value) * 100, x, torch.ones_like(x))[1],
        functional.vjp(lambda value: model(value).mean(0), x, torch.ones(WIDTH))[1],
    ]


def grad_in_a_recomputed_forward(model: Net, x: Tensor) -> Seen:
    """A forward that differentiates, with a hook, and is recomputed in the backward."""
    log: Log = []

    def part(x: Tensor) -> Tensor:
        hidden = model.body(x)
        squared = hidden.square()
        squared.register_hook(noted(log))
        (gradient,) = torch.autograd.grad(squared.mean(), [hidden], create_graph=True)
        return model.head(hidden + gradient)

    checkpoint(part, x, use_reentrant=False).float().square().mean().backward()
    return log


SIGHTS = (
    parameter_hook,
    clamped_parameter,
    hidden_hook,
    clamped_hidden,
    in_place,
    same,
    loss_hook,
    input_hook,
    several,
    after_accumulation,
    inner_grad,
    node_hooks,
    changing_node_hooks,
    leaf_node_hooks,
    module_hooks,
    changing_module_hooks,
    global_module_hooks,
    old_module_hooks,
    retained,
    retained_and_read_in_a_hook,
    retained_then_edited,
    of_inputs,
    into_a_hidden_one,
    of_plain_modules,
    of_what_a_checkpoint_uses,
    after_accumulation_in_a_checkpoint,
    twice_differentiated,
    grad_of_hidden,
    jacobian_and_products,
    grad_in_a_recomputed_forward,
)


def batch(dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(got: Tensor | None, expected: Tensor | None) -> None:
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        atol = 5e-3 * expected.detach().abs().max().item()
        torch.testing.assert_close(got.float(), expected.detach(), rtol=2e-2, atol=atol)


@pytest.mark.parametrize("sight", SIGHTS, ids=lambda each: each.__name__)
@pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph=True", "ignore:Using a non-full backward"
)
def test_user_code_sees_true_gradients(sight: Callable[[Net, Tensor], Seen], tmp_path: Path) -> None:
    plain, model = Net(), Net()
    expected = sight(plain, batch(torch.float32))
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        got = sight(model, batch(torch.float16))
        assert len(got) == len(expected)
        for mine, other in zip(got, expected, strict=True):
            check(mine, other)
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            check(runtime.grad(parameter), other.grad)
    for each in (*plain.parameters(), *expected):
        if each is not None:
            each.grad = None  # create_graph makes a cycle


def test_hooks_that_are_older_than_the_runtime(tmp_path: Path) -> None:
    found: list[Log] = []
    for compute in (None, "fp16"):
        log: Log = []
        model, x = Net(), batch(torch.float32).requires_grad_()
        x.register_hook(noted(log))
        model.head.weight.register_hook(noted(log))
        model.body.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        model.act.register_full_backward_hook(lambda _, inputs, outputs, log=log: noted(log)(inputs, outputs))
        between = x.clone()
        between.register_hook(noted(log))
        between.retain_grad()
        if compute is None:
            loss(model, between).backward()
            log.append(model.body.weight.grad)
        else:
            with opened(model, tmp_path, home="unified", compute=compute) as runtime:
                loss(model, between).backward()
                log.append(runtime.grad(model.body.weight))
        found.append([*log, between.grad, x.grad])
    for expected, got in zip(*found, strict=True):
        check(got, expected)


def test_a_hook_of_a_node_that_is_older_sees_the_scale(tmp_path: Path) -> None:
    """What docs tell users who keep a graph from before their first runtime in fp16."""
    log: Log = []
    plain, model, x = Net(), Net(), batch(torch.float32).requires_grad_()
    for each in (plain, model):
        between, gone = x * 2, x * 2
        between.grad_fn.register_prehook(noted(log))
        gone.register_hook(noted(log))
        inputs = between + gone
        del gone
        if each is plain:
            loss(plain, inputs).backward()
            continue
        with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
            scale = runtime.stats.loss_scale
            assert scale > 1
            loss(model, inputs).backward()
    assert len(log) == 4
    for expected, got in zip(log[:2], log[2:], strict=True):
        check(got / scale, expected)


def test_hooks_outlive_the_runtime(tmp_path: Path) -> None:
    log: Log = []
    x = torch.ones(3, requires_grad=True)
    with opened(Net(), tmp_path, home="unified", compute="fp16"):
        y = x * 2
        y.register_hook(noted(log))
        y.retain_grad()
    y.sum().backward()
    assert torch.equal(log[0], torch.ones(3)) and torch.equal(y.grad, torch.ones(3))


def test_a_hook_that_looks_on_costs_no_bits(tmp_path: Path) -> None:
    """The gradients are so small that they underflow in what the hooks see."""
    with_hooks, without = Net(), Net()
    found = []
    for model in (without, with_hooks):
        with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
            seen: Log = []
            if model is with_hooks:
                with_hook(model, noted(seen))
                model.body.weight.register_hook(lambda gradient: gradient)
                model.act.register_full_backward_hook(
                    lambda _, inputs, outputs, seen=seen: noted(seen)(inputs)
                )
            (loss(model, batch(torch.float16)) * 2.0**-22).backward()
            assert all(not each.any() for each in seen)
            found.append(runtime.grad(model.body.weight))
    assert found[0].any() and torch.equal(*found)


def test_a_function_sees_the_scale_of_the_statistics(tmp_path: Path) -> None:
    """What docs tell authors of a torch.autograd.Function whose backward adds a gradient of its own."""
    seen: Log = []

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(gradient)
            return gradient + 0.001 * factor

    found = []
    plain, model = Net(), Net()
    factor = 1.0
    plain.head(Added.apply(plain.body(batch(torch.float32)))).sum().backward()
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        factor = runtime.stats.loss_scale
        assert factor > 1
        y = model.head(Added.apply(model.body(batch(torch.float16)))).float() * 0.01
        y.sum().backward()
        found.append(runtime.grad(model.body.bias))
    assert len(seen) == 2
    factor = 1.0
    plain.zero_grad()
    (plain.head(Added.apply(plain.body(batch(torch.float32)))) * 0.01).sum().backward()
    check(found[0], plain.body.bias.grad)


def test_a_function_multiplies_a_loss_of_its_own_by_the_scale(tmp_path: Path) -> None:
    """What docs tell authors of a torch.autograd.Function whose backward calls backward() on another loss."""
    factor = 1.0

    class Aside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, model: Net) -> Tensor:
            ctx.model, ctx.x = model, x.detach()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            with torch.enable_grad():
                aside = ctx.model.head(ctx.x).float().square().mean() * factor
            aside.backward()
            return gradient, None

    plain, model = Net(), Net()
    plain.head(Aside.apply(plain.body(batch(torch.float32)), plain)).sum().mul(0.01).backward()
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        factor = runtime.stats.loss_scale
        assert factor > 1
        model.head(Aside.apply(model.body(batch(torch.float16)), model)).float().sum().mul(0.01).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            check(runtime.grad(mine), other.grad)


def test_a_step_that_a_thread_of_autograd_runs(tmp_path: Path) -> None:
    """Deep recursion moves a backward inside of a backward to another thread of autograd's."""
    log: list[tuple[int, Tensor]] = []

    def nested(model: Net, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            y = model(x)
            if y.requires_grad:  # it is recomputed
                y.register_hook(lambda gradient: log.append((threading.get_ident(), gradient.clone())))
            return y
        return checkpoint(lambda value: nested(model, value, depth - 1), x, use_reentrant=True)

    plain, model = Net(), Net()
    nested(plain, batch(torch.float32).requires_grad_(), 70).square().mean().backward()
    with opened(model, tmp_path, home="unified", compute="fp16") as runtime:
        nested(model, batch(torch.float16).requires_grad_(), 70).square().mean().backward()
        check(runtime.grad(model.body.weight), plain.body.weight.grad)
    (_, expected), (thread, got) = log
    assert thread != threading.get_ident()
    check(got, expected)
