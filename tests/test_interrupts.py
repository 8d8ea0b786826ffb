"""Tests of runtimes under I/O faults outside training steps, and under KeyboardInterrupt in a step.

Afterwards the failed or interrupted operation can be repeated, or further use of the runtime raises an error
that says why this is impossible. In both cases the runtime can be closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_runtime
import torch
from faulty import CASES, check_error, clean, one_step, opened, places, watchdog
from homes import both_homes
from parity import copied, differences, tensors_copied
from small_runtime import two_layers
from zoo import entry

from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError, storage_error

__all__ = ["watchdog"]


def edit(model: Any, runtime: Any) -> None:
    with runtime.full_parameters(model.blocks[0].mlp[0]), torch.no_grad():
        model.blocks[0].mlp[0].weight.mul_(0.5)


def save(model: Any, runtime: Any) -> Any:
    return copied(model.state_dict())


def save_optimizer(model: Any, runtime: Any) -> Any:
    return tensors_copied(runtime.optimizer.state_dict())


def load(model: Any, runtime: Any) -> None:
    try:
        model.load_state_dict(clean("nvme", "bf16").parameters)
    except RuntimeError as error:  # torch catches what a copy raises, and lists it in an error of its own
        assert "Could not" in str(error)
        raise storage_error(
            "load", str(runtime._components.store.nvme.slabs[0].path), None, errno.EIO
        ) from error


def load_optimizer(model: Any, runtime: Any) -> None:
    runtime.optimizer.load_state_dict(clean("nvme", "bf16").optimizer)


def evaluate(model: Any, runtime: Any) -> Any:
    of = entry("tied")
    with torch.no_grad():
        return of.loss(model, of.batch(0, 0)).item()


OPERATIONS: list[Callable[[Any, Any], Any]] = [edit, save, save_optimizer, load, load_optimizer, evaluate]


@functools.cache
def done_well(operation: Callable[[Any, Any], Any]) -> tuple[Any, dict[str, int]]:
    """Train one step, run `operation(model, runtime)` without faults, and return (results, transfers).

    results: (what the operation returned, (the model's state dict, the optimizer's state dict)); both state
    dicts are those after the operation. transfers: number of I/O calls that the operation made, by kind:
    "read", "write" or "sync".
    """
    clean("nvme", "bf16")  # not below, where its check for leaked threads would see the other runtime's
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        faults = Faults()
        with opened("nvme", "bf16", Path(directory), faults) as (model, runtime):
            one_step(model, runtime, 0)
            runtime.optimizer.zero_grad()
            before = faults.calls
            returned = operation(model, runtime)
            calls = {kind: count - before[kind] for kind, count in faults.calls.items()}
            return (returned, everything(model, runtime)), calls


def everything(model: Any, runtime: Any) -> Any:
    return save(model, runtime), save_optimizer(model, runtime)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failed_operation_can_be_repeated_or_says_that_it_cannot(
    operation: Callable[[Any, Any], Any], kind: str, tmp_path: Path
) -> None:
    expected, calls = done_well(operation)
    for nth in places(calls[kind], 3):
        faults = Faults()
        with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
            one_step(model, runtime, 0)
            runtime.optimizer.zero_grad()
            faults.fail(kind, nth, errno.EIO)
            with contextlib.suppress(StorageError):
                got = operation(model, runtime), everything(model, runtime)
                # The read that failed was made ahead, and its page was never needed.
                assert kind == "read" or not faults.fired
                assert differences(got, expected) == [], nth
                continue
            faults.clear()
            try:
                got = operation(model, runtime), everything(model, runtime)
            except StorageError as error:
                check_error(error, errno.EIO, tmp_path)
                assert kind == "write"
                with pytest.raises(StorageError):
                    everything(model, runtime)
                continue
            if operation is not edit:  # an edit done twice has another result
                assert differences(got, expected) == [], nth
            detached = next(model.parameters()).detach()
            assert detached.data_ptr() == next(model.parameters()).data_ptr()


def test_a_gradient_that_could_not_be_written_home_is_written_again(tmp_path: Path) -> None:
    expected, _ = done_well(save)
    faults = Faults()
    with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
        one_step(model, runtime, 0)
        runtime.optimizer.zero_grad()
        # The staging is full of gradients, so the first update writes one home before it reads.
        faults.fail("write", 1, errno.EIO)
        with pytest.raises(StorageError):
            save(model, runtime)
        got = save(model, runtime), everything(model, runtime)
        assert faults.fired == 1
        assert differences(got, expected) == []


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_runtime_closes_whatever_fails_then(kind: str, tmp_path: Path) -> None:
    faults = Faults()
    with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
        one_step(model, runtime, 0)
        runtime.optimizer.zero_grad()
        faults.delay(kind, 1, 0.01, times=None)
        faults.fail(kind, 1, errno.EIO, times=None)
        with pytest.raises(StorageError):
            one_step(model, runtime, 1)
        runtime.close()


class Interrupting(torch.autograd.Function):
    """The identity function, with a backward that raises KeyboardInterrupt."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyboardInterrupt


