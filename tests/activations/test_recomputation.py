"""Tests of recomputed blocks: what they keep, what they compute, and what becomes of blocks that must not run
again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from counted_steps import counted
from homes import budget_for
from micro_batches import no_warnings, without_dropout
from parity import Recipe, copied, differences, paged, reference
from policy_runs import small_pages, smallest_budget
from small_runtime import gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Entry, entry

import infinity
from infinity.activations.fake_steps import Steps
from infinity.activations.recomputation import blocks_of, is_recomputed, recomputing
from infinity.lm.decoder import Decoder, DecoderConfig
from infinity.planning import fake_step
from infinity.planning.fake_step import run_fake_step
from infinity.planning.plan import Plan

FP32 = infinity.Precision(compute="fp32")
BUDGET = infinity.Budget(host="64MiB")
DIM = 16


class Half(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dim: int = DIM, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(nn.Module):
    """A stem, four blocks and a head. `call` says how the model calls a block."""

    def __init__(
        self,
        kind: Callable[[], nn.Module] = Half,
        call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x),
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(DIM, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def rows(count: int = 6, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def planned(model: nn.Module, *inputs: Any, activations: str = "recompute", **options: Any) -> Plan:
    given: dict[str, Any] = {"budget": BUDGET, "precision": FP32, "device": "cpu"}
    return infinity.plan(
        model, adamw(model), activations=activations, example_inputs=inputs, **{**given, **options}
    )


@contextmanager
def offloaded(model: nn.Module, activations: str, **options: Any) -> Iterator[infinity.Runtime]:
    given: dict[str, Any] = {"budget": BUDGET, "precision": FP32, "device": "cpu"}
    with infinity.offload(model, adamw(model), activations=activations, **{**given, **options}) as runtime:
        yield runtime


Found = tuple[list[float], list[dict[str, Tensor | None]], dict[str, Tensor], Tensor]


def trained(make: Callable[[], nn.Module], activations: str, steps: int = 2, **options: Any) -> Found:
    """Train a model, offloaded, and return (losses, gradients of each step, state_dict, state of the random
    number generator).
    """
    model = seeded(make)
    losses, found = [], []
    with offloaded(model, activations, **options) as runtime:
        torch.manual_seed(11)
        for _ in range(steps):
            loss = model(rows()).square().mean()
            loss.backward()
            losses.append(loss.item())
            found.append(gradients(runtime, model))
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        state = {name: each.clone() for name, each in model.state_dict().items()}
    return losses, found, state, torch.get_rng_state()


def assert_same(make: Callable[[], nn.Module], **options: Any) -> None:
    """Assert that recomputation changes no bit of a training, and that blocks were recomputed."""
    assert planned(seeded(make), rows()).residuals.recomputed
    assert differences(trained(make, "recompute", **options), trained(make, "keep", **options)) == []


# --- bytes ----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two layers of experts, each of which takes a fixed share of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Half() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for experts in self.layers:
            x = x + torch.cat([expert(part) for expert, part in zip(experts, x.chunk(3), strict=True)])
        return x


class Pictures(nn.Module):
    """A network of convolutions, whose blocks have running statistics or not."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(3))
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
        attn_implementation="eager",  # with "sdpa" transformers makes a mask for tensors without data only
    )
    return transformers.LlamaForCausalLM(config)


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(vocabulary=67, width=32, layers=2, heads=4, hidden=64))


IDS = torch.arange(18).view(2, 9) % 67
IMAGES = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(2))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "mlp": (Stack, rows(), 4),
    "decoder": (decoder, IDS, 2),
    "llama": (llama, IDS, 3),
    "convnet": (lambda: Pictures(lambda width: nn.GroupNorm(2, width)), IMAGES, 3),
    "experts": (Experts, rows(), 6),
    "tied": (zoo.Tied, IDS, 2),
}
"""Name -> function that makes the model, its input, the number of its blocks that are recomputed."""


