"""Tests of departures: commits of pages at home in device memory, while training goes on."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import committed_runs
import pytest
import torch
from commit_states import continued
from committed_runs import Job, opened, take_step, user_state
from emulated_device import EmulatedDevice
from faulty import watchdog

from infinity.aio import Faults
from infinity.errors import StorageFull
from infinity.pages.departures import Departures
from infinity.pages.open_tiers import injected
from infinity.pages.store import Store
from infinity.planning import twin_flow

__all__ = ["watchdog"]

LAST = 2
"""The step after which the runs here save. The commit before is of the step before."""


@pytest.fixture(autouse=True)
def budgets_of_their_own() -> Iterator[None]:
    """Have these tests share no budget with others, because plans for an emulated device need more RAM."""
    with mock.patch.dict(committed_runs._SMALLEST, clear=True):
        yield


@dataclass
class Run:
    """A run that has made LAST steps and is about to save, on an emulated device."""

    job: Job
    directories: list[Path]
    device: EmulatedDevice
    faults: Faults
    model: Any
    runtime: Any

    @property
    def store(self) -> Store:
        store: Store = self.runtime._components.store
        return store

    def departing(self) -> set[Any]:
        assert self.store.ledger is not None
        return set(self.store.ledger.departing())

    def save(self) -> Any:
        """Begin a commit, and assert that all parts are still to depart and none is being copied."""
        before = self.device.count("cuMemcpyAsync"), self.faults.calls["write"]
        commit = self.runtime.save(state=user_state(LAST))
        assert (self.device.count("cuMemcpyAsync"), self.faults.calls["write"]) == before
        pages, states = self.runtime._components.pages, self.runtime._components.states.pages
        homes = [each.home for page in pages for each in (page, states[page.index])]
        assert self.departing() == {part for home in homes for part in home.twins.parts if part.trained}
        assert not commit.done
        return commit

    def stream(self) -> Any:
        """The stream of copies down to the host."""
        return self.runtime._components.store.link.streams["down"]

    def check(self) -> None:
        """Assert that the commit has the bits of step LAST, after the runtime was closed."""
        assert continued(self.job, self.directories, LAST) is None


@contextmanager
def running(root: Path, job: Job | None = None, *, seed: int = 0, threads: bool = False) -> Iterator[Run]:
    """Yield a Run, and assert at its end that nothing is leased of staging. seed, threads: of the device."""
    job, faults = job or Job(home="device"), Faults()
    directories = job.directories(root)
    with EmulatedDevice(seed, threads=threads).in_use() as device, injected(faults):
        with opened(job, directories) as (model, runtime):
            take_step(model, runtime, 1)
            runtime.save(state=user_state(1)).wait()
            for step in range(2, LAST + 1):
                take_step(model, runtime, step)
            runtime._components.scheduler.complete_all()
            staging = runtime._components.store.staging
            yield Run(job, directories, device, faults, model, runtime)
        gc.collect()  # tracebacks of interrupted calls refer to what was leased
        assert staging.leased == 0


def test_save_returns_before_anything_is_copied_or_written(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.device.hold(run.stream())
        commit = run.save()
        for _ in range(20):
            run.store.poll()
        assert not commit.done
        assert len(run.departing()) > 5
        run.device.let_go(run.stream())
        commit.wait()
        assert run.departing() == set()
        assert run.store.staging.leased == 0
    run.check()


def test_parts_depart_while_the_model_computes(tmp_path: Path) -> None:
    """Nobody waits for the commit, and it lands."""
    with running(tmp_path) as run, torch.no_grad():
        commit = run.save()
        while not commit.done:
            run.model(torch.ones(4, 32), True)
        assert commit.failure is None
    run.check()


def update(run: Run) -> None:
    take_step(run.model, run.runtime, LAST + 1)
    run.runtime._components.scheduler.complete_all()


def edit(run: Run) -> None:
    with run.runtime.full_parameters(run.model.first), torch.no_grad():
        run.model.first.weight.mul_(3.0)


def edit_beside(run: Run) -> None:
    with torch.no_grad():
        run.model.first.weight.add_(1.0)


def replace_values(run: Run) -> None:
    run.model.first.load_state_dict({"weight": torch.ones(64, 32), "bias": torch.ones(64)})


def replace_states(run: Run) -> None:
    weight = run.model.first.weight
    state = {name: torch.ones_like(each) for name, each in run.runtime.optimizer.state[weight].items()}
    run.runtime.optimizer.state[weight] = state


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parts depart only when somebody waits for them."""
    monkeypatch.setattr(Departures, "advance", lambda self, begin: None)


