"""Tests of visits: chunks whose states come to the device to be updated there have the bits of the CPU's
updates, whatever share of them visits, and every access to memory is ordered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from emulated_device import EmulatedDevice
from homes import ROOMY, short_visits, visiting_budget
from small_runtime import TIED, loss_of
from torch import nn

import infinity
from infinity.errors import ConfigError, DeviceError, NonFiniteGradient
from infinity.gradients.gradients import Gradients
from infinity.optim.balance import Balance, Measured, busy_seconds
from infinity.optim.scheduler import UpdateScheduler
from infinity.optim.visits import Visit, Visits
from infinity.planning import homes, twin_flow

LAZY: dict[str, Any] = {"update": "lazy"}
SUMS: dict[str, Any] = {"update": "lazy", "accumulation": 3}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with short_visits():
        yield


def make_optimizer(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """An optimizer with two param groups, of different options."""
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}]
    return kind(groups, lr=1e-2, **options)


BUDGETS: dict[Any, infinity.Budget] = {}
"""What `opened` has asked `visiting_budget`, by the arguments on which it depends."""


@contextlib.contextmanager
def opened(
    *,
    visits: bool = True,
    compute: str = "bf16",
    states: str = "fp32",
    kind: Any = torch.optim.AdamW,
    keep: tuple[str, ...] = (),
    update: str = "eager",
    accumulation: int = 1,
    **more: Any,
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload a small model to the emulated device in use, and yield (model, runtime)."""
    model = TIED.make()
    optimizer = make_optimizer(model, kind)
    facts: dict[str, Any] = {
        "precision": infinity.Precision(compute=compute, states=states, keep=keep),
        "update": update,
        "accumulation": accumulation,
        "device": "cpu",
    }
    with mock.patch.object(twin_flow, "has_kernels", lambda device: visits):
        budget = infinity.Budget(device=ROOMY, host=ROOMY)
        if visits:
            room = homes.Candidate._visiting, homes.VISITORS
            key = kind, compute, states, keep, update, accumulation, room, "checkpoint" in more
            if key not in BUDGETS:
                BUDGETS[key] = visiting_budget(model, optimizer, **facts, checkpoint=more.get("checkpoint"))
            budget = BUDGETS[key]
        with infinity.offload(model, optimizer, budget=budget, **facts, **more) as runtime:
            assert bool(runtime.plan.visiting_units) == visits
            yield model, runtime


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that grows by (unit, chunk) with each chunk that the device updates on a visit."""
    seen: list[tuple[int, int]] = []
    launch = Visit.launch

    def counted(visit: Visit) -> None:
        seen.append((visit.unit, visit.chunk_index))
        launch(visit)

    monkeypatch.setattr(Visit, "launch", counted)
    return seen


@contextlib.contextmanager
def behind_the_model(apart: bool) -> Iterator[None]:
    """Whether updates by the CPU run while the model goes on, as on a GPU."""
    made = UpdateScheduler.__init__

    def changed(scheduler: UpdateScheduler, *arguments: Any, **options: Any) -> None:
        made(scheduler, *arguments, **options)
        scheduler._shares_cpu = scheduler._shares_cpu and not apart

    with mock.patch.object(UpdateScheduler, "__init__", changed):
        yield


def step(model: nn.Module, runtime: Any, number: int) -> list[float]:
    """Take a step of as many backwards as are declared, with clipping where updates are lazy."""
    told = []
    for each in range(runtime.plan.accumulation):
        loss = loss_of(model, number + each)
        loss.backward()
        told.append(loss.item())
    if runtime.plan.update == "lazy":
        told.append(float(runtime.clip_grad_norm_(0.5)))
    runtime.optimizer.step()
    runtime.optimizer.zero_grad(set_to_none=number % 2 == 0)
    return told


def everything(model: nn.Module, runtime: Any) -> Any:
    return parity.copied(model.state_dict()), parity.tensors_copied(runtime.optimizer.state_dict())


Told = list[Any]
Action = Callable[[nn.Module, Any, int], Any]


def trained(seed: int = 0, *actions: Action, apart: bool = False, **options: Any) -> Told:
    """Take a step by each of the actions on the emulated device. Returns all that they and the runtime tell.

    actions: functions of (model, runtime, number of the step).
    """
    device, told = EmulatedDevice(seed), Told()
    with device.in_use(), behind_the_model(apart), opened(**options) as (model, runtime):
        for number, action in enumerate(actions):
            told.append(action(model, runtime, number))
            if number % 2:
                told.append(everything(model, runtime))
    return told


def edited(model: nn.Module, runtime: Any, number: int) -> list[float]:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(0.75)
    return step(model, runtime, number)


def at_another_rate(model: nn.Module, runtime: Any, number: int) -> list[float]:
    runtime.optimizer.param_groups[0]["lr"] *= 0.5
    return step(model, runtime, number)


def with_loaded_states(model: nn.Module, runtime: Any, number: int) -> list[float]:
    runtime.optimizer.load_state_dict(runtime.optimizer.state_dict())
    return step(model, runtime, number)


def with_loaded_states_and_views(model: nn.Module, runtime: Any, number: int) -> list[float]:
    """User code has views of all parameters, so that an update is completed as soon as it is decided."""
    runtime.optimizer.load_state_dict(runtime.optimizer.state_dict())
    views = [each.detach() for each in model.parameters()]
    told = step(model, runtime, number)
    return [*told, *(each.double().sum().item() for each in views)]


def pair_of(runtime: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parameters of a unit."""
    page = next(each for each in runtime._components.pages if len(each.parameters) > 1)
    return page.parameters[0], page.parameters[1]


