"""Commit: one that was begun, as whoever saves sees it, and what makes commits together with other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from infinity.errors import InfinityError

SLICE = 0.05
"""Seconds after which a waiting thread looks again, so that signals are handled meanwhile."""


class Commit:
    """A commit that `Runtime.save` has begun."""

    def __init__(self, generation: int, drive: Callable[[Commit], None]) -> None:
        self.generation = generation
        """The number of the commit in its directory; later commits have larger numbers."""
        self._drive = drive
        self._ended = threading.Event()
        self._failure: InfinityError | None = None
        self.told = False
        """Whether the failure was raised to the user."""

    @property
    def done(self) -> bool:
        """Whether the commit has ended: it is durable, or it has failed and `wait` raises the error."""
        return self._ended.is_set()

    @property
    def failure(self) -> InfinityError | None:
        """The error by which the commit failed; None if it is durable or has not ended."""
        return self._failure

    def wait(self) -> None:
        """Complete the updates that the commit needs, and wait until the commit is durable.

        Raises the error by which the commit failed: StorageFull or StorageError. Also raises StorageError if
        a read of an update failed; the commit is pending still then, and a second call repeats the read. In
        a process that was forked from the runtime's process it raises ConfigError.
        """
        self._drive(self)
        self.join()
        if self._failure is not None:
            self.told = True
            raise self._failure.again()

    def join(self) -> None:
        """Wait until the commit has ended, without completing updates for it."""
        while not self._ended.wait(SLICE):
            pass

    def end(self, failure: InfinityError | None) -> None:
        """Note that the commit has ended. Called once, as a rule by the commit's thread."""
        self._failure = failure
        self._ended.set()


def landed() -> Commit:
    """A Commit that is done, with the generation 0: what `Runtime.save` returns for a copy of the run."""
    commit = Commit(0, lambda _: None)
    commit.end(None)
    return commit


class CommittingRanks(Protocol):
    """The ranks with which a commit is made; see [Note: commits of ranks] in
    infinity/checkpoint/committer.py.
    """

    def begin(self, number: int, created: str, failure: InfinityError | None) -> tuple[int, str]:
        """Wait until all ranks begin a commit. Returns its number, the largest that a rank proposes, and its
        time, which is the same on all ranks and tells it from commits of other runs.

        number, created: proposals. failure: why this rank cannot begin one. It is raised on all ranks.
        """
        ...

    def decide(self, number: int, wanted: Callable[[], bool]) -> InfinityError | None:
        """Say that this rank's part is durable, unless it has refused it, and wait until those of all ranks
        are. Returns None then, and otherwise the reason of one that is not. Raises RankFailure if a rank is
        lost.

        wanted: whether this rank waits for the commit, so that all others are to complete what it lacks.
        """
        ...

    def refuse(self, failure: BaseException) -> bool:
        """Say that this rank's part of the commit that ranks begin is not durable, and will not be.

        Returns False, and does nothing, if this rank has said already how it is, or none is begun.
        """
        ...
