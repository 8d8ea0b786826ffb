"""Helpers for tests of timeline files, which hold trace events in JSON for Perfetto.

They read the events, check the spans of time, and make the disk fill up while a file is being written.
"""

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
    """Read a complete timeline file and return its events. Raises an error if the file is no strict JSON."""
    events: list[Event] = json.loads(path.read_text(), parse_constant=_no_json)
    return events


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def lines_of(text: str) -> list[Event]:
    """Return the events in `text`, the content of a timeline file that may have been cut off anywhere.

    The first line holds no event, and each further line holds one. Reading stops at the first line that is
    no complete JSON.
    """
    found = []
    for line in text.split("\n")[1:]:
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError:
            break
        found.append(event)
    return found


def rows_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the spans (events with a duration) of each row, by the row's name.

    A row is a line of the timeline, and has the number `tid` in the file. Each span gets `start` and `end`,
    in nanoseconds, in addition to its own fields. The event that names a row must come before the row's
    spans.
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
    """Return the spans of all transfers over `edge`, a way between two tiers in one direction.

    They are the spans of all rows whose names begin with the edge's value.
    """
    rows = rows_of(events)
    return [each for name, spans in rows.items() if name.split(" ")[0] == edge.value for each in spans]


def crossings(events: Sequence[Event], way: str, peer: int) -> list[Event]:
    """Return the spans of all payloads that came "from" another rank or went "to" it, by their ends.

    They are the spans of all rows whose names begin so.
    """
    spans = [
        each
        for name, found in rows_of(events).items()
        if name.split(" ")[:3] == [way, "rank", str(peer)]
        for each in found
    ]
    return sorted(spans, key=lambda each: each["end"])


def check_rows(events: Sequence[Event]) -> None:
    """Assert that no two spans of the same row overlap, and that no span ends before it begins."""
    for name, spans in rows_of(events).items():
        ordered = sorted(spans, key=lambda each: (each["start"], each["end"]))
        assert all(each["start"] <= each["end"] for each in ordered), name
        for one, next_one in itertools.pairwise(ordered):
            assert one["end"] <= next_one["start"], name


def full_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Have the disk fill up while a timeline file is being written.

    The first `calls` calls of os.write succeed, the next one writes only 20 bytes of its data, and the one
    after that fails with ENOSPC.
    """
    write, seen = os.write, itertools.count(1)

    def limited(descriptor: int, data: Any) -> int:
        number = next(seen)
        if number == calls + 1:
            return write(descriptor, bytes(data)[:20])
        if number == calls + 2:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr("infinity.telemetry.trace_event.os.write", limited)
