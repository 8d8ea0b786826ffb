"""Tests of commits of pages at home in device memory, which `save` copies to disk."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import committed_runs
import numpy as np
import pytest
import torch
from commit_states import continued
from committed_runs import Job, opened, take_step, user_state
from emulated_device import EmulatedDevice
from faulty import watchdog

from infinity.aio import Faults
from infinity.checksum import crc32c_blocks
from infinity.errors import ConfigError, StorageFull
from infinity.pages.durable_io import DurableIO, extend
from infinity.pages.store import Store
from infinity.planning import twin_flow
from infinity.system.disk_files import injected

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

    def save(self) -> Any:
        return self.runtime.save(state=user_state(LAST))

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


def test_nothing_is_copied_or_written_after_save(tmp_path: Path) -> None:
    """The commit lands while copies to the host are held back, and no further bytes go to the slabs."""
    with running(tmp_path) as run:
        commit = run.save()
        run.device.hold(run.stream())
        before = run.device.count("cuMemcpyAsync"), run.faults.calls["write"]
        commit.join()
        assert commit.failure is None
        assert (run.device.count("cuMemcpyAsync"), run.faults.calls["write"]) == before
        run.device.let_go(run.stream())
    run.check()


def test_the_copies_take_the_bounce_buffer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging may be taken as a whole, and no piece is larger than half of the buffer."""
    pieces: list[torch.Tensor] = []
    copy = DurableIO.copy_out_piece

    def noted(self: Any, part: Any, offset: int, memory: torch.Tensor, checksums: Any) -> Any:
        pieces.append(memory)
        return copy(self, part, offset, memory, checksums)

    monkeypatch.setattr(DurableIO, "copy_out_piece", noted)
    with running(tmp_path) as run, run.store.staging.lease(run.store.staging.largest_free):
        run.save().wait()
        bounce = run.store.bounce
        assert bounce is not None
        assert len(pieces) > 10
        assert max(each.nbytes for each in pieces) == bounce.nbytes // 2
        ends = {each.data_ptr() - bounce.data_ptr() + each.nbytes for each in pieces}
        assert min(ends) > 0
        assert max(ends) == bounce.nbytes
        pieces.clear()
    run.check()


@pytest.mark.parametrize("window", [4096, 20480, 1 << 20])
def test_checksums_of_pieces_are_those_of_the_whole(window: int) -> None:
    memory = torch.arange(300_000).mul(2654435761).to(torch.uint8)
    rows = np.array([(0, 0, 8192), (256, 100_001, 8192), (110_080, 4, 16384), (120_064, 150_000, 16384)])
    found = np.zeros(13 + 1 + 10, dtype=np.int64)
    for offset in range(0, memory.nbytes, window):
        extend(found, rows, offset, memory[offset : offset + window])
    assert found.tolist() == crc32c_blocks(memory, rows).tolist()


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


CHANGES = [update, edit, edit_beside, replace_values, replace_states]


@pytest.mark.sweep
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_after_save_is_not_in_the_commit(
    change: Callable[[Run], None], compute: str, tmp_path: Path
) -> None:
    with running(tmp_path, Job(home="device", compute=compute)) as run:
        commit = run.save()
        change(run)
        commit.wait()
    run.check()


@pytest.mark.parametrize("update_", ["lazy", "eager"])
def test_an_update_on_the_device_is_not_in_the_commit(
    update_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    with running(tmp_path, Job(home="device", update=update_)) as run:
        assert run.runtime.plan.updated_on_device
        commit = run.save()
        update(run)
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


def test_a_part_that_is_not_copied_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as run:
        monkeypatch.setattr(Store, "copy_to_disk", lambda *_: None)
        run.save().wait()
    assert continued(run.job, run.directories, LAST) is not None


def test_an_edit_through_a_view_from_before_is_not_in_the_commit(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        view = run.model.first.weight.detach()
        commit = run.save()
        view.mul_(3.0)
        commit.wait()
    run.check()


@pytest.mark.parametrize("nth", [1, 4])
def test_save_raises_the_error_of_a_write_and_the_next_one_works(nth: int, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        last = run.runtime._components.committer.last
        run.faults.fail("write", nth, errno.ENOSPC)
        with pytest.raises(StorageFull):
            run.save()
        assert run.faults.fired == 1
        assert run.runtime._components.committer.last is last
        run.save().wait()
    run.check()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("held", ["copies", "writes"])
def test_ctrl_c_waits_for_save_and_a_second_one_ends_it(held: str, times: int, tmp_path: Path) -> None:
    with running(tmp_path) as run:

        def interrupt_and_release() -> None:
            for _ in range(times):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            run.device.let_go(run.stream())
            run.faults.release()

        if held == "copies":
            run.device.hold(run.stream())
        else:
            run.faults.hold("write", 1, times=None)
        other = threading.Thread(target=interrupt_and_release)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            run.save()
        other.join()
        if times == 2:
            with pytest.raises(ConfigError, match="interrupted half way"):
                run.save()
    assert continued(run.job, run.directories, LAST if times == 1 else LAST - 1) is None
