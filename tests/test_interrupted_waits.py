"""Tests of Ctrl-C, once and twice, at places where a transition is half done or a request is still under way.

After each the runtime goes on with right values, or refuses every further use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_runtime
import torch
from homes import budget_for, evict_all
from small_runtime import files, two_layers
from torch import nn

import infinity
from infinity.accumulation.task_threads import Surroundings, Task
from infinity.activations import hook_stack
from infinity.aio import Faults
from infinity.build import carry_out
from infinity.cpu_adam import ThreadPool
from infinity.errors import ConfigError
from infinity.model import materialize
from infinity.pages.parameter_page import ParameterPage
from infinity.system.disk_files import injected

X = torch.ones(1, 64)

on_disk = pytest.mark.parametrize("home", ["nvme", "unified-nvme"])


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupts(*seconds: float) -> Iterator[None]:
    """Context that must be left by KeyboardInterrupt. SIGINT is sent after each of `seconds`."""
    timers = [threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)) for each in seconds]
    for timer in timers:
        timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        while any(timer.is_alive() for timer in timers):
            with contextlib.suppress(KeyboardInterrupt):  # one that came late
                time.sleep(0.01)


@contextlib.contextmanager
def opened(directory: Path, home: str, faults: Faults | None = None, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (model, runtime) for a model of two linear layers whose pages are at `home`."""
    model = two_layers(64)
    with injected(faults or Faults()), small_runtime.opened(model, directory, home=home, **how) as runtime:
        yield model, runtime


def raises(*_: Any) -> None:
    raise KeyboardInterrupt


@on_disk
def test_a_page_that_is_given_up_twice_is_read_again(home: str, tmp_path: Path) -> None:
    """Ctrl-C ends the wait for a read, and again the wait until the read has ended: no layer computes NaN."""
    faults = Faults()
    with opened(tmp_path, home, faults) as (model, runtime), torch.no_grad():
        expected = model(X)
        evict_all(runtime._components.prefetch_engine)
        faults.hold("read", 1)
        with interrupts(0.2, 0.4):
            model(X)
        faults.release()
        assert torch.equal(model[0](X), two_layers(64)[0](X))
        assert torch.equal(model(X), expected)


@on_disk
@pytest.mark.parametrize("method", ["land", "_show"])
def test_a_landing_that_is_interrupted_is_repeated(
    method: str, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, home) as (model, runtime), torch.no_grad():
        expected = model(X)
        evict_all(runtime._components.prefetch_engine)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ParameterPage, method, raises)
            model(X)
        assert torch.equal(model(X), expected)


