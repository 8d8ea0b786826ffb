"""Tests of files of trace events: Perfetto can load a file that breaks off anywhere, and spans that overlap
are shown in separate rows (lanes).
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from timelines import lines_of, load

from infinity.telemetry.trace_event import EventFile, Lanes, Row, instant, row_name, span

ROW = Row(1, 7)
EVENTS = [
    *row_name(ROW, 'a "row"'),
    span(ROW, "moves", 1_000, 2_500, {"bytes": 3}),
    instant(ROW, "now", 5, {}),
]


def test_events_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    file = EventFile(path)
    file.append(EVENTS[:2])
    file.append([])
    file.append(EVENTS[2:])
    file.close()
    file.close()
    assert load(path) == [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "infinity"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 7, "args": {"name": 'a "row"'}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 7, "args": {"sort_index": 7}},
        {"name": "moves", "ph": "X", "ts": 1.0, "dur": 1.5, "pid": 1, "tid": 7, "args": {"bytes": 3}},
        {"name": "now", "ph": "i", "s": "t", "ts": 0.005, "pid": 1, "tid": 7, "args": {}},
    ]


def test_a_process_has_a_number_a_name_and_a_label(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    EventFile(path, 4, "infinity rank 3", "time 0 is now").close()
    assert load(path) == [
        {"name": "process_name", "ph": "M", "pid": 4, "tid": 0, "args": {"name": "infinity rank 3"}},
        {"name": "process_labels", "ph": "M", "pid": 4, "tid": 0, "args": {"labels": "time 0 is now"}},
    ]


def test_a_file_that_breaks_off_has_all_events_before(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    file = EventFile(path)
    file.append(EVENTS)
    unfinished = path.read_text()
    assert json.loads(unfinished + "]") == lines_of(unfinished)
    assert len(lines_of(unfinished)) == 1 + len(EVENTS)
    file.close()
    whole = path.read_text()
    ends = [place for place, letter in enumerate(whole) if letter == "\n"]
    for length in range(2, len(whole)):
        assert len(lines_of(whole[:length])) >= sum(end <= length for end in ends[1:-1])


def test_a_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("x" * 10_000)
    EventFile(path).close()
    assert len(load(path)) == 1


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda each: (each[0], sum(each))))


@given(spans)
def test_lanes_have_no_overlaps(given_spans: list[tuple[int, int]]) -> None:
    lanes = Lanes()
    placed = defaultdict(list)
    for start, end in given_spans:
        placed[lanes.place(start, end)].append((start, end))
    for row in placed.values():
        assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(sorted(row)))


@given(spans)
def test_in_order_there_are_no_more_lanes_than_are_in_flight(given_spans: list[tuple[int, int]]) -> None:
    lanes, ordered = Lanes(), sorted(given_spans)
    taken = {lanes.place(start, end) for start, end in ordered}
    in_flight = [sum(s <= start < e or (s, e) == (start, end) for s, e in ordered) for start, end in ordered]
    assert len(taken) <= max(in_flight, default=0)
