"""Trainings of several ranks in which the commit of one rank fails; see commit_plans.py.

Each function takes `Plan.rank` for the rank that fails, and returns what that rank and the others met.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import rank_processes
from committing_ranks import everything, offloaded, plan_of_this_rank, take_step
from recorded_run import Recording

from infinity.aio import Faults
from infinity.checkpoint import commit_files
from infinity.checkpoint.committer import Committer
from infinity.distributed.barrier import Barrier
from infinity.errors import InfinityError, StorageError
from infinity.pages.ledger import Commit
from infinity.system.disk_files import injected

FILES = (
    ("create", 1, errno.ENOSPC),
    ("create", 2, errno.EDQUOT),
    ("write", 1, errno.EIO),
    ("write", 2, errno.ENOSPC),
    ("sync", 1, errno.EIO),
    ("sync", 2, errno.ENOSPC),
    ("rename", 1, errno.ENOSPC),
)
"""The operations on a commit's two files that fail: (operation, which of its kind, errno)."""


class Training:
    """A training on this rank, and how its calls fail."""

    def __init__(self, model: Any, runtime: Any, faults: Faults, files: Recording) -> None:
        self.plan, self.case, self.place = plan_of_this_rank()
        self.model, self.runtime, self.faults, self.files = model, runtime, faults, files
        self.failing = self.place.rank == self.plan.rank
        """Whether this rank is the one that fails."""
        self.losses: list[str] = []
        self.errors: list[list[Any]] = []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            step = len(self.losses) + 1
            self.losses.append(take_step(self.case, self.place, self.model, self.runtime, step).hex())

    def save(self, **options: Any) -> Commit:
        """Begin a commit that `committing_ranks.train` can continue."""
        commit: Commit = self.runtime.save(**({"state": {"step": len(self.losses)}} | options))
        return commit

    def fails(self, call: Callable[[], object]) -> None:
        """Make a call that is to raise a typed error, and note it."""
        try:
            call()
        except InfinityError as error:
            errno_ = error.errno if isinstance(error, StorageError) else None
            self.errors.append([type(error).__name__, str(error), errno_])
        else:
            self.errors.append(["", "", None])

    def names(self) -> list[str]:
        """The files of commits that this rank has."""
        return sorted(
            each for each in os.listdir(self.plan.commits / f"rank-{self.place.rank}") if "commit" in each
        )

    def told(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "errors": self.errors,
            "end": everything(self.model, self.runtime),
        }


@contextlib.contextmanager
def started() -> Iterator[Training]:
    """Offload the model of the plan, with a disk that may fail."""
    plan, case, place = plan_of_this_rank()
    faults = Faults()
    files = Recording(faults)
    with injected(faults, files), offloaded(plan, case, place) as (model, runtime):
        yield Training(model, runtime, faults, files)


@contextlib.contextmanager
def begun() -> Iterator[Training]:
    """Do as `started`, take a step, commit it, and take another one."""
    with started() as run:
        run.step()
        run.save().wait()
        run.step()
        yield run


# --- disks ----------------------------------------------------------------------------------------------


def full_disk() -> dict[str, Any]:
    """One operation after the other fails on one rank. Every second error is met by the next `save`."""
    with started() as run:
        for number, (operation, nth, code) in enumerate(FILES):
            run.step()
            run.save().wait()
            before = run.names()
            run.step()
            if run.failing:
                run.files.fail(operation, nth, code)
            commit = run.save(state="lost")
            if number % 2:
                run.step()
                run.fails(run.save)
            else:
                run.fails(commit.wait)
            assert commit.done and run.names() == before
        return run.told()


def first_commit_fails() -> dict[str, Any]:
    """The first commit fails at the slab's name, the second at its manifest, and no third is made."""
    with started() as run:
        for nth in (1, 2):
            run.step()
            if run.failing:
                run.files.fail("rename", nth, errno.ENOSPC)
            run.fails(run.save().wait)
            assert run.names() == []
            assert not run.runtime._components.store.nvme.keep
        return run.told()


def first_commit_fails_once() -> dict[str, Any]:
    """The first commit fails, and the second is made."""
    with started() as run:
        run.step()
        if run.failing:
            run.files.fail("rename", 2, errno.ENOSPC)
        run.fails(run.save().wait)
        run.step()
        run.save().wait()
        return run.told()


def pages_not_written() -> dict[str, Any]:
    """The commit's thread cannot write a page that is in RAM."""
    with begun() as run:
        if run.failing:
            run.faults.fail("write", 2, errno.EIO)
        run.fails(run.save().wait)
        run.step()
        run.save().wait()
        return run.told()


def pages_not_synced() -> None:
    """The sync of a slab fails, after which the rank refuses to go on."""
    with begun() as run:
        if run.failing:
            run.faults.fail("sync", 1, errno.EIO)
        run.fails(run.save().wait)
        assert run.errors[0][0] == "StorageError", run.errors
        run.step(3)


def pages_lost() -> None:
    """Results of updates cannot be written to NVMe, where their only copy was to be."""
    with started() as run:
        run.step()
        run.save().wait()
        if run.failing:
            run.faults.fail("write", 1, errno.EIO, times=None)
        run.step()
        run.fails(lambda: run.save().wait())
        assert run.errors[0][0] == "StorageError", run.errors
        run.step(3)


def name_not_synced() -> None:
    """The sync of the directory fails, so that nobody knows whether the commit of the rank is there."""
    with begun() as run:
        if run.failing:
            run.files.fail("sync directory", 1, errno.EIO)
        run.fails(run.save().wait)
        assert run.errors[0][0] == "StorageError", run.errors
        run.step(3)


