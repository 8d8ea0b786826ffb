"""Recording ranks: two ranks that train and commit, and record what they do to the disks of their nodes.

Both ranks mark by which calls they hear of each other, so that a test can tell which moments of the two may
be at the same time (crash_cuts.py): "sent X" stands before what makes the other rank hear X, and
"heard X" behind it. Other messages, such as pages and gradients, are not marked: commits must not need them.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import rank_processes
import torch
from committed_runs import COMMITS, STEPS, after, committing
from rank_commit_bugs import BUGS, Patch
from ranked_commits import MORE, Job, Node, opened, take_step, user_state
from recorded_run import Images, Recording, images

from infinity.aio import Faults
from infinity.distributed.barrier import Barrier, CommitVotes
from infinity.errors import InfinityError, StorageError
from infinity.optim.scheduler import UpdateScheduler
from infinity.system.disk_files import injected

ASKED = "RECORDING_RANKS"
"""Environment variable: what the ranks are to do, as JSON."""
PATIENCE = 60
"""Seconds after which a rank that hangs in a part ends and says where."""


def file_of(node: Node, part: str) -> Path:
    """The file in which a rank keeps what it recorded of a part on a node."""
    return node.root / f"{part}-{node.number}.pickle"


class Watched(Recording):
    """A recording that calls a function before an operation: `before`."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self._waiting: dict[tuple[str, str], Callable[[], object]] = {}

    def before(self, operation: str, name: str, call: Callable[[], object]) -> None:
        """Call a function once before an operation, on the thread that does it. name: of the file."""
        self._waiting[operation, name] = call

    def begins(self, operation: str, path: str, **options: Any) -> int:
        call = self._waiting.pop((operation, os.path.basename(path)), None)
        if call is not None:
            call()
        return super().begins(operation, path, **options)


class Rank:
    """One rank in a part of a recorded run."""

    def __init__(self, job: Job, node: Node, rank: int, part: str, patch: Patch) -> None:
        """part: names the part among those of one run. patch: is undone at the end of the part."""
        self.job, self.node, self.rank, self.patch = job, node, rank, patch
        self.faults = Faults()
        self.recording = Watched(self.faults)
        self._part = part
        self._step = 0
        self._base: Images = {}
        self._before = 0
        self._mark_what_is_heard()

    @contextlib.contextmanager
    def opened(self, *, resume: bool = False) -> Iterator[tuple[Any, Any]]:
        """The model and the runtime. A new run is recorded from then on, and one that resumes from before."""
        if resume:
            self._begin()
        with (
            injected(self.faults, self.recording),
            opened(self.job, self.node, self.rank, resume=resume) as made,
        ):
            if not resume:
                self._begin()
            yield made

    def step(self, model: Any, runtime: Any, number: int) -> None:
        """Train step number `number` with this rank's micro-batch."""
        take_step(model, runtime, self.job, number, range(self.rank, self.rank + 1))

    def save(self, runtime: Any, step: int) -> Any:
        """Begin the commit after a step, and return it."""
        self._step = step
        return runtime.save(state=user_state(self.rank, step))

    def wait(self, commit: Any) -> None:
        """Wait for a commit."""
        commit.wait()
        self.recording.mark(f"durable {commit.generation}")

    def fails(self, commit: Any) -> None:
        """Wait for a commit that fails on both ranks, because the disk of one has failed."""
        try:
            commit.wait()
        except StorageError:
            return
        raise AssertionError("A commit was made although a disk has failed.")

    def train(self, model: Any, runtime: Any, steps: range) -> None:
        """Train steps, with the commits of COMMITS. The last commit may be pending."""
        for step in committing(model, runtime, self, steps):
            self.step(model, runtime, step)

    def keep(self) -> None:
        """Write what was recorded to a file for the test."""
        recorded = self.recording.events()[self._before :], self._base
        file_of(self.node, self._part).write_bytes(pickle.dumps(recorded))

    def die(self) -> None:
        """End the process at once, as a signal that cannot be caught would."""
        self.keep()
        os._exit(0)

    def _begin(self) -> None:
        self._base = images(*self.node.directories)
        self._before = len(self.recording.events())

    def _mark_what_is_heard(self) -> None:
        """Also mark which commits are begun, and which count as far as this rank knows."""
        agree, begin, tell, decide = Barrier.agree, CommitVotes.begin, CommitVotes._vote, CommitVotes.decide
        mark, part = self.recording.mark, self._part

        def agreeing(votes: Barrier, *arguments: Any, **options: Any) -> Any:
            barrier = f"{part} barrier {votes.number + 1}"
            mark(f"sent {barrier}")
            found = agree(votes, *arguments, **options)
            mark(f"heard {barrier}")
            return found

        def beginning(votes: CommitVotes, *arguments: Any) -> Any:
            number, created = begin(votes, *arguments)
            mark(f"begun {number} {self._step}")
            return number, created

        def telling(votes: CommitVotes, failure: Any) -> None:
            mark(f"sent {part} vote {votes._open}")
            tell(votes, failure)

        def deciding(votes: CommitVotes, number: int, wanted: Any) -> Any:
            agreement = votes._open
            failure = decide(votes, number, wanted)
            if agreement:
                mark(f"heard {part} vote {agreement}")
            if failure is None:
                mark(f"durable {number}")
            return failure

        self.patch.set(Barrier, "agree", agreeing)
        for name, instead in {"begin": beginning, "_vote": telling, "decide": deciding}.items():
            self.patch.set(CommitVotes, name, instead)


