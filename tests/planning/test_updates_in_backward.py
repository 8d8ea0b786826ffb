"""Tests of units that the device updates in the backward, with gradients that have no page; see
[Note: updates in the backward] in infinity/gradients/device.py. Their bits must be those of eager updates by
the CPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_units import kernels, opened, updated
from homes import ROOMY
from parity import copied, differences, tensors_copied
from small_runtime import TIED, loss_of

import infinity
from infinity.config import Budget
from infinity.errors import ConfigError, NonFiniteGradient
from infinity.gradients.device import DeviceUnits
from infinity.planning import twin_flow
from infinity.planning.placement import Kind

__all__ = ["kernels", "updated"]

EAGER: dict[str, Any] = {"update": "eager", "accumulation": 1}


def units_of(runtime: Any) -> DeviceUnits:
    found: DeviceUnits = runtime._components.scheduler._on_device
    return found


def test_units_are_updated_in_the_backward(kernels: None, updated: list[int], tmp_path: Path) -> None:
    with opened(tmp_path, **EAGER) as (model, runtime):
        plan = runtime.plan
        units = len(plan.updated_on_device)
        assert units > 4
        assert all(plan.page_bytes(unit, Kind.GRADIENT) == 0 for unit in plan.updated_on_device)
        before = copied(model.state_dict())
        loss_of(model, 0).backward()
        assert len(updated) == units and not units_of(runtime)._fresh
        assert differences(before, copied(model.state_dict())) != []
        runtime.optimizer.step()
        assert len(updated) == units
        with mock.patch.object(DeviceUnits, "stopped", side_effect=AssertionError):  # it waits for the device
            runtime.optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(ConfigError, match="came after its eager update"):
            loss_of(model, 2).backward()


def test_the_room_of_gradients_goes_to_more_units(kernels: None) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"precision": infinity.Precision(compute="bf16"), "device": "cpu"}
    whole = infinity.plan(model, optimizer, budget=Budget(device=ROOMY, host=ROOMY), **options, **EAGER)
    lazy = infinity.plan(
        model, optimizer, budget=Budget(device=ROOMY, host=ROOMY), **options, update="lazy", accumulation=1
    )
    assert whole.updated_on_device == lazy.updated_on_device
    gradients = sum(lazy.page_sizes[Kind.GRADIENT])
    spared = lazy.device_bytes - whole.device_bytes
    assert spared == gradients - max(lazy.page_sizes[Kind.GRADIENT])
    budget = Budget(device=whole.device_bytes, host=ROOMY)
    there = infinity.plan(model, optimizer, budget=budget, **options, **EAGER).updated_on_device
    before = infinity.plan(model, optimizer, budget=budget, **options, update="lazy", accumulation=1)
    assert len(there) > len(before.updated_on_device)


class Trained:
    """The results of a short training with eager updates, on the device or on the CPU."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
        monkeypatch.setattr(twin_flow, "has_kernels", lambda device: there)
        self.opened = opened(directory / str(there), compute="bf16", **EAGER)
        self.told: list[Any] = []

    def run(self, *steps: Any) -> list[Any]:
        """Take the steps, functions of (model, runtime), and return all values after each."""
        with self.opened as (model, runtime):
            for each in steps:
                self.told.append(each(model, runtime))
                state = tensors_copied(runtime.optimizer.state_dict())
                self.told.append((copied(model.state_dict()), state))
        return self.told


def plain(model: Any, runtime: Any) -> float:
    loss = loss_of(model, 0)
    loss.backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()


def leaves_zeros(model: Any, runtime: Any) -> None:
    loss_of(model, 1).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad(set_to_none=False)


def only_some(model: Any, runtime: Any) -> None:
    """Parameters that get no gradient keep their units from being updated before `step()`."""
    frozen = [each for number, each in enumerate(model.parameters()) if number % 3 == 0]
    loss = loss_of(model, 2)
    handles = [each.register_hook(lambda gradient: gradient * 0) for each in frozen]
    loss.backward()
    for handle in handles:
        handle.remove()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def first_only(model: Any, runtime: Any) -> None:
    """Only one parameter gets a gradient; see `leaves_zeros` for what the others have."""
    parameter = next(iter(model.parameters()))
    (parameter.float().square().sum()).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def not_finite(model: Any, runtime: Any) -> str:
    """The gradient of a parameter in the middle of the model becomes infinite."""
    every = list(model.parameters())
    handle = every[len(every) // 2].register_hook(lambda gradient: gradient * math.inf)
    loss_of(model, 3).backward()
    handle.remove()
    with pytest.raises(NonFiniteGradient) as raised:
        runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return str(raised.value)


@pytest.mark.parametrize(
    "steps",
    [
        (plain, leaves_zeros, first_only, plain),
        (only_some, first_only, plain),
        (not_finite, plain, not_finite, plain),
    ],
    ids=["zeros", "part", "infinite"],
)
def test_the_bits_are_those_of_the_cpus_eager_updates(
    steps: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)
    here, there = (Trained(tmp_path, monkeypatch, there=there).run(*steps) for there in (False, True))
    assert differences(here, there) == []


def test_a_gradient_that_waits_can_be_read_and_dropped(kernels: None, tmp_path: Path) -> None:
    """A gradient that is infinite and dropped before any update stops nothing."""
    with opened(tmp_path, compute="fp32", **EAGER) as (model, runtime):
        page = next(each for each in runtime._components.pages if len(each.parameters) > 1)
        parameter = page.parameters[0]
        values = parameter.detach().clone()
        (parameter.square().sum() * math.inf).backward()
        assert torch.equal(runtime.grad(parameter), 2 * values * math.inf)
        parameter.grad = None
        (page.parameters[1] * 3).sum().backward()
        assert torch.equal(runtime.grad(page.parameters[1]), torch.full_like(page.parameters[1], 3))
        before = copied(model.state_dict())
        runtime.optimizer.step()
        changed = differences(before, copied(model.state_dict()))
        assert len(changed) == 1
        assert torch.equal(parameter.detach(), values)
        assert torch.equal(runtime.grad(page.parameters[1]), torch.full_like(page.parameters[1], 3))
        (page.parameters[1] * 3).sum().backward()  # without zero_grad()
        assert torch.equal(runtime.grad(page.parameters[1]), torch.full_like(page.parameters[1], 6))
