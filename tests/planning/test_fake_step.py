"""Tests of the dry run, which is a step of a fake copy of the model. It must count the bytes of a real step,
and nothing may be different after it.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import signal
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import counted_steps
import numpy as np
import pytest
import torch
from counted_steps import counted
from object_state import global_generators, state_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from zoo import ENTRIES, Entry, entry

import infinity
from infinity.cli.command import handled, interrupt
from infinity.planning import fake_step
from infinity.planning.fake_step import FakeStep, run_fake_step
from infinity.planning.predict import Work

CPU = torch.device("cpu")
FP32 = infinity.Precision(compute="fp32")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def dry(model: nn.Module, *inputs: Any, train: bool = True, **keywords: Any) -> FakeStep:
    return run_fake_step(model, keywords or inputs, precision=FP32, device=CPU, train=train)


def known(model: nn.Module, *inputs: Any) -> int:
    found = dry(model, *inputs)
    assert found.unknown is None
    assert found.activations is not None
    return found.activations


class Wide(nn.Module):
    """A residual network of 8 blocks, each four times as wide inside."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)
        )
        self.first, self.reentrant = nn.Linear(32, 32), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_a_checkpointed_step_takes_what_a_real_one_takes() -> None:
    x, bytes_of = torch.ones(64, 32), {}
    for reentrant in (None, True, False):
        bytes_of[reentrant] = known(Wide(reentrant), x)
        assert bytes_of[reentrant] == counted(Wide(reentrant), x)
    assert max(bytes_of[True], bytes_of[False]) < bytes_of[None] / 2


@pytest.mark.parametrize("each", ENTRIES, ids=str)
def test_nothing_of_a_model_changes_and_its_bytes_are_right(each: Entry) -> None:
    model, (inputs, _) = each.make(), each.batch(0, 0)
    before = state_of(model, inputs, global_generators())
    found = dry(model, inputs)
    assert state_of(model, inputs, global_generators()) == before
    if each.name == "mixture":  # asks which experts were chosen
        assert found.unknown is not None
        assert "values of tensors" in found.unknown
    else:
        assert found.activations == counted(each.make(), inputs)


@pytest.mark.parametrize(
    ("kind", "count"),
    [(nn.LSTM, 3), (nn.GRU, 2), (nn.RNN, 2), pytest.param(nn.LSTM, 60, marks=pytest.mark.slow)],
)
def test_recurrent_modules_take_what_real_ones_take(kind: type[nn.RNNBase], count: int) -> None:
    draw = random.Random(5)
    for number in range(count):
        batch, steps, inputs = (draw.randrange(1, most) for most in (9, 2 + count, 300))
        hidden = (64, 192, 256, draw.randrange(1, 300))[number % 4]  # rows of 256 elements are padded
        options: dict[str, Any] = {
            "batch_first": number % 2 == 0,
            "bidirectional": number % 3 == 0,
            "bias": number % 5 > 0,
        }
        for dtype, name in (torch.float32, "fp32"), (torch.bfloat16, "bf16"):
            model = kind(inputs, hidden, num_layers=2, dtype=dtype, **options)
            x = torch.randn(batch, steps, inputs, dtype=dtype)
            precision = infinity.Precision(compute=name)
            found = run_fake_step(model, (x,), precision=precision, device=CPU, train=True)
            assert found.activations == counted(model, x), (batch, steps, inputs, hidden, options, dtype)


@pytest.mark.parametrize("name", ["checkpointed", "reentrant", "convnet", "recurrent"])
def test_example_inputs_change_nothing_of_training(name: str) -> None:
    after = []
    for given in ({}, {"example_inputs": (entry(name).batch(0, 0)[0],)}):
        model = entry(name).make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        budget = infinity.Budget(host="64MiB")
        with infinity.offload(
            model, optimizer, budget=budget, precision=FP32, device="cpu", **given
        ) as runtime:
            assert (runtime.plan.activations is not None) == bool(given)
            losses = []
            for step in range(2):
                loss = entry(name).loss(model, entry(name).batch(step, 0))
                loss.backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                losses.append(loss.item())
            after.append((losses, state_of(dict(model.named_buffers()), global_generators())))
    assert after[0] == after[1]


