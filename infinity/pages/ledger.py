"""Ledger: which bytes a pending commit holds, and what it still waits for.

A commit is pending from `save` on until its manifest is durable. It holds each part (see
infinity/pages/twins.py) as the part is after the last step. Some parts have these bytes already. The others
get them later, because updates may run long after the step that decided them. Three things bring a part's
bytes to the place that the commit holds:

- Its page is at home on NVMe: the update writes them there anyway.
- Its page is at home in memory that the CPU can use: a thread writes them from there, and the next change of
  that memory waits for it (`settle`). This is a flush.
- Its page is at home in device memory: `save` has copied them to disk (`Store.copy_to_disk`), and the results
  of an update are written to disk beside (`DurableIO.write_besides`).

[Note: two threads]
The thread that trains calls `begin`, `written`, `updated` and `settle`, under the runtime's
lock. The thread of the commit calls `next_flush`, `flushed` and `end`, and never takes the runtime's lock.
Both take the ledger's own lock, for moments only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from infinity.errors import InfinityError
from infinity.pages.twins import Part
from infinity.tiers.link import Transfer, watcher_of

_SLICE = 0.05
"""Seconds after which a waiting thread looks again, so that signals are handled meanwhile."""

Chunk = tuple[int, int]
"""(index of a unit, index of a chunk in the unit)."""


@dataclass(slots=True, eq=False)
class Pending:
    """What one pending commit holds and still waits for."""

    captured: dict[Part, tuple[int, npt.NDArray[np.int64], bool]] = field(default_factory=dict)
    """Part -> (index of the place that the commit holds, checksums of the bytes there, whether all bytes
    there have values).
    """
    begun: dict[Part, bool] = field(default_factory=dict)
    """`Part.begun`, at the time of `save`, of the parts whose bytes are those of that time. A later step may
    decide the first update of a chunk before the commit has the chunk's bytes.
    """
    awaited: dict[Chunk, Sequence[Part]] = field(default_factory=dict)
    """Chunks whose update was decided and has not been computed -> their parts."""
    late: set[Part] = field(default_factory=set)
    """The parts of `awaited` whose bytes have not come yet."""
    to_flush: deque[Part] = field(default_factory=deque)
    """Parts in memory that the CPU can use and that nobody has begun to flush."""
    unflushed: set[Part] = field(default_factory=set)
    """Parts whose flush has not ended: those in `to_flush`, and those whose write is under way."""
    writes: list[Transfer] = field(default_factory=list)
    """Writes under way of bytes that the commit holds."""
    failure: InfinityError | None = None
    """The error by which the commit cannot land any more."""
    taken: bool = False
    """Whether somebody will call `Ledger.end` for this commit."""
    wanted: bool = False
    """Whether somebody waits for the commit's end."""
    ended: bool = False
    named: bool = False
    """Whether the manifest has its name, so that a crash may resume this commit even if it fails now."""


