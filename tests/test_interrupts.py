"""Tests of runtimes under I/O faults outside training steps, and under KeyboardInterrupt in a step.

Afterwards the failed or interrupted operation can be repeated, or further use of the runtime raises an error
that says why this is impossible. In both cases the runtime can be closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_runtime
import torch
from faulty import CASES, HANG, check_error, clean, one_step, opened, places, watchdog, watched
from homes import both_homes
from interrupted_lines import Lines, Place
from interrupted_lines import places as lines_of
from parity import copied, differences, tensors_copied
from small_runtime import two_layers
from zoo import entry

from infinity.activations import hook_stack
from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError, storage_error
from infinity.model.paged_parameter import take_gradient

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


@pytest.mark.sweep
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


@pytest.mark.sweep
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
        assert hook_stack.top() is None
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
        assert hook_stack.top() is None


def test_an_interrupted_update_says_so_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        of = entry("tied")
        of.loss(model, of.batch(0, 0)).backward()
        with monkeypatch.context() as patch:
            patch.setattr("infinity.optim.scheduler.count_step", interrupted)
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
        assert hook_stack.top() is None
        model[0].weight.detach().fill_(0.5)
        model(x)
        assert bool((model.state_dict()["0.weight"] == 0.5).all())


def gradients_of(model: Any, runtime: Any) -> dict[str, torch.Tensor]:
    return {name: runtime.grad(parameter) for name, parameter in model.named_parameters()}


def backward(model: Any) -> None:
    of = entry("tied")
    of.loss(model, of.batch(0, 0)).backward()


def sweep(home: str, compute: str, directory: Path, most: int | None) -> None:
    """Interrupt a forward with its backward before one line of the package after the other, call zero_grad(),
    and repeat both. The gradients must be those of an undisturbed run each time.

    most: the greatest number of lines. home, compute, directory: as in `opened`.
    """
    raised = 0
    with opened(home, compute, directory, Faults()) as (model, runtime):
        for _ in range(2):  # the second time, pages are fetched ahead
            backward(model)
            expected = gradients_of(model, runtime)
            runtime.optimizer.zero_grad()
        with Lines() as lines:
            backward(model)
        runtime.optimizer.zero_grad()
        left = lines_of(lines, most)
        for place in left:
            with watched(HANG):  # one watchdog for each line, as a test has many
                with contextlib.suppress(KeyboardInterrupt), Lines(place) as interrupted:
                    backward(model)
                raised += interrupted.raised
                runtime.optimizer.zero_grad()
                backward(model)
                assert differences(gradients_of(model, runtime), expected) == [], place
                runtime.optimizer.zero_grad()
    assert raised >= len(left) * 0.9  # a line that only slow I/O reaches may be missed


@pytest.mark.parametrize(("home", "compute"), CASES)
def test_no_line_leaves_a_gradient_behind(home: str, compute: str, tmp_path: Path) -> None:
    sweep(home, compute, tmp_path, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("home", "compute"), CASES)
def test_no_line_at_all_leaves_a_gradient_behind(home: str, compute: str, tmp_path: Path) -> None:
    sweep(home, compute, tmp_path, None)


def interrupted_before(model: Any, place: Place) -> None:
    with pytest.raises(KeyboardInterrupt), Lines(place):
        backward(model)


def line_of(function: Callable[..., Any], offset: int) -> int:
    return inspect.unwrap(function).__code__.co_firstlineno + offset


@pytest.mark.parametrize("forget", ["zero_grad", "None"])
def test_a_gradient_that_no_hook_has_taken_is_forgotten(forget: str, tmp_path: Path) -> None:
    with opened("unified-nvme", "fp32", tmp_path, Faults()) as (model, runtime):
        backward(model)
        expected = gradients_of(model, runtime)
        runtime.optimizer.zero_grad()
        place = Place("model/paged_parameter.py", line_of(take_gradient, 2), 1)
        interrupted_before(model, place)
        for call in (
            runtime.optimizer.step,
            lambda: runtime.clip_grad_norm_(1.0),
            lambda: runtime.grad(next(model.parameters())),
        ):
            with pytest.raises(ConfigError, match="interrupted while a gradient was added"):
                call()
        if forget == "None":
            for parameter in model.parameters():
                parameter.grad = None
            assert all(parameter.grad is None for parameter in model.parameters())
        runtime.optimizer.zero_grad()
        backward(model)
        assert differences(gradients_of(model, runtime), expected) == []