def first_only(model: nn.Module, runtime: Any, number: int) -> torch.Tensor:
    """One parameter gets a gradient, which is read before the step."""
    parameter = pair_of(runtime)[0]
    parameter.float().square().sum().backward()
    found = runtime.grad(parameter)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return found


def read_after_step(model: nn.Module, runtime: Any, number: int) -> torch.Tensor:
    """One parameter gets a gradient, which is read after the step. No other one has a gradient of zeros."""
    runtime.optimizer.zero_grad()
    parameter = pair_of(runtime)[0]
    parameter.float().square().sum().backward()
    runtime.optimizer.step()
    found = runtime.grad(parameter)
    runtime.optimizer.zero_grad()
    return found


def dropped(model: nn.Module, runtime: Any, number: int) -> None:
    """Gradients are dropped before their unit has all of them, and a step has another parameter's."""
    first, last = pair_of(runtime)
    (first.float().square().sum() * math.inf).backward()
    first.grad = None
    last.float().square().sum().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def not_finite(model: nn.Module, runtime: Any, number: int) -> str:
    """The gradient of a parameter in the middle of the model becomes infinite."""
    every = list(model.parameters())
    handle = every[len(every) // 2].register_hook(lambda gradient: gradient * math.inf)
    loss_of(model, number).backward()
    handle.remove()
    with pytest.raises(NonFiniteGradient) as raised:
        runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return str(raised.value)


def interrupted(model: nn.Module, runtime: Any, number: int) -> None:
    """A hook fails in the backward, before any unit has all its gradients."""
    every = list(model.parameters())
    handle = every[-1].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, number).backward()
    handle.remove()
    with contextlib.suppress(ConfigError):
        runtime.optimizer.step()
    runtime.optimizer.zero_grad()


def overflowed(model: nn.Module, runtime: Any, number: int) -> list[float]:
    """A gradient becomes infinite, so that the loss scale skips the step."""
    handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient * math.inf)
    *told, norm = step(model, runtime, number)
    handle.remove()
    assert not math.isfinite(norm)
    return told


