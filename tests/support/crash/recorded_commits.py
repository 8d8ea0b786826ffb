"""Recorded commits: recordings of runs that commit, from which a test draws the states that crashes leave."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from committed_runs import COMMITS, STEPS, Job, Marks, after, opened, take_step, train, user_state
from recorded_run import Event, Images, Recording, images, with_whole_slabs

from infinity.aio import Faults
from infinity.errors import StorageError
from infinity.system.disk_files import injected


@dataclass(frozen=True)
class Recorded:
    """A recording of a run: its events, the files before it, and its directories."""

    job: Job
    """The run's, or that of its last part if it was resumed."""
    events: list[Event]
    base: Images
    directories: list[Path]
    """That of the commits, and those of slabs."""


Record = Callable[[Path, Faults], Recorded]
"""Function that makes a recording of a run below a directory, with faults."""


def new_run(job: Job, act: Callable[[Any, Any, Recording], object]) -> Record:
    """A new run, from after its offload to its close. act: trains a model with a runtime."""

    def record(root: Path, faults: Faults) -> Recorded:
        recording = Recording(faults)
        directories = job.directories(root)
        with injected(faults, recording), opened(job, directories) as (model, runtime):
            base = images(*directories)
            before = len(recording.events())
            act(model, runtime, recording)
        return Recorded(job, recording.events()[before:], base, directories)

    return record


def whole(job: Job) -> Record:
    """A run of STEPS steps."""

    def act(model: Any, runtime: Any, recording: Recording) -> None:
        train(model, runtime, Marks(recording.mark), range(1, STEPS + 1))

    return new_run(job, act)


def refused(job: Job) -> Record:
    """A run of STEPS steps that begins with a commit whose slab a full disk gives no name."""

    def act(model: Any, runtime: Any, recording: Recording) -> None:
        take_step(model, runtime, 1)
        recording.fail("rename", 1, errno.ENOSPC)
        with pytest.raises(StorageError, match=r"\.slab"):
            runtime.save(state=user_state(1)).wait()
        train(model, runtime, Marks(recording.mark), range(2, STEPS + 1))

    return new_run(job, act)


def streamed(first: Job, second: Job) -> Record:
    """A run that is resumed with other homes, so that pages are streamed to new slabs; from the resume on.

    The first part commits once, and is not recorded.
    """

    def record(root: Path, faults: Faults) -> Recorded:
        directories = list(dict.fromkeys([*second.directories(root), *first.directories(root)]))
        step = COMMITS[0]
        with opened(first, first.directories(root)) as (model, runtime):
            for number in range(1, step + 1):
                take_step(model, runtime, number)
            runtime.save(state=user_state(step)).wait()
        base = images(*directories)
        recording = Recording(faults)
        recording.mark(f"begun 1 {step}")
        recording.mark("durable 1 0")
        with (
            injected(faults, recording),
            opened(second, second.directories(root), resume=True) as (model, runtime),
        ):
            after(model, runtime, step)
            train(model, runtime, Marks(recording.mark), range(step + 1, STEPS + 1))
        return Recorded(second, with_whole_slabs(recording.events()), base, directories)

    return record


def killed(job: Job) -> Record:
    """A run whose process is killed between a commit's rename and the sync of its directory, and resumed.

    The kill is a sync that fails. It is not in the recording, as nothing of the first process after it.
    """

    def record(root: Path, faults: Faults) -> Recorded:
        recording = Recording(faults)
        directories = job.directories(root)
        marks = Marks(recording.mark)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinity.tiers.slab._end", lambda slab: None)  # no removal
            with injected(faults, recording), opened(job, directories) as (model, runtime):
                base = images(*directories)
                before = len(recording.events())
                for step in (1, 2, 3):
                    take_step(model, runtime, step)
                    if step == COMMITS[0]:
                        marks.wait(marks.save(runtime, step))
                recording.fail("sync directory", 1, errno.EIO)
                with pytest.raises(StorageError):
                    marks.save(runtime, COMMITS[1]).wait()
                events = recording.events()[before:]
        events = [each for each in events if each.ok or each.kind != "sync directory"]
        between = len(recording.events())
        with injected(faults, recording), opened(job, directories, resume=True) as (model, runtime):
            recording.mark("durable 2 0")  # as it was resumed, it must not be lost any more
            after(model, runtime, COMMITS[1])
            train(model, runtime, marks, range(COMMITS[1] + 1, STEPS + 1))
        return Recorded(job, events + recording.events()[between:], base, directories)

    return record