def counted_again(model: nn.Module, x: Tensor) -> int:
    """The peak bytes of what the operations of an offloaded model's step allocate."""
    watch = fake_step._Watch()
    with watch:
        found = model(x)
        found = getattr(found, "logits", found)
        found.backward(torch.ones_like(found))
    return watch.peak


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each == "llama" else each for each in MODELS]
)
def test_a_real_step_takes_the_bytes_of_the_plan(name: str) -> None:
    make, x, count = MODELS[name]
    found = {}
    for policy in ("keep", "recompute"):
        plan = planned(seeded(make), x, activations=policy)
        assert plan.residuals.policy == policy
        assert len(plan.residuals.recomputed) == count * (policy == "recompute")
        model = seeded(make)
        with recomputing(model, plan.residuals.recomputed):
            assert counted(model, x) == plan.activations
        for budget in (BUDGET, infinity.Budget(device="32MiB", host="64MiB")):
            model = seeded(make)
            with offloaded(model, policy, budget=budget, example_inputs=(x,)) as runtime:
                assert runtime.plan.residuals == plan.residuals
                assert counted_again(model, x) == plan.activations
        found[policy] = plan
    kept, again = found["keep"], found["recompute"]
    assert again.activations < kept.activations
    assert again.work.forward == kept.work.forward
    assert sum(again.work.flops.values()) > sum(kept.work.flops.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["recompute+offload", "offload", "auto"])
@pytest.mark.parametrize("below", ["RAM", "NVMe"])
@pytest.mark.parametrize("memory", ["unified", "apart"])
def test_a_real_step_of_which_tensors_leave_takes_the_bytes_of_the_plan(
    name: str, policy: str, below: str, memory: str, tmp_path: Path
) -> None:
    make, x, _ = MODELS[name]
    with small_pages():
        least = smallest_budget(
            lambda budget: planned(seeded(make), x, activations=policy, budget=budget),
            memory,
            below,
            tmp_path,
            ample=False,
        )
        for more in (0, 40_000) if memory == "apart" else (0,):  # bytes with which some tensors are kept
            budget = replace(least, device=least.device and least.device + more)
            model = seeded(make)
            with offloaded(model, policy, budget=budget, example_inputs=(x,)) as runtime:
                plan, pages = runtime.plan, runtime._components.pager.residual
                assert counted_again(model, x) == plan.activations
                room = plan.residuals.room
                if room is None or pages is None:
                    assert room is pages
                    continue
                counts, fields = pages.counts, ("saved", "down", "up", "written", "read")
                assert {each: getattr(counts, each) for each in fields} == {
                    each: getattr(room, each) for each in fields
                }
                assert runtime._components.store.activations.counters.peak <= room.ram


# --- bits -----------------------------------------------------------------------------------------------

TRANSFORMER = entry("transformer")


@pytest.mark.parametrize(
    ("name", "home", "compute"),
    [
        ("transformer", "unified", "fp32"),
        ("tied", "unified", "bf16"),
        ("transformer", "nvme", "bf16"),
        ("encoder", "nvme", "fp32"),  # its norms come last, and have a page each that must leave
    ],
)
def test_every_bit_is_as_if_all_were_kept(name: str, home: str, compute: str, tmp_path: Path) -> None:
    each, recipe, runs = entry(name), Recipe(compute=compute, accumulate=2, steps=2), {}
    for policy in ("keep", "recompute"):
        runs[policy] = paged(each, recipe, home, tmp_path, activations=policy)
        runs[policy].optimizer["generator"] = torch.get_rng_state()
    assert differences(vars(runs["recompute"]), vars(runs["keep"])) == []
    if compute == "fp32":
        assert differences(runs["keep"].gradients[0], reference(each, recipe).gradients[0]) == []


