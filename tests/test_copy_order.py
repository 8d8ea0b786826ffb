"""Random training on a device whose streams are late at random: the device's checker finds an order for every
access to memory, and results have the bits of a run without streams.

A seed determines a program (which blocks each forward uses, in which order, how often, what happens
between backward and step), where pages rest, when updates run, and how late the device's streams are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from emulated_device import EmulatedDevice
from homes import evict_all
from random_programs import BLOCKS, WIDTH, Blocks, Place, adamw, budget_of, stepped, trained
from waits import Wait, waits_seen

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.parameter_page import Presence
from infinity.tiers.copy_streams import Order

HOMES = ("host", "mixed", "device", "nvme", "mirrored")
UPDATES = ("lazy", "eager", "speculative", "sync")
PLACES = (
    *itertools.starmap(Place, itertools.product(HOMES, UPDATES)),
    *(Place("device", update, kernels=True) for update in UPDATES if update != "speculative"),
    *(Place("visits", update, kernels=True) for update in ("lazy", "eager")),
)
SEEDS_OF_A_PROGRAM = 2 * len(PLACES)
"""Number of successive seeds that have the same program: two for each place, with updates behind the model
and not. The two share one expected result, which is computed without streams.
"""


@functools.cache
def without_streams(number: int, place: Place) -> dict[str, Any]:
    """Train without copy streams, so that each copy is done at once, and return the results.

    number: the random program to run. place: where pages rest, and when updates run.
    """
    return trained(number, place)


def drawn(seed: int) -> tuple[int, Place]:
    """Return what a seed determines: (number of the program, where pages rest and when updates run)."""
    return seed // SEEDS_OF_A_PROGRAM, PLACES[seed % len(PLACES)]


@contextlib.contextmanager
def behind_the_model() -> Iterator[None]:
    """Within the `with` statement, updates run on the CPU while the model goes on, which waits for an update
    only when it uses the results, as on a GPU.
    """
    made = UpdateScheduler.__init__

    def apart(scheduler: UpdateScheduler, *arguments: Any, **options: Any) -> None:
        made(scheduler, *arguments, **options)
        scheduler._shares_cpu = False

    with mock.patch.object(UpdateScheduler, "__init__", apart):
        yield


def run(seed: int) -> dict[str, Any]:
    """Train as a seed determines, on the device that is in use. Returns the results."""
    with behind_the_model() if seed % 2 else contextlib.nullcontext():
        return trained(*drawn(seed))


def check(seed: int, *, threads: bool = False) -> None:
    device = EmulatedDevice(seed, threads=threads)
    with device.in_use():
        found = run(seed)
    assert device.count("cuMemcpyAsync") > 10
    assert parity.differences(found, without_streams(*drawn(seed))) == []


@pytest.mark.parametrize(
    "seeds",
    [
        range(0, len(PLACES), 2),
        *(
            pytest.param(range(at, at + len(PLACES)), marks=pytest.mark.slow)
            for at in range(0, 1000, len(PLACES))
        ),
    ],
    ids=lambda seeds: f"{seeds.start} to {seeds[-1]}",
)
def test_random_training_is_ordered_and_has_every_bit(seeds: range) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("seed", range(0, 24, 3))
def test_streams_that_are_threads_change_nothing(seed: int) -> None:
    check(seed, threads=True)


@pytest.mark.parametrize("order", [each for each in Order if each is not Order.OFFER])  # needs other ranks
def test_each_order_that_is_missing_is_seen_in_training(order: Order) -> None:
    for seed in range(60):
        device = EmulatedDevice(seed)
        try:
            with device.in_use(), device.without(order):
                run(seed)
        except AssertionError:
            assert device.violations
            return
    pytest.fail(f"nobody misses {order}")


IMPLIED = {
    # The first two imply the third, and the third implies the first two.
    ("following", "optim/scheduler.py:_queue", "optim/chunk_update.py:compute"),
    ("following", "optim/scheduler.py:_queue", "optim/unit_update.py:submit"),
    ("following", "optim/scheduler.py:step", "optim/scheduler.py:step"),
    # Nobody reads the results of a speculative update before it is confirmed or undone. The copy that brings
    # the values before follows that of the results on the same stream, and is awaited.
    ("following", "pages/store.py:bring", "pages/store.py:bring"),
    ("host waits", "elsewhere", "optim/scheduler.py:_await_copies"),
    # These drop sources of copies early. Whoever began a copy waits for it.
    ("host asks", "copy by pages/store.py:read", "pages/gradient_copies.py:_begin"),
    ("host asks", "copy by pages/store.py:read", "pages/store.py:read"),
    # The copy of the new gradient follows on the same stream. With several ranks there may be none.
    ("host waits", "copy by pages/store.py:read", "gradients/gradients.py:add"),
    # The copy waits for all that the compute stream has queued, too. Another thread's may be another stream.
    ("last writer", "gradients/device.py:update", "pages/store.py:read"),
}
"""(order, what recorded the event, what waits) of waits that no training here needs, because of others."""

TRIES = 100
"""Number of trainings without a wait after which one of them must have missed the wait."""


@pytest.mark.slow
def test_each_wait_that_is_missing_is_seen_in_training() -> None:
    """Not only each order, but each pair of a function that waits and one that began what it waits for."""
    caught: set[Wait] = set()
    tries: Counter[Wait] = Counter()

    def waits_of(seed: int, without: Wait | None = None) -> set[Wait]:
        device = EmulatedDevice(seed)
        try:
            with device.in_use(), waits_seen(device, lambda wait: wait == without) as waits:
                run(seed)
        except (AssertionError, InfinityError):  # an update may meet a gradient that has not come
            assert device.violations
            assert without is not None, device.violations
            caught.add(without)
        return waits

    for seed in range(20 * len(PLACES)):
        for wait in sorted(waits_of(seed) - caught, key=str):
            if (wait.order.value, wait.recorded, wait.awaited) not in IMPLIED and tries[wait] < TRIES:
                tries[wait] += 1
                waits_of(seed, without=wait)
    assert len(caught) >= 30
    missed = {wait for wait in tries.keys() - caught if tries[wait] == TRIES}
    assert missed == set(), f"{len(caught)} of {len(tries)} are missed by a training"


@contextlib.contextmanager
def opened(device: EmulatedDevice, home: str = "host") -> Iterator[tuple[Any, Any]]:
    """Yield a small model and its runtime on the emulated device. Asserts at the end that the device's
    checker has found an order for all accesses to memory.

    home: where pages rest, one of HOMES.
    """
    model = Blocks()
    with (
        device.in_use(),
        infinity.offload(model, adamw(model), budget=budget_of(Place(home)), device="cpu") as runtime,
    ):
        yield model, runtime


def test_a_look_ahead_returns_while_copies_are_held() -> None:
    device = EmulatedDevice(3)
    with opened(device) as (model, runtime):
        stepped(model, runtime)
        engine, streams = runtime._components.prefetch_engine, runtime._components.store.link.streams
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


def test_a_second_ctrl_c_ends_a_step_whose_gradients_do_not_come_down() -> None:
    device = EmulatedDevice(4)
    with opened(device) as (model, runtime):
        down = runtime._components.store.link.streams["down"]
        inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        loss = model(inputs, tuple(range(BLOCKS)))
        device.hold(down)
        timers = [threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)) for each in (0.1, 0.3)]
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()  # as far as the ring has room
            runtime.optimizer.step()
        for timer in timers:
            timer.join()
        device.let_go(down)
        del loss
        with pytest.raises(ConfigError, match="interrupted half way"):
            runtime.optimizer.zero_grad()
