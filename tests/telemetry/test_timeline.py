"""Tests that a timeline shows what its meter recorded, at the right time, and that a full disk ends it."""

from __future__ import annotations

import errno
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import needs_cuda
from process_resources import check_nothing_left, resources
from timelines import Event, edge_rows, full_after, lines_of, load, rows_of

from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.telemetry import timeline
from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge, Phase, Wait
from infinity.telemetry.timeline import Timeline
from infinity.tiers.copy_streams import CopyStreams, open_link
from infinity.tiers.link import Arrived, Timing

# --- what is recorded -----------------------------------------------------------------------------------


class Clock:
    """A fake clock that stands still at `now` microseconds until it is set."""

    now = 0.0
    wall = 1_600_000_000 * 10**9
    """The time of day at `now` = 0, in nanoseconds."""

    def time_ns(self) -> int:
        return self.wall + self.perf_counter_ns()

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e3)

    def perf_counter(self) -> float:
        return self.now / 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timeline, "time", made)
    monkeypatch.setattr("infinity.telemetry.meter.time", made)
    return made


class Slow:
    """A fake transfer that is under way until `found`, its (start, end) in nanoseconds, is set."""

    def __init__(self) -> None:
        self.found: tuple[int, int] | None = None

    @property
    def timing(self) -> Timing:
        return self

    def times(self) -> tuple[int, int] | None:
        return self.found

    def done(self) -> bool:
        return self.found is not None

    def wait(self) -> object:
        return None


