"""Tests that no more memory, leases, descriptors, threads and objects are in use after many steps than after
a few.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import both_homes, budget_for
from memory_in_use import Growth
from process_resources import check_nothing_left, resources
from small_runtime import files, loss_of, opened, two_layers
from torch import nn
from zoo import Batch, Entry, entry

import infinity
from infinity.activations import autograd_hooks
from infinity.prefetch import trace

WARM = 24
STEPS, FEW, MANY = 280, 120, 1048
"""Numbers of steps. STEPS: in the test of whole training steps. MANY: in the same test with -m slow. FEW: in
all other tests. Each of the INTERVALS then has a multiple of 4 steps, because inputs repeat after 4 steps.
"""
PROCESS_WARM = 400
"""Steps of whole training before those: the first test of a process fills caches of Python for so long."""
INTERVALS = 8
"""Into how many equal intervals the steps after the first WARM are divided. Memory is recorded after each."""
BYTES_PER_STEP = 16
"""Bytes a step by which the heap and the mappings may grow. A leaked allocation has at least 32 bytes."""
OBJECTS_PER_STEP = 0.5


@pytest.fixture
def full_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trace, which records a step's accesses to pages, grow to at most four accesses.

    If step() is never called, the trace grows up to its bound. The low bound is reached in the first step, so
    that the trace's growth does not look like a leak.
    """
    monkeypatch.setattr(trace, "MOST_ACCESSES", 4)


steps_never_end = pytest.mark.usefixtures("full_traces")