def test_a_view_of_a_page_whose_return_is_interrupted_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page lands in the memory that the view has kept, also if the first landing there is interrupted."""
    model = two_layers(64)
    optimizer, precision = torch.optim.AdamW(model.parameters()), infinity.Precision(compute="fp32")
    budget = budget_for("unified-nvme", model, optimizer, tmp_path, precision)
    plan = infinity.plan(model, optimizer, budget=budget, precision=precision, device="cpu")
    plan = replace(plan, resident_bytes=2 * plan.resident_bytes)  # for the view's page and one more
    with carry_out(plan, model, optimizer, budget=budget) as runtime, torch.no_grad():
        expected = model(X)
        weight = model[0].weight
        view = weight.detach()
        evict_all(runtime._components.prefetch_engine)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ParameterPage, "_show", raises)
            model(X)
        assert torch.equal(model(X), expected)
        weight.zero_()
        assert view.any().item() is False


@on_disk
def test_a_page_whose_leaving_is_interrupted_is_found_again(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, home) as (model, runtime), torch.no_grad():
        expected = model(X)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ParameterPage, "_show", raises)
            evict_all(runtime._components.prefetch_engine)
        assert torch.equal(model(X), expected)


@on_disk
def test_no_other_parameter_changes_after_an_interrupted_write_of_one(home: str, tmp_path: Path) -> None:
    """Writes of single parameters share a buffer. The next one waits until the interrupted one is over."""
    faults = Faults()
    model = two_layers(60)  # its parameters end inside of blocks of 4 KiB
    with injected(faults), small_runtime.opened(model, tmp_path, home=home) as runtime:
        for _ in range(2):
            model(torch.ones(2, 60)).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        small_runtime.settle(runtime)
        state = runtime.optimizer.state
        before = state[model[0].weight]["exp_avg"].clone()
        changed = {name: each.clone() for name, each in state[model[2].weight].items()}
        changed["exp_avg"].fill_(7.0)
        same = {name: each.clone() for name, each in state[model[0].bias].items()}
        faults.hold("write", 1)
        with interrupts(0.2):
            state[model[0].bias] = same
        threading.Timer(0.2, faults.release).start()
        state[model[2].weight] = changed
        assert torch.equal(state[model[0].weight]["exp_avg"], before)
        assert torch.equal(state[model[2].weight]["exp_avg"], changed["exp_avg"])


def test_an_interrupted_close_still_closes(tmp_path: Path) -> None:
    faults = Faults()
    with opened(tmp_path, "nvme", faults) as (model, runtime):
        model(X).sum().backward()
        faults.delay("write", 1, 1.0, times=None)
        runtime.optimizer.step()
        runtime._components.scheduler.complete_all()
        assert runtime._components.store._writes
        with interrupts(0.2):
            runtime.close()
        assert files(tmp_path) == []


def test_a_task_that_is_broken_off_ends_before_its_owner_goes_on() -> None:
    """A second Ctrl-C does not end the wait for the task."""
    ended = threading.Event()

    def function() -> None:
        time.sleep(0.8)
        ended.set()

    task = Task(function, Surroundings())
    with interrupts(0.2, 0.4):
        try:
            task.proceed()
        finally:
            task.break_off()
            assert ended.is_set()
    assert task.done


def test_a_task_whose_thread_cannot_start_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(lambda: None, Surroundings())
    monkeypatch.setattr(threading.Thread, "start", raises)
    with pytest.raises(KeyboardInterrupt):
        task.proceed()
    task.break_off()


@pytest.mark.parametrize("third", [1, 3])
def test_a_model_whose_filling_is_interrupted_keeps_its_tensors(
    third: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """third: the number of the substitute whose making is interrupted."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = [id(each) for each in model.parameters()]
    made, real = [], torch.empty_strided

    def empty_strided(*args: Any, **how: Any) -> torch.Tensor:
        made.append(None)
        if len(made) == third:
            raise KeyboardInterrupt
        return real(*args, **how)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    with pytest.raises(KeyboardInterrupt):
        materialize.materialize(model, torch.device("cpu"), lambda parameter, values: None)
    assert [id(each) for each in model.parameters()] == before


def interrupt_forward(model: Any) -> None:
    """Run a forward that KeyboardInterrupt ends in the middle layer."""
    handle = model[1].register_forward_hook(raises)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()


def test_a_state_dict_after_an_interrupted_forward_holds_copies(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    with small_runtime.opened(model, tmp_path, home="nvme"):
        interrupt_forward(model)
        kept = model.state_dict()  # it would not fit if it held views of the pages
        assert all(torch.equal(kept[name], expected[name]) for name in expected)


def test_gradients_outside_of_the_model_have_their_scale_after_an_interrupted_forward(tmp_path: Path) -> None:
    with opened(tmp_path, "nvme", compute="fp16") as (model, runtime):

        def penalty() -> torch.Tensor:
            (model[0].weight.float() ** 2).sum().mul(1e-2).backward()
            found: torch.Tensor = runtime.grad(model[0].weight).clone()
            runtime.optimizer.zero_grad()
            return found

        expected = penalty()
        interrupt_forward(model)
        assert torch.equal(penalty(), expected)


def test_hooks_of_saved_tensors_are_gone_after_an_interrupted_forward(tmp_path: Path) -> None:
    """A context around the forward pops the runtime's pair of hooks in place of its own."""
    with opened(tmp_path, "nvme") as (model, _):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            interrupt_forward(model)
        model(X)
        assert hook_stack.top() is None


@pytest.mark.parametrize("where", ["submit", "deliver", "begun"])
def test_an_update_that_is_interrupted_half_way_ends_the_runtime(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same update would run twice, or would be in two places."""
    with opened(tmp_path, "nvme") as (model, runtime):
        for _ in range(2):
            model(X).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
        after = {
            "submit": (ThreadPool, "submit_again"),
            "deliver": (type(runtime._components.scheduler), "_deliver"),
            "begun": (type(runtime._components.scheduler), "_began"),
        }
        owner, name = after[where]
        real: Callable[..., Any] = getattr(owner, name)

        def interrupted(*args: Any, **how: Any) -> None:
            if where == "submit":
                real(*args, **how)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            model.state_dict()
        with pytest.raises(ConfigError, match="interrupted half way"):
            model(X)
