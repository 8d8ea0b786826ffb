"""Trace events in Chrome's format, which Perfetto reads: a file of events, one a line.

The format is the JSON array of "Trace Event Format" (Google's document that chrome://tracing links to). The
array's end may be missing: readers accept that, so a run that was killed leaves a timeline up to its last
write. Every line but the first and the last is one event, with a comma behind it if another follows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence

from infinity.errors import StorageError, storage_errors

Value = str | int | float | bool
Args = Mapping[str, Value]
"""Named values that an event shows."""

PROCESS = 1
"""The `pid` of every event: a file holds those of one process."""

_END = "\n]\n"


class EventFile:
    """A file that events are appended to. Earlier content of the file is lost.

    Nothing is buffered: when `append` returns, the kernel has its events. Raises StorageError and StorageFull
    where the file cannot be opened or written, the first line included.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with storage_errors("open", self.path):
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        self._whole = 0
        """Bytes up to the end of the last event."""
        self._closed = False
        try:
            self._write("[\n" + _event("process_name", '"ph":"M"', 0, {"name": "infinity"}))
        except BaseException:
            self.close()
            raise

    def append(self, events: Sequence[str]) -> None:
        """Write events, JSON objects without a line break. After an error the file ends with the last event
        of an earlier call."""
        if events and not self._closed:
            self._write("".join(",\n" + event for event in events))

    def close(self) -> None:
        """Write the array's end and close the file. Calling it again does nothing. Raises StorageError; the
        file is closed all the same."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._whole:
                self._write(_END)
        finally:
            with storage_errors("close", self.path):  # a network's file system may say late that it is full
                os.close(self._descriptor)

    def _write(self, text: str) -> None:
        left = memoryview(text.encode())
        size = len(left)
        try:
            with storage_errors("write", self.path):
                while left:
                    left = left[os.write(self._descriptor, left) :]
        except StorageError:
            with contextlib.suppress(OSError):  # it may be a device or a pipe, or have no room for the end
                os.ftruncate(self._descriptor, self._whole)
                if self._whole and text is not _END:
                    os.write(self._descriptor, _END.encode())
            self._whole = 0
            raise
        self._whole += size


def span(row: int, name: str, start: int, end: int, args: Args) -> str:
    """A complete event ("X"). start, end: nanoseconds."""
    return _event(name, f'"ph":"X","ts":{start / 1e3},"dur":{(end - start) / 1e3}', row, args)


def instant(row: int, name: str, at: int, args: Args) -> str:
    """An instant event ("i") of one row. at: nanoseconds."""
    return _event(name, f'"ph":"i","s":"t","ts":{at / 1e3}', row, args)


def row_name(row: int, name: str) -> list[str]:
    """The metadata of a row: its name, and its place among the rows, which is its number."""
    return [
        _event("thread_name", '"ph":"M"', row, {"name": name}),
        _event("thread_sort_index", '"ph":"M"', row, {"sort_index": row}),
    ]


def _event(name: str, what: str, row: int, args: Args) -> str:
    """The JSON of an event. It is not made by json.dumps, which takes several times as long, in the training
    thread."""
    more = ",".join(f"{_json(key)}:{_json(value)}" for key, value in args.items())
    return f'{{"name":{_json(name)},{what},"pid":{PROCESS},"tid":{row},"args":{{{more}}}}}'


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
    """Rows for spans of one kind: spans of a row must not overlap, so those that do go to different rows."""

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def place(self, start: int, end: int) -> int:
        """The first lane, from 0, that is free when the span begins; it is taken until the span's end."""
        for lane, free in enumerate(self._free_from):
            if free <= start:
                self._free_from[lane] = end
                return lane
        self._free_from.append(end)
        return len(self._free_from) - 1