SWEEP = [each for each in zoo.ENTRIES if blocks_of(each.make())]


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("home", ["unified", "unified-nvme", "host", "nvme", "mixed"])
@pytest.mark.parametrize("each", SWEEP, ids=str)
def test_every_bit_of_the_zoo(each: Entry, home: str, compute: str, backwards: int, tmp_path: Path) -> None:
    recipe = Recipe(compute=compute, accumulate=backwards, steps=2, clip=0.5)
    runs = {}
    for policy in ("keep", "recompute"):
        runs[policy] = paged(each, recipe, home, tmp_path, watch=True, activations=policy)
        runs[policy].optimizer["generator"] = torch.get_rng_state()
    assert differences(vars(runs["recompute"]), vars(runs["keep"])) == []


def accumulated(
    each: Entry, directory: Path, *, activations: str, recompute: bool, dropout: bool, compute: str
) -> tuple[Any, ...]:
    """Train with runtime.accumulate; returns (losses, gradients, state_dict, random state)."""
    model = each.make() if dropout else without_dropout(each.make())
    precision = infinity.Precision(compute=compute, keep=each.keep)
    budget = budget_for("nvme", model, adamw(model), directory, precision)
    assert budget.device_bytes is not None
    budget = replace(budget, device=4 * budget.device_bytes)  # a block's pages fit together
    with offloaded(model, activations, budget=budget, precision=precision) as runtime, no_warnings():
        torch.manual_seed(5)
        batches = [each.batch(0, micro) for micro in range(3)]
        losses = runtime.accumulate(
            batches, functools.partial(each.loss, model), together=3, recompute=recompute
        )
        found = gradients(runtime, model)
        runtime.optimizer.step()
        state = copied(model.state_dict())
    return losses, found, state, torch.get_rng_state()


@pytest.mark.parametrize("compute", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [False, True])
def test_micro_batches_that_run_together_have_the_same_bits(
    dropout: bool, compute: str, tmp_path: Path
) -> None:
    """With the policy, with accumulate(recompute=True), and with both. Without either, micro-batches stop
    within blocks, too, and dropout draws in another order.
    """
    run = functools.partial(accumulated, TRANSFORMER, tmp_path, dropout=dropout, compute=compute)
    first = run(activations="recompute", recompute=False)
    for policy, recompute in (("recompute", True), ("keep", True), *([] if dropout else [("keep", False)])):
        assert differences(run(activations=policy, recompute=recompute), first) == []


# --- how blocks are called ------------------------------------------------------------------------------


class Gated(Half):
    """A block that is called with tensors in keywords and containers, and returns a tuple."""

    def forward(self, x: Tensor, *, pair: Any, scale: float, skip: bool, more: Any) -> tuple[Tensor, Any]:  # type: ignore[override]
        y = super().forward(x) * pair[0] + pair[1][0]
        return (x if skip else y * scale + more["bias"]), {"y": y}


def call_gated(block: nn.Module, x: Tensor) -> Tensor:
    more = {"bias": x.mean(), "none": None}
    result, others = block(x, pair=(x.sigmoid(), [x]), scale=0.5, skip=False, more=more)
    return result + others["y"]


def test_keywords_containers_constants_and_tuples() -> None:
    assert_same(lambda: Stack(Gated, call_gated))


def test_a_block_that_is_called_twice() -> None:
    assert_same(lambda: Stack(call=lambda block, x: block(block(x) + 1)))


class Nested(nn.Module):
    """A block with blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Half() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](x))


def test_blocks_in_blocks() -> None:
    assert planned(seeded(lambda: Stack(Nested)), rows()).residuals.recomputed == tuple(
        f"blocks.{number}" for number in range(4)
    )
    assert_same(lambda: Stack(Nested))


def test_the_same_tensor_is_one_object_again() -> None:
    class Same(Half):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) if x is y else (x * y).sin() * super().forward(y)

    assert_same(lambda: Stack(Same, lambda block, x: block(x, y=x)))


def test_a_view_that_is_called_within_saved_tensor_hooks_of_the_user() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    found = []
    for policy in ("keep", "recompute"):
        packed.clear()
        model = seeded(Stack)
        with offloaded(model, policy) as runtime:
            torch.manual_seed(2)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(rows()).sum()
            loss.backward()
            found.append((loss.item(), gradients(runtime, model), len(packed)))
    assert differences(found[0][:2], found[1][:2]) == []
    assert found[0][2] > 2 * found[1][2] > 0


def test_autocast_is_as_in_the_forward() -> None:
    def call(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x).float()

    assert_same(lambda: Stack(call=call))


class Mixed(Half):
    """A block whose own forward multiplies an fp32 tensor by a parameter, outside of any module."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.ones(DIM, DIM) / DIM
        return super().forward(F.linear(x.float(), self.up.weight[:DIM]) @ table)