def whole(each: Rank) -> None:
    """A run of STEPS steps, from after its offload to its close."""
    with each.opened() as (model, runtime):
        each.train(model, runtime, range(1, STEPS + 1))
    each.keep()


def refused(each: Rank) -> None:
    """A run in which the disk of rank 1 is full for the first commit, and that of rank 0 for a later one."""
    with each.opened() as (model, runtime):
        each.step(model, runtime, 1)
        if each.rank == 1:
            each.recording.fail("create", 1, errno.ENOSPC)
        each.fails(each.save(runtime, 1))
        each.step(model, runtime, 2)
        each.wait(each.save(runtime, 2))
        each.step(model, runtime, 3)
        if each.rank == 0:
            each.recording.fail("rename", 1, errno.ENOSPC)
        pending = each.save(runtime, 3)
        after(model, runtime, 3)
        each.step(model, runtime, 4)
        each.fails(pending)
        each.train(model, runtime, range(5, STEPS + 1))
    each.keep()


def unsynced(each: Rank) -> None:
    """A run in which rank 1 cannot sync the name of its second part, so that it may be there after a crash.

    Rank 1 tries when both ranks have agreed on the next step, and waits until rank 0 has written the updates
    of that step. Then rank 1 refuses further use, which ends the run on both.
    """
    written = each.node.root / "rank 0 has written its updates"
    with contextlib.suppress(InfinityError), each.opened() as (model, runtime):
        for number in (1, 2):
            each.step(model, runtime, number)
        each.wait(each.save(runtime, 2))
        each.step(model, runtime, 3)
        if each.rank == 1:
            _sync_with_the_next_step(each, written)
        pending = each.save(runtime, 3)
        each.step(model, runtime, 4)
        each.fails(pending)
        with runtime._components.pager.lock:
            runtime._components.scheduler.complete_all()
        written.touch()
        each.step(model, runtime, 5)
    each.keep()


def _sync_with_the_next_step(each: Rank, written: Path) -> None:
    """Have the next sync of the directory of commits fail when the updates of the next step are decided, and
    have these wait until all ranks were told, and until a file is there.
    """
    decided, told = threading.Event(), threading.Event()
    refuse, step = CommitVotes.refuse, UpdateScheduler.step

    def refusing(*arguments: Any) -> bool:
        refused = refuse(*arguments)
        told.set()
        return refused

    def deciding(*arguments: Any) -> None:
        decided.set()
        told.wait()
        while not written.exists():
            time.sleep(0.001)
        step(*arguments)

    each.patch.set(CommitVotes, "refuse", refusing)
    each.patch.set(UpdateScheduler, "step", deciding)
    each.recording.fail("sync directory", 1, errno.EIO)
    each.recording.before("sync directory", f"rank-{each.rank}", decided.wait)


