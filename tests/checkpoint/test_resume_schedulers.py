"""Tests that every scheduler of torch goes on after a resume as in a run without a break.

A scheduler is made before `runtime.load()`, which restores what its constructor has changed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runtime import two_layers
from torch.optim import lr_scheduler, swa_utils

import infinity

Optimizer = torch.optim.Optimizer
RATES = (0.02, 0.05)
"""Learning rates of the two param groups."""


class Warmup:
    """A callable whose attributes LambdaLR keeps in its state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        return min(1.0, (1 + epoch) / self.steps)


def parts(optimizer: Optimizer) -> list[Any]:
    return [
        lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.8),
    ]


MAKERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Warmup(6), lambda epoch: 0.9**epoch]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 6], gamma=0.5),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(optimizer, parts(optimizer), milestones=[4]),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=7, power=2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(parts(optimizer)),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=12),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.001, anneal_epochs=6),
}
BASES = {"LRScheduler", "_LRScheduler"}


def known_to_torch() -> set[str]:
    found = inspect.getmembers(lr_scheduler, inspect.isclass)
    return {name for name, each in found if issubclass(each, lr_scheduler.LRScheduler)} - BASES


def test_every_scheduler_of_torch_is_among_them() -> None:
    assert known_to_torch() <= MAKERS.keys()
    assert len(known_to_torch()) >= 15


@contextmanager
def offloaded(directory: Path, *, resume: bool, momentum: bool = True) -> Iterator[tuple[Any, Any]]:
    """Offload a small model with commits in a directory; yields the model and its runtime."""
    model = two_layers()
    first, last = model[0].parameters(), model[2].parameters()
    groups = [{"params": list(each), "lr": rate} for each, rate in zip((first, last), RATES, strict=True)]
    optimizer: Optimizer = torch.optim.SGD(groups, momentum=0.9) if momentum else torch.optim.AdamW(groups)
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host="8MiB"),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
        checkpoint=directory,
        resume=directory if resume else None,
    ) as runtime:
        yield model, runtime


def train(model: Any, runtime: Any, scheduler: Any, steps: range) -> list[Any]:
    """Train steps with these numbers. Returns their losses and all groups' options before each of them."""
    found: list[Any] = []
    for step in steps:
        found.append([{**group, "params": None} for group in runtime.optimizer.param_groups])
        generator = torch.Generator().manual_seed(step)
        loss = (model(torch.randn(4, 64, generator=generator)) - 1).square().mean()
        loss.backward()
        found.append(loss.item())
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return found


def skip_where_torch_is_too_old(make: Callable[[Optimizer], Any]) -> None:
    """In torch 2.6 SWALR's state has a function, and SequentialLR steps in a way that is deprecated there."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = make(optimizer)
    if any(inspect.isfunction(each) for each in scheduler.state_dict().values()):
        pytest.skip("this torch keeps a function in the scheduler's state")
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        with warnings.catch_warnings(record=True) as found:
            optimizer.step()
            for _ in range(6):
                scheduler.step()
        if found:
            pytest.skip(f"this torch warns: {found[0].message}")


@pytest.mark.sweep
@pytest.mark.parametrize("momentum", [True, False], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_scheduler_goes_on(name: str, momentum: bool, tmp_path: Path) -> None:
    """Each scheduler is made once before `load` and once after it, and then `load` is called again."""
    make = MAKERS[name]
    skip_where_torch_is_too_old(make)
    with offloaded(tmp_path / "undisturbed", resume=False, momentum=momentum) as (model, runtime):
        scheduler = make(runtime.optimizer)
        train(model, runtime, scheduler, range(3))
        runtime.save(state={"scheduler": scheduler.state_dict()})
        wanted = train(model, runtime, scheduler, range(3, 8))
        last = scheduler.get_last_lr()
    assert len({str(each) for each in wanted[::2]}) > 1
    with offloaded(tmp_path / "resumed", resume=False, momentum=momentum) as (model, runtime):
        scheduler = make(runtime.optimizer)
        train(model, runtime, scheduler, range(3))
        runtime.save(state={"scheduler": scheduler.state_dict()})
    for loads_before in (False, True):
        with (
            warnings.catch_warnings(),
            offloaded(tmp_path / "resumed", resume=True, momentum=momentum) as (model, runtime),
        ):
            warnings.simplefilter("error")
            if loads_before:
                runtime.load()
            scheduler = make(runtime.optimizer)
            scheduler.load_state_dict(runtime.load()["scheduler"])
            assert train(model, runtime, scheduler, range(3, 8)) == wanted
            assert scheduler.get_last_lr() == last


def test_a_learning_rate_that_the_user_sets_after_load_stays(tmp_path: Path) -> None:
    with offloaded(tmp_path, resume=False) as (model, runtime):
        train(model, runtime, lr_scheduler.StepLR(runtime.optimizer, 1), range(2))
        runtime.save()
    with warnings.catch_warnings(), offloaded(tmp_path, resume=True) as (model, runtime):
        warnings.simplefilter("error")
        scheduler = lr_scheduler.StepLR(runtime.optimizer, 1)
        runtime.load()
        runtime.optimizer.param_groups[0]["lr"] = 0.125
        assert train(model, runtime, scheduler, range(2, 3))[0][0]["lr"] == 0.125