def test_operands_are_cast_as_in_the_forward() -> None:
    precision = infinity.Precision(compute="bf16", inputs="keep")
    assert_same(lambda: Stack(Mixed), precision=precision)


def test_graphs_that_are_kept_and_gradients_of_gradients() -> None:
    found = []
    for policy in ("keep", "recompute"):
        model = seeded(Stack).eval()
        with offloaded(model, policy) as runtime:
            x = rows().requires_grad_()
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            once = gradients(runtime, model)
            runtime.optimizer.zero_grad()
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            slope.square().sum().backward()
            found.append((once, gradients(runtime, model), slope.detach()))
    assert differences(*found) == []


def test_a_backward_into_some() -> None:
    found = []
    for policy in ("keep", "recompute"):
        model = seeded(Stack)
        with offloaded(model, policy):
            x = rows().requires_grad_()
            found.append(torch.autograd.grad(model(x).sum(), x)[0])
            del x
    assert torch.equal(*found)


def test_threads_of_their_own() -> None:
    expected = trained(Stack, "keep")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(trained(Stack, "recompute")))
    thread.start()
    thread.join()
    assert differences(found[0][:3], expected[:3]) == []


# --- when nothing is recomputed -------------------------------------------------------------------------


def calls_of(model: nn.Module) -> list[bool]:
    """A list to which each forward of a first linear layer of a block adds whether it was in a backward."""
    calls: list[bool] = []
    for block in blocks_of(model).values():
        block.up.register_forward_hook(lambda *_: calls.append(torch._C._current_graph_task_id() != -1))
    return calls


def test_a_forward_without_a_graph_keeps_nothing_to_recompute() -> None:
    model = seeded(Stack)
    calls = calls_of(model)
    with offloaded(model, "recompute"):
        model(rows()).sum().backward()
        assert calls == [False] * 4 + [True] * 4
        with torch.no_grad():
            expected = model.eval()(rows())
        with torch.inference_mode():
            assert torch.equal(model(rows()), expected)
        assert torch.equal(torch.func.vmap(model)(rows()), expected)
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            assert torch.equal(model(rows()), expected)
        assert len(calls) == 8 + 4 * 4