def interrupted_forward(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1].mlp[1], "forward", forward)
        one_step(model, runtime, 1)


def interrupted_backward(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = model.blocks[0].register_forward_hook(lambda module, args, result: Interrupting.apply(result))
    try:
        one_step(model, runtime, 1)
    finally:
        handle.remove()


def interrupted_hook(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[0].mlp[0].weight.register_hook(hook)
    try:
        one_step(model, runtime, 1)
    finally:
        handle.remove()


INTERRUPTS = [interrupted_forward, interrupted_backward, interrupted_hook]


@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=lambda each: each.__name__)
def test_training_goes_on_after_an_interrupt(
    interrupt: Callable[..., None], home: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(home, compute, tmp_path, Faults()) as (model, runtime):
        losses = [one_step(model, runtime, 0)]
        runtime.optimizer.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            interrupt(model, runtime, monkeypatch)
        runtime.optimizer.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        for step in (1, 2):
            losses.append(one_step(model, runtime, step))
            runtime.optimizer.zero_grad()
        parameters = copied(model.state_dict())
    expected = clean(home, compute)
    assert losses == expected.losses
    assert differences(parameters, expected.parameters) == []


@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=lambda each: each.__name__)
def test_an_interrupted_runtime_closes(
    interrupt: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        with pytest.raises(KeyboardInterrupt):
            interrupt(model, runtime, monkeypatch)
        runtime.close()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_interrupted_update_says_so_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        of = entry("tied")
        of.loss(model, of.batch(0, 0)).backward()
        with monkeypatch.context() as patch:
            patch.setattr("infinity.optim.updater.count_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runtime.optimizer.step()
        for use in (model.state_dict, runtime.optimizer.zero_grad, lambda: of.loss(model, of.batch(0, 0))):
            with pytest.raises(ConfigError, match="interrupted half way"):
                use()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_gradient_is_lost_until_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = entry("tied")
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        with monkeypatch.context() as patch:
            patch.setattr("infinity.pages.store.Store.write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                of.loss(model, of.batch(0, 0)).backward()
        with pytest.raises(ConfigError, match="interrupted while a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        assert one_step(model, runtime, 0) == clean("nvme", "bf16").losses[0]


@both_homes
def test_a_forward_that_was_interrupted_is_left_at_the_next(home: str, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    plain, model = two_layers(), two_layers()
    x = torch.ones(1, 64)
    with small_runtime.opened(model, tmp_path, home=home) as runtime:
        handle = model[1].register_forward_hook(interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(x)
        handle.remove()
        for each in (plain, model):
            each(x).sum().backward()
        assert torch.equal(runtime.grad(model[0].weight), plain[0].weight.grad)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model[0].weight.detach().fill_(0.5)
        model(x)
        assert bool((model.state_dict()["0.weight"] == 0.5).all())