class Ledger:
    """The parts of all pages, and the pending commit, if there is one."""

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.lost: InfinityError | None = None
        """The error of a commit that failed after its manifest had its name. Its places stay held for good,
        and so do those of the commit before.
        """
        self._changed = threading.Condition()
        self._parts: dict[Chunk, Sequence[Part]] = {}

    def set_parts(self, parts: Mapping[Chunk, Sequence[Part]]) -> None:
        """Set the parts of each chunk: its slice of the parameter page, and its optimizer states."""
        self._parts = dict(parts)

    # --- the thread that trains -------------------------------------------------------------------------

    def begin(
        self, outstanding: Iterable[Chunk], frozen: Iterable[Part], writes: Iterable[Transfer]
    ) -> Pending:
        """Make the pending commit, with the parts as they will be after the updates that are outstanding.

        outstanding: the chunks whose update was decided and has not been computed. frozen: the parts of
        frozen parameters. writes: the writes of pages that are under way. Returns the pending commit.
        """
        pending = self.pending = Pending(writes=list(writes))
        late = set(outstanding)
        pending.awaited = {chunk: self._parts[chunk] for chunk in late}
        pending.late = {part for parts in pending.awaited.values() for part in parts}
        ready = [part for chunk, parts in self._parts.items() if chunk not in late for part in parts]
        for part in (*ready, *frozen):
            pending.begun[part] = part.begun
            if part.home.in_place and (part.trained or part.durable is None):
                pending.to_flush.append(part)
            else:
                _capture(pending, part)
        pending.unflushed.update(pending.to_flush)
        return pending

    def wants(self, part: Part) -> bool:
        """Whether the pending commit waits for the update that brings the part's next bytes."""
        pending = self.pending  # the commit's thread sets the attribute to None
        return pending is not None and part in pending.late

    def written(self, part: Part, transfer: Transfer) -> None:
        """Note that a write of a whole part to its place `side` has begun, with bytes that the pending commit
        holds.
        """
        with self._changed:
            pending = self.pending
            if pending is None:
                return  # the commit has failed meanwhile
            pending.writes.append(watcher_of(transfer))
            _capture(pending, part)
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
            while not pending.ended and any(part in pending.unflushed for part in wanted):
                self._changed.wait(_SLICE)

    def settle_chunk(self, chunk: Chunk) -> None:
        """Do what `settle` does for the parts of a chunk."""
        pending = self.pending
        if pending is not None and pending.unflushed:
            self.settle(self._parts[chunk])

    def blocks(self, chunk: Chunk) -> bool:
        """Whether an update of the chunk would need a third place for its results, so that the pending commit
        has to be driven to its end first.
        """
        if self.pending is None:
            return False
        return any(part.home.nvme_lease is not None and part.target() is None for part in self._parts[chunk])

    def awaited_units(self) -> list[int]:
        """The units with an update for which the pending commit waits, unless the commit was given up."""
        with self._changed:
            pending = self.pending
            awaited = () if pending is None or pending.ended else pending.awaited
            return list(dict.fromkeys(unit for unit, _ in awaited))

    def land(self) -> None:
        """Wait until the pending commit has ended, whether it is durable or has failed.

        No update may be outstanding for which it waits; `UpdateScheduler.complete_awaited` sees to that.
        """
        self.want()
        with self._changed:
            assert self.pending is None or self.pending.ended or not self.pending.awaited
            while self.pending is not None:
                self._changed.wait(_SLICE)

    def want(self) -> None:
        """Note that somebody waits for the end of the pending commit."""
        pending = self.pending
        if pending is not None:
            pending.wanted = True

    # --- the thread of the commit -----------------------------------------------------------------------

    def take(self, pending: Pending) -> bool:
        """Become the one who ends a commit. Returns False if somebody else is that already."""
        with self._changed:
            taken, pending.taken = pending.taken, True
        return not taken

    def next_flush(self, *, block: bool) -> Part | None:
        """Take the next part to flush; None if there is none now.

        block: wait for one, and return None only if there will be none any more.
        """
        pending = self.pending
        assert pending is not None
        with self._changed:
            while not pending.to_flush:
                if not block or pending.ended or not pending.awaited:
                    return None
                self._changed.wait()
            return None if pending.ended else pending.to_flush.popleft()

    def flushed(self, part: Part) -> None:
        """Note that a part's bytes have been written from memory to its place `side`."""
        pending = self.pending
        assert pending is not None
        with self._changed:
            _capture(pending, part)
            pending.unflushed.discard(part)
            self._changed.notify_all()

    def end(self, pending: Pending, failure: InfinityError | None) -> None:
        """Note that a commit has ended. Its places are durable if `failure` is None, else free.

        They stay held if it failed when its manifest had its name: that commit, the one before, or both are
        on the disk, and nobody knows.
        """
        with self._changed:
            if failure is not None and pending.named:
                self.lost = failure
            for part, (side, _, _) in pending.captured.items():
                if self.lost is not None:
                    continue
                part.pending = None
                if failure is None:
                    part.durable = side
            pending.failure = failure
            pending.ended = True
            pending.awaited.clear()
            pending.late.clear()
            pending.unflushed.clear()
            self.pending = None
            self._changed.notify_all()

    def abandon(self, failure: InfinityError | None = None) -> None:
        """Let the pending commit end without waiting for updates. failure: the error that is the reason."""
        pending = self.pending
        if pending is not None:
            with self._changed:
                pending.failure = pending.failure or failure
                pending.ended = True
                self._changed.notify_all()


def _capture(pending: Pending, part: Part) -> None:
    pending.captured[part] = part.side, part.checksums, pending.begun.get(part, part.begun)
    part.pending = part.side  # last: `end` frees the places of what was captured