class Small(nn.Module):
    """A model of three linear layers. Its forward uses the first layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x


def rows(step: int, micro: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 64, generator=generator), torch.randint(64, (4,), generator=generator)


SMALL = Entry("small", Small, rows)


def settle(runtime: Any) -> None:
    """Complete all due updates of `runtime`, abandon its prefetches, and wait for all of its transfers."""
    if runtime._components.scheduler is not None:
        runtime._components.scheduler.complete_all()
    runtime._components.prefetch_engine.abandon()
    runtime._components.store.settle()
    for page in runtime._components.pages:
        page.home.settle(0, page.home.nbytes, True)


def held(runtime: Any) -> dict[str, Any]:
    """Return what `runtime` holds, after a garbage collection.

    "leases": name of a pool -> (leased bytes, number of leases). "requests": number of transfers under way.
    "objects": name of a class of infinity or torch -> number of its instances that are alive.
    """
    gc.collect()
    store, homes = runtime._components.store, [page.home for page in runtime._components.pages]
    return {
        "leases": {name: (pool.counters.leased, pool.counters.leases) for name, pool in store.pools.items()},
        "requests": sum(len(home.in_flight) for home in homes) + len(store._writes),
        "objects": Counter(
            type(each).__qualname__
            for each in gc.get_objects()
            if str(type(each).__module__).startswith(("infinity.", "torch"))
            and type(each) is not trace.Access
        ),
    }


def check_nothing_grows(runtime: Any, act: Callable[[int], None], steps: int) -> None:
    """Assert that `steps` calls of `act` leave no more in use than the first WARM of these calls did.

    This includes what `held` returns, descriptors, threads and memory. `act` gets the number of the call.
    """
    for step in range(WARM):
        act(step)
    settle(runtime)
    before, kernels, grown = held(runtime), resources(), Growth()
    grown.look(WARM)
    for step in range(WARM, steps):
        act(step)
        if (step + 1 - WARM) % ((steps - WARM) // INTERVALS) == 0:
            settle(runtime)
            grown.look(step + 1)
    after = held(runtime)
    check_nothing_left(kernels)
    assert {key: after[key] for key in after if key != "objects"} == {
        key: before[key] for key in before if key != "objects"
    }
    assert after["objects"] - before["objects"] == Counter()
    check_no_growth(grown)


def check_no_growth(grown: Growth) -> None:
    """Assert that the heap and the mappings each grow by at most BYTES_PER_STEP.

    Also assert that the number of Python's objects grows by at most OBJECTS_PER_STEP.
    """
    assert len(grown.steps) == INTERVALS + 1
    assert grown.per_step(grown.heap) <= BYTES_PER_STEP, list(grown.heap)
    assert grown.per_step(grown.objects) <= OBJECTS_PER_STEP, list(grown.objects)
    assert grown.per_step(grown.mapped) <= BYTES_PER_STEP, list(grown.mapped)


@pytest.mark.parametrize("steps", [STEPS, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "home", ["mixed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nvme", "unified-nvme"))]
)
def test_training_holds_no_more_after_many_steps(home: str, steps: int, tmp_path: Path) -> None:
    model = SMALL.make()
    with opened(model, tmp_path, home=home, compute="bf16") as runtime:

        def act(step: int) -> None:
            loss_of(model, step % 4, of=SMALL).backward()
            runtime.clip_grad_norm_(1.0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()

        for step in range(PROCESS_WARM):
            act(step)
        check_nothing_grows(runtime, act, steps)


def one_object() -> bytes:
    return bytes(31)


def one_block() -> int:
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    return int(malloc(64))


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("leaked", [one_object, one_block], ids=lambda each: each.__name__)
def test_a_leak_of_64_bytes_at_every_step_is_found(leaked: Callable[[], object], tmp_path: Path) -> None:
    model, kept = SMALL.make(), []
    with opened(model, tmp_path, home="mixed", compute="bf16") as runtime:

        def act(step: int) -> None:
            loss_of(model, step % 4, of=SMALL).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            kept.append(leaked())

        with pytest.raises(AssertionError, match="per_step"):
            check_nothing_grows(runtime, act, FEW)


@steps_never_end
def test_dropped_losses_hold_nothing(tmp_path: Path) -> None:
    model = SMALL.make()
    with opened(model, tmp_path) as runtime:
        check_nothing_grows(runtime, lambda step: str(loss_of(model, step % 4, of=SMALL)) and None, FEW)


@steps_never_end
def test_gradients_that_are_forgotten_hold_nothing(tmp_path: Path) -> None:
    model = SMALL.make()
    with opened(model, tmp_path) as runtime:

        def act(step: int) -> None:
            loss_of(model, step % 4, of=SMALL).backward()
            runtime.optimizer.zero_grad()

        check_nothing_grows(runtime, act, FEW)


class Broken(Exception):
    """The exception that the tests raise."""


@steps_never_end
@pytest.mark.parametrize("where", ["module", "hook", "backward"])
def test_exceptions_hold_nothing(where: str, tmp_path: Path) -> None:
    model = SMALL.make()

    def fail(*_: Any) -> None:
        raise Broken

    with opened(model, tmp_path) as runtime:

        def act(step: int) -> None:
            target = model.layers[step % 3]
            if where == "backward":
                handle = target.weight.register_hook(fail)
            elif where == "hook":
                handle = target.register_forward_pre_hook(fail)
            else:
                handle = target.register_forward_hook(fail)
            with pytest.raises(Broken):
                loss_of(model, step % 4, of=SMALL).backward()
            handle.remove()
            assert autograd_hooks.top() is None
            runtime.optimizer.zero_grad()

        check_nothing_grows(runtime, act, FEW)
        assert torch.isfinite(loss_of(model, 0, of=SMALL))


@steps_never_end
def test_views_and_copies_hold_nothing(tmp_path: Path) -> None:
    of = entry("tied")
    model = of.make()
    with opened(model, tmp_path) as runtime:

        def act(step: int) -> None:
            weight = model.blocks[0].mlp[0].weight
            views = [weight.detach(), weight.data, weight[0], weight.t()]
            with torch.no_grad():
                views[step % 4].mul_(1.0)
            del views
            model.state_dict()
            runtime.optimizer.state_dict()
            assert runtime.grad(weight) is None

        check_nothing_grows(runtime, act, FEW)


@both_homes
def test_a_runtime_that_is_dropped_with_its_model_gives_everything_back(home: str, tmp_path: Path) -> None:
    precision = infinity.Precision(compute="fp32")
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = budget_for(home, model, optimizer, tmp_path, precision)
    runtime = infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu")
    model(torch.ones(1, 64)).sum().backward()
    runtime.optimizer.step()
    reference = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert reference() is not None  # the model is still in use
    model(torch.ones(1, 64))
    del model, optimizer
    gc.collect()
    assert reference() is None
    assert files(tmp_path) == []
