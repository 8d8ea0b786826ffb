"""Tests of units that the device updates in the backward, with gradients that have no page; see
[Note: updates in the backward] in infinity/gradients/device.py. Their bits must be those of eager updates by
the CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_units import adamw, kernels, opened, updated
from emulated_device import EmulatedDevice
from homes import ROOMY
from parity import copied, differences, tensors_copied
from small_runtime import TIED, loss_of
from torch import nn

import infinity
from infinity.config import Budget
from infinity.errors import ConfigError, NonFiniteGradient
from infinity.gradients.device import DeviceUnits
from infinity.gradients.gradients import Gradients
from infinity.planning import twin_flow
from infinity.planning.placement import Kind

__all__ = ["kernels", "updated"]

EAGER: dict[str, Any] = {"update": "eager", "accumulation": 1}

SOME: dict[bool, tuple[int, int]] = {False: (60, ROOMY), True: (25, 600 << 10)}
"""Whether the device has memory of its own -> (share, host) for `divided`, so that it updates some units."""


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


@contextlib.contextmanager
def divided(directory: Path, share: int, *, host: str | int = ROOMY) -> Iterator[tuple[nn.Module, Any]]:
    """Open a runtime whose device tier has `share` percent of what all units would take there. host: the
    budget of RAM; pages beyond both are on disk. Yields (model, runtime).
    """
    options: dict[str, Any] = {"precision": infinity.Precision(compute="bf16"), "device": "cpu", **EAGER}
    model = TIED.make()
    optimizer = adamw(model)
    whole = infinity.plan(model, optimizer, budget=Budget(device=ROOMY, host=ROOMY), **options)
    budget = Budget(device=whole.device_bytes * share // 100, host=host, nvme={str(directory): ROOMY})
    with infinity.offload(model, optimizer, budget=budget, **options) as runtime:
        yield model, runtime


def each_infinite(model: nn.Module, runtime: Any) -> list[Any]:
    """In each step the gradient of another parameter is infinite. Returns the errors and all values after
    each.
    """
    told: list[Any] = []
    for number, parameter in enumerate([*model.parameters()][1::4]):
        handle = parameter.register_hook(lambda gradient: gradient * math.inf)
        loss_of(model, number).backward()
        handle.remove()
        with pytest.raises(NonFiniteGradient) as raised:
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        state = tensors_copied(runtime.optimizer.state_dict())
        told.append((str(raised.value), copied(model.state_dict()), state))
    return told


@pytest.fixture(scope="module")
def with_all_in_ram(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What `each_infinite` returns if the CPU updates all units."""
    with opened(tmp_path_factory.mktemp("ram"), **EAGER) as (model, runtime):
        return each_infinite(model, runtime)


@pytest.mark.parametrize(
    "case",
    [
        ("some", False, True),
        ("none", True, False),
        ("some", True, False),
        ("some", True, True),
        ("all", True, False),
    ],
    ids=["some", "apart-none", "apart-some", "apart-some-late", "apart-all"],
)
def test_a_gradient_that_is_not_finite_stops_the_same_units_wherever_they_are(
    case: tuple[str, bool, bool],
    with_all_in_ram: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those are updated whose last gradient came before it, by the CPU and by the device.

    case: which units the device updates, whether it has memory of its own, and whether the host learns of
    gradients at the end of the backward only.
    """
    (there, apart, late), come = case, Gradients.come
    if late:
        monkeypatch.setattr(Gradients, "come", lambda *found, wait=False: wait and come(*found, wait=True))
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: there != "none")
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)
    share, host = {"none": (100, ROOMY), "some": SOME[apart], "all": (100, ROOMY)}[there]
    with (
        EmulatedDevice(3).in_use() if apart else contextlib.nullcontext(),
        divided(tmp_path, share, host=host) as (model, runtime),
    ):
        units = len(runtime._components.pages)
        on_device = runtime.plan.updated_on_device
        assert {"none": 0, "all": units}.get(there, len(on_device)) == len(on_device)
        if there == "some":  # a unit of the CPU is between others in the order of gradients
            assert on_device and min(set(range(units)) - on_device) < max(on_device)
        found = each_infinite(model, runtime)
    assert len({words for words, *_ in found}) == len(found)
    assert differences(with_all_in_ram, found) == []


def test_a_gradient_that_is_dropped_stops_no_update(kernels: None, tmp_path: Path) -> None:
    """Nor does dropping a gradient let updates run that another one has stopped."""
    with divided(tmp_path, SOME[False][0]) as (_, runtime):
        pages, on_device = runtime._components.pages, runtime.plan.updated_on_device
        several = [page for page in pages if len(page.parameters) > 1]
        here, other = [page for page in several if page.index not in on_device][:2]
        there, another = [page for page in several if page.index in on_device][:2]

        def infinite(*pages: Any) -> None:
            for page in pages:
                (page.parameters[0].float().square().sum() * math.inf).backward()

        def changed() -> list[bool]:
            found = []
            for page in (other, another):
                before = page.parameters[0].detach().clone()
                torch.stack([(each.float() * 3).sum() for each in page.parameters]).sum().backward()
                found.append(not torch.equal(page.parameters[0], before))
            return found

        infinite(here, there)
        there.parameters[0].grad = None
        assert changed() == [False, False]
        with pytest.raises(NonFiniteGradient, match=f"0 of {len(pages)} units"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        infinite(here, there)
        (here.parameters[1].float() * 3).sum().backward()  # else there would be no gradient left
        here.parameters[0].grad = there.parameters[0].grad = None
        assert changed() == [True, True]
        runtime.optimizer.step()


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
