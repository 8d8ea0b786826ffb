"""Random training on a device whose streams dawdle: nothing is unordered, and no bit differs for it.

A seed gives a program (which blocks each forward goes through, in which order, how often, what happens
between backward and step), where pages rest, when updates run, and how the device's streams dawdle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from emulated_device import COMPUTE, LIBRARY, EmulatedDevice
from homes import budget_for, evict_all
from torch import nn

import infinity
from infinity import twin_flow
from infinity.page import Presence
from infinity.tiers.copy_streams import Order
from infinity.tiers.driver import Driver, emulated
from infinity.update import Updater

HOMES = ("host", "mixed", "device", "nvme", "mirrored")
UPDATES = ("lazy", "eager", "sync")
SEEDS_OF_A_PROGRAM = 45
"""Each place three times, so that what copies without streams give is computed once for three seeds."""
BLOCKS = 5
WIDTH = 8


class Blocks(nn.Module):
    """Blocks of different sizes, taken in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16 * hidden), nn.Tanh(), nn.Linear(16 * hidden, WIDTH))
            for hidden in (8, 12, 8, 20, 8)
        )

    def forward(self, inputs: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for block in order:
            inputs = inputs + self.blocks[block](inputs)
        return inputs.square().mean()


@dataclass(frozen=True)
class Step:
    orders: tuple[tuple[int, ...], ...]
    """Of the blocks, one a micro-batch."""
    evaluated: tuple[int, ...]
    """A forward without gradients before the step."""
    clipped: bool
    read: bool
    """Whether gradients are looked at."""
    edited: int | None
    """A block whose first weight is changed after the step."""


@dataclass(frozen=True)
class Place:
    home: str
    update: str
    kernels: bool = False
    """Whether the device updates what rests on it."""


def program_of(number: int, update: str) -> list[Step]:
    """Eager updates begin in the backward: before their step nobody looks at anything, and each block comes
    once a step."""
    draw = random.Random(number)
    eager = update == "eager"

    def order() -> tuple[int, ...]:
        blocks = draw.sample(range(BLOCKS), draw.randint(2, BLOCKS))
        again = [] if eager or draw.random() < 0.5 else draw.choices(blocks, k=1)
        return (*blocks, *again)

    return [
        Step(
            orders=tuple(order() for _ in range(1 if eager else draw.randint(1, 2))),
            evaluated=order() if draw.random() < 0.5 and not eager else (),
            clipped=draw.random() < 0.3 and not eager,
            read=draw.random() < 0.3 and not eager,
            edited=draw.randrange(BLOCKS) if draw.random() < 0.3 else None,
        )
        for _ in range(3)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """On a disk, one for all runs: slabs are removed when a runtime closes."""
    return tempfile.TemporaryDirectory(prefix="copy-order-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


@functools.cache
def budget_of(home: str, kernels: bool = False) -> Any:
    """kernels: whether `twin_flow.has_kernels` says so."""
    model = Blocks()
    driver, precision = Driver.load(str(LIBRARY)), infinity.Precision(compute="fp32")
    with emulated(driver, driver.foreign(COMPUTE)):  # plans for which have a ring for gradients
        found = budget_for(home, model, adamw(model), Path(folder().name), precision)
        if home != "host":
            return found
        ring = infinity.plan(model, adamw(model), budget=found, precision=precision, device="cpu").ring_bytes
    # Room for more than one page to be resident.
    return infinity.Budget(device=2 * found.device_bytes - ring, host=found.host_bytes)


def trained(number: int, place: Place) -> dict[str, Any]:
    """What a program has left, with pages at a place."""
    model = Blocks()
    seen: dict[str, Any] = {"losses": [], "evaluated": [], "gradients": [], "norms": []}
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    with (
        mock.patch.object(twin_flow, "has_kernels", lambda device: place.kernels),
        infinity.offload(
            model,
            adamw(model),
            budget=budget_of(place.home, place.kernels),
            precision=infinity.Precision(compute="fp32"),
            device="cpu",
            update=place.update,
            accumulation=1 if place.update == "eager" else None,
        ) as runtime,
    ):
        assert bool(runtime.plan.updated_on_device) == place.kernels
        for step in program_of(number, place.update):
            for order in step.orders:
                loss = model(inputs, order)
                loss.backward()
                seen["losses"].append(loss.item())
            if step.read:
                seen["gradients"].append([runtime.grad(each) for each in model.parameters()])
            if step.clipped:
                seen["norms"].append(float(runtime.clip_grad_norm_(0.1)))
            if step.evaluated:
                with torch.no_grad():
                    seen["evaluated"].append(model(inputs, step.evaluated).item())
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            if step.edited is not None:
                with torch.no_grad():
                    model.blocks[step.edited][0].weight.mul_(0.5)
        seen["parameters"] = parity.copied(model.state_dict())
        seen["optimizer"] = parity.tensors_copied(runtime.optimizer.state_dict())
    return seen


@functools.cache
def without_streams(number: int, place: Place) -> dict[str, Any]:
    """The same where copies are copies."""
    return trained(number, place)


def drawn(seed: int) -> tuple[int, Place]:
    """The program and the place of a seed."""
    places = [Place(home, update) for home, update in itertools.product(HOMES, UPDATES)]
    return seed // SEEDS_OF_A_PROGRAM, places[seed % len(places)]


def check(seed: int, *, threads: bool = False) -> None:
    check_at(seed, *drawn(seed), threads=threads)


def check_at(seed: int, number: int, place: Place, *, threads: bool = False) -> None:
    device = EmulatedDevice(seed, threads=threads)
    with device.in_use():
        found = trained(number, place)
    assert device.count("cuMemcpyAsync") > 10
    assert parity.differences(found, without_streams(number, place)) == []


@pytest.mark.parametrize("first", range(0, 60, 12))
def test_random_training_is_ordered_and_has_every_bit(first: int) -> None:
    for seed in range(first, first + 12):
        check(seed)


@pytest.mark.parametrize("update", UPDATES)
def test_updates_on_the_device_are_ordered_too(update: str) -> None:
    for seed in range(6):
        check_at(seed, seed // 2, Place("device", update, kernels=True))


@pytest.mark.parametrize("home", HOMES)
def test_updates_behind_the_model_are_ordered_too(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: nobody waits for an update on the CPU before its outcome is used."""
    made = Updater.__init__

    def apart(updater: Updater, *arguments: Any, **options: Any) -> None:
        made(updater, *arguments, **options)
        updater._queue.shares_cpu = False

    for seed, update in enumerate(UPDATES * 3):
        number, place = seed // 3, Place(home, update)
        expected = without_streams(number, place)
        with monkeypatch.context() as patch, (device := EmulatedDevice(seed)).in_use():
            patch.setattr(Updater, "__init__", apart)
            found = trained(number, place)
        assert device.count("cuMemcpyAsync") > 10
        assert parity.differences(found, expected) == []


@pytest.mark.parametrize("seed", range(0, 24, 3))
def test_streams_that_are_threads_change_nothing(seed: int) -> None:
    check(seed, threads=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 1000, 20))
def test_more_random_training_is_ordered_and_has_every_bit(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.parametrize("order", Order)
def test_each_order_that_is_missing_is_seen_in_training(order: Order) -> None:
    for seed in range(60):
        device = EmulatedDevice(seed)
        try:
            with device.in_use(), device.without(order):
                trained(*drawn(seed))
        except AssertionError:
            assert device.violations
            return
    pytest.fail(f"nobody misses {order}")


@contextlib.contextmanager
def opened(device: EmulatedDevice, home: str = "host", update: str = "lazy") -> Iterator[tuple[Any, Any]]:
    """The model and its runtime on a device; at the end nothing was unordered."""
    model = Blocks()
    with (
        device.in_use(),
        infinity.offload(model, adamw(model), budget=budget_of(home), device="cpu", update=update) as runtime,
    ):
        yield model, runtime


def stepped(model: Any, runtime: Any) -> list[torch.Tensor]:
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(inputs, tuple(range(BLOCKS))).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return list(parity.copied(model.state_dict()).values())


def test_a_look_ahead_returns_while_copies_are_held() -> None:
    device = EmulatedDevice(3)
    with opened(device) as (model, runtime):
        stepped(model, runtime)
        engine, streams = runtime._parts.engine, runtime._parts.store.link.streams
        evict_all(engine)
        late: list[str] = []

        def let_go() -> None:
            late.append("the look-ahead waited")
            for stream in streams.values():
                device.let_go(stream)

        for stream in streams.values():
            device.hold(stream)
        watchdog = threading.Timer(30, let_go)
        watchdog.start()
        engine.look_ahead()
        watchdog.cancel()
        assert any(page.presence is Presence.ARRIVING for page in engine.pages)
        assert late == []
        for stream in streams.values():
            device.let_go(stream)
        stepped(model, runtime)


def test_ctrl_c_ends_a_step_whose_gradients_do_not_come_down() -> None:
    device = EmulatedDevice(4)
    with opened(device) as (model, runtime):
        expected = stepped(model, runtime)
    with opened(device) as (model, runtime):
        down = runtime._parts.store.link.streams["down"]
        inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        loss = model(inputs, tuple(range(BLOCKS)))
        device.hold(down)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()  # as far as the ring has room
            runtime.optimizer.step()
        timer.join()
        device.let_go(down)
        del loss
        runtime.optimizer.zero_grad()
        assert parity.differences(stepped(model, runtime), expected) == []