CHANGES = [update, edit, edit_beside, replace_values, replace_states]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_waits_for_the_departure_of_what_it_changes(
    change: Callable[[Run], None], compute: str, tmp_path: Path
) -> None:
    with running(tmp_path, Job(home="device", compute=compute)) as run:
        commit = run.save()
        before = run.departing()
        change(run)
        assert run.departing() < before
        if change is not update:
            assert len(run.departing()) >= len(before) - 4, "more was waited for than the change is of"
        commit.wait()
    run.check()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("update_", ["lazy", "eager"])
def test_an_update_on_the_device_waits_too(
    update_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    with running(tmp_path, Job(home="device", update=update_)) as run:
        assert run.runtime.plan.updated_on_device
        commit = run.save()
        before = run.departing()
        update(run)
        assert run.departing() < before
        commit.wait()
    run.check()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_training_goes_on_while_streams_are_late(
    kernels: bool, threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's checker finds an order for every access to memory, and the commit has the right bits."""
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: kernels)
    for seed in range(1, 4):
        with running(tmp_path / str(seed), seed=seed, threads=threads) as run:
            commit = run.save()
            update(run)
            commit.wait()
        run.check()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_that_does_not_wait_is_seen(
    change: Callable[[Run], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "let_depart", lambda *_: None)
    with running(tmp_path) as run:
        commit = run.save()
        change(run)
        commit.wait()
    assert continued(run.job, run.directories, LAST) is not None


def test_an_edit_through_a_view_from_before_waits(tmp_path: Path) -> None:
    """The page departs in `save`, because nobody asks the runtime before such an edit."""
    with running(tmp_path) as run:
        view = run.model.first.weight.detach()
        commit = run.runtime.save(state=user_state(LAST))
        view.mul_(3.0)
        assert run.departing()
        commit.wait()
    run.check()


def test_a_load_drives_the_commit_to_its_end(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.runtime.save(tmp_path / "copy")
        commit = run.save()
        run.runtime.load(tmp_path / "copy")
        assert commit.done
    run.check()


@pytest.mark.parametrize("nth", [1, 4])
def test_after_a_failed_write_the_next_save_works(nth: int, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        commit = run.save()
        run.faults.fail("write", nth, errno.ENOSPC)
        with pytest.raises(StorageFull):
            commit.wait()
        assert run.faults.fired == 1
        assert run.store.staging.leased == 0
        run.save().wait()
    run.check()


def test_an_error_in_between_leaves_nothing_of_the_commit(tmp_path: Path) -> None:
    """A commit that is given up while parts are on their way does not disturb the one after it."""
    with running(tmp_path) as run:
        commit = run.save()
        run.device.hold(run.stream())
        run.store.poll()
        assert run.store.staging.leased > 0
        run.runtime._abandon()
        commit.join()
        assert run.departing() == set()
        run.device.let_go(run.stream())
        run.save().wait()
        assert run.store.staging.leased == 0
    run.check()


def test_close_lands_the_commit(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        commit = run.save()
    assert commit.done
    assert commit.failure is None
    run.check()


@contextmanager
def interrupted() -> Iterator[None]:
    """A context that a signal ends soon."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


@pytest.mark.parametrize("again", ["wait", "close"])
@pytest.mark.parametrize("held", ["copies", "writes"])
def test_ctrl_c_ends_the_wait_for_departures(held: str, again: str, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        commit = run.save()
        if held == "copies":
            run.device.hold(run.stream())
        else:
            run.faults.hold("write", 1, times=None)
        with interrupted():
            commit.wait()
        assert run.departing()
        run.device.let_go(run.stream())
        run.faults.release()
        if again == "wait":
            commit.wait()
            assert run.store.staging.leased == 0
        else:
            run.runtime.close()
        assert commit.failure is None
    run.check()


def test_an_interrupted_close_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        commit = run.save()
        run.faults.delay("write", 1, 0.5, times=None)
        with interrupted():
            run.runtime.close()
        assert commit.done
    assert continued(run.job, run.directories, LAST - 1) is None


def test_parts_for_which_staging_has_no_room_depart_through_ram_of_their_own(tmp_path: Path) -> None:
    with running(tmp_path) as run, run.store.staging.lease(run.store.staging.largest_free) as lease:
        assert lease.nbytes > 0
        commit = run.save()
        for _ in range(20):
            run.store.poll()
        assert not commit.done
        commit.wait()
    run.check()


def test_at_most_two_parts_or_a_share_of_staging_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    begin = Departures._begin

    def counted(self: Departures, *arguments: Any) -> Any:
        begun = begin(self, *arguments)
        seen.append((len(self._under_way), sum(each.memory.nbytes for each in self._under_way)))
        return begun

    monkeypatch.setattr(Departures, "_begin", counted)
    with running(tmp_path) as run:
        commit = run.save()
        commit.wait()
        assert len(seen) > 5
        assert all(count <= 2 or held <= run.store.staging.nbytes // 4 for count, held in seen)
