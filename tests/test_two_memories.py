"""No torch operation mixes host memory with the memory of a device, in whatever a program does. On a CUDA
device such an operation would be an error, or a copy outside of the link.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import covered
from device_units import adamw
from emulated_device import EmulatedDevice, planned_apart
from homes import budget_for, short_visits, visiting_budget
from small_runtime import TIED, loss_of
from tiled_models import inputs, language
from torch import nn
from two_memories import TwoMemories

import infinity
from infinity.layout import tiles
from infinity.layout.tiles import TiledModule
from infinity.planning import twin_flow
from infinity.tiers import Tier

HOMES = ("host", "mixed", "device", "nvme", "mirrored", "visits")


Loss = Callable[[Any, int], torch.Tensor]
"""Function of a model and a batch's number."""


def stepped(model: nn.Module, runtime: Any, numbers: range, loss: Loss = loss_of) -> None:
    """Take a step of several backwards with clipping, if updates wait for the norm."""
    for number in numbers:
        (loss(model, number) / len(numbers)).backward()
    if runtime.plan.update != "eager":
        for parameter in model.parameters():
            runtime.grad(parameter)
        runtime.clip_grad_norm_(0.5)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def used(model: nn.Module, runtime: Any, directory: Path, loss: Loss) -> None:
    """Make all other calls that read or write parameters and states, with a step after each change."""
    stepped(model, runtime, range(2), loss)
    kept = runtime.optimizer.state_dict()
    parameter = next(model.parameters())
    with torch.no_grad():
        parameter.mul_(0.5)
        parameter[0] = 0.25
    stepped(model, runtime, range(2, 4), loss)
    for module in model.modules():
        if not [*module.children()] and not isinstance(module, TiledModule):
            with runtime.full_parameters(module), torch.no_grad():
                for each in module.parameters():
                    each.add_(each, alpha=0.01)
    with runtime.masters():
        model.state_dict()
    runtime.optimizer.state[parameter]["exp_avg"].abs().max()
    runtime.optimizer.load_state_dict(kept)
    model.load_state_dict({name: 1.01 * each for name, each in model.state_dict().items()})
    stepped(model, runtime, range(2), loss)
    runtime.export(directory / "export")
    runtime.save(directory / "copy", state={"step": 3})
    assert runtime.load(directory / "copy") == {"step": 3}
    stepped(model, runtime, range(2), loss)