def test_the_users_hooks_on_a_block_run_once() -> None:
    model, seen = seeded(Stack), []
    model.blocks[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model.blocks[1].register_forward_hook(lambda *_: seen.append("after"))
    model.blocks[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    with offloaded(model, "recompute"):
        model(rows()).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_without_an_optimizer_nothing_is_recomputed() -> None:
    model = seeded(Stack)
    with infinity.offload(model, None, budget=BUDGET, device="cpu", activations="recompute") as runtime:
        assert runtime.plan.residuals.policy == "keep"
        assert not any(map(is_recomputed, model.blocks))


# --- copies, and the end --------------------------------------------------------------------------------


def test_copies_of_a_model_are_plain() -> None:
    model = seeded(lambda: Stack(call=call_plainly))
    with offloaded(model, "recompute"):
        assert all(map(is_recomputed, model.blocks))
        assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x"]
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in copies:
            assert not any(map(is_recomputed, each.blocks))
            assert torch.equal(each.eval()(rows()), model.eval()(rows()))
            with torch.no_grad():
                each.blocks[0].down.bias.add_(1)
            assert not torch.equal(each(rows()), model(rows()))


def call_plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def test_a_forward_of_the_users_own_is_recomputed_and_given_back() -> None:
    model, x = seeded(Stack), rows()
    own = model.blocks[2].forward
    doubled = lambda x: own(2 * x)  # noqa: E731
    model.blocks[2].forward = doubled
    assert planned(model, x).residuals.recomputed == tuple(f"blocks.{number}" for number in range(4))
    calls = calls_of(model)
    with offloaded(model, "recompute") as runtime:
        model(x).sum().backward()
        assert calls == [False] * 4 + [True] * 4
        runtime.optimizer.step()
        runtime.close(keep=True)
    assert model.blocks[2].forward is doubled
    assert "forward" not in vars(model.blocks[1])
    model(x).sum().backward()
    assert len(calls) == 12


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("again", [False, True])
def test_an_exception_in_a_block_leaves_nothing_behind(error: type[BaseException], again: bool) -> None:
    """again: the exception comes when the block runs again."""
    failing = []

    class Failing(Half):
        def forward(self, x: Tensor) -> Tensor:
            if failing and (torch._C._current_graph_task_id() != -1) == again:
                raise error("here")
            return super().forward(x)

    found = []
    for fails in (False, True):
        model = seeded(lambda: Stack(Failing))
        with offloaded(model, "recompute") as runtime:
            if fails:
                failing.append(1)
                with pytest.raises(error, match="here"):
                    model(rows()).sum().backward()
                failing.clear()
                runtime.optimizer.zero_grad()
            torch.manual_seed(4)
            model(rows()).sum().backward()
            found.append(gradients(runtime, model))
    assert differences(*found) == []


# --- blocks that are left alone -------------------------------------------------------------------------


class Counting(Half):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Noting(Half):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class InPlace(Half):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Cached(Half):
    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class FilledCache:
    """An object as transformers gives its layers unless they are called with use_cache=False."""


class Checkpointing(Half):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointing):
    reentrant = True


class Flagged(Half):
    gradient_checkpointing = True


def compiled() -> nn.Module:
    block = Half()
    block.compile(backend="eager")
    return block


ITSELF = "is recomputed by the model itself"
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batchnorm": (
        lambda: Stack(lambda: Half(norm=nn.BatchNorm1d)),
        "has running statistics (BatchNorm1d)",
    ),
    "buffer": (lambda: Stack(Counting), "changes its buffer calls"),
    "attribute": (lambda: Stack(Noting), "changes its attribute last"),
    "in place": (
        lambda: Stack(InPlace, lambda block, x: block(x * 1)),
        "changes a tensor that it is called with",
    ),
    "object": (
        lambda: Stack(Cached, lambda block, x: block(x, cache=threading.Event())),
        "is called with a Event, which it may change",
    ),
    "cache": (
        lambda: Stack(Cached, lambda block, x: block(x, cache=FilledCache())),
        "is called with a FilledCache, which it may change (call the model with use_cache=False)",
    ),
    "within": (lambda: Stack(Checkpointing), ITSELF),
    "reentrant": (lambda: Stack(Reentrant), ITSELF),
    "around": (lambda: Stack(call=lambda block, x: checkpoint(block, x, use_reentrant=False)), ITSELF),
    "flag": (lambda: Stack(Flagged), ITSELF),
    "compiled": (lambda: Stack(compiled), "is compiled"),
}


@pytest.mark.parametrize("name", LEFT)
def test_blocks_that_must_not_run_again_are_left_alone_and_named(name: str) -> None:
    make, reason = LEFT[name]
    plan = planned(seeded(make), rows())
    assert plan.activations is not None
    assert plan.activations == planned(seeded(make), rows(), activations="keep").activations
    assert plan.residuals.recomputed == ()
    assert plan.residuals.left_alone == tuple((f"blocks.{number}", reason) for number in range(4))
    line = f"activations: blocks.0, blocks.1, blocks.2 and 1 more do not run again: each block {reason}"
    assert line in str(plan)


@pytest.mark.parametrize("name", ["within", "reentrant", "around"])
def test_a_model_that_recomputes_by_itself_is_right_without_example_inputs(name: str) -> None:
    make, _ = LEFT[name]
    assert differences(trained(make, "recompute"), trained(make, "keep")) == []