def set_after_step(model: nn.Module, runtime: Any, number: int) -> list[Any]:
    """Gradients are set while the updates that use the gradients before are pending."""
    told, scheduler = step(model, runtime, number), runtime._components.scheduler
    if scheduler._visits is not None and scheduler._visits.share == 1.0:
        assert [*scheduler._visits.outstanding()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        found = runtime.grad(parameter)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return [told, found]


def dropped_before(model: nn.Module, runtime: Any, number: int) -> list[float]:
    """A parameter whose gradient is dropped is not updated, and the others of its chunk are."""
    loss = loss_of(model, number)
    for _ in range(runtime.plan.accumulation):
        loss_of(model, number).backward()
    pair_of(runtime)[0].grad = None
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return [loss.item()]


def edited_before_its_first(model: nn.Module, runtime: Any, number: int) -> list[float]:
    """Parameters are edited whose first update comes later than that of others in their chunks."""
    for page in runtime._components.pages:
        min(page.parameters, key=torch.Tensor.numel).float().square().sum().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    with torch.no_grad():
        for page in runtime._components.pages:
            max(page.parameters, key=torch.Tensor.numel).mul_(0.75)
    return step(model, runtime, number)


def zeros_beside(model: nn.Module, runtime: Any, number: int) -> None:
    """All parameters but one of a unit have gradients of zeros."""
    loss_of(model, number).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad(set_to_none=False)
    pair_of(runtime)[0].float().square().sum().backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


SHARES = (0.0, 1 / 3, 1.0, None)
"""Shares of chunks that visit; None: as measured."""


@pytest.mark.sweep(most=7)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "options",
    [
        {"compute": "fp32"},
        {},
        {"states": "bf16"},
        {"states": "int8"},
        {"kind": torch.optim.SGD},
        {"kind": torch.optim.SGD, "keep": ("*norm*",)},
        {"kind": torch.optim.Adam},
        LAZY,
        SUMS,
        {**LAZY, "states": "int8"},
        {**LAZY, "compute": "fp32"},
        {**SUMS, "compute": "fp16"},
        {**LAZY, "kind": torch.optim.SGD, "keep": ("*norm*",)},
    ],
    ids=str,
)
def test_bits_are_those_of_the_cpus_updates(
    options: dict[str, Any],
    share: float | None,
    launched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if share is not None:
        monkeypatch.setattr(Visits, "share", share)
    actions = (step, step, step, edited, at_another_rate, with_loaded_states, step)
    expected = trained(0, *actions, visits=False, **options)
    assert not launched
    for seed in (1, 2):
        assert parity.differences(trained(seed, *actions, apart=seed == 2, **options), expected) == []
    assert bool(launched) == (share != 0)


@pytest.mark.parametrize("options", [LAZY, SUMS, {**LAZY, "compute": "fp16"}], ids=str)
def test_lazy_updates_are_those_of_the_gradients_at_step(
    options: dict[str, Any], launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of steps that the loss scale skips, gradients that are dropped or set, and shares that change."""
    monkeypatch.setattr(Visits, "share", 1.0)
    skipped = overflowed if options.get("compute") == "fp16" else step
    actions = (step, skipped, set_after_step, edited, dropped_before, step)
    expected = trained(0, *actions, visits=False, **options)
    assert not launched
    for seed in (3, 4):
        assert parity.differences(trained(seed, *actions, apart=seed == 4, **options), expected) == []
    assert launched


def test_the_cpu_updates_chunks_with_zeros_and_edited_masters(
    launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Visits, "share", 1.0)
    actions = (edited_before_its_first, step, zeros_beside, step)
    expected = trained(0, *actions, visits=False, **LAZY)
    assert parity.differences(trained(3, *actions, apart=True, **LAZY), expected) == []
    assert launched


@pytest.mark.parametrize("options", [{}, LAZY], ids=str)
def test_states_that_were_written_are_read_again(
    options: dict[str, Any], launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the update must have ended before others could advance."""
    monkeypatch.setattr(Visits, "share", 1.0)
    actions = (step, step, with_loaded_states_and_views, with_loaded_states, step)
    expected = trained(0, *actions, visits=False, **options)
    for seed in (3, 4):
        assert parity.differences(trained(seed, *actions, apart=seed == 4, **options), expected) == []
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_lazy_visits_have_the_bits_of_the_cpu_over_many_steps(
    compute: str, accumulation: int, launched: list[tuple[int, int]]
) -> None:
    skipped = overflowed if compute == "fp16" else edited
    some = (step, step, edited, at_another_rate, step, skipped, set_after_step, dropped_before, step, step)
    options = {**LAZY, "compute": compute, "accumulation": accumulation}
    expected = trained(0, *some, *some, visits=False, **options)
    for seed in range(1, 9):
        assert parity.differences(trained(seed, *some, *some, apart=seed % 2, **options), expected) == []
    assert launched


def test_states_come_up_once_for_each_visit(
    launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is little room, so that updates are decided before their states are read."""
    monkeypatch.setattr(Visits, "share", 1.0)
    monkeypatch.setattr(homes, "VISITORS", 2)
    given_up: list[Visit] = []
    cancel = Visit.cancel
    monkeypatch.setattr(Visit, "cancel", lambda visit: given_up.append(visit) or cancel(visit))
    trained(3, step, step, step, step, step)
    assert launched and not given_up


@pytest.mark.parametrize(
    "actions",
    [
        (step, step, first_only, step, dropped, step),
        (step, step, read_after_step, step),
        (step, step, not_finite, step),
        (step, interrupted, step, step),
    ],
    ids=["part", "read", "infinite", "interrupted"],
)
def test_gradients_that_do_not_lead_to_a_visit_are_used_dropped_or_refused_as_by_the_cpu(
    actions: tuple[Action, ...], launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Visits, "share", 1.0)
    expected = trained(0, *actions, visits=False)
    for seed in (3, 4):
        assert parity.differences(trained(seed, *actions, apart=seed == 4), expected) == []
    assert launched


def test_gradients_beyond_their_room_go_home(
    launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for gradients those of a unit that is not complete go home, and the CPU updates
    their chunks.
    """
    monkeypatch.setattr(Visits, "share", 1.0)
    sent: list[bool] = []
    send = Gradients.send_oldest_home
    monkeypatch.setattr(Gradients, "send_oldest_home", lambda each: sent.append(send(each)) or sent[-1])
    expected = trained(0, step, step, step, step)
    assert not any(sent)
    visited = len(launched)
    room = homes.Candidate._visiting
    monkeypatch.setattr(homes.Candidate, "_visiting", lambda *each: (sum(room(*each)), 0))
    assert parity.differences(trained(5, step, step, step, step, apart=True), expected) == []
    assert any(sent)
    assert 0 < len(launched) - visited < visited


@pytest.mark.parametrize("options", [{}, LAZY], ids=str)
def test_a_commit_holds_the_results_of_visits(
    options: dict[str, Any], launched: list[tuple[int, int]], tmp_path: Path
) -> None:
    device = EmulatedDevice(6)
    with device.in_use(), behind_the_model(True):
        with opened(checkpoint=tmp_path, **options) as (model, runtime):
            for number in range(3):
                step(model, runtime, number)
            commit = runtime.save()
            rest = [step(model, runtime, number) for number in (3, 4)]
            commit.wait()
            expected = everything(model, runtime)
        assert launched
        with opened(checkpoint=tmp_path, resume=tmp_path, **options) as (model, runtime):
            assert [step(model, runtime, number) for number in (3, 4)] == rest
            assert parity.differences(everything(model, runtime), expected) == []


@pytest.mark.parametrize("options", [{}, LAZY], ids=str)
def test_a_runtime_closes_while_chunks_visit(options: dict[str, Any]) -> None:
    device = EmulatedDevice(7)
    with device.in_use(), behind_the_model(True), opened(**options) as (model, runtime):
        assert "visits: the device updates up to 100%" in str(runtime.plan)
        assert runtime.stats.visiting_share is None
        for number in range(4):
            step(model, runtime, number)
        share = runtime.stats.visiting_share
        assert 0 < share < 1 and f"{share:.0%} updated on the device by visits" in str(runtime.stats)
        with mock.patch.object(Visit, "arrived", False):
            loss_of(model, 2).backward()
            if options:
                runtime.optimizer.step()
        assert [*runtime._components.scheduler._visits.outstanding()]
    del model, runtime
    assert device.left == []


def test_a_copy_that_fails_ends_the_runtime() -> None:
    """Results that do not come home are lost, so that the runtime refuses to go on."""
    device = EmulatedDevice(8)
    with device.in_use(), opened() as (model, runtime):
        for number in range(3):
            step(model, runtime, number)
        launch = Visit.launch

        def failing(visit: Visit) -> None:
            device.fail("cuMemcpyAsync", 1)
            launch(visit)

        with mock.patch.object(Visit, "launch", failing), pytest.raises(DeviceError):
            step(model, runtime, 3)
        with pytest.raises(DeviceError):
            step(model, runtime, 4)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("start, best", [(50e9, 0.73), (10e9, 0.0), (400e9, 0.97)])
def test_the_balance_finds_the_share_with_the_shortest_step(start: float, best: float, lazy: bool) -> None:
    """A machine whose steps take as long as the CPU or the link, with pauses of the link."""
    elements = 10**9
    balance = Balance(parameters=2 * elements, gradients=2 * elements, states=10 * elements, lazy=lazy)
    pause, memory = 0.015, 120e9
    best += 0.09 * (lazy and start == 50e9)

    def seconds(share: float) -> tuple[float, float]:
        """Seconds of the CPU and of the link."""
        cpu = ((28e9 - 4e9 * share) if lazy else (30e9 - 8e9 * share)) / memory
        return cpu, (2e9 + 10e9 * share) / start + pause

    for _ in range(40):
        there = int(balance.share * elements)
        cpu, link = seconds(balance.share)
        balance.stepped(
            Measured(
                there=there,
                here=elements - there,
                computed=elements - there,
                busy=cpu,
                link=start,
                seconds=max(cpu, link),
            )
        )
    shortest = min(max(seconds(each / 1000)) for each in range(1001))
    assert max(seconds(balance.share)) < 1.03 * shortest or balance.share < 0.05
    assert abs(balance.share - best) < 0.05


def test_overlapping_jobs_are_busy_once() -> None:
    second = 10**9
    times = [(0, 2 * second), (second, 3 * second), (5 * second, 6 * second)]
    assert busy_seconds(times) == 4.0