@pytest.mark.sweep(most=3)
@covered(
    {
        "home": HOMES,
        "kernels": (False, True),
        "compute": ("fp32", "bf16", "fp16"),
        "states": ("fp32", "bf16", "int8"),
        "update": ("lazy", "eager", "speculative", "sync"),
    },
    allowed=lambda case: (
        (case["compute"], case["update"]) != ("fp16", "eager")  # which is refused
        and (not case["kernels"] or case["home"] in ("device", "visits"))
        and (not case["kernels"] or case["update"] != "speculative")
        and (case["home"] != "visits" or (case["kernels"] and case["update"] == "lazy"))
    ),
)
def test_no_operation_mixes_the_memories(
    *,
    home: str,
    kernels: bool,
    compute: str,
    states: str,
    update: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a run that goes on from a commit of another one, and in its commits. "visits" is "mirrored",
    and chunks visit the device.
    """
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: kernels)
    everything(TIED.make, home=home, compute=compute, states=states, update=update, directory=tmp_path)


@pytest.mark.parametrize(
    ("home", "compute", "states", "update"),
    [
        ("mixed", "fp32", "fp32", "lazy"),
        pytest.param("device", "bf16", "int8", "lazy", marks=pytest.mark.slow),
        ("mixed", "fp16", "fp32", "speculative"),
        ("mirrored", "bf16", "bf16", "sync"),
    ],
)
def test_no_operation_of_a_tiled_model_mixes_the_memories(
    *, home: str, compute: str, states: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: False)
    monkeypatch.setattr(tiles, "FEWEST_ELEMENTS", 1 << 18)
    everything(
        functools.partial(language, tied=True),
        home=home,
        compute=compute,
        states=states,
        update=update,
        directory=tmp_path,
        loss=lambda model, number: model.loss(inputs(number)),
    )


def everything(
    make: Callable[[], nn.Module],
    *,
    home: str,
    compute: str,
    states: str,
    update: str,
    directory: Path,
    loss: Loss = loss_of,
) -> None:
    """Use models that `make` makes in all ways, with the memories watched. directory: for files."""
    kernels = twin_flow.has_kernels(torch.device("cpu"))
    precision, commits = infinity.Precision(compute=compute, states=states), directory / "commits"
    options: dict[str, Any] = {
        "update": update,
        "accumulation": 2 if update in ("eager", "speculative") else None,
    }
    model, visits = make(), home == "visits"
    with contextlib.ExitStack() as cleanup:
        if visits:
            cleanup.enter_context(short_visits())
        facts = {**options, "checkpoint": commits}
        with planned_apart():
            if visits:
                budget = visiting_budget(model, adamw(model), precision=precision, device="cpu", **facts)
            else:
                budget = budget_for(home, model, adamw(model), directory, precision, **facts)
        options |= {"budget": budget, "precision": precision, "device": "cpu"}
        cleanup.enter_context(EmulatedDevice(3).in_use())
        cleanup.enter_context(TwoMemories().checked())
        with infinity.offload(model, adamw(model), checkpoint=commits, **options) as runtime:
            assert bool(runtime.plan.updated_on_device) == (kernels and not visits)
            assert bool(runtime.plan.visiting_units) == visits
            used(model, runtime, directory, loss)
            commit = runtime.save(state="last")
            stepped(model, runtime, range(2), loss)
            commit.wait()
        model = make()
        with infinity.offload(model, adamw(model), resume=commits, **options) as runtime:
            assert runtime.load() == "last"
            stepped(model, runtime, range(2), loss)
            runtime.save().wait()


def added(here: torch.Tensor, there: torch.Tensor) -> object:
    return here + there


def copied(here: torch.Tensor, there: torch.Tensor) -> object:
    return there.copy_(here)


def joined(here: torch.Tensor, there: torch.Tensor) -> object:
    return torch.cat((here, there))


def all_added(here: torch.Tensor, there: torch.Tensor) -> object:
    return torch._foreach_add([there, there], [there, here])


def result_added(here: torch.Tensor, there: torch.Tensor) -> object:
    return (there * 2).add_(here[:1])


def input_used_twice(here: torch.Tensor, there: torch.Tensor) -> object:
    inputs = torch.ones(4)
    return inputs * there, inputs * here


def scaled(here: torch.Tensor, there: torch.Tensor) -> object:
    return there * here.sum()


def picked(here: torch.Tensor, there: torch.Tensor) -> object:
    return there[here.long()]


@pytest.mark.parametrize("act", [added, copied, joined, all_added, result_added, input_used_twice])
def test_an_operation_that_mixes_them_is_found(act: Callable[..., object]) -> None:
    with pytest.raises(AssertionError, match=r"test_two_memories\.py"), TwoMemories().checked() as memories:
        act(*both(memories))


@pytest.mark.parametrize("act", [scaled, picked])
def test_what_a_gpu_takes_from_the_host_is_no_mixture(act: Callable[..., object]) -> None:
    with TwoMemories().checked() as memories:
        act(*both(memories))


def both(memories: TwoMemories) -> tuple[torch.Tensor, torch.Tensor]:
    """Four zeros in host memory, and four in device memory."""
    here, there = torch.zeros(4), torch.zeros(4)
    memories.put(here, Tier.HOST)
    memories.put(there, Tier.DEVICE)
    here.add_(0)
    there.add_(0)
    return here, there
