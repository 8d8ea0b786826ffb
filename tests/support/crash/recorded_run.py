"""Recorded runs: a run's operations and transfers in the order of one counter, and the files before it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infinity.aio import Faults

Images = Mapping[str, Mapping[str, bytes]]
"""The bytes of every regular file, by directory (an absolute path) and by name."""


class Event(NamedTuple):
    """One event of a recording, with the fields of `Faults.recorded`."""

    kind: str
    path: str
    target: str
    offset: int
    data: bytes
    submitted: int
    completed: int | None
    ok: bool
    moved: int
    changed: bool


class Recording:
    """Records the operations of `DiskFiles`, among the transfers that `faults` records, and makes some fail.

    It implements infinity.system.disk_files.Observer. Thread-safe. faults: the object that the run's engines
    have; its recording starts here.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._failing: list[tuple[str, int, int]] = []
        self.calls: Counter[str] = Counter()
        """Number of operations by kind; those of all kinds together under "any"."""
        faults.record()

    def fail(self, operation: str, nth: int, error: int) -> None:
        """Make one operation fail with errno `error` before it does anything.

        operation: a kind of operation (see Observer.begins), or "any". nth: counted from 1, from now on.
        """
        with self._lock:
            self._failing.append((operation, self.calls[operation] + nth, error))

    def forget(self) -> None:
        """Make no further operation fail."""
        with self._lock:
            self._failing.clear()

    def mark(self, text: str) -> None:
        """Record that the run has come to a point, of which a `Check` is then told."""
        self._faults.noted(self._faults.note("mark", text, "", 0, b""))

    def events(self) -> list[Event]:
        """The events recorded so far, in the order of their submission."""
        return [Event(*event) for event in self._faults.recorded()]

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        with self._lock:
            self.calls.update((operation, "any"))
            due = ((operation, self.calls[operation]), ("any", self.calls["any"]))
            errors = [error for kind, nth, error in self._failing if (kind, nth) in due]
        ticket = self._faults.note(operation, path, target, offset, data)
        if errors:
            raise OSError(errors[0], os.strerror(errors[0]), path)
        return ticket

    def ended(self, ticket: int) -> None:
        self._faults.noted(ticket)


def images(*directories: str | os.PathLike[str]) -> dict[str, dict[str, bytes]]:
    """The regular files of directories as they are now, to begin a recording from."""
    found: dict[str, dict[str, bytes]] = {}
    for directory in map(os.path.abspath, directories):
        files = (entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
        found[directory] = {entry.name: Path(entry).read_bytes() for entry in files}
    return found


def with_whole_slabs(events: Sequence[Event]) -> list[Event]:
    """Events in which a slab that is made has its whole length at once: its room is taken before it is used.

    Taking the room is no operation of DiskFiles, so the length is that of the file that is there now, after
    the recorded run, or up to the last byte that was written if it is gone.
    """
    return [
        event._replace(kind="preallocate", offset=_slab_bytes(events[number:]))
        if event.kind == "create" and event.path.endswith(".slab")
        else event
        for number, event in enumerate(events)
    ]


def _slab_bytes(events: Sequence[Event]) -> int:
    """The length of the slab that the first of these events has made."""
    made, path = events[0], events[0].path
    for each in events[1:]:
        if each.kind == "create" and each.path == made.path:
            break
        if each.kind == "rename" and each.path == path and each.ok:
            path = each.target
    if path != made.path and os.path.exists(path):
        return os.path.getsize(path)
    writes = (each for each in events if each.kind == "write" and each.path == made.path)
    return max((each.offset + len(each.data) for each in writes), default=0)
