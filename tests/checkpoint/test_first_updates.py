"""Tests of commits between whose steps some parameters get their first update."""

from __future__ import annotations

from pathlib import Path

import pytest
from commit_states import continued
from committed_runs import EDITED_AFTER, SPARE_FROM, Job, opened, take_step

from infinity.aio import Faults
from infinity.checkpoint.commit_files import newest
from infinity.system.disk_files import DiskFiles, injected

JOBS = [
    Job(),
    Job(update="eager"),
    Job(update="eager", compute="bf16"),
    Job(home="ram"),
    Job(home="ram", update="eager"),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_first_updates_after_a_resume_have_the_bits_of_the_undisturbed_run(job: Job, tmp_path: Path) -> None:
    directories = job.directories(tmp_path)
    last = SPARE_FROM - 2  # the next step edits, and the one after it has the first updates
    with opened(job, directories) as (model, runtime):
        for step in range(1, last + 1):
            take_step(model, runtime, step)
        runtime.save(state={"step": last, "note": ("text", last)}).wait()
    assert continued(job, directories, last) is None


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_a_first_update_does_not_change_the_commit_that_is_still_written(tmp_path: Path, update: str) -> None:
    job, faults = Job(home="ram", update=update), Faults()
    directories = job.directories(tmp_path)
    with injected(faults), opened(job, directories) as (model, runtime):
        for step in range(1, EDITED_AFTER + 1):
            take_step(model, runtime, step)
        # Few parts are written at a time, so the last wait until step 4 has decided its updates.
        faults.delay("write", 1, 0.05, times=None)
        commit = runtime.save(state={"step": EDITED_AFTER, "note": ("text", EDITED_AFTER)})
        assert not commit.done
        take_step(model, runtime, SPARE_FROM)
        commit.wait()
    saved = newest(directories[0], DiskFiles())
    assert saved is not None
    (spare,) = (each for each in saved.manifest.parameters if "spare.weight" in each.names)
    assert not spare.moments
    assert continued(job, directories, EDITED_AFTER) is None