@pytest.mark.filterwarnings("ignore:activations=")
@pytest.mark.parametrize(("name", "what"), [("buffer", "its buffer calls"), ("in place", "a tensor that")])
def test_a_change_that_no_dry_run_has_seen_is_an_error(name: str, what: str) -> None:
    make, _ = LEFT[name]
    model, error = seeded(make), f"The block blocks.0 changes {what}"
    with offloaded(model, "recompute"), pytest.raises(infinity.ConfigError, match=error):
        model(rows())
    model = seeded(make)
    with offloaded(model, "recompute", example_inputs=(rows(),)):
        model(rows()).sum().backward()


def test_a_policy_that_was_asked_for_and_leaves_blocks_alone_is_told() -> None:
    def told(make: Callable[[], nn.Module], activations: str = "recompute") -> list[str]:
        model = seeded(make)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with offloaded(model, activations, example_inputs=(rows(),)):
                pass
        return [str(each.message) for each in found]

    caching, reason = LEFT["cache"]
    for policy in ("recompute", "recompute+offload"):
        assert told(caching, policy) == [
            f'activations="{policy}" was asked for, but blocks.0, blocks.1, blocks.2 and 1 more do not run '
            f"again: each block {reason}."
        ]
    bare = told(lambda: nn.Sequential(nn.Linear(DIM, 1)))
    assert bare == [
        'activations="recompute" was asked for, but no block runs again, because the model has none that may.'
    ]
    assert told(Stack) == told(LEFT["within"][0]) == []


