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
    no complete JSON. Of a pair whose second event was cut off, nothing is returned.
    """
    found: list[Event] = []
    for line in text.split("\n")[1:]:
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError:
            break
        found.append(event)
    return found[:-1] if found and found[-1]["ph"] == "b" else found


def rows_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Return the spans of each row, by the row's name: complete events ("X"), whose row has a number (`tid`)
    and was named before, and pairs of asynchronous events ("b", "e") with one id, whose name is their row's.

    Each span gets `start` and `end`, in nanoseconds, in addition to its own fields.
    """
    names: dict[int, str] = {}
    begun: dict[int, Event] = {}
    rows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        at = round(event.get("ts", 0) * 1e3)
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            rows[names[event["tid"]]].append(event | {"start": at, "end": at + round(event["dur"] * 1e3)})
        elif event["ph"] == "b":
            assert event["id"] not in begun
            begun[event["id"]] = event | {"start": at}
        elif event["ph"] == "e":
            one = begun.pop(event["id"])
            assert (one["name"], one["cat"], one["pid"]) == (event["name"], event["cat"], event["pid"])
            rows[event["name"]].append(one | {"end": at})
    assert not begun, "each pair is written as a whole"
    return dict(rows)


def edge_rows(events: Sequence[Event], edge: Edge) -> list[Event]:
    """Return the spans of all transfers over `edge`, a way between two tiers in one direction."""
    return rows_of(events).get(edge.value, [])


def crossings(events: Sequence[Event], way: str, peer: int) -> list[Event]:
    """Return the spans of all payloads that came "from" another rank or went "to" it, by their ends."""
    return sorted(rows_of(events).get(f"{way} rank {peer}", []), key=lambda each: each["end"])


def check_rows(events: Sequence[Event]) -> None:
    """Assert that no two spans of the training thread's rows overlap, and that none ends before it begins."""
    for name, spans in rows_of(events).items():
        ordered = sorted(spans, key=lambda each: (each["start"], each["end"]))
        assert all(each["start"] <= each["end"] for each in ordered), name
        if name in ("step", "compute", "waits"):
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

    monkeypatch.setattr("infinity.telemetry.timeline.os.write", limited)
