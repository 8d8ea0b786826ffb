"""Crashed files: which of the bytes and the names of a recorded run survive a crash at some moment.

[Note: what the disk keeps]
A **boundary** is a number of the recording's counter: the crash comes right after that submission or
completion. At a boundary:

- A write is durable if it completed before a sync of its file was submitted, and this sync has completed.
- A later write may be there whole, absent, or torn: any subset of its sectors of 512 bytes. A sector that
  several such writes cover holds the durable bytes or those of any one of the writes.
- After a sync that failed, the writes that it should have covered never become durable, whatever later syncs
  say: the kernel may have dropped their bytes. A write that failed may be there in part.
- A name (of a create, rename or remove) is durable if the operation completed before a sync of its directory
  was submitted, and this sync has completed. Of the later operations in a directory the first n are there,
  as on a file system with a journal, or with ordered_names=False any subset.
- A name may be there although its file's bytes are not. The file then has any length up to that of its
  writes, and zeros where no write was kept.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from recorded_run import Event

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""
Keep = bool | np.ndarray[Any, np.dtype[np.bool_]]
"""What is kept of a write: all, nothing, or a bool for each sector that it touches."""


@dataclass(eq=False)
class Change:
    """A write to a file, or an operation on a name, and from which number on it is durable."""

    kind: str
    submitted: int
    completed: float
    """An operation of Python's that failed, whose end is not recorded, ended at once."""
    failed: bool
    durable_at: float = math.inf

    def settle(self, syncs: Sequence[Event]) -> None:
        """Find `durable_at` among the syncs of the change's file or directory."""
        failed = [sync for sync in syncs if not sync.ok]
        for sync in syncs:
            if not sync.ok or sync.completed is None or self.failed or self.completed > sync.submitted:
                continue
            spoilt = (
                bad.submitted < sync.completed and self.submitted < (bad.completed or bad.submitted)
                for bad in failed
            )
            if not any(spoilt):
                self.durable_at = min(self.durable_at, sync.completed)


@dataclass(eq=False)
class Write(Change):
    offset: int = 0
    data: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    @property
    def sectors(self) -> range:
        return range(self.offset // SECTOR, -(-self.end // SECTOR))

    @property
    def split_sectors(self) -> list[int]:
        """The sectors of which the write covers only a part."""
        edges = {self.offset // SECTOR} if self.offset % SECTOR else set()
        return sorted(edges | ({self.end // SECTOR} if self.end % SECTOR else set()))

    def meets(self, earlier: Write) -> bool:
        """Whether both write the same bytes and were in flight together."""
        together = earlier.completed > self.submitted
        return together and self.offset < earlier.end and earlier.offset < self.end

    def put(self, image: np.ndarray[Any, Any], keep: Keep) -> None:
        """Write what is kept to a file's bytes, which are at least `end` long."""
        if isinstance(keep, bool):
            if keep:
                image[self.offset : self.end] = self.data
            return
        kept = np.repeat(keep, SECTOR)[self.offset - self.sectors.start * SECTOR :][: len(self.data)]
        image[self.offset : self.end][kept] = self.data[kept]


@dataclass(eq=False)
class Name(Change):
    name: str = ""
    target: str = ""
    file: File | None = None

    def apply(self, names: dict[str, File]) -> None:
        if self.kind != "create":
            names.pop(self.name, None)
        if self.kind != "remove" and self.file is not None:
            names[self.target or self.name] = self.file


class File:
    """A file by whatever name: its bytes before the recording, its writes and its syncs."""

    CACHED = 8
    """How many versions of the durable bytes are kept, since states come in the order of their boundaries."""

    def __init__(self, base: bytes) -> None:
        self._base = np.frombuffer(base, np.uint8)
        self.writes: list[Write] = []
        self.syncs: list[Event] = []
        self._cache: dict[int, np.ndarray[Any, Any]] = {}
        self._moments: list[float] = []

    def settle(self) -> None:
        """Find from when on each write is durable. Called once, when all writes and syncs are known."""
        for write in self.writes:
            write.settle(self.syncs)
        self._moments = sorted(write.durable_at for write in self.writes)

    def pending(self, boundary: int) -> list[Write]:
        """The writes that a crash may lose."""
        return [write for write in self.writes if write.submitted <= boundary < write.durable_at]

    def content(self, boundary: int, keep: Mapping[Write, Keep], *, longest: bool) -> np.ndarray[Any, Any]:
        """The file's bytes, given what is kept of its pending writes.

        longest: the file has the length of all pending writes, kept or not.
        """
        pending = self.pending(boundary)
        if not pending:
            return self._durable(boundary, {})
        durable = [write for write in self.writes if write.durable_at <= boundary]
        last = max((write.submitted for write in durable), default=0)
        # A write that failed, or whose sync did, may lie below a later one that is durable.
        early = {write: keep[write] for write in pending if write.completed < last}
        below = self._durable(boundary, early)
        ends = [len(below)]
        for write in pending:
            kept = keep[write]
            if longest or kept is True:
                ends.append(write.end)
            elif not isinstance(kept, bool) and kept.any():
                there = write.sectors.start + int(np.flatnonzero(kept)[-1]) + 1
                ends.append(min(write.end, there * SECTOR))
        image = np.zeros(max(*ends, *(write.end for write in pending)), np.uint8)
        image[: len(below)] = below
        for write in pending:
            if write not in early:
                write.put(image, keep[write])
        return image[: max(ends)]

    def _durable(self, boundary: int, early: Mapping[Write, Keep]) -> np.ndarray[Any, Any]:
        count = bisect.bisect_right(self._moments, boundary)  # names the set: it only grows
        if not early and count in self._cache:
            return self._cache[count]
        writes = [write for write in self.writes if write.durable_at <= boundary or write in early]
        image = np.zeros(max([len(self._base), *(write.end for write in writes)]), np.uint8)
        image[: len(self._base)] = self._base
        for write in writes:
            write.put(image, early.get(write, True))
        if not early:
            if len(self._cache) >= self.CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[count] = image
        return image


@dataclass(eq=False)
class Directory:
    base: dict[str, File]
    changes: list[Name] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)

    def fewest(self, boundary: int) -> int:
        """The number of changes that a crash at `boundary` leaves at least, in the order of a journal."""
        return max(
            (n for n, change in enumerate(self.changes, 1) if change.durable_at <= boundary), default=0
        )

    def names(self, changes: Sequence[Name]) -> dict[str, File]:
        names = dict(self.base)
        for change in changes:
            change.apply(names)
        return names
