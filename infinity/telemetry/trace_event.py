"""Trace events: a file of events in Chrome's trace format, which Perfetto reads, one event in each line.

The format is the JSON array of "Trace Event Format", the document by Google to which chrome://tracing links.
Readers accept an array whose end is missing, so that a run that was killed leaves a readable timeline up to
the last write. Every line except the first and the last is one event, followed by a comma if another event
follows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from infinity.errors import StorageError, storage_errors

Value = str | int | float | bool
Args = Mapping[str, Value]
"""The arguments of an event: values by name, which the viewer shows with the event."""

_END = "\n]\n"


class EventFile:
    """A file to which events are appended. Opening the file deletes its earlier content.

    Nothing is buffered: when `append` returns, the events have been passed to the kernel. The constructor
    and `append` raise StorageError or StorageFull if the file cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], process: int = 1, name: str = "infinity", label: str = ""
    ) -> None:
        """process: the number of the process whose events the file holds. name, label: what the viewer calls
        the process, and says of it.
        """
        self.path = os.fspath(path)
        with storage_errors("open", self.path):
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        self._whole = 0
        """Length of the file in bytes up to the end of its last event; 0 if nothing was written yet or a
        write has failed.
        """
        self._closed = False
        try:
            self._write("[\n" + _event("process_name", '"ph":"M"', process, 0, {"name": name}))
            if label:
                self.append([_event("process_labels", '"ph":"M"', process, 0, {"labels": label})])
        except BaseException:
            self.close()
            raise

    def append(self, events: Sequence[str]) -> None:
        """Write events to the file. events: JSON objects without line breaks.

        If the write fails, the file keeps the events of earlier calls and the end of the array, as far as the
        disk allows. Nothing but `close` may be called then.
        """
        if events and not self._closed:
            self._write("".join(",\n" + event for event in events))

    def close(self) -> None:
        """Write the end of the JSON array and close the file. Another call does nothing.

        Raises StorageError if the write or the closing fails. The file is closed in any case.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._whole:
                self._write(_END)
        finally:
            with storage_errors("close", self.path):  # a network file system may report late that it is full
                os.close(self._descriptor)

    def _write(self, text: str) -> None:
        left = memoryview(text.encode())
        size = len(left)
        try:
            with storage_errors("write", self.path):
                while left:
                    left = left[os.write(self._descriptor, left) :]
        except StorageError:
            with contextlib.suppress(OSError):  # the file may be a device or a pipe, or the disk may be full
                os.ftruncate(self._descriptor, self._whole)
                if self._whole and text is not _END:
                    os.write(self._descriptor, _END.encode())
            self._whole = 0
            raise
        self._whole += size


class Row(NamedTuple):
    """A row of the viewer: the number of its process, and its own number, by which the viewer sorts rows."""

    process: int
    number: int


def span(row: Row, name: str, start: int, end: int, args: Args) -> str:
    """The JSON of a complete event ("X"), an interval in one row.

    args: shown with the event. start, end: nanoseconds since the moment that is time 0 of the file.
    """
    return _event(name, f'"ph":"X","ts":{start / 1e3},"dur":{(end - start) / 1e3}', *row, args)


def instant(row: Row, name: str, at: int, args: Args) -> str:
    """The JSON of an instant event ("i"), a point in one row.

    args: shown with the event. at: nanoseconds since the moment that is time 0 of the file.
    """
    return _event(name, f'"ph":"i","s":"t","ts":{at / 1e3}', *row, args)


def row_name(row: Row, name: str) -> list[str]:
    """The JSON of the two metadata events that name a row and set the row's position in the viewer."""
    return [
        _event("thread_name", '"ph":"M"', *row, {"name": name}),
        _event("thread_sort_index", '"ph":"M"', *row, {"sort_index": row.number}),
    ]


def _event(name: str, what: str, process: int, row: int, args: Args) -> str:
    """The JSON of an event. what: the fields of the event's type and times as JSON text, such as
    '"ph":"M"', without braces.

    The text is formatted here because json.dumps would take several times as long, in the training thread.
    """
    more = ",".join(f"{_json(key)}:{_json(value)}" for key, value in args.items())
    return f'{{"name":{_json(name)},{what},"pid":{process},"tid":{row},"args":{{{more}}}}}'


def _json(value: Value) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if math.isfinite(value):
        return repr(value)
    return _quoted(str(value))  # JSON has no such numbers


@functools.lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return json.dumps(text)


class Lanes:
    """The rows, called lanes, in which spans of one kind (such as the transfers from NVMe to RAM) are shown.

    Spans in one row must not overlap, so overlapping spans are placed in different lanes.
    """

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def place(self, start: int, end: int) -> int:
        """Find the first lane that is free at `start`, occupy it until `end`, and return its number from 0.

        If no lane is free, one more is added. start, end: times in nanoseconds. A call with an earlier
        `start` than the call before can be given more lanes than are needed.
        """
        for lane, free in enumerate(self._free_from):
            if free <= start:
                self._free_from[lane] = end
                return lane
        self._free_from.append(end)
        return len(self._free_from) - 1