def test_auto_leaves_blocks_alone_without_a_warning() -> None:
    kinds = (kind() for kind in itertools.cycle((Half, Flagged, Counting)))
    model, x = seeded(lambda: Stack(kinds.__next__)), rows(1024)
    model.blocks.extend(itertools.islice(kinds, 2))
    least = next(iter(planned(model, x).smallest.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offloaded(model, "auto", example_inputs=(x,), budget=infinity.Budget(host=least)) as runtime:
            found = runtime.plan.residuals
    assert found.policy == "recompute"
    assert {reason for _, reason in found.left_alone} == {ITSELF, LEFT["buffer"][1]}


def test_an_object_that_no_dry_run_has_seen_is_told_once() -> None:
    make, _ = LEFT["object"]
    model, why = seeded(make), "not recomputed in backward: each is called with a Event"
    with offloaded(model, "recompute"), pytest.warns(UserWarning, match=why) as told:
        model(rows()).sum().backward()
        model(rows()).sum().backward()
    assert len([each for each in told if "recomputed" in str(each.message)]) == 1


def test_a_model_without_blocks_says_so() -> None:
    plan = planned(seeded(lambda: nn.Sequential(nn.Linear(DIM, 1))), rows())
    assert "activations: no block runs again, because the model has none that may" in str(plan)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(infinity.ConfigError, match='"auto", "keep", "recompute"'):
        planned(seeded(Stack), rows(), activations="offload it")


# --- auto -----------------------------------------------------------------------------------------------


def test_auto_keeps_what_fits_and_recomputes_what_does_not() -> None:
    model, x = seeded(Stack), rows(4096)
    kept, again = (planned(model, x, activations=policy) for policy in ("keep", "recompute"))
    assert again.activations < kept.activations
    roomy = planned(model, x, activations="auto")
    assert roomy.residuals == kept.residuals
    least = [each.smallest[next(iter(each.smallest))] for each in (again, kept)]
    budget = infinity.Budget(host=least[0])
    assert least[0] < least[1]
    with pytest.raises(infinity.BudgetError):
        planned(model, x, activations="keep", budget=budget)
    plan = planned(model, x, activations="auto", budget=budget)
    assert plan.residuals.recomputed == again.residuals.recomputed
    assert plan.activations == again.activations
    assert "4 blocks run again in backward, because not all activations fit" in str(plan)
    plan = planned(model, x, activations="auto", budget=infinity.Budget(host=least[0] - 4096))
    assert plan.residuals.policy == "recompute+offload"
    with pytest.raises(infinity.BudgetError) as error:
        planned(model, x, activations="auto", budget=infinity.Budget(host="64KiB"))
    assert error.value.needed < least[0]
    plan = planned(model, x, activations="auto", budget=infinity.Budget(host=error.value.needed))
    assert plan.residuals.policy != "keep"


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_auto_keeps_the_activations_of_the_last_blocks_that_fit(name: str) -> None:
    make, _, count = MODELS[name]
    x = rows(1024) if name == "mlp" else IDS.repeat(20, 3)
    model = seeded(make)
    kept, again = (planned(model, x, activations=policy) for policy in ("keep", "recompute"))
    least, most = (next(iter(each.smallest.values())) for each in (again, kept))
    numbers = []
    for part in (0.2, 0.5, 0.8):
        budget = infinity.Budget(host=int(least + part * (most - least)) // 4096 * 4096)
        plan = planned(model, x, activations="auto", budget=budget)
        found = plan.residuals
        assert (*found.recomputed, *found.kept) == again.residuals.recomputed
        real = seeded(make)
        with recomputing(real, found.recomputed):
            assert counted(real, x) == plan.activations
        numbers.append(len(found.recomputed))
        assert again.activations <= plan.activations < kept.activations
        assert (
            kept.work.flops[torch.float32] < plan.work.flops[torch.float32] <= again.work.flops[torch.float32]
        )
    assert numbers == sorted(numbers, reverse=True)
    assert 0 < numbers[-1] < count
    assert numbers[-1] < numbers[0] <= count
    with offloaded(seeded(make), "auto", budget=budget, example_inputs=(x,)) as runtime:
        blocks = blocks_of(runtime._model)
        assert [name for name in blocks if is_recomputed(blocks[name])] == [*found.recomputed]


@pytest.mark.parametrize("name", [*MODELS, "twice"])
def test_the_estimates_of_a_number_of_blocks_are_close(name: str) -> None:
    twice = (lambda: Stack(call=lambda block, x: block(block(x) + 1)), rows(), 4)
    make, x, count = (MODELS | {"twice": twice})[name]
    run = functools.partial(
        run_fake_step, seeded(make), (x,), precision=FP32, device=torch.device("cpu"), train=True
    )
    steps = Steps(run, [*blocks_of(seeded(make))], torch.device("cpu"), unified=True)
    assert len(steps.blocks) == count
    for number in range(count + 1):
        estimate, exact = steps.estimate(number), steps.recomputing(number)
        assert estimate.activations >= 0.99 * exact.activations
        assert estimate.activations <= 1.01 * exact.activations or name == "twice"
        assert 1 <= sum(estimate.work.flops.values()) / sum(exact.work.flops.values()) < 1.1


def test_auto_recomputes_what_fits_if_pages_then_need_not_move() -> None:
    """On a GPU of a machine file, whose rates are fixed, with little RAM and the other pages on disk."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(width=512, layers=4, heads=8, hidden=1472))
        ids = torch.empty(1, 4096, dtype=torch.long)
    budget = infinity.Budget(device="640MiB", host="64MiB", nvme={"/tmp": "10GiB"})
    options = {"budget": budget, "machine": "rtx4090-desktop", "device": "cuda", "update": "lazy"}
    plans = {
        policy: planned(model, ids, ids, activations=policy, precision=infinity.Precision(), **options)
        for policy in ("keep", "recompute", "auto")
    }
    least = {policy: plan.prediction.least for policy, plan in plans.items() if plan.prediction}
    assert least["auto"] < 0.95 * least["keep"]
    assert least["auto"] < least["recompute"] < least["keep"]
    found = plans["auto"].residuals
    assert 0 < len(found.recomputed) < 4
    assert len(found.recomputed) + len(found.kept) == 4
    assert "s with all kept" in str(plans["auto"])
