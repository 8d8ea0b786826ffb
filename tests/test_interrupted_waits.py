"""Tests of Ctrl-C, once and twice, while a request is under way, and in code that holds no lock.

After one the runtime goes on with right values. After the second it refuses every further use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_runtime
import torch
from homes import evict_all
from small_runtime import files, two_layers
from torch import nn

from infinity.accumulation.task_threads import Surroundings, Task
from infinity.activations import autograd_hooks
from infinity.aio import Faults
from infinity.errors import ConfigError
from infinity.model import materialize
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


@pytest.mark.parametrize("what", ["read", "write"])
def test_ctrl_c_comes_when_a_wait_is_over(what: str, tmp_path: Path) -> None:
    faults = Faults()
    with opened(tmp_path, "nvme", faults) as (model, runtime):
        model(X).sum().backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        expected = model(X).detach()
        small_runtime.settle(runtime)
        evict_all(runtime._components.prefetch_engine)
        state = runtime.optimizer.state
        changed = {name: each.clone() for name, each in state[model[2].weight].items()}
        changed["exp_avg"].fill_(7.0)
        faults.delay(what, 1, 0.5, times=None)
        with interrupts(0.2), torch.no_grad():
            if what == "read":
                model(X)
            else:
                state[model[2].weight] = changed
        faults.clear()
        if what == "write":
            assert torch.equal(state[model[2].weight]["exp_avg"], changed["exp_avg"])
        assert torch.equal(model(X), expected)


@on_disk
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_second_ctrl_c_ends_a_wait_and_the_runtime(kind: str, home: str, tmp_path: Path) -> None:
    faults = Faults()
    with opened(tmp_path, home, faults) as (model, runtime):
        model(X).sum().backward()
        runtime.optimizer.step()
        model(X)
        evict_all(runtime._components.prefetch_engine)
        faults.hold(kind, 1, times=None)
        with interrupts(0.2, 0.4), torch.no_grad():
            model[0].weight.add_(1)
            model(X)
            runtime.optimizer.state[model[0].weight] = runtime.optimizer.state[model[0].weight]
        faults.release()
        for use in (lambda: model(X), runtime.optimizer.zero_grad, model[0].weight.sum):
            with pytest.raises(ConfigError, match="interrupted half way"):
                use()
        runtime.close()
        assert files(tmp_path) == []


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_interrupted_close_still_closes(times: int, tmp_path: Path) -> None:
    faults = Faults()
    with opened(tmp_path, "nvme", faults) as (model, runtime):
        model(X).sum().backward()
        faults.delay("write", 1, 1.0, times=None)
        runtime.optimizer.step()
        runtime._components.scheduler.complete_all()
        assert runtime._components.store._writes
        with interrupts(*(0.2, 0.4)[:times]):
            runtime.close()
        assert files(tmp_path) == []


def test_a_timeout_of_the_user_comes_when_a_wait_is_over(tmp_path: Path) -> None:
    class Late(Exception):
        pass

    def late(*_: object) -> None:
        raise Late

    faults, before = Faults(), signal.signal(signal.SIGALRM, late)
    with opened(tmp_path, "nvme", faults) as (model, runtime), torch.no_grad():
        expected = model(X)
        evict_all(runtime._components.prefetch_engine)
        faults.delay("read", 1, 0.3, times=None)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Late):
            model(X)
        assert torch.equal(model(X), expected)
    signal.signal(signal.SIGALRM, before)


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
        assert autograd_hooks.top() is None