def simple(rows: dict[str, list[Event]]) -> dict[str, list[tuple[Any, ...]]]:
    """Convert a timeline's events, by row, to tuples (name, start, end, args) with times in microseconds."""
    return {
        row: [(each["name"], each["start"] // 1000, each["end"] // 1000, each["args"]) for each in found]
        for row, found in rows.items()
    }


def test_the_trainers_time_is_parted_into_compute_and_waits(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    clock.now = 100
    with Timeline(path) as lines:
        clock.now = 1000
        with meter.recording(lines):
            clock.now = 1010
            meter.entered(Phase.FORWARD)
            clock.now = 1020
            with meter.stalling(Edge.NVME_TO_HOST, Wait.FAULT):
                clock.now = 1050
            clock.now = 1060
            meter.entered(Phase.FORWARD)
            clock.now = 1070
            meter.entered(Phase.STEP)
            clock.now = 1090
            meter.updating(15e-6)
            clock.now = 1100
            meter.stepped(100e-6)
            meter.entered(Phase.BETWEEN)
            lines.annotate(loss=2.5, norm=float("nan"))
            clock.now = 1130
    rows = rows_of(load(path))
    step = rows.pop("step")
    assert simple(rows) == {
        "compute": [
            ("between", 0, 10, {}),
            ("forward", 10, 20, {}),
            ("forward", 50, 70, {}),
            ("step", 70, 75, {}),
            ("step", 90, 100, {}),
            ("between", 100, 130, {}),
        ],
        "waits": [("nvme->host", 20, 50, {"for": "page fault"}), ("update", 75, 90, {})],
    }
    assert [(each["name"], each["start"], each["end"]) for each in step] == [("step 1", 0, 100_000)]
    args = step[0]["args"]
    assert (args["loss"], args["norm"], args["limited by"]) == (2.5, "nan", "compute")
    assert [args[each] for each in ("page faults", "update", "compute")] == pytest.approx(
        [3e-5, 1.5e-5, 5.5e-5]
    )


def test_a_wait_for_other_ranks_parts_the_wait_around_it(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    with Timeline(path) as lines, meter.recording(lines):
        clock.now = 10
        with meter.stalling(Edge.NVME_TO_HOST, Wait.FAULT):
            clock.now = 20
            with meter.awaiting("parameters"):
                clock.now = 50
            clock.now = 55
        clock.now = 60
        with meter.awaiting("step()"):
            clock.now = 65
        meter.stepped(65e-6)
    rows = rows_of(load(path))
    assert rows["step"][0]["args"]["other ranks"] == pytest.approx(35e-6)
    assert simple(rows)["waits"] == [
        ("nvme->host", 10, 20, {"for": "page fault"}),
        ("ranks", 20, 50, {"for": "parameters"}),
        ("nvme->host", 50, 55, {"for": "page fault"}),
        ("ranks", 60, 65, {"for": "step()"}),
    ]
    assert simple(rows)["compute"] == [("between", 0, 10, {}), ("between", 55, 60, {})]


def test_transfers_end_when_they_landed(clock: Clock, tmp_path: Path) -> None:
    """In a timeline, a transfer ends when its bytes arrived, not when the meter found that they had.

    A transfer that is still under way when the timeline ends is marked "unfinished".
    """
    path = tmp_path / "out.json"
    meter, transfers = Meter(), [Slow() for _ in range(4)]
    with Timeline(path) as lines, meter.recording(lines):
        for nbytes, each in enumerate(transfers, 1):
            meter.moved(Edge.NVME_TO_HOST, nbytes, each)
        meter.moved(Edge.HOST_TO_DEVICE, 7, Arrived(2_000, 5_000))
        clock.now = 50
        transfers[1].found = (3_000, 6_000)
        meter.stepped(50e-6)
        assert len(edge_rows(lines_of(path.read_text()), Edge.NVME_TO_HOST)) == 1, "the first is under way"
        transfers[0].found = (1_000, 9_000)
        transfers[2].found = (6_000, 8_000)
        clock.now = 100
        meter.stepped(50e-6)
        assert len(edge_rows(lines_of(path.read_text()), Edge.NVME_TO_HOST)) == 3
    rows = rows_of(load(path))
    assert simple(rows)["nvme->host"] == [
        ("nvme->host", 3, 6, {"bytes": 2}),
        ("nvme->host", 1, 9, {"bytes": 1}),
        ("nvme->host", 6, 8, {"bytes": 3}),
        ("nvme->host", 0, 100, {"bytes": 4, "unfinished": True}),
    ]
    assert simple(rows)["host->device"] == [("host->device", 2, 5, {"bytes": 7})]


def test_updates_of_chunks_lie_where_their_threads_worked(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter, jobs = Meter(), [Slow() for _ in range(4)]
    with Timeline(path) as lines, meter.recording(lines):
        for number, job in enumerate(jobs):
            clock.now = 10 * number
            meter.submitted(job, 100 + number)
        jobs[0].found, jobs[1].found, jobs[2].found = (5_000, 40_000), (40_000, 70_000), (60_000, 75_000)
        clock.now = 90
    assert simple(rows_of(load(path)))["update"] == [
        ("update", 5, 40, {"parameters": 100}),
        ("update", 40, 70, {"parameters": 101}),
        ("update", 60, 75, {"parameters": 102}),
        ("update", 30, 90, {"parameters": 103, "unfinished": True}),
    ]


def test_payloads_have_rows_for_each_rank_and_way(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    clock.now = 100

    def cross(way: str, began: int, ended: int, unit: int | None = None) -> None:
        clock.now = ended
        meter.crossed(way, "gradients", unit, began + ended, 1000 * began)

    cross("to rank 1", 90, 99)
    clock.now = 100
    with Timeline(path) as lines, meter.recording(lines):
        cross("to rank 0", 101, 103, unit=5)
        cross("from rank 0", 102, 104)
        cross("from rank 0", 103, 105)
        cross("from rank 2", 90, 110)  # has begun before the recording
        clock.now = 120
    cross("to rank 1", 121, 122)
    rows = simple(rows_of(load(path)))
    assert rows.pop("compute") == [("between", 0, 20, {})]
    what = {"what": "gradients"}
    assert rows == {
        "from rank 2": [("from rank 2", 0, 10, {**what, "bytes": 200})],
        "to rank 0": [("to rank 0", 1, 3, {**what, "bytes": 204, "unit": 5})],
        "from rank 0": [
            ("from rank 0", 2, 4, {**what, "bytes": 206}),
            ("from rank 0", 3, 5, {**what, "bytes": 208}),
        ],
    }


def test_ranks_have_processes_and_time_zero_in_common(clock: Clock, tmp_path: Path) -> None:
    since = clock.wall + 5_000
    for rank, beyond in ((0, 0), (2, 10**9)):  # the other rank's perf_counter has begun at another time
        path = tmp_path / f"{rank}.json"
        clock.now, clock.wall = 30 + beyond, clock.wall - 1000 * beyond
        meter = Meter()
        with Timeline(path, rank=rank, since=since) as lines, meter.recording(lines):
            now = clock.perf_counter_ns()
            meter.crossed("to rank 1", "states", 7, 8, now)
            clock.now += 10
        events = load(path)
        assert {each["pid"] for each in events} == {1 + rank}
        assert events[0]["args"] == {"name": f"infinity rank {rank}"}
        assert events[1]["args"] == {"labels": "time 0 is 2020-09-13T12:26:40.000005+00:00"}
        assert simple(rows_of(events)) == {
            "compute": [("between", 25, 35, {})],
            "to rank 1": [("to rank 1", 25, 25, {"what": "states", "bytes": 8, "unit": 7})],
        }


def test_a_long_step_is_written_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    with Timeline(path) as lines, meter.recording(lines):
        for number in range(3 * timeline._BUFFERED):
            meter.moved(Edge.NVME_TO_HOST, 5, Arrived(number, number + 1))
            assert len(lines._spans) + len(lines._under_way) < 2 * timeline._BUFFERED
        written = lines_of(path.read_text())
        assert len(edge_rows(written, Edge.NVME_TO_HOST)) >= 2 * timeline._BUFFERED
    assert sum(each["args"]["bytes"] for each in edge_rows(load(path), Edge.NVME_TO_HOST)) == (
        15 * timeline._BUFFERED
    )


def test_one_recording_at_a_time_and_none_afterwards(tmp_path: Path) -> None:
    meter = Meter()
    with Timeline(tmp_path / "one.json") as one, Timeline(tmp_path / "two.json") as two:
        with meter.recording(one):
            with pytest.raises(ConfigError, match="being recorded already"), meter.recording(two):
                pass
            meter.moved(Edge.NVME_TO_HOST, 1)
        meter.moved(Edge.NVME_TO_HOST, 2)
        with meter.recording(two):
            meter.moved(Edge.NVME_TO_HOST, 4)
    for name, nbytes in (("one", 1), ("two", 4)):
        moved = edge_rows(load(tmp_path / f"{name}.json"), Edge.NVME_TO_HOST)
        assert [each["args"]["bytes"] for each in moved] == [nbytes]


# --- the file -------------------------------------------------------------------------------------------


def test_events_are_those_of_the_format(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("x" * 10_000)
    meter = Meter()
    with Timeline(path) as lines, meter.recording(lines):
        meter.moved(Edge.NVME_TO_HOST, 3, Arrived(1_000, 2_500))
        clock.now = 4
    events = load(path)
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "infinity"}}
    named = [(each["tid"], each["args"]["name"]) for each in events if each["name"] == "thread_name"]
    assert named == [(1, "step"), (2, "compute"), (3, "waits")]
    row = {"pid": 1, "tid": 0}
    pair = {"name": "nvme->host", "cat": "nvme->host", "id": 1, **row}
    assert events[7:] == [
        {"name": "between", "ph": "X", "ts": 0.0, "dur": 4.0, "pid": 1, "tid": 2, "args": {}},
        {**pair, "ph": "b", "ts": 1.0, "args": {"bytes": 3}},
        {**pair, "ph": "e", "ts": 2.5, "args": {}},
    ]


def test_a_file_that_breaks_off_has_all_events_before(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    with Timeline(path) as lines, meter.recording(lines):
        for number in range(3):
            meter.moved(Edge.NVME_TO_HOST, number, Arrived(number, number + 1))
            meter.stepped(1.0)
        unfinished = path.read_text()
        assert json.loads(unfinished + "]") == lines_of(unfinished)
    whole = path.read_text()
    ends = [place for place, letter in enumerate(whole) if letter == "\n"]
    for length in range(2, len(whole)):
        found = sum(end <= length for end in ends[1:-1])
        assert found - 1 <= len(lines_of(whole[:length])) <= found + 1, "a pair may be cut in two"


# --- what cannot be written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind", "number"),
    [
        ("absent/out.json", StorageError, errno.ENOENT),
        (".", StorageError, errno.EISDIR),
        ("/dev/full", StorageFull, errno.ENOSPC),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    path: str, kind: type[StorageError], number: int, tmp_path: Path
) -> None:
    before = resources()
    with pytest.raises(kind) as raised:
        Timeline(tmp_path / path)  # where `path` is absolute, this is `path` itself
    assert raised.value.errno == number
    check_nothing_left(before)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_full_disk_ends_the_timeline_and_nothing_else(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    before = resources()
    full_after(monkeypatch, calls)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Timeline(path) as lines, meter.recording(lines):
            for _ in range(2):
                meter.moved(Edge.NVME_TO_HOST, 1, Arrived(1, 2))
                meter.submitted(Slow(), 3)
                meter.stepped(1.0)
                meter.entered(Phase.FORWARD)
                lines.annotate(loss=1.0)
    assert [each.category for each in said] == [RuntimeWarning]
    assert "training goes on without it" in str(said[0].message)
    assert isinstance(lines.failure, StorageFull)
    assert len(load(path)) >= 1
    check_nothing_left(before)
    assert meter.snapshot().steps == 2


# --- copies on a device of its own memory ---------------------------------------------------------------


class FakeEvent:
    """A fake CUDA event that is recorded when it is made, at the next of `FakeEvent.times` (milliseconds)."""

    times: Iterator[float]

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.at = next(self.times) if timed else math.nan

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def milliseconds_since(self, earlier: FakeEvent) -> float:
        assert self.timed and earlier.timed
        return self.at - earlier.at


class FakeStream:
    def wait(self, event: FakeEvent) -> None:
        pass

    def record(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(timing)

    def copy(self, into: int, source: int, nbytes: int, *, piece: int) -> None:
        pass


class FakeDriver:
    checked = False

    def stream(self, priority: int = 0) -> FakeStream:
        return FakeStream()


def test_events_around_a_copy_tell_its_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.tiers.copy_streams.time", clock)
    driver: Any = FakeDriver()
    compute: Any = FakeStream()
    link = CopyStreams(driver, lambda: compute)
    source, into = torch.ones(4), torch.zeros(4)
    assert link.to_device(into, source, 0).timing is None
    FakeEvent.times = iter([1000.0, 1000.5, 1002.0, 1003.0, 1004.0, 5000.0, 5000.25, 5000.75])
    clock.now = 7_000
    with link.timed():
        up, again = link.to_device(into, source, 0).timing, link.to_device(into, source, 0).timing
        clock.now = 11_000_000  # so long after that the first anchor would be too coarse
        later = link.to_device(into, source, 0).timing
    assert link.to_device(into, source, 0).timing is None
    assert up is not None and again is not None and later is not None
    assert up.times() == (7_500_000, 9_000_000)
    assert again.times() == (10_000_000, 11_000_000)
    assert later.times() == (11_000_250_000, 11_000_750_000)


@needs_cuda
def test_copies_on_cuda_have_the_hosts_time() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    link = open_link(device)
    source = torch.ones(1 << 24, dtype=torch.uint8).pin_memory()
    into = torch.zeros_like(source, device=device)
    with link.timed():
        before = time.perf_counter_ns()
        transfer = link.to_device(into, source, 0)
        transfer.wait()
        after = time.perf_counter_ns()
    assert transfer.timing is not None
    times = transfer.timing.times()
    assert times is not None
    slack = 100_000
    """Nanoseconds by which the clocks of the device and the host may differ."""
    assert before - slack <= times[0] < times[1] <= after + slack
