"""Tests of optimizer states that are read ahead, that is, before it is decided what their update computes.

Losses, parameters and states must have the same bits as in training without reading ahead, whatever user
code does between the backward and step().
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cover import covered
from homes import ROOMY
from parity import copied, differences, tensors_copied
from small_runtime import TIED, files, loss_of
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.build import carry_out
from infinity.optim.chunk_update import ChunkUpdate
from infinity.optim.scheduler import ReadAhead
from infinity.planning.placement import Kind
from infinity.ranks import SingleRank
from infinity.system.disk_files import injected
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

GRADIENT_HOMES = (Tier.NVME, Tier.HOST)


def staging(plan: Any, staged: int) -> dict[str, int]:
    """Return the fields `staging_bytes` and `chunk_update_bytes` for a changed copy of the plan.

    With them, staging (buffers in host RAM that updates work on) has room for `staged` updates of the
    largest chunk at a time.
    """
    chunks = [
        (unit, number)
        for unit, layout in enumerate(plan.layout.units)
        for number in range(len(layout.chunks))
    ]
    largest = max(plan.state_format(*each).nbytes for each in chunks)
    gradient = max(
        plan.gradient_offset(unit, 1) for unit, layout in enumerate(plan.layout.units) if layout.chunks
    )
    return {"staging_bytes": staged * (largest + 2 * gradient), "chunk_update_bytes": largest + 2 * gradient}


@contextlib.contextmanager
def opened(
    directory: Path,
    *,
    gradients: Tier = Tier.NVME,
    accumulation: int | None = 1,
    staged: int = 8,
    faults: Faults | None = None,
    update: str = "lazy",
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload the model TIED in bf16, with states on NVMe and parameters in RAM. Yields (model, runtime).

    gradients: the tier where gradients rest. accumulation: the declared number of backwards a step; with
    None, lazy updates read no states ahead. staged: how many updates of the largest chunk staging has room
    for. faults: injected into the disk's I/O.
    """
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = infinity.Budget(host=ROOMY, nvme={str(directory): ROOMY})
    plan = infinity.plan(
        model,
        optimizer,
        budget=budget,
        precision=infinity.Precision(compute="bf16", accumulate="compute"),
        device="cpu",
        update=update,
        accumulation=accumulation,
    )
    where = {Kind.PARAMETER: Tier.HOST, Kind.GRADIENT: gradients, Kind.OPTIMIZER: Tier.NVME}
    homes = tuple(
        {kind: None if tier is None else where[kind] for kind, tier in unit.items()} for unit in plan.homes
    )
    with (
        injected(faults or Faults()),
        carry_out(
            replace(plan, homes=homes, **staging(plan, staged)),
            model,
            optimizer,
            budget=budget,
            ranks=SingleRank(),
        ) as runtime,
    ):
        yield model, runtime
    assert files(directory) == []


def held(runtime: Any) -> list[ChunkUpdate]:
    """Return the updates of chunks that now hold states which were read ahead."""
    units = runtime._components.scheduler._units
    return [update for group in units for update in group.chunks if update.is_ahead]


def held_once_written(runtime: Any) -> list[ChunkUpdate]:
    """Wait for the last step's writes, continue to read ahead, and return the updates that hold states.

    States that are still being written are not read ahead before the write has ended.
    """
    runtime._components.store.settle()
    runtime._components.scheduler.advance()
    return held(runtime)


def nothing(model: nn.Module, runtime: Any) -> None:
    pass


def clip(model: nn.Module, runtime: Any) -> None:
    runtime.clip_grad_norm_(0.1)


def other_moments(model: nn.Module, runtime: Any) -> None:
    """Load other first moments into the optimizer, after the old ones have been read ahead."""
    optimizer = runtime.optimizer
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"] * 0.5
    optimizer.load_state_dict(state)


