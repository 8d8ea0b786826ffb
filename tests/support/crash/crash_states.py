"""Crash states: everything that a disk may hold after power was lost at some moment of a recorded run.

A test runs a protocol whose I/O engines share one `Faults`, and whose `DiskFiles` has a `Recording` of that
`Faults` as its observer. A `Disk`, made from the recording and from the content of the directories before it,
then builds the states that a crash could have left, and the protocol's loader must read every one of them.
What may survive is decided in crashed_files.py, and which of it does is drawn here.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crashed_files import Directory, File, Keep, Name, Write
from recorded_run import Event, Images, Recording, images

__all__ = ["Check", "Disk", "Event", "Recording", "State", "images"]

PAGE = 4096
Check = Callable[[dict[str, Path], list[str]], str | None]
"""Looks at one crash state. Is given, for every recorded directory, the directory in which the state lies,
and the marks from before the crash. Returns None, or what is wrong in words.
"""


@dataclass(frozen=True)
class State:
    """What one crash left: the bytes of every file by directory and name, and how it was chosen, in words."""

    boundary: int
    how: str
    directories: dict[str, dict[str, np.ndarray[Any, Any]]]

    def write_to(self, root: Path) -> dict[str, Path]:
        """Write the files to directories below `root`, in place of an earlier state's, as sparse files.

        Returns the directory of each recorded directory.
        """
        places = {}
        for number, (directory, files) in enumerate(self.directories.items()):
            place = places[directory] = root / str(number)
            place.mkdir(parents=True, exist_ok=True)
            for name in os.listdir(place):
                os.unlink(place / name)
            for name, content in files.items():
                _write_sparse(place / name, content)
        return places


def _write_sparse(path: Path, content: np.ndarray[Any, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, len(content))
        whole = len(content) // PAGE * PAGE
        used = np.concatenate(([False], content[:whole].reshape(-1, PAGE).any(axis=1), [False]))
        edges = np.flatnonzero(used[1:] != used[:-1])  # where runs of pages with data begin and end
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            os.pwrite(descriptor, content[first * PAGE : end * PAGE].data, first * PAGE)
        os.pwrite(descriptor, content[whole:].data, whole)
    finally:
        os.close(descriptor)


class Disk:
    """The states that a crash can leave of a recorded run; see [Note: what the disk keeps].

    events: the recording, taken while nothing is in flight. base: all regular files of the run's directories
    as they were when the recording began; `images` gives them, and all of them count as durable.
    ordered_names: the names that survive are the first n operations of each directory, else any of them. An
    event of the kind "preallocate" is the creation of a file with as many zeros as its `offset` says.

    Raises ValueError for an operation on a file that is neither in `base` nor created in the recording, and
    for a rename into another directory.
    """

    def __init__(self, events: Sequence[Event], base: Images, *, ordered_names: bool = True) -> None:
        self._ordered = ordered_names
        self._directories = {
            directory: Directory({name: File(content) for name, content in files.items()})
            for directory, files in base.items()
        }
        self._live = {
            os.path.join(path, name): file
            for path, directory in self._directories.items()
            for name, file in directory.base.items()
        }
        self._files = list(self._live.values())
        self._known = dict(self._live)  # removed and renamed names too, for files opened before
        self._marks: list[Event] = []
        self.mistakes: list[str] = []
        """What is wrong whatever a crash leaves, in words: a write whose memory was changed while it was in
        flight, and two writes in flight at once that overlap, whose order the engine does not promise.
        """
        for event in sorted(events, key=lambda event: event.submitted):
            self._take(event)
        for file in self._files:
            file.settle()
        for directory in self._directories.values():
            for change in directory.changes:
                change.settle(directory.syncs)
        counted = (event for event in events if event.kind != "read")
        writes = (event for event in events if event.kind == "write")
        self._writes = {n for event in writes for n in (event.submitted, event.completed)}
        self.boundaries = sorted({n for event in counted for n in (event.submitted, event.completed) if n})
        """Every number at which the run may crash."""

    def marks(self, boundary: int) -> list[str]:
        """The texts of the marks from before the crash, in their order."""
        return [mark.path for mark in self._marks if mark.submitted <= boundary]

    @property
    def marked(self) -> list[tuple[int, str]]:
        """The number and the text of every mark, in order."""
        return [(mark.submitted, mark.path) for mark in self._marks]

    def states(self, boundary: int, rng: np.random.Generator) -> Iterator[State]:
        """Crash states at a boundary, without end.

        The first four keep or lose all names and all bytes that were not durable. The others are drawn.
        """
        for names, how in itertools.product(("no", "all"), ("nothing kept", "all kept")):
            yield self._state(boundary, rng, how, names)
        while True:
            yield self._state(boundary, rng, str(rng.choice(_HOW)), str(rng.choice(_NAMES)))

    def sample(self, count: int, seed: int) -> Iterator[State]:
        """`count` crash states in the order of their boundaries, at each as many as `allotted` says."""
        rng = np.random.default_rng(seed)
        for boundary, number in self.allotted(count):
            # The four fixed states are worth their place where there are others beside them.
            skipped = 0 if number >= 8 else int(rng.integers(5))
            yield from itertools.islice(self.states(boundary, rng), skipped, skipped + number)

    def allotted(self, count: int) -> Iterator[tuple[int, int]]:
        """Divide `count` crash states among the boundaries: yields (boundary, number of states) in order.

        A boundary of an operation or a sync, where one thing begins or ends to be durable, gets four times as
        many as one of a write: these are many and alike. Where a crash can lose nothing there is one state,
        and a boundary there gets a sixteenth.
        """
        shares = np.cumsum([0, *(self._share(boundary) for boundary in self.boundaries)])
        ends = (shares * (count / shares[-1])).round().astype(int).tolist()
        yield from zip(self.boundaries, (end - first for first, end in itertools.pairwise(ends)), strict=True)

    def drawn(self, boundary: int, rng: np.random.Generator) -> State:
        """One crash state at a boundary. Every second one keeps or loses all names, and all bytes."""
        if rng.integers(2):
            return self._state(boundary, rng, _HOW[rng.integers(2)], _NAMES[rng.integers(2)])
        return self._state(boundary, rng, str(rng.choice(_HOW)), str(rng.choice(_NAMES)))

    def first_violation(self, check: Check, where: Path, *, count: int, seed: int = 0) -> str | None:
        """Write `count` crash states below `where` and check them. Returns what is wrong first, if anything.

        A mistake of the run itself is wrong before any state is.
        """
        if self.mistakes:
            return self.mistakes[0]
        for state in self.sample(count, seed):
            wrong = check(state.write_to(where), self.marks(state.boundary))
            if wrong is not None:
                return f"{wrong} [crash at {state.boundary}, {state.how}]"
        return None

    def _share(self, boundary: int) -> int:
        changes = (change for directory in self._directories.values() for change in directory.changes)
        names = any(change.submitted <= boundary < change.durable_at for change in changes)
        if not names and not any(file.pending(boundary) for file in self._files):
            return 1
        return 4 if boundary in self._writes else 16

    def _take(self, event: Event) -> None:
        path = os.path.abspath(event.path)
        if event.kind == "mark":
            self._marks.append(event)
        elif event.kind == "write":
            data = np.frombuffer(event.data, np.uint8)
            data = data[: event.moved] if event.ok else data
            write = Write(**self._span(event), offset=event.offset, data=data)
            where = f"write of {path} at byte {event.offset}"
            if event.changed:
                self.mistakes.append(f"The memory of the {where} was changed in flight.")
            if any(write.meets(other) for other in self._file(path).writes):
                self.mistakes.append(f"The {where} overlaps another write in flight.")
            self._file(path).writes.append(write)
        elif event.kind == "sync":
            self._file(path).syncs.append(event)
        elif event.kind == "sync directory":
            self._directory(path).syncs.append(event)
        elif event.kind in ("create", "preallocate", "rename", "remove") and event.ok:
            self._take_name(event, path)

    def _take_name(self, event: Event, path: str) -> None:
        target = os.path.abspath(event.target) if event.target else ""
        if target and os.path.dirname(target) != os.path.dirname(path):
            raise ValueError(f"{path} is renamed to {target} in another directory, which is not modelled.")
        made = event.kind in ("create", "preallocate")
        if made:
            self._files.append(File(bytes(event.offset)))
            self._live[path] = self._known[path] = self._files[-1]
        elif event.kind == "remove" and path not in self._live:
            return  # there was no such file
        file = self._file(path)
        if not made:
            self._live.pop(path, None)
        if event.kind == "rename":
            self._live[target] = self._known[target] = file
        change = Name(**self._span(event), name=os.path.basename(path), file=file)
        change.target = os.path.basename(target)
        self._directory(os.path.dirname(path)).changes.append(change)

    @staticmethod
    def _span(event: Event) -> dict[str, Any]:
        """The fields of `Change`. Python reports no end of an operation that failed: it ended at once."""
        ended = event.completed if event.completed is not None else event.submitted
        return {"kind": event.kind, "submitted": event.submitted, "completed": ended, "failed": not event.ok}

    def _file(self, path: str) -> File:
        if path not in self._known:
            raise ValueError(f"{path} is neither among the files of the start nor created in the recording.")
        return self._known[path]

    def _directory(self, path: str) -> Directory:
        if path not in self._directories:
            raise ValueError(f"{path} is not among the directories of the start.")
        return self._directories[path]

    def _state(self, boundary: int, rng: np.random.Generator, how: str, names: str) -> State:
        pending = [write for file in self._files for write in file.pending(boundary)]
        keep = _kept(how, pending, [file.pending(boundary) for file in self._files], rng)
        longest = names == "all" or bool(rng.integers(2))
        directories = {}
        for path, directory in self._directories.items():
            there = directory.names(self._surviving(directory, boundary, names, rng))
            directories[path] = {
                name: file.content(boundary, keep, longest=longest) for name, file in there.items()
            }
        return State(boundary, f"{how}, {names} names kept", directories)

    def _surviving(
        self, directory: Directory, boundary: int, names: str, rng: np.random.Generator
    ) -> list[Name]:
        """The operations on names that survive. names: which of those that are not durable, of _NAMES."""
        begun = [change for change in directory.changes if change.submitted <= boundary]
        fewest = directory.fewest(boundary)
        if names == "all":
            return begun
        if self._ordered:
            return begun[: fewest if names == "no" else int(rng.integers(fewest, len(begun) + 1))]
        pending = [change for change in begun if change.durable_at > boundary]
        one = pending[rng.integers(len(pending))] if pending else None
        kept: dict[str, Callable[[Name], bool]] = {
            "no": lambda _: False,
            "some": lambda _: bool(rng.integers(2)),
        }
        kept |= {"all but one": lambda change: change is not one, "one": lambda change: change is one}
        return [change for change in begun if change.durable_at <= boundary or kept[names](change)]


_NAMES = ("no", "all", "some", "all but one", "one")
"""Which operations on names are kept, of those that a crash may lose. With a journal the last three are the
same: the first n.
"""
_HOW = (
    "nothing kept",
    "all kept",
    "one write lost",
    "one write kept",
    "one write torn, others kept",
    "one write torn, others lost",
    "one file lost",
    "one file kept",
    "the later kept",
    "the earlier kept",
    "whole writes kept or lost",
    "all torn",
)
"""How to choose what is kept of the writes that a crash may lose."""


def _kept(
    how: str, pending: list[Write], by_file: list[list[Write]], rng: np.random.Generator
) -> dict[Write, Keep]:
    """What is kept of every pending write. how: one of _HOW. by_file: the pending writes of each file."""
    if not pending:
        return {}
    one = pending[rng.integers(len(pending))]
    cut = pending[rng.integers(len(pending))].submitted
    files = [writes for writes in by_file if writes]
    file = set(files[rng.integers(len(files))])
    rules: dict[str, Callable[[Write], Keep]] = {
        "nothing kept": lambda write: False,
        "all kept": lambda write: True,
        "one write lost": lambda write: write is not one,
        "one write kept": lambda write: write is one,
        "one write torn, others kept": lambda write: _torn(write, rng) if write is one else True,
        "one write torn, others lost": lambda write: _torn(write, rng) if write is one else False,
        "one file lost": lambda write: write not in file,
        "one file kept": lambda write: write in file,
        "the later kept": lambda write: write.submitted >= cut,
        "the earlier kept": lambda write: write.submitted <= cut,
        "whole writes kept or lost": lambda write: bool(rng.integers(2)),
        "all torn": lambda write: _torn(write, rng),
    }
    keep = {write: rules[how](write) for write in pending}
    for writes in files:
        _keep_what_lies_below(writes, keep)
    return keep


def _torn(write: Write, rng: np.random.Generator) -> Keep:
    """Some sectors of a write: each with one probability, or those before or after some point."""
    count = len(write.sectors)
    if rng.integers(2):
        return rng.random(count) < rng.random()
    before = np.arange(count) < rng.integers(count + 1)
    return before if rng.integers(2) else ~before


def _keep_what_lies_below(writes: list[Write], keep: dict[Write, Keep]) -> None:
    """Keep, with a part of a sector, what earlier writes put into the same sector.

    The page cache has them all when it writes the sector to the disk.
    """
    for position in range(len(writes) - 1, 0, -1):
        write = writes[position]
        for sector in write.split_sectors:
            if not _keeps(keep[write], write, sector):
                continue
            for other in writes[:position]:
                if other.completed <= write.submitted and sector in other.sectors:
                    keep[other] = _with_sector(keep[other], other, sector)


def _keeps(keep: Keep, write: Write, sector: int) -> bool:
    return keep if isinstance(keep, bool) else bool(keep[sector - write.sectors.start])


def _with_sector(keep: Keep, write: Write, sector: int) -> Keep:
    if keep is True:
        return True
    mask = np.zeros(len(write.sectors), bool) if isinstance(keep, bool) else keep.copy()
    mask[sector - write.sectors.start] = True
    return mask
