"""Timeline files: reading and checking their events, and a disk that is full before a file is complete."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infinity.telemetry.stats import Edge

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """The events of a complete timeline file."""
    events: list[Event] = json.loads(path.read_text(), parse_constant=_no_json)
    return events


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def lines_of(text: str) -> list[Event]:
    """The events of a timeline file that may break off anywhere, read line by line."""
    found = []
    for line in text.split("\n")[1:]:
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError:
            break
        found.append(event)
    return found


def rows_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Spans by the name of their row, with `start` and `end` in nanoseconds.

    The event that names a row must come before the spans of the row.
    """
    names: dict[int, str] = {}
    rows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            rows[names[event["tid"]]].append(
                event | {"start": start, "end": start + round(event["dur"] * 1e3)}
            )
    return rows


def edge_rows(events: Sequence[Event], edge: Edge) -> list[Event]:
    """The spans of all rows that belong to an edge, which is a way from one tier to another."""
    rows = rows_of(events)
    return [each for name, spans in rows.items() if name.split(" ")[0] == edge.value for each in spans]


def check_rows(events: Sequence[Event]) -> None:
    """Assert that no two spans of a row overlap, and that no span ends before it begins."""
    for name, spans in rows_of(events).items():
        ordered = sorted(spans, key=lambda each: (each["start"], each["end"]))
        assert all(each["start"] <= each["end"] for each in ordered), name
        for one, next_one in itertools.pairwise(ordered):
            assert one["end"] <= next_one["start"], name


def full_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Have the disk fill up: `calls` writes succeed, the next writes 20 bytes, and the one after it fails."""
    write, seen = os.write, itertools.count(1)

    def limited(descriptor: int, data: Any) -> int:
        number = next(seen)
        if number == calls + 1:
            return write(descriptor, bytes(data)[:20])
        if number == calls + 2:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr("infinity.telemetry.trace_event.os.write", limited)