def other_masters(model: nn.Module, runtime: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def other_weights(model: nn.Module, runtime: Any) -> None:
    model.load_state_dict({name: each * 0.75 for name, each in copied(model.state_dict()).items()})


def one_more_backward(model: nn.Module, runtime: Any) -> None:
    loss_of(model, 9).backward()


def another_batch(model: nn.Module, runtime: Any) -> None:
    runtime.optimizer.zero_grad()
    loss_of(model, 9).backward()


def all_staging(model: nn.Module, runtime: Any) -> None:
    """Take all staging memory for a moment, and assert that the updates have given up states read ahead."""
    scheduler = runtime._components.scheduler
    assert scheduler.take(runtime.plan.staging_bytes).nbytes == runtime.plan.staging_bytes
    assert held(runtime) == []


ACTS = [
    nothing,
    clip,
    other_moments,
    other_masters,
    other_weights,
    one_more_backward,
    another_batch,
    all_staging,
]


def train(model: nn.Module, runtime: Any, act: Callable[[nn.Module, Any], None], ahead: bool) -> list[Any]:
    """Train four steps, calling `act` before each step(). Return [losses, parameters, optimizer states].

    ahead: True asserts that each backward after the first step reads states ahead. False asserts that none
    does.
    """
    losses = []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        assert bool(held_once_written(runtime)) == (ahead and step > 0)  # states exist after the first step
        act(model, runtime)
        runtime.optimizer.step()
        assert held(runtime) == []
        runtime.optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())]


@pytest.mark.sweep
@pytest.mark.parametrize("gradients", GRADIENT_HOMES)
@pytest.mark.parametrize("act", ACTS, ids=lambda each: each.__name__)
def test_the_bits_of_states_that_are_read_by_their_update(act: Any, gradients: Tier, tmp_path: Path) -> None:
    found = []
    for accumulation in (None, 1):
        directory = tmp_path / str(accumulation)
        directory.mkdir()
        with opened(directory, gradients=gradients, accumulation=accumulation) as (model, runtime):
            found.append(train(model, runtime, act, ahead=accumulation is not None))
    assert differences(found[0], found[1]) == []


@pytest.mark.parametrize("gradients", GRADIENT_HOMES)
def test_nothing_is_read_twice(gradients: Tier, tmp_path: Path) -> None:
    """Before step(), states are read ahead in the order of their updates until half of staging is full.

    No state is read a second time: a step reads no more bytes from the disk than the plan says.
    """
    with opened(tmp_path, gradients=gradients) as (model, runtime):
        store, read = runtime._components.store, 0
        states = runtime._components.states.pages
        for step in range(4):
            loss_of(model, step).backward()
            early = held_once_written(runtime)
            if step:
                order = [unit for unit in runtime._components.prefetch_engine.next_step() if unit in states]
                chunks = [(unit, number) for unit in order for number in range(len(states[unit].formats))]
                assert {(each.unit, each.chunk_index) for each in early} == set(chunks[: len(early)])
                room, after = runtime.plan.staging_bytes // 2, chunks[len(early)]
                taken = sum(each.needed_ahead for each in early)
                assert taken <= room < taken + states[after[0]].formats[after[1]].nbytes
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            runtime._components.scheduler.complete_all()
            store.settle()
            before, read = read, runtime.stats.edges[Edge.NVME_TO_HOST].bytes
            if step > 1:
                assert read - before <= runtime.plan.traffic.disk_read
                if gradients is Tier.HOST:
                    assert read - before == runtime.plan.traffic.disk_read


def test_with_micro_batches_only_the_last_one_brings_states(tmp_path: Path) -> None:
    with opened(tmp_path, accumulation=2) as (model, runtime):
        for step in range(3):
            loss_of(model, step).backward()
            assert held(runtime) == []
            loss_of(model, step + 5).backward()
            assert bool(held_once_written(runtime)) == (step > 0)
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()


def test_a_read_that_fails_is_left_to_the_update(tmp_path: Path) -> None:
    found = []
    for failing in (False, True):
        directory, faults = tmp_path / str(failing), Faults()
        directory.mkdir()
        with opened(directory, gradients=Tier.HOST, faults=faults) as (model, runtime):
            for step in range(3):
                loss = loss_of(model, step)
                if failing and step == 2:
                    faults.fail("read", 1, errno.EIO, times=2)
                loss.backward()
                assert bool(held_once_written(runtime)) == (step > 0)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found.append(copied(model.state_dict()))
    assert differences(found[0], found[1]) == []


def test_it_ends_with_what_was_read_ahead(tmp_path: Path) -> None:
    faults = Faults()
    faults.delay("read", 1, 0.002, times=None)
    with opened(tmp_path, faults=faults) as (model, runtime):
        for step in range(2):
            loss_of(model, step).backward()
            if step == 0:
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
        assert held_once_written(runtime)


def test_without_room_nothing_is_read_ahead(tmp_path: Path) -> None:
    with opened(tmp_path, staged=1) as (model, runtime):
        for step in range(3):
            loss_of(model, step).backward()
            assert held(runtime) == []
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()


def drop_a_read(model: nn.Module, runtime: Any) -> None:
    if found := held(runtime):
        runtime._components.scheduler._cancel(found[-1])


