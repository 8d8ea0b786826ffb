"""Tests of training in which the device updates some or all units. Its parameters, states and losses must
have the bits of a training in which the CPU updates all units. It must also go on correctly after edits of
parameters, after loading of state dicts, after skipped steps and after failed reads.

test_twin_flow.py tests which units the device updates, test_device_update.py tests the arithmetic.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zoo
from device_units import adamw, kernels, opened, part_of, step, updated
from homes import ROOMY, needs_cuda
from parity import Recipe, copied, differences, tensors_copied
from small_runtime import TIED, loss_of
from torch import nn

import infinity
from infinity.accumulation.vertical import Accumulator
from infinity.aio import Faults
from infinity.config import Budget
from infinity.cpu_adam.page import GRAD_DTYPES
from infinity.device_update import kernels as device_kernels
from infinity.errors import NonFiniteGradient, StorageError
from infinity.planning import twin_flow

__all__ = ["kernels", "updated"]

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


# ---- Training ----


RECIPES = [
    Recipe(),
    Recipe(clip=0.5, groups=2, decay_rate=True),
    Recipe(accumulate=4, optimizer="adam", clip=0.5),
    Recipe(optimizer="sgd", groups=2),
    Recipe(optimizer="plain_sgd", accumulate=4),
    Recipe(optimizer="adagrad", clip=0.5),
]


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", ["transformer", "channels_last"])
@pytest.mark.usefixtures("kernels")
def test_it_trains_as_plain_pytorch_does(
    name: str, recipe: Recipe, device: str, updated: list[int], tmp_path: Path
) -> None:
    """The gradients of the first step have the bits of training in plain PyTorch. The gradient norms and the
    losses of all steps differ from plain PyTorch's by at most 1e-5 of their value.

    Losses may differ more if two trainings in plain PyTorch, with torch's fused and with its foreach
    optimizer, differ from each other too: by at most twice that difference.
    """
    entry = zoo.entry(name)
    recipe = Recipe(**{**vars(recipe), "device": device})
    run = parity.paged(entry, recipe, "device", tmp_path, watch=True)
    assert sum(updated) > 0
    truth = parity.reference(entry, recipe)
    assert (
        differences(
            run.gradients[0], {n: None if g is None else g.cpu() for n, g in truth.gradients[0].items()}
        )
        == []
    )
    assert run.norms == pytest.approx(truth.norms, rel=1e-5)
    parity.check_losses(entry, recipe, run, truth)


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_every_bit_is_that_of_the_cpus_updates(
    states: str, compute: str, updated: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Losses, parameters and optimizer states have the same bits whether the device or the CPU computes the
    updates. The loss must fall by more than 0.3 in eight steps.

    states: the format in which moments are stored.
    """

    def train(kernels: bool) -> Any:
        monkeypatch.setattr(twin_flow, "has_kernels", lambda device: kernels)
        with opened(tmp_path / str(kernels), compute=compute, states=states) as (model, runtime):
            losses = [step(model, runtime, number % 2, clip=0.5) for number in range(8)]
            state = tensors_copied(runtime.optimizer.state_dict())
            return losses, copied(model.state_dict()), state

    one, other = train(True), train(False)
    assert one[0] == other[0] and differences(one, other) == []
    assert one[0][-1] < one[0][0] - 0.3
    assert updated


@pytest.mark.usefixtures("kernels")
@pytest.mark.sweep
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_gradients_that_rest_as_they_come_change_no_bit(
    compute: str, part: bool, updated: list[int], tmp_path: Path
) -> None:
    """With accumulation=1, gradients are stored in the parameters' dtype, two bytes an element, instead of
    fp32. Losses, gradients, parameters and optimizer states have the same bits either way.

    part: whether only some pages rest on the device.
    """

    def train(accumulation: int | None) -> Any:
        directory = tmp_path / str(accumulation)
        with opened(directory, part=part, compute=compute, accumulation=accumulation) as (model, runtime):
            loss_of(model, 9).backward()
            gradients = {name: runtime.grad(each) for name, each in model.named_parameters()}
            runtime.optimizer.zero_grad()
            losses = [step(model, runtime, number % 2, clip=0.5) for number in range(4)]
            state = tensors_copied(runtime.optimizer.state_dict())
            dtypes = {page.dtype(0) for page in runtime._components.gradients.pages.values()}
            asked = {device_kernels.DTYPES[each.gradient] for each in runtime.plan.update_kinds}
            return (losses, gradients, copied(model.state_dict()), state), dtypes, asked

    wide, single = train(None), train(1)
    assert updated
    assert wide[1:] == ({torch.float32}, {"kF32"})
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    assert single[1:] == ({dtype}, {device_kernels.DTYPES[GRAD_DTYPES[dtype].value]})
    assert differences(wide[0], single[0]) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.sweep