class Stateful(nn.Module):
    """A model with state of many kinds, all of which its forward changes."""

    calls = 0
    shared: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(3), persistent=False)
        self.count, self.log, self.recent, self.seen = 0, [], deque(maxlen=3), Counter()
        self.table: Tensor | None = None
        self.noise = torch.Generator().manual_seed(3)
        self.numpy, self.random = np.random.default_rng(4), random.Random(5)
        self.array = np.zeros(3)
        self.child = nn.Identity()
        self.child.parent = weakref.ref(self)
        self.cached = functools.lru_cache(self.scale)
        self.note = self.log.append
        self.lock = threading.Lock()

    def scale(self, size: int) -> Tensor:
        return torch.full((size,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        assert self.child.parent() is self
        type(self).calls += 1
        with self.lock:
            self.count += 1
            self.note(x.mean())
        self.shared.append(x)
        self.recent.append(x)
        self.seen["forward"] += 1
        self.steps.add_(1)
        self.array += 1
        if self.table is None:
            self.table = torch.arange(8.0)
        self.noise.manual_seed(self.noise.initial_seed() + 1)
        noise = torch.randn(x.shape, generator=self.noise) * self.numpy.normal() * self.random.random()
        torch.manual_seed(int(np.random.randint(9)) + random.randrange(9))
        return self.last(torch.relu(self.first(x + noise))) + self.table * self.cached(8)


def test_state_of_every_kind_is_as_before() -> None:
    model = Stateful()
    before = state_of(model, global_generators(), Stateful.calls, Stateful.shared)
    assert known(model, X) > 0
    assert state_of(model, global_generators(), Stateful.calls, Stateful.shared) == before
    model(X)
    changed = set(before) ^ set(state_of(model, global_generators(), Stateful.calls, Stateful.shared))
    for name in ("count", "log", "recent", "seen", "steps", "array", "table", "noise", "numpy", "random"):
        assert any(name in line for line in changed), name


class Trainer:
    """An object of the user's, outside of the model, with a hook."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.outputs.append(output)
        return output * 2  # 128 bytes more, and a gradient


def test_hooks_that_a_step_does_not_call_may_hold_anything() -> None:
    model, thread = nn.Sequential(nn.Linear(8, 8)), threading.Thread()
    model[0].register_state_dict_post_hook(lambda *_: thread.name)
    model[0].register_load_state_dict_pre_hook(lambda *_: thread.name)
    assert known(model, X) > 0
    model[0].register_forward_hook(lambda *_: thread.name)
    assert dry(model, X).unknown == "0._forward_hooks cannot be copied: a thread"


def test_hooks_run_on_copies_of_what_they_hold() -> None:
    model, trainer, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Trainer(), []
    plain = known(model, X)
    model[0].register_forward_hook(trainer.hook)
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model.register_forward_pre_hook(lambda module, args, memo={}: memo.update(args=args))
    model[1].register_full_backward_hook(lambda *_: seen.append(2))
    old, calls = model[1].forward, [0]

    def patched(x: Tensor) -> Tensor:
        calls[0] += 1
        return old(x)

    model[1].forward = patched
    before = state_of(model, trainer, seen, calls)
    assert known(model, X) > plain
    assert state_of(model, trainer, seen, calls) == before
    assert (trainer.outputs, seen, calls) == ([], [], [0])


LOG: list[Any] = []
TABLES: dict[int, Tensor] = {}
CALLS = 0
GENERATOR = torch.Generator().manual_seed(2)
TEACHER = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
TOTAL = torch.zeros(2)
HISTOGRAM = np.zeros(2)


class Statistics:
    steps = 0


@functools.lru_cache
def positions(size: int) -> Tensor:
    return torch.arange(size).float()


def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function so that the attribute `calls` of the result gives the number of its calls."""
    count, calls = 0, []

    def called(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        calls.append(count)
        return function(*args)

    called.calls = calls
    return called


HIDDEN = types.SimpleNamespace()
"""As a package that is only imported: what it has is not looked at."""


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + HIDDEN.rows(8)


def test_a_cache_anywhere_in_the_process_keeps_no_tensor_without_data() -> None:
    HIDDEN.rows = functools.lru_cache(lambda size: torch.arange(size).float())
    model = Shifted(8, 8)
    first = known(model, X)
    assert HIDDEN.rows.cache_info().currsize == 0
    assert known(model, X) == first, "the table was made again"
    real = HIDDEN.rows(8)
    assert known(model, X) == first - real.nbytes
    assert HIDDEN.rows(8) is real, "what it had before stays"


class Worldly(nn.Module):
    """A model that uses, and changes, variables of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    @counting
    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        LOG.append(x)
        TOTAL.add_(1)
        Statistics.steps += 1
        HISTOGRAM[0] += 1
        counted_steps.noted = 1
        table = TABLES.setdefault(8, torch.arange(8.0))
        GENERATOR.manual_seed(GENERATOR.initial_seed() + 1)
        return TEACHER(self.first(x)) + torch.rand(8, generator=GENERATOR) + table + positions(8)


def test_variables_of_the_models_module_are_as_before() -> None:
    def world() -> list[str]:
        variables = (LOG, TABLES, CALLS, GENERATOR, TEACHER, TOTAL, HISTOGRAM)
        return state_of(*variables, Statistics.steps, Worldly.forward, "noted" in vars(counted_steps))

    positions.cache_clear()
    before = world()
    assert known(Worldly(), X) > 0
    assert world() == before
    assert type(positions(8)) is Tensor
    Worldly()(X).sum().backward()
    assert CALLS == len(LOG) == Statistics.steps == HISTOGRAM[0] == counted_steps.noted == 1
    assert Worldly.forward.calls == [1]
    del counted_steps.noted


def test_attributes_of_a_class_that_no_module_names_are_as_before() -> None:
    class Local(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Local.calls += 1
            Local.last = x
            return super().forward(x)

    assert known(Local(8, 8), X) > 0
    assert Local.calls == 0
    assert not hasattr(Local, "last")


class Copying:
    """An object with its own way to copy itself. It holds a tensor that copy.deepcopy refuses."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Copying:
        return Copying(copy.deepcopy(self.tensor, memo))


def test_objects_that_copy_themselves_get_fake_tensors_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.held = Copying(2 * torch.ones(3, requires_grad=True))
    assert known(model, X) > 0


@pytest.mark.parametrize(
    "normed",
    [weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_parametrized_modules_are_copied(normed: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(normed(nn.Linear(8, 8)))
    before = state_of(dict(model.named_parameters()), dict(model.named_buffers()))
    assert known(model, X) == counted(model, X)
    assert parametrize.is_parametrized(model[0]) == (normed not in {weight_norm, spectral_norm})
    if normed is not spectral_norm and normed is not parametrizations.spectral_norm:
        assert state_of(dict(model.named_parameters()), dict(model.named_buffers())) == before


def test_a_compiled_model_is_not_compiled_for_it() -> None:
    graphs, thread = [], threading.Thread()  # a compiler may hold what cannot be copied

    def backend(graph: Any, _: Any) -> Any:
        graphs.append((graph, thread))
        return graph.forward

    class Compiling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.squash = torch.compile(torch.tanh, backend=backend)

        @torch.compile(backend=backend)
        def inner(self, x: Tensor) -> Tensor:
            return self.first(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.squash(self.inner(x))

    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    whole, in_place = torch.compile(plain, backend=backend), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    plain._compile_kwargs = {"backend": backend}  # as Lightning notes it, where it is imported
    in_place.compile(backend=backend)
    found = {known(model, X) for model in (plain, whole, in_place, Compiling(), nn.Sequential(whole))}
    assert len(found) == 1
    assert graphs == []


class Asking(nn.Module):
    """A model whose forward does what `what` says with its hidden state."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.what = nn.Linear(8, 8), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.what == "item":
            return y * y.detach().std().item()
        if self.what == "numpy":
            return y * float(y.detach().float().numpy().std())
        if self.what == "branch":
            return y if y.sum() > 0 else -y
        if self.what == "pointer":
            assert y.data_ptr() != 0
        if self.what == "raise":
            raise KeyError("first\nsecond")
        return y


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("item", "the model needs values of tensors"),
        ("branch", "the model needs values of tensors"),
        ("numpy", "the dry run ended with RuntimeError: "),
        ("pointer", "the dry run ended with "),
        ("raise", "the dry run ended with KeyError: 'first\\nsecond'"),
    ],
)
def test_a_step_that_cannot_be_run_tells_the_reason(what: str, reason: str) -> None:
    found = dry(Asking(what), X)
    assert found.activations is None
    assert found.unknown is not None
    assert found.unknown.startswith(reason)
    assert "\n" not in found.unknown


def test_wrong_inputs_are_a_reason_and_the_plan_prints_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    budget = infinity.Budget(host="64MiB")
    for inputs, word in (((torch.ones(4, 9),), "RuntimeError"), ({"y": X}, "TypeError"), ((), "TypeError")):
        plan = infinity.plan(model, None, budget=budget, device="cpu", example_inputs=inputs)
        assert plan.activations is None
        assert plan.activations_unknown is not None
        assert word in plan.activations_unknown
        assert f"activations unknown: {plan.activations_unknown}" in str(plan)
    assert "activations unknown" not in str(infinity.plan(model, None, budget=budget, device="cpu"))


def test_a_runtime_without_a_dry_run_trains() -> None:
    model = Asking("numpy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = infinity.Budget(host="64MiB")
    with infinity.offload(model, optimizer, budget=budget, device="cpu", example_inputs=(X,)) as runtime:
        assert runtime.plan.activations_unknown is not None
        model(X).float().sum().backward()
        runtime.optimizer.step()
        assert runtime.plan.activations_unknown is None  # measured now
        assert "activations unknown" not in str(runtime.plan)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: (each for each in ()), "1.thing cannot be copied: cannot pickle 'generator' object"),
        (threading.Thread, "1.thing cannot be copied: a thread"),
        (
            lambda: [each for each in ({}.keys(),)],
            "1.thing cannot be copied: cannot pickle 'dict_keys' object",
        ),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_named(make: Callable[[], Any], reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    model[1].thing = make()
    found = dry(model, X)
    assert found.activations is None
    assert reason in (found.unknown or "")


def test_a_copy_has_limits(monkeypatch) -> None:
    model = nn.Linear(8, 8)
    model.numbers = [[] for _ in range(2000)]
    model.array = np.zeros(2000)
    assert known(model, X) > 0
    monkeypatch.setattr("infinity.planning.fake_model._MOST_OBJECTS", 1000)
    assert "more than 1000 objects" in (dry(model, X).unknown or "")
    del model.numbers
    monkeypatch.setattr("infinity.planning.fake_model._MOST_ARRAY_BYTES", 1000)
    assert "of numpy arrays" in (dry(model, X).unknown or "")


def test_inputs_and_their_containers_are_as_before() -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            batch["more"].hidden = self.first(batch.pop("x"))
            batch["more"].seen.append(1)
            return batch["more"].hidden

    batch = {"x": X.clone().requires_grad_(), "more": SimpleNamespace(seen=[])}
    before = state_of(batch)
    assert known(Taking(), batch) > 0
    assert state_of(batch) == before


def test_an_interrupt_restores_too() -> None:
    class Interrupting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            random.random()
            torch.manual_seed(5)
            LOG.append(x)
            raise KeyboardInterrupt

    before = state_of(LOG, global_generators())
    with pytest.raises(KeyboardInterrupt):
        dry(Interrupting(), X)
    assert state_of(LOG, global_generators()) == before


def test_a_signal_in_a_step_arrives_at_its_end(monkeypatch) -> None:
    """Raised in what torch calls for an operation, KeyboardInterrupt ended the process with SIGABRT."""
    ended = []
    backward = fake_step._backward
    monkeypatch.setattr(fake_step, "_backward", lambda output: ended.append(backward(output)))

    class Signalled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            LOG.append(x)
            signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    model = Signalled(8, 8)
    before = state_of(LOG, global_generators())
    with handled(interrupt, signal.SIGINT):
        with pytest.raises(KeyboardInterrupt):
            dry(model, X)
        assert signal.getsignal(signal.SIGINT) is interrupt
    assert ended == [None]
    assert state_of(LOG, global_generators()) == before


def test_saved_tensors_share_the_storages_of_what_the_forward_made() -> None:
    x = torch.ones(16, 16, requires_grad=True)
    # Five results, the last one's gradient, and the two gradients between which a backward passes on.
    assert 5 * 1024 <= known(nn.Sequential(*(nn.Tanh() for _ in range(5))), x) <= 8 * 1024


def test_products_count_by_dtype_and_other_operations_by_their_bytes() -> None:
    square = nn.Linear(4, 4, bias=False)
    assert dry(square, torch.ones(3, 4), train=False).work == Work({torch.float32: 2 * 3 * 4 * 4}, 0)
    # Backward begins with ones, which torch.ones_like makes from the output.
    forward = Work({torch.float32: 2 * 3 * 4 * 4}, 0)
    both = Work({torch.float32: 2 * 2 * 3 * 4 * 4}, 2 * 3 * 4 * 4, forward)
    assert dry(square, torch.ones(3, 4)).work == both
    assert dry(nn.Tanh(), torch.ones(3, 4), train=False).work == Work({}, 2 * 3 * 4 * 4)
    assert dry(nn.Flatten(), torch.ones(3, 4), train=False).work == Work({}, 0), "a view"


def test_attention_on_the_cpu_counts_as_two_products_forward_and_five_backward() -> None:
    x = torch.ones(2, 4, 32, 8, requires_grad=True)  # (batch, heads, sequence, width of a head)

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    assert dry(Attention(), x).work.flops == {torch.float32: 7 * 2 * (2 * 4) * 32 * 32 * 8}


def test_a_dry_run_does_the_work_of_a_real_step() -> None:
    model, inputs = entry("transformer").make(), entry("transformer").batch(0, 0)[0]
    watch = fake_step._Watch()
    with watch:
        fake_step._step(model, (inputs,), {}, watch, train=True)
    assert dry(model, inputs).work.flops == watch.work.flops
    assert dry(model, inputs).work.nbytes == pytest.approx(watch.work.nbytes, rel=0.01)


def test_a_step_for_cuda_without_cuda_runs_with_the_cpus_operators() -> None:
    device = torch.device("cuda")
    found = run_fake_step(Wide(None), (torch.ones(64, 32),), precision=FP32, device=device, train=True)
    assert found == dry(Wide(None), torch.ones(64, 32))


def test_the_json_of_the_command_has_the_reason(capsys, monkeypatch, tmp_path: Path) -> None:
    from infinity.cli import main

    def failing(*_: Any, **__: Any) -> FakeStep:
        return FakeStep(None, Work({}, 0), "a reason")

    monkeypatch.setattr("infinity.api.run_fake_step", failing)
    text = tmp_path / "text.txt"
    text.write_text("a text of some words\n" * 3000)
    assert main(["plan", "--model", "10m", "--data", str(text), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["activations_unknown"] == "a reason"