def killed(operation: str, name: str, victim: int) -> Callable[[Rank], None]:
    """A run in which one rank is killed before an operation of the second commit, and the other soon after.

    name: of the file of the operation.
    """

    def run(each: Rank) -> None:
        with each.opened() as (model, runtime):
            for number in (1, 2):
                each.step(model, runtime, number)
            each.wait(each.save(runtime, 2))
            each.step(model, runtime, 3)
            if each.rank == victim:
                each.recording.before(operation, name, each.die)
            with contextlib.suppress(InfinityError):
                each.wait(each.save(runtime, 3))
            each.die()

    return run


def saved(each: Rank) -> None:
    """A run that ends with its first commit. Nothing of it is recorded."""
    with opened(each.job, each.node, each.rank) as (model, runtime):
        each.train(model, runtime, range(1, COMMITS[0] + 1))


def resumed(each: Rank) -> None:
    """A run that goes on from what the one before has left, to the end."""
    (each.node.commits / f"rank-{each.rank}").mkdir(exist_ok=True)
    with each.opened(resume=True) as (model, runtime):
        step = runtime.load()["step"]
        generation = runtime._components.checkpoint.saved.manifest.generation
        each.recording.mark(f"durable {generation}")  # it must not be lost any more
        after(model, runtime, step)
        each.train(model, runtime, range(step + 1, STEPS + 1))
    each.keep()


KILLED = {
    "killed before the rename": killed("rename", ".commit-2.tmp", 1),
    "killed before the sync": killed("sync directory", "rank-0", 0),
}
"""The parts after which the processes are gone."""
PARTS: Mapping[str, Callable[[Rank], None]] = {
    "whole": whole,
    "refused": refused,
    "unsynced": unsynced,
    "saved": saved,
    "resumed": resumed,
    **KILLED,
}


class Task(NamedTuple):
    """A part that two ranks run."""

    part: str
    """A name in PARTS."""
    job: dict[str, Any]
    """The fields of a Job."""
    nodes: list[int]
    """Rank -> the node on which it is."""
    root: str
    """Directory of the run."""
    bug: str | None
    """A name in BUGS, of a mistake that is put into the code; None: none."""


def _begin() -> tuple[Any, int]:
    """Prepare this process. Returns what it is asked, and its rank."""
    torch.set_num_threads(1)
    return json.loads(os.environ[ASKED]), int(os.environ["RANK"])


def recording() -> None:
    """Run parts of recordings on this rank, one after the other."""
    asked, rank = _begin()
    for task in (Task(*each) for each in asked):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        node, patch = Node(Path(task.root), task.nodes[rank]), Patch()
        each = Rank(Job(**task.job), node, rank, task.part, patch)
        if task.bug is not None:
            BUGS[task.bug](patch)
        PARTS[task.part](each)
        patch.undo()


def resuming() -> list[list[float]]:
    """Resume each of several runs, train MORE steps and commit. Returns the losses of each."""
    asked, rank = _begin()
    found = []
    for options, root, nodes in asked:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        job, losses = Job(**options), []
        with opened(job, Node(Path(root), nodes[rank]), rank, resume=True) as (model, runtime):
            state = runtime.load()
            step = state["step"]
            assert state == user_state(rank, step)
            for number in range(step + 1, step + MORE + 1):
                after(model, runtime, number - 1)
                losses += take_step(model, runtime, job, number, range(rank, rank + 1))
            runtime.save(state=user_state(rank, number)).wait()
        found.append(losses)
    return found


if __name__ == "__main__":
    rank_processes.serve(globals())