@pytest.mark.parametrize("update", ["sync", "eager"])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_same_bits_whenever_updates_run(
    part: bool, update: str, accumulation: int, updated: list[int], tmp_path: Path
) -> None:
    def train(update: str) -> Any:
        directory = tmp_path / update
        with opened(directory, part=part, update=update, accumulation=accumulation) as (model, runtime):
            losses = []
            for number in range(3):
                for micro in range(accumulation):
                    loss = loss_of(model, 10 * number + micro)
                    loss.backward()
                    losses.append(loss.item())
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            state = tensors_copied(runtime.optimizer.state_dict())
            return losses, copied(model.state_dict()), state

    lazy, other = train("lazy"), train(update)
    assert updated
    assert differences(lazy, other) == []


def stop_everywhere(accumulator: Accumulator, blocks: Any) -> dict[nn.Module, frozenset[int]]:
    """Return the modules before which micro-batches of `runtime.accumulate` stop: all modules. A micro-batch
    that stops waits until the other micro-batches have come to the same module.

    A test puts this function in place of Accumulator._stops, which leaves out modules whose pages never leave
    the device. The keys of the result are the modules, and the values are the units that hold each module's
    own parameters. blocks: not used.
    """
    modules = dict(accumulator.model.named_modules())
    units = accumulator.plan.layout.module_units
    return {modules[path]: frozenset(found) for path, found in units.items()}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.filterwarnings("ignore:Saved activations take")
@pytest.mark.filterwarnings("error")
def test_micro_batches_together_have_the_bits_of_the_plain_loop(
    part: bool, kernels: None, updated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accumulator, "_stops", stop_everywhere)

    def train(together: bool) -> Any:
        with opened(tmp_path / str(together), part=part) as (model, runtime):
            monkeypatch.setattr(Accumulator, "_pays", lambda self: together)
            for number in range(3):
                runtime.accumulate(range(4 * number, 4 * number + 4), lambda each: loss_of(model, each))
                runtime.clip_grad_norm_(0.5)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train(True), train(False)) == []
    assert updated


# ---- What people do between steps ----


@pytest.mark.sweep
@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("part", [False, True])
def test_a_state_dict_goes_on_with_the_same_bits(
    part: bool, states: str, kernels: None, tmp_path: Path
) -> None:
    def run(directory: Path, start: Any) -> Any:
        with opened(directory, part=part, states=states) as (model, runtime):
            if start is None:
                for number in range(2):
                    step(model, runtime, number)
            else:
                model.load_state_dict(start[0])
                runtime.optimizer.load_state_dict(start[1])
            middle = copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())
            for number in range(2, 4):
                step(model, runtime, number)
            return middle, (copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict()))

    middle, end = run(tmp_path / "a", None)
    loaded, again = run(tmp_path / "b", middle)
    assert differences(middle, loaded) == []
    assert differences(end, again) == []


