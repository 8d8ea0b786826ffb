"""Tests of what goes on beside a commit that is under way: waits for memory, and failures of updates."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from commit_states import continued
from committed_runs import Job, opened, take_step, user_state

from infinity.aio import Faults
from infinity.errors import StorageError
from infinity.system.disk_files import injected


def test_updates_wait_for_staging_that_a_commit_of_device_homes_writes_from(tmp_path: Path) -> None:
    job, faults = Job(home="device"), Faults()
    directories = job.directories(tmp_path)
    with injected(faults), opened(job, directories) as (model, runtime):
        take_step(model, runtime, 1)
        take_step(model, runtime, 2)
        faults.delay("write", 1, 0.03, times=None)
        runtime.save(state=user_state(2)).wait()
    assert continued(job, directories, 2) is None


def test_close_ends_a_commit_whose_update_cannot_be_read(tmp_path: Path) -> None:
    job, faults = Job(), Faults()
    directories = job.directories(tmp_path)
    with injected(faults), opened(job, directories) as (model, runtime):
        take_step(model, runtime, 1)
        take_step(model, runtime, 2)
        runtime.save(state=user_state(2)).wait()
        take_step(model, runtime, 3)
        faults.fail("read", 1, errno.EIO, times=None)
        commit = runtime.save(state=user_state(3))
        with pytest.raises(StorageError) as raised:
            runtime.close()
    assert raised.value.errno == errno.EIO
    assert commit.done
    assert continued(job, directories, 2) is None
