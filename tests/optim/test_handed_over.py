"""Tests of updates that the update threads begin and end by themselves, on an emulated device.

They wait for the gradients that come from the device, and begin to copy the parameters there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from random_programs import BLOCKS, WIDTH, Blocks, Place, adamw, budget_of
from torch import nn

import infinity
from infinity.cpu_adam import ThreadPool
from infinity.errors import DeviceError, InfinityError
from infinity.optim.scheduler import UpdateScheduler
from infinity.tiers.copy_streams import CopyStreams, Order
from infinity.tiers.driver import Event

ILLEGAL_ADDRESS = 700


@contextlib.contextmanager
def opened(
    device: EmulatedDevice, home: str = "mirrored", update: str = "speculative"
) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a model and its runtime. The trainer's thread does not compute the updates, as on a GPU.

    home: where pages rest, as in homes.py; "mirrored": parameters on the device and in RAM, all else in RAM.
    """
    model = Blocks()
    with (
        device.in_use(),
        infinity.offload(
            model,
            adamw(model),
            budget=budget_of(Place(home, update), 1),
            precision=infinity.Precision(compute="fp32"),
            device="cpu",
            update=update,
            accumulation=1,
        ) as runtime,
    ):
        runtime._components.scheduler._shares_cpu = False
        runtime._components.gradients._copies._limit = 1 << 30  # backward ends while copies are held
        yield model, runtime


def backward(model: nn.Module) -> None:
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(inputs, tuple(range(BLOCKS))).backward()


def handed_over(scheduler: UpdateScheduler) -> list[Any]:
    """The tickets of all updates that the update threads have, one for each chunk."""
    units = [group.in_ram for group in scheduler._units]
    return [each for unit in units for tickets, _, _ in unit._jobs for each in tickets.each]


def await_computed(scheduler: UpdateScheduler) -> None:
    """Wait without any call of the runtime until the updates that were handed over are computed."""
    deadline = time.monotonic() + 60
    tickets = handed_over(scheduler)
    assert tickets
    while not all(each.done() for each in tickets):
        assert time.monotonic() < deadline, "an update waits for the trainer"
        time.sleep(0.001)


def test_updates_end_while_the_trainer_does_nothing() -> None:
    device = EmulatedDevice(2, threads=True)
    with opened(device) as (model, runtime):
        scheduler, link = runtime._components.scheduler, runtime._components.store.link
        before = [each.clone() for each in model.parameters()]
        device.hold(link.streams["down"])
        backward(model)
        assert len(handed_over(scheduler)) == sum(len(each.chunks) for each in scheduler._units)
        assert not any(each.done() for each in handed_over(scheduler))
        copies = device.count("cuMemcpyAsync")
        device.let_go(link.streams["down"])
        await_computed(scheduler)
        assert device.count("cuMemcpyAsync") >= copies + len(handed_over(scheduler))
        for group in scheduler._units:
            for _, copies, _ in group.in_ram._jobs:
                copies.hooks.events()[1].synchronize()
        runtime.optimizer.step()
        assert runtime.stats.confirmed_updates == len(scheduler._units)
        assert all(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_latest_units_and_those_that_hold_staging_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward uses the latest units of a backward first. The disk waits for what holds staging."""
    submit, found = ThreadPool.submit_updates, list[int]()

    def noted(pool: ThreadPool, *arguments: Any, priority: int, **options: Any) -> Any:
        found.append(priority)
        return submit(pool, *arguments, priority=priority, **options)

    monkeypatch.setattr(ThreadPool, "submit_updates", noted)
    with opened(EmulatedDevice(2)) as (model, _):
        backward(model)
    latest = [*found]
    assert len(latest) > 1 and latest == sorted(set(latest))
    found.clear()
    with opened(EmulatedDevice(2), "nvme") as (model, runtime):
        backward(model)
        runtime.optimizer.step()
        runtime._components.scheduler.complete_all()
    assert found and min(found) > latest[-1] << 32


def test_a_gradient_that_update_threads_do_not_wait_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = CopyStreams._awaited

    def gives(streams: CopyStreams, order: Order, event: Event) -> Event | None:
        return None if order is Order.HOST_ASKS else awaited(streams, order, event)

    monkeypatch.setattr(CopyStreams, "_awaited", gives)
    device = EmulatedDevice(2, threads=True)
    with contextlib.suppress(AssertionError), opened(device) as (model, runtime):
        link = runtime._components.store.link
        device.hold(link.streams["down"])
        backward(model)
        await_computed(runtime._components.scheduler)
        device.let_go(link.streams["down"])
    assert any("host: update" in each for each in device.violations)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventQuery", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_call_that_fails_in_an_update_thread_is_raised_and_ends_the_runtime(call: str) -> None:
    device = EmulatedDevice(2, threads=True)
    with opened(device) as (model, runtime):
        scheduler, link = runtime._components.scheduler, runtime._components.store.link
        device.hold(link.streams["down"])
        backward(model)
        device.fail(call, ILLEGAL_ADDRESS)
        device.let_go(link.streams["down"])
        await_computed(scheduler)
        with pytest.raises(DeviceError, match=call):
            runtime.optimizer.step()
            backward(model)
        with pytest.raises(InfinityError, match=call):
            runtime.optimizer.step()


def test_no_kernel_uses_new_parameters_before_they_come_where_a_wait_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = EmulatedDevice(2, threads=True)
    with opened(device, update="lazy") as (model, runtime):
        link = runtime._components.store.link
        urgent, drain, wait = link.streams["up (urgent)"], link.drain, link._wait
        failed = list[Event]()

        def drains() -> None:
            drain()
            device.hold(urgent)  # the copies that the update threads begin next

        def fails(order: Order, event: Event, waiter: Any) -> None:
            if order is Order.ARRIVAL and not failed:
                failed.append(event)
                raise DeviceError("Refused.", "Start anew.", call="cuStreamWaitEvent", code=700, name="")
            if waiter is None:
                device.let_go(urgent)
            wait(order, event, waiter)

        backward(model)
        monkeypatch.setattr(link, "drain", drains)
        monkeypatch.setattr(link, "_wait", fails)
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        with pytest.raises(DeviceError, match="Refused"):
            backward(model)
        assert failed[0].done()


def test_copies_that_lose_their_event_are_waited_for_before_the_error_is_raised() -> None:
    device, let_go = EmulatedDevice(2, threads=True), threading.Event()
    with opened(device) as (model, runtime):
        scheduler, link = runtime._components.scheduler, runtime._components.store.link
        urgent = link.streams["up (urgent)"]
        device.hold(link.streams["down"])
        device.hold(urgent)
        backward(model)
        device.fail("cuEventRecord", ILLEGAL_ADDRESS)  # the one after the copies of the first unit
        device.let_go(link.streams["down"])
        await_computed(scheduler)

        def later() -> None:
            let_go.set()
            device.let_go(urgent)

        timer = threading.Timer(0.2, later)
        timer.start()
        errors = list[DeviceError]()
        for group in scheduler._units:
            for _, copies, _ in group.in_ram._jobs:
                try:
                    copies.check()
                except DeviceError as error:
                    assert let_go.is_set()
                    errors.append(error)
        timer.join()
        assert len(errors) == 1
