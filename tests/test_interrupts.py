"""Tests of runtimes under I/O faults outside training steps, and under signals in a step.

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
from faulty import CASES, HANG, check_error, clean, one_step, opened, places, watchdog, watched
from homes import both_homes
from interrupted_lines import Lines, Place
from interrupted_lines import places as lines_of
from parity import copied, differences, tensors_copied
from small_runtime import two_layers
from zoo import entry

from infinity.activations import autograd_hooks
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
        assert autograd_hooks.top() is None
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
        assert autograd_hooks.top() is None


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


def test_a_gradient_whose_addition_fails_is_lost_until_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    of = entry("tied")
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        with monkeypatch.context() as patch:
            patch.setattr("infinity.pages.store.Store.write", fails)
            with pytest.raises(MemoryError):
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
        assert autograd_hooks.top() is None
        model[0].weight.detach().fill_(0.5)
        model(x)
        assert bool((model.state_dict()["0.weight"] == 0.5).all())


def gradients_of(model: Any, runtime: Any) -> dict[str, torch.Tensor]:
    return {name: runtime.grad(parameter) for name, parameter in model.named_parameters()}


def backward(model: Any) -> None:
    of = entry("tied")
    of.loss(model, of.batch(0, 0)).backward()


def sweep(home: str, compute: str, directory: Path, most: int | None) -> None:
    """Send SIGINT before one line of a forward with its backward after the other, call zero_grad(), and
    repeat both. The gradients must be those of an undisturbed run each time.

    most: the greatest number of lines. home, compute, directory: as in `opened`.
    """
    sent = 0
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
                sent += interrupted.sent
                runtime.optimizer.zero_grad()
                backward(model)
                assert differences(gradients_of(model, runtime), expected) == [], place
                runtime.optimizer.zero_grad()
            assert autograd_hooks.top() is None, place
    assert sent >= len(left) * 0.9  # a line that only slow I/O reaches may be missed


def sweep_steps(home: str, compute: str, directory: Path, most: int | None) -> None:
    """Send SIGINT before lines of step() and of the next forward with its updates. A step is done, or not
    begun and made again, and parameters and states must be those of an undisturbed run.
    """

    def step(runtime: Any) -> None:
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        everything(runtime._model, runtime)

    def trained(place: Place | None, number: int) -> tuple[Any, Lines]:
        where = directory / str(number)
        where.mkdir()
        with opened(home, compute, where, Faults()) as (model, runtime), watched(HANG):
            one_step(model, runtime, 0)
            runtime.optimizer.zero_grad()
            backward(model)
            with contextlib.suppress(KeyboardInterrupt), Lines(place) as lines:
                step(runtime)
            if runtime.stats.steps < 2:
                step(runtime)
            runtime.optimizer.zero_grad()
            return everything(model, runtime), lines

    expected, lines = trained(None, 0)
    sent = 0
    for number, place in enumerate(lines_of(lines, most), 1):
        got, interrupted = trained(place, number)
        assert differences(got, expected) == [], place
        sent += interrupted.sent
    assert sent >= number * 0.4  # how often lines are visited that advance transfers depends on the disk


@pytest.mark.sweep
@pytest.mark.parametrize("swept", [sweep, sweep_steps])
@pytest.mark.parametrize(("home", "compute"), CASES)
def test_a_signal_before_a_line_changes_no_bit(
    swept: Callable[..., None], home: str, compute: str, tmp_path: Path
) -> None:
    swept(home, compute, tmp_path, 20 if swept is sweep else 6)


@pytest.mark.slow
@pytest.mark.parametrize("swept", [sweep, sweep_steps])
@pytest.mark.parametrize(("home", "compute"), CASES)
def test_a_signal_before_any_line_changes_no_bit(
    swept: Callable[..., None], home: str, compute: str, tmp_path: Path
) -> None:
    swept(home, compute, tmp_path, None if swept is sweep else 400)


def twice(home: str, compute: str, directory: Path, most: int) -> None:
    """Send SIGINT twice before lines of a step, most of which hold the lock. The runtime is right afterwards,
    or refuses further use, and closes.
    """
    lost = 0
    for number in range(most + 1):
        (directory / str(number)).mkdir()
    with opened(home, compute, directory / str(most), Faults()) as (model, runtime), Lines() as lines:
        expected = [one_step(model, runtime, 0)]
        runtime.optimizer.zero_grad()
        expected.append(one_step(model, runtime, 1))
    held = [each for each in lines_of(lines) if each.file.startswith(("optim/scheduler", "pages/"))]
    for number, place in enumerate(held[:: max(1, len(held) // most)][:most]):
        with opened(home, compute, directory / str(number), Faults()) as (model, runtime), watched(HANG):
            with contextlib.suppress(KeyboardInterrupt), Lines(place, times=2):
                one_step(model, runtime, 0)
            try:
                runtime.optimizer.zero_grad()
                loss = one_step(model, runtime, runtime.stats.steps)
                assert loss == expected[runtime.stats.steps - 1], place
            except ConfigError as error:
                assert "interrupted half way" in str(error), place
                lost += 1
    assert lost


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize(("home", "compute"), CASES)
def test_a_second_signal_loses_the_runtime_at_most(home: str, compute: str, tmp_path: Path) -> None:
    twice(home, compute, tmp_path, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("home", "compute"), CASES)
def test_a_second_signal_at_more_lines(home: str, compute: str, tmp_path: Path) -> None:
    twice(home, compute, tmp_path, 200)


@pytest.mark.parametrize("forget", ["zero_grad", "None"])
def test_a_gradient_that_no_hook_has_taken_is_forgotten(forget: str, tmp_path: Path) -> None:
    """A hook of the user that was there before the runtime's has failed."""

    def fail(_: torch.Tensor) -> None:
        raise LookupError

    model = two_layers()
    handle = model[0].weight.register_post_accumulate_grad_hook(fail)
    x = torch.ones(1, 64)
    with small_runtime.opened(model, tmp_path, home="nvme") as runtime:
        with pytest.raises(LookupError):
            model(x).sum().backward()
        handle.remove()
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
        model(x).sum().backward()
        plain = two_layers()
        plain(x).sum().backward()
        assert torch.equal(runtime.grad(model[0].weight), plain[0].weight.grad)
