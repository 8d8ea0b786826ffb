"""Ledger: which bytes a pending commit holds, and what it still waits for.

A commit is pending from `save` on until it has ended. It holds each part (see
infinity/pages/parts.py) as the part is after the last step. Some parts have these bytes already. The others
get them later, because updates may run long after the step that decided them. Three things bring a part's
bytes to the slot that the commit holds:

- Its page is at home on NVMe: the update writes them there anyway.
- Its page is at home in memory that the CPU can use: a thread writes them from there, and the next change of
  that memory waits for it (`settle`). This is a flush.
- Its page is at home in device memory: `save` has completed its update, and copied it to disk
  (`Store.copy_to_disk`).

[Note: two threads]
The thread that trains calls `begin`, `written`, `updated`, `settle`, `wait` and `give_up`, under the
runtime's lock. The thread of the commit calls `next_flush`, `flushed`, `complete` and `end`, and
never takes the runtime's lock. Both take the ledger's own lock, for moments only.

[Note: the states of a commit]
    PENDING -> WRITING -> NAMED -> DURABLE or UNKNOWN
    PENDING -> GIVEN_UP -> FAILED
    any but NAMED -> FAILED
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError, InfinityError
from infinity.pages.parts import Part
from infinity.tiers.link import Transfer, watcher_of

_SLICE = 0.05
"""Seconds after which a waiting thread looks again, so that signals are handled meanwhile."""

Chunk = tuple[int, int]
"""(index of a unit, index of a chunk in the unit)."""


class CommitState(enum.Enum):
    """Where a commit stands. The last three states are its ends."""

    PENDING = enum.auto()
    """It waits for the bytes that it holds."""
    GIVEN_UP = enum.auto()
    """It no longer waits for bytes, and will fail."""
    WRITING = enum.auto()
    """The bytes of its pages are written, its manifest is not. It can no longer be given up."""
    NAMED = enum.auto()
    """Its manifest may have its final name, but the name is not known to be durable."""
    DURABLE = enum.auto()
    FAILED = enum.auto()
    """It failed: the commit before it is still the newest, and the slots that it held are free."""
    UNKNOWN = enum.auto()
    """It failed after it was NAMED. A restart resumes it or the commit before, so the slots of both stay
    held.
    """


class Held(NamedTuple):
    """The bytes of a part that a commit holds."""

    slot: int
    """Index of the slot that has the bytes."""
    checksums: npt.NDArray[np.int64]
    """Checksums of the slot's blocks."""
    begun: bool
    """Whether all bytes in the slot have values."""


class Commit:
    """A commit that `Runtime.save` has begun."""

    def __init__(self, generation: int, complete: Callable[[Commit], None]) -> None:
        """complete: called with this commit; it completes the updates for which the commit waits."""
        self.generation = generation
        """The number of the commit in its directory; later commits have larger numbers."""
        self.state = CommitState.PENDING
        self.failure: InfinityError | None = None
        """The error by which the commit failed or was given up; None if it is durable or has not ended."""
        self.reported = False
        """Whether the failure was raised to the user."""
        self.wanted = False
        """Whether this process waits for the commit's end."""
        self._complete = complete
        self._over = threading.Event()
        self.held: dict[Part, Held] = {}
        """Part -> its bytes that the commit holds already. Like the attributes below, empty after the
        commit's end.
        """
        self.begun: dict[Part, bool] = {}
        """Part -> its `Part.begun` at the time of `save`, for parts that the commit holds as they were then.
        A later step may decide the first update of a chunk before the commit has the chunk's bytes.
        """
        self.awaited: dict[Chunk, Sequence[Part]] = {}
        """Chunk whose update was decided and has not been computed -> the chunk's parts."""
        self.late: set[Part] = set()
        """The parts of `awaited` whose bytes have not come yet."""
        self.to_flush: deque[Part] = deque()
        """Parts in memory that the CPU can use and that nobody has begun to flush."""
        self.unflushed: set[Part] = set()
        """Parts whose flush has not ended: those in `to_flush`, and those whose write is under way."""
        self.writes: list[Transfer] = []
        """Writes under way of bytes that the commit holds."""

    @property
    def done(self) -> bool:
        """Whether the commit has ended: it is durable, or it has failed and `wait` raises the error."""
        return self._over.is_set()

    def wait(self) -> None:
        """Complete the updates that the commit needs, and wait until the commit is durable.

        Raises the error by which the commit failed: StorageFull or StorageError. Also raises StorageError if
        a read of an update failed; the commit is pending still then, and a second call repeats the read. In
        a process that was forked from the runtime's process it raises ConfigError.
        """
        self._complete(self)
        self.join()
        if self.failure is not None:
            self.reported = True
            raise self.failure.again()

    def report(self) -> None:
        """Raise the error by which the commit failed, if it has ended and the error was not raised before."""
        if self.done and self.failure is not None and not self.reported:
            self.reported = True
            raise self.failure.again()

    def join(self) -> None:
        """Wait until the commit has ended, without completing updates for it."""
        while not self._over.wait(_SLICE):
            pass

    @property
    def open(self) -> bool:
        """Whether the commit still waits for bytes."""
        return self.state is CommitState.PENDING

    def capture(self, part: Part) -> None:
        """Hold the newest bytes of a part that are on disk or being written there."""
        self.held[part] = Held(part.newest, part.checksums, self.begun.get(part, part.begun))
        part.pending = part.newest

    def end(self, state: CommitState, failure: InfinityError | None = None) -> None:
        """End the commit, so that it holds nothing any more. failure: why it is not durable."""
        self.state, self.failure = state, failure
        for each in (
            self.held,
            self.begun,
            self.awaited,
            self.late,
            self.to_flush,
            self.unflushed,
            self.writes,
        ):
            each.clear()
        self._over.set()