def forward_only(model: nn.Module, runtime: Any) -> None:
    with torch.no_grad():
        loss_of(model, 3)


def a_graph_that_nobody_uses(model: nn.Module, runtime: Any) -> None:
    loss_of(model, 9)


BEFORE_FORWARD = [
    nothing,
    other_moments,
    other_masters,
    other_weights,
    all_staging,
    drop_a_read,
    forward_only,
    a_graph_that_nobody_uses,
]


def read_on(runtime: Any) -> None:
    """Finish the due updates, and begin to read states ahead for the next ones."""
    runtime._components.scheduler.complete_all()
    runtime._components.store.settle()
    runtime._components.scheduler.advance()


def train_eagerly(
    model: nn.Module, runtime: Any, act: Callable[[nn.Module, Any], None], backwards: int
) -> list[Any]:
    """Train four steps with eager updates, calling `act` before the last forward of each step.

    Return [number of updates whose states were read ahead, summed over the steps, losses, parameters,
    optimizer states]. backwards: the number of backwards in a step.
    """
    losses, seen = [], 0
    for step in range(4):
        for number in range(backwards):
            if number + 1 == backwards:
                read_on(runtime)
                seen += len(held(runtime))
                act(model, runtime)
            assert number + 1 == backwards or held(runtime) == []
            loss = loss_of(model, step + 10 * number)
            loss.backward()
            losses.append(loss.item())
        runtime.optimizer.step()
        assert held(runtime) == []
        runtime.optimizer.zero_grad()
    return [seen, losses, copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())]


@pytest.mark.sweep
@covered({"act": BEFORE_FORWARD, "gradients": GRADIENT_HOMES, "backwards": (1, 2)})
def test_the_bits_of_eager_updates_whose_states_were_read(
    act: Any, gradients: Tier, backwards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for ahead in (False, True):
        directory = tmp_path / str(ahead)
        directory.mkdir()
        with monkeypatch.context() as patch:
            if not ahead:
                patch.setattr(ReadAhead, "candidates", lambda self, pending: iter(()))
            with opened(directory, gradients=gradients, accumulation=backwards, update="eager") as opening:
                seen, *outcome = train_eagerly(*opening, act, backwards)
        # No room is left for more while the gradients of the first micro-batch are on their way to NVMe.
        assert bool(seen) == (ahead and not (gradients is Tier.NVME and backwards == 2))
        found.append(outcome)
    assert differences(found[0], found[1]) == []


@pytest.mark.parametrize("gradients", GRADIENT_HOMES)
def test_states_that_come_before_their_gradients_are_read_once(gradients: Tier, tmp_path: Path) -> None:
    with opened(tmp_path, gradients=gradients, update="eager") as (model, runtime):
        pool, read = runtime._components.store.staging, 0
        for step in range(4):
            read_on(runtime)
            assert bool(held(runtime)) == (step > 0)
            assert 4 * pool.counters.leased <= 3 * pool.nbytes
            loss_of(model, step).backward()
            runtime.optimizer.step()
            runtime._components.scheduler.complete_all()
            runtime._components.store.settle()
            before, read = read, runtime.stats.edges[Edge.NVME_TO_HOST].bytes
            if step > 1:
                assert read - before <= runtime.plan.traffic.disk_read
                if gradients is Tier.HOST:
                    assert read - before == runtime.plan.traffic.disk_read
            runtime.optimizer.zero_grad()


def test_a_read_before_the_gradient_that_fails_is_left_to_the_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for failing in (False, True):
        directory, faults = tmp_path / str(failing), Faults()
        directory.mkdir()
        with opened(directory, faults=faults, update="eager") as (model, runtime):
            for step in range(3):
                with monkeypatch.context() as patch:
                    patch.setattr(ReadAhead, "candidates", lambda self, pending: iter(()))
                    read_on(runtime)
                if failing and step == 2:
                    faults.fail("read", 1, errno.EIO, times=2)
                runtime._components.scheduler.advance()
                assert bool(held(runtime)) == (step > 0)
                loss_of(model, step).backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            found.append(copied(model.state_dict()))
    assert differences(found[0], found[1]) == []


def test_eager_updates_with_staging_for_one_update_read_nothing_ahead(tmp_path: Path) -> None:
    with opened(tmp_path, staged=1, update="eager") as (model, runtime):
        for step in range(3):
            read_on(runtime)
            assert held(runtime) == []
            loss_of(model, step).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