def refused_and_killed() -> None:
    """One rank refuses a commit; the others die when they are about to take their part back."""
    with begun() as run:
        if run.failing:
            run.files.fail("create", 1, errno.ENOSPC)
        else:
            commit_files.take_back = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        run.fails(run.save().wait)
        run.step(2)


def slow_disk() -> dict[str, Any]:
    """The disk of one rank syncs nothing for longer than ranks wait for each other. Training goes on."""
    with started() as run:
        run.step()
        run.save().wait()
        failure_event = run.runtime._components.ranks.failure_event
        for waits in (True, False):
            run.step()
            if run.failing:
                run.faults.hold("sync", 1, times=None)
            commit = run.save()
            run.step(2)
            assert not commit.done
            if run.failing:
                threading.Timer(1.5, run.faults.release).start()
            patience, failure_event.timeout = failure_event.timeout, 0.5
            if waits:
                commit.wait()
            else:
                run.runtime._components.committer.complete()  # as the next save() does first
            failure_event.timeout = patience
            assert commit.done and commit.failure is None
        return run.told()


def slow_disk_without_places() -> dict[str, Any]:
    """The disk of one rank syncs so late that its next updates need places which commits hold."""
    with started() as run:
        run.step()
        run.save().wait()
        run.step()
        if run.failing:
            run.faults.hold("sync", 1, times=None)
            threading.Timer(1.0, run.faults.release).start()
        commit = run.save()
        run.step(3)
        commit.wait()
        return run.told()


# --- calls ----------------------------------------------------------------------------------------------


def state_of_one_rank() -> dict[str, Any]:
    """One rank gives a state that cannot be kept. The others meet it in `wait`, and in the next `save`."""
    with started() as run:
        for waits in (True, False):
            run.step()
            run.save().wait()
            if run.failing:
                run.fails(lambda: run.save(state=run.fails))
            elif waits:
                run.fails(run.save(state=1).wait)
            else:
                run.save(state=1)
            if not waits:
                run.step()
                run.fails(run.save)
            run.step()
            run.save().wait()
        return run.told()


def saved_by_one_rank() -> None:
    with started() as run:
        run.step()
        run.runtime._components.ranks.failure_event.timeout = 1.0
        if run.failing:
            run.save()
        run.step()


def saved_by_one_rank_while_others_sleep() -> None:
    with started() as run:
        run.step()
        run.runtime._components.ranks.failure_event.timeout = 1.0
        if not run.failing:
            time.sleep(2.0)
        run.save()


def _interrupt_in(owner: Any, name: str, *, after: bool = False, times: int = 1) -> None:
    """Have SIGINT come in the next call of a function: at its beginning, or at its end."""
    function = getattr(owner, name)

    def interrupted(*given: Any, **options: Any) -> Any:
        setattr(owner, name, function)
        returned = function(*given, **options) if after else None
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return returned if after else function(*given, **options)

    setattr(owner, name, interrupted)


INTERRUPTS: tuple[tuple[Any, str, bool], ...] = (
    (Committer, "complete", False),
    (Barrier, "agree", False),
    (Barrier, "agree", True),
    (Committer, "_save", False),
    (threading.Thread, "start", False),
    (threading.Thread, "start", True),
)
"""Where SIGINT comes inside of save(): (owner, name, whether it comes at the function's end)."""


def interrupted() -> None:
    """A second Ctrl-C ends one rank inside of save()."""
    with begun() as run:
        if run.failing:
            owner, name, after = INTERRUPTS[run.plan.nth]
            _interrupt_in(owner, name, after=after, times=2)
        run.fails(lambda: run.save().wait())
        run.step(2)


def interrupted_once() -> dict[str, Any]:
    """Ctrl-C comes inside of save() on one rank, which goes on. All commits are made."""
    with started() as run:
        for owner, name, after in INTERRUPTS:
            run.step()
            if run.failing:
                _interrupt_in(owner, name, after=after)
                with contextlib.suppress(KeyboardInterrupt):
                    run.save()
                    raise AssertionError
                run.runtime._components.committer.last.wait()
            else:
                run.save().wait()
            run.step()
            run.save().wait()
        return run.told()


# --- ranks that wait for others -------------------------------------------------------------------------


def await_end(commit: Commit) -> None:
    """Wait until a commit has ended, without doing anything for it."""
    while not commit.done:
        time.sleep(0.01)


def waited_for_early() -> dict[str, Any]:
    """One rank is slow to come out of the agreement by which a commit is begun, for which others wait."""
    with started() as run:
        wire = run.runtime._components.ranks.wire
        released = wire._released

        @contextlib.contextmanager
        def slowly() -> Iterator[None]:
            with released():
                yield
                time.sleep(0.5)

        for _ in range(3):
            run.step()
            if run.failing:
                wire._released = slowly
            commit = run.save()
            wire._released = released
            if run.failing:
                await_end(commit)
            else:
                commit.wait()
        return run.told()


def updates_not_read() -> dict[str, Any]:
    """One rank cannot read what its updates need, while another one waits for the commit.

    Nobody asks that rank for pages meanwhile, which would end the ranks.
    """
    with begun() as run:
        parts = run.runtime._components
        commit = run.save()
        with parts.pager.lock:
            parts.prefetch_engine.land_all()
        parts.ranks.agree("nobody reads")
        if run.failing:
            run.faults.fail("read", 1, errno.EIO, times=None)
        parts.ranks.agree("nobody can read")
        if run.failing:
            await_end(commit)
        run.fails(commit.wait)
        run.faults.clear()
        parts.ranks.agree("all can read")
        run.step()
        run.save().wait()
        return run.told()


if __name__ == "__main__":
    rank_processes.serve(globals())
