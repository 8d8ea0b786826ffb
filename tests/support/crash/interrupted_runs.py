"""Interrupted runs: a small run with commits, in one call of which SIGINT comes, and what must follow.

Afterwards the run goes on with the bits of the undisturbed run. After a second signal it may refuse further
use instead, by a typed error. It closes, nothing of it is left, and a new run continues a whole commit: the
last durable one or its successor.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commit_states import continued
from committed_runs import Job, after, arguments, make, opened, shot, take_step, undisturbed, user_state
from faulty import start_torch_threads
from interrupted_lines import Lines, Place
from parity import differences
from process_resources import check_nothing_left, resources

import infinity
from infinity.aio import Faults
from infinity.checkpoint.commit_files import newest
from infinity.checkpoint.run_state import RunState
from infinity.errors import InfinityError
from infinity.system.disk_files import DiskFiles, injected

LAST = 6
"""The step after which a run is compared and closed."""


class Run:
    """A run under test, and the calls that may be interrupted."""

    def __init__(self, model: Any, runtime: Any, faults: Faults) -> None:
        self.model = model
        self.runtime = runtime
        self.faults = faults
        self.commit: Any = None
        """The latest commit that `save` has returned."""
        self.durable = 0
        """The step of the last commit that is known to be durable."""

    def step(self, number: int) -> None:
        """Train a step, whose loss must be that of the undisturbed run."""
        assert take_step(self.model, self.runtime, number) == undisturbed()[number].loss, f"step {number}"
        after(self.model, self.runtime, number)

    def save(self, step: int) -> None:
        """Begin the commit after a step."""
        self.commit = self.runtime.save(state=user_state(step))

    def wait(self, step: int) -> None:
        """Wait for the commit after a step."""
        self.commit.wait()
        self.durable = step


class Saving:
    """`save` after step 2, which first lands the commit after step 1."""

    resumes = False
    """Whether the run continues a commit after step 2, which `prepare` finds loaded."""

    def prepare(self, run: Run) -> None:
        """Train until the call."""
        run.step(1)
        run.save(1)
        run.step(2)

    def act(self, run: Run) -> None:
        """Make the call."""
        run.save(2)

    def go_on(self, run: Run) -> None:
        """Train from the call to step LAST."""
        for number in range(3, LAST + 1):
            run.step(number)


class Waiting(Saving):
    """`Commit.wait` after step 2."""

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        run.wait(1)
        run.save(2)

    def act(self, run: Run) -> None:
        run.wait(2)

    def go_on(self, run: Run) -> None:
        self.act(run)
        super().go_on(run)


class Loading(Saving):
    """`load` of a run that continues the commit after step 2."""

    resumes = True

    def prepare(self, run: Run) -> None:
        run.durable = 2

    def act(self, run: Run) -> None:
        assert run.runtime.load() == user_state(2)

    def go_on(self, run: Run) -> None:
        self.act(run)
        super().go_on(run)


class Landing(Saving):
    """`state_dict` after step 5, whose updates need slots that the commit after step 4 frees."""

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        run.wait(1)
        run.step(3)
        run.step(4)
        run.save(4)
        run.faults.delay("sync", 1, 0.3, times=None)
        run.step(5)

    def act(self, run: Run) -> None:
        run.model.state_dict()

    def go_on(self, run: Run) -> None:
        run.faults.clear()
        run.step(LAST)


CALLS = {"save": Saving, "wait": Waiting, "load": Loading, "landing": Landing}


@dataclass(frozen=True)
class Outcome:
    """What came of a run with an interrupted call."""

    lines: Lines
    refused: InfinityError | None
    """The error by which the run refused to go on; None if it went on."""
    durable: int
    """The step of the last commit that was known to be durable."""


def interrupt(call: str, job: Job, place: Place | None, root: Path, times: int = 1) -> Outcome:
    """Run a call in which SIGINT comes at a place, go on, and look at the run and at what it leaves.

    call: a key of CALLS. place: None for no signal. root: an empty directory. times: number of signals. After
    one the run must go on.
    """
    undisturbed()
    start_torch_threads()
    scenario = CALLS[call]()
    directories = job.directories(root)
    if scenario.resumes:
        commit_steps(job, directories, 2)
    before = checked_resources()
    outcome = _run(scenario, job, directories, Lines(place, times=times))
    assert outcome.refused is None or times > 1, place
    check_nothing_left(before, garbage=True)
    if outcome.durable or times == 1 or newest(directories[0], DiskFiles()) is not None:
        check_continues(job, directories, outcome.durable)
    return outcome


def interrupt_resume(first: Job, second: Job, place: Place | None, root: Path) -> Lines:
    """Continue a run by an `offload` that Ctrl-C interrupts at a place, and look at what it leaves.

    first: the run that commits after step 2. second: the one that continues it. Returns the lines of offload.
    """
    undisturbed()
    start_torch_threads()
    commit_steps(first, first.directories(root), 2)
    before = checked_resources()
    lines = _resume(second, second.directories(root), place)
    check_nothing_left(before, garbage=True)
    check_continues(second, second.directories(root), 2)
    assert len(list(root.glob("*/*.slab"))) == (second.paths if second.home == "nvme" else 1)
    return lines


def _resume(job: Job, directories: Sequence[Path], place: Place | None) -> Lines:
    lines = Lines(place)
    model, optimizer = make()
    asked = arguments(job, directories, resume=True)
    try:
        with lines:
            runtime = infinity.offload(model, optimizer, **asked)
        runtime.close()
    except KeyboardInterrupt:
        assert lines.sent
    return lines


def commit_steps(job: Job, directories: Sequence[Path], steps: int) -> None:
    """Train a number of steps, commit, and close."""
    with opened(job, directories) as (model, runtime):
        for number in range(1, steps + 1):
            take_step(model, runtime, number)
        runtime.save(state=user_state(steps)).wait()


def check_continues(job: Job, directories: Sequence[Path], durable: int) -> None:
    """Assert that no lock is left, and that a new run continues a whole commit with the right bits.

    durable: the step of the last commit that is known to be durable.
    """
    assert [each for path in directories for each in path.iterdir() if each.suffix == ".lock"] == []
    saved = newest(directories[0], DiskFiles())
    assert saved is not None
    step = RunState(saved.manifest.run, saved.tensors).user_state["step"]
    assert step >= durable
    assert continued(job, directories, step) is None


def checked_resources() -> Any:
    gc.collect()
    return resources()


def _run(scenario: Saving, job: Job, directories: Sequence[Path], lines: Lines) -> Outcome:
    faults, refused = Faults(), None
    with ExitStack() as inside:
        inside.enter_context(injected(faults))
        model, runtime = inside.enter_context(opened(job, directories, resume=scenario.resumes))
        run = Run(model, runtime, faults)
        scenario.prepare(run)
        with contextlib.suppress(KeyboardInterrupt), lines:
            scenario.act(run)
        try:
            scenario.go_on(run)
            last = shot(model, runtime, LAST, undisturbed()[LAST].loss)
            assert differences(vars(last), vars(undisturbed()[LAST]), "run") == []
        except InfinityError as error:
            refused = error.again()
            with pytest.raises(type(error)):
                runtime.optimizer.zero_grad()
            with contextlib.suppress(type(error)):
                runtime.close()
        faults.clear()
    return Outcome(lines, refused, run.durable)