def copied() -> Commit:
    """A Commit that is done, with the generation 0: what `Runtime.save` returns for a copy of the run."""
    commit = Commit(0, lambda _: None)
    commit.end(CommitState.DURABLE)
    return commit


class Ledger:
    """The parts of all pages, and the pending commit, if there is one."""

    def __init__(self) -> None:
        self.pending: Commit | None = None
        self.unknown: InfinityError | None = None
        """The error of a commit that ended as UNKNOWN. The slots of later commits stay held, too."""
        self._changed = threading.Condition()
        self._parts: dict[Chunk, Sequence[Part]] = {}

    def set_parts(self, parts: Mapping[Chunk, Sequence[Part]]) -> None:
        """Set the parts of each chunk: its slice of the parameter page, and its optimizer states."""
        self._parts = dict(parts)

    # --- the thread that trains -------------------------------------------------------------------------

    def begin(
        self,
        commit: Commit,
        outstanding: Iterable[Chunk],
        frozen: Iterable[Part],
        writes: Iterable[Transfer],
    ) -> None:
        """Let a new commit hold the parts as they will be after all outstanding updates.

        outstanding: the chunks whose update was decided and has not been computed. frozen: the parts of
        frozen parameters. writes: the writes of pages that are under way.
        """
        commit.writes += writes
        commit.awaited.update((chunk, self._parts[chunk]) for chunk in outstanding)
        commit.late.update(part for parts in commit.awaited.values() for part in parts)
        self.pending = commit
        ready = (
            part for chunk, parts in self._parts.items() if chunk not in commit.awaited for part in parts
        )
        for part in (*ready, *frozen):
            commit.begun[part] = part.begun
            if part.home.in_place and (part.trained or part.durable is None):
                commit.to_flush.append(part)
            else:
                commit.capture(part)
        commit.unflushed.update(commit.to_flush)

    def give_up(self, failure: InfinityError | None = None) -> None:
        """Make the pending commit fail now if it still waits for bytes. failure: the reason; None: its
        runtime ends.
        """
        commit = self.pending
        if commit is not None:
            with self._changed:
                if commit.open:
                    commit.state = CommitState.GIVEN_UP
                    commit.failure = failure or ConfigError(
                        "A commit was given up, because its runtime ended.", "Resume from the last one."
                    )
                    self._changed.notify_all()

    def wants(self, part: Part) -> bool:
        """Whether the pending commit waits for an update that will bring a part's next bytes."""
        pending = self.pending  # the commit's thread sets the attribute to None
        return pending is not None and part in pending.late

    def written(self, part: Part, transfer: Transfer) -> None:
        """Note that a write of a whole part to its slot `newest` has begun, and that the pending commit holds
        the bytes.
        """
        with self._changed:
            pending = self.pending
            if pending is None:
                return  # the commit has failed meanwhile
            pending.writes.append(watcher_of(transfer))
            pending.capture(part)
            pending.late.discard(part)
            self._changed.notify_all()

    def updated(self, chunk: Chunk) -> None:
        """Note that an awaited update of a chunk has been computed, and that its writes have begun."""
        pending = self.pending
        if pending is None or chunk not in pending.awaited:
            return
        with self._changed:
            for part in pending.awaited.pop(chunk, ()):  # none if the commit has failed meanwhile
                if part in pending.late:
                    pending.late.discard(part)
                    pending.to_flush.append(part)
                    pending.unflushed.add(part)
            self._changed.notify_all()

    def settle(self, parts: Iterable[Part]) -> None:
        """Wait until no flush reads the memory of these parts, so that it may change."""
        pending = self.pending
        if pending is None or not pending.unflushed:
            return
        wanted = [part for part in parts if part in pending.unflushed]
        if not wanted:
            return
        with self._changed:
            for part in reversed(wanted):  # those that nobody has begun go first
                if part in pending.to_flush:
                    pending.to_flush.remove(part)
                    pending.to_flush.appendleft(part)
            while pending.open and any(part in pending.unflushed for part in wanted):
                self._changed.wait(_SLICE)

    def settle_chunk(self, chunk: Chunk) -> None:
        """Do what `settle` does for the parts of a chunk."""
        pending = self.pending
        if pending is not None and pending.unflushed:
            self.settle(self._parts[chunk])

    def blocks(self, chunk: Chunk) -> bool:
        """Whether an update of the chunk would need a third slot for its results, so that the pending commit
        has to end first.
        """
        if self.pending is None:
            return False
        return any(
            part.home.nvme_lease is not None and part.free_slot() is None for part in self._parts[chunk]
        )

    def awaited_units(self) -> list[int]:
        """The units with an update for which the pending commit waits, unless the commit was given up."""
        if self.pending is None:
            return []
        with self._changed:
            pending = self.pending
            awaited = pending.awaited if pending is not None and pending.open else ()
            return list(dict.fromkeys(unit for unit, _ in awaited))

    def wait(self) -> None:
        """Wait until the pending commit has ended, whether it is durable or has failed.

        Before the call, `UpdateScheduler.complete_awaited` must have computed all updates that the commit
        waits for.
        """
        commit = self.pending
        if commit is not None:
            assert not commit.open or not commit.awaited
            commit.wanted = True
            commit.join()

    # --- the thread of the commit -----------------------------------------------------------------------

    def next_flush(self, *, block: bool) -> Part | None:
        """Take the next part to flush; None if there is none now.

        block: wait for a part; None then means that no part will come any more.
        """
        pending = self.pending
        assert pending is not None
        with self._changed:
            while not pending.to_flush:
                if not block or not pending.open or not pending.awaited:
                    return None
                self._changed.wait()
            return pending.to_flush.popleft() if pending.open else None

    def flushed(self, part: Part) -> None:
        """Note that a part's bytes have been written from memory to its slot `newest`."""
        pending = self.pending
        assert pending is not None
        with self._changed:
            pending.capture(part)
            pending.unflushed.discard(part)
            self._changed.notify_all()

    def complete(self, commit: Commit) -> None:
        """Note that all bytes of a commit are written. Raises the commit's error if it was given up
        meanwhile.
        """
        with self._changed:
            if commit.state is CommitState.GIVEN_UP:
                assert commit.failure is not None
                raise commit.failure.again()
            commit.state = CommitState.WRITING

    def end(self, commit: Commit, failure: InfinityError | None) -> None:
        """End a commit, and free the slots that no commit holds any more. failure: None if the commit is
        durable.
        """
        with self._changed:
            state = CommitState.DURABLE
            if failure is not None:
                named = commit.state is CommitState.NAMED
                state = CommitState.UNKNOWN if named else CommitState.FAILED
                self.unknown = failure if named else self.unknown
            for part, held in commit.held.items() if self.unknown is None else ():
                part.pending = None
                if state is CommitState.DURABLE:
                    part.durable = held.slot
            self.pending = None
            commit.end(state, failure)
            self._changed.notify_all()