def edit(model: nn.Module, runtime: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def edit_of_data(model: nn.Module, runtime: Any) -> None:
    next(model.parameters()).data.add_(0.125)


def whole(model: nn.Module, runtime: Any) -> None:
    with runtime.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def reload(model: nn.Module, runtime: Any) -> None:
    model.load_state_dict({name: 0.9 * each for name, each in model.state_dict().items()})


@pytest.mark.sweep
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("act", [edit, edit_of_data, whole, reload], ids=lambda each: each.__name__)
def test_edits_become_the_masters(
    act: Callable[..., None], compute: str, part: bool, kernels: None, tmp_path: Path
) -> None:
    """After an edit of parameters, a step with a learning rate of 0 leaves the edited parameters unchanged,
    and their master weights are equal to them.

    act: the function that makes the edit.
    """
    with opened(tmp_path, part=part, compute=compute) as (model, runtime):
        for number in range(2):
            step(model, runtime, number)
        before = copied(model.state_dict())
        act(model, runtime)
        edited = copied(model.state_dict())
        changed = {name for name in edited if not torch.equal(edited[name], before[name])}
        assert changed
        for group in runtime.optimizer.param_groups:
            group["lr"] = 0.0
        step(model, runtime, 2)
        assert differences(edited, copied(model.state_dict())) == []
        if compute != "fp32":
            for name, parameter in model.named_parameters():
                master = runtime.optimizer.state[parameter]["master"]
                assert (name in changed) <= torch.equal(master, edited[name].float())


@pytest.mark.sweep
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("accumulate", ["fp32", "compute"])
def test_gradients_have_the_bits_of_the_cpus(
    accumulate: str, part: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gradients that the device accumulates, and their norm, have the bits of gradients that the CPU
    accumulates.

    accumulate: as in Precision. part: whether only some pages rest on the device.
    """
    model = TIED.make()
    precision = infinity.Precision(accumulate=accumulate)
    budget = Budget(device=ROOMY, host=ROOMY)
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    if part:
        budget = part_of(model, tmp_path, precision)

    def gradients() -> tuple[dict[str, torch.Tensor | None], float]:
        model = TIED.make()
        arguments: dict[str, Any] = {"budget": budget, "precision": precision, "device": "cpu"}
        with infinity.offload(model, adamw(model), **arguments) as runtime:
            assert bool(runtime.plan.updated_on_device) == twin_flow.has_kernels(torch.device("cpu"))
            for micro in range(3):
                loss_of(model, micro).backward()
            found = {name: runtime.grad(each) for name, each in model.named_parameters()}
            return found, float(runtime._components.gradients.norm())

    there, norm = gradients()
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: False)
    here, expected = gradients()
    assert differences(there, here) == []
    assert norm == expected


def test_a_gradient_can_be_read_and_clipped(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, compute="fp32") as (model, runtime):
        loss_of(model).backward()
        gradients = {name: runtime.grad(each) for name, each in model.named_parameters()}
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        assert float(runtime.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-6)
        for name, each in model.named_parameters():
            assert torch.allclose(runtime.grad(each), gradients[name] * (0.5 / (norm + 1e-6)), rtol=1e-6)


def test_a_gradient_that_is_not_finite_ends_the_step_before_it_begins(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        step(model, runtime, 0)
        before = copied(model.state_dict())
        (loss_of(model, 1) * math.inf).backward()
        with pytest.raises(NonFiniteGradient):
            runtime.optimizer.step()
        assert differences(before, copied(model.state_dict())) == []
        runtime.optimizer.zero_grad()
        step(model, runtime, 1)
        assert differences(before, copied(model.state_dict())) != []


def test_a_step_that_overflows_in_fp16_is_skipped(kernels: None, tmp_path: Path) -> None:
    with opened(tmp_path, compute="fp16") as (model, runtime):
        before = copied(model.state_dict())
        (loss_of(model) * 1e6).backward()
        runtime.optimizer.step()
        assert runtime.stats.skipped_steps == 1
        assert differences(before, copied(model.state_dict())) == []
        runtime.optimizer.zero_grad()
        while runtime.stats.skipped_steps == runtime.stats.steps:
            step(model, runtime, 1)
        assert differences(before, copied(model.state_dict())) != []


def test_a_fault_elsewhere_repeats_and_loses_nothing(
    kernels: None, updated: list[int], tmp_path: Path
) -> None:
    def train(failing: bool) -> Any:
        faults = Faults()
        with opened(tmp_path / str(failing), part=True, faults=faults) as (model, runtime):
            step(model, runtime, 0)
            loss_of(model, 1).backward()
            runtime.optimizer.step()
            if failing:
                faults.fail("read", 1, errno.EIO, times=None)
                with pytest.raises(StorageError):
                    loss_of(model, 2)
                    runtime.optimizer.state_dict()
                faults.clear()
            runtime.optimizer.zero_grad()
            step(model, runtime, 2)
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train(True), train(False)) == []
    assert len(updated) % 2 == 0
