"""A timeline is a file that Perfetto loads, wherever it breaks off, and shows what the statistics count."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import each_device, needs_cuda
from hypothesis import given
from hypothesis import strategies as st
from small_runtime import TIED, loss_of, opened, train_step
from tiny_job import TinyJob, make_tiny, run_error

from infinity import cli, timeline
from infinity.aio import Faults
from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.store import injected
from infinity.telemetry import Edge, Meter, Phase, Stats, Wait
from infinity.tiers.link import Arrived, CudaLink, Timing, open_link
from infinity.timeline import Timeline
from infinity.trace_event import EventFile, Lanes, instant, row_name, span

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """The events of a complete file."""
    events: list[Event] = json.loads(path.read_text(), parse_constant=_no_json)
    return events


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def lines_of(text: str) -> list[Event]:
    """The events of a file that may break off anywhere, as a reader finds them that goes by lines."""
    found = []
    for line in text.split("\n")[1:]:
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError:
            break
        found.append(event)
    return found


def rows_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Spans by the name of their row, with `start` and `end` in nanoseconds. Every row is named before."""
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
    """The spans of all lanes of an edge."""
    rows = rows_of(events)
    return [each for name, spans in rows.items() if name.split(" ")[0] == edge.value for each in spans]


def check_rows(events: Sequence[Event]) -> None:
    """No two spans of a row overlap, and none ends before it begins."""
    for name, spans in rows_of(events).items():
        ordered = sorted(spans, key=lambda each: (each["start"], each["end"]))
        assert all(each["start"] <= each["end"] for each in ordered), name
        for one, next_one in itertools.pairwise(ordered):
            assert one["end"] <= next_one["start"], name


# --- the file -------------------------------------------------------------------------------------------


EVENTS = [*row_name(7, 'a "row"'), span(7, "moves", 1_000, 2_500, {"bytes": 3}), instant(7, "now", 5, {})]


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
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind) as raised:
        Timeline(tmp_path / path)  # which is `path`, where that is absolute
    assert raised.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == before


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


# --- what is recorded -----------------------------------------------------------------------------------


class Clock:
    """Time stands still until it is set. In microseconds."""

    now = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e3)

    def perf_counter(self) -> float:
        return self.now / 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timeline, "time", made)
    monkeypatch.setattr("infinity.telemetry.time", made)
    return made


class Slow:
    """A transfer that is under way until it is told when it was."""

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
    """(name, start, end, args) in microseconds, by row."""
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
    events = load(path)
    rows = rows_of(events)
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
    instants = [each for each in events if each["ph"] == "i"]
    assert [(each["name"], each["ts"], each["args"]["loss"]) for each in instants] == [
        ("step 1 ends", 100.0, 2.5)
    ]


def test_transfers_end_when_they_landed(clock: Clock, tmp_path: Path) -> None:
    """Not when somebody looked; what is under way at the end is said to be so."""
    path = tmp_path / "out.json"
    meter, transfers = Meter(), [Slow() for _ in range(4)]
    with Timeline(path) as lines, meter.recording(lines):
        for nbytes, each in enumerate(transfers, 1):
            meter.moved(Edge.NVME_TO_HOST, nbytes, each)
        meter.moved(Edge.HOST_TO_DEVICE, 7, Arrived(2_000, 5_000))
        clock.now = 50
        transfers[1].found = (3_000, 6_000)
        meter.stepped(50e-6)
        assert not edge_rows(lines_of(path.read_text()), Edge.NVME_TO_HOST), "the first is under way"
        transfers[0].found = (1_000, 9_000)
        transfers[2].found = (6_000, 8_000)
        clock.now = 100
        meter.stepped(50e-6)
        assert len(edge_rows(lines_of(path.read_text()), Edge.NVME_TO_HOST)) == 3
    rows = rows_of(load(path))
    assert simple(rows)["nvme->host"] == [("moves", 1, 9, {"bytes": 1})]
    assert simple(rows)["nvme->host 1"] == [
        ("moves", 3, 6, {"bytes": 2}),
        ("moves", 6, 8, {"bytes": 3}),
    ]
    assert simple(rows)["nvme->host 2"] == [("moves", 0, 100, {"bytes": 4, "unfinished": True})]
    assert simple(rows)["host->device"] == [("moves", 2, 5, {"bytes": 7})]


def test_updates_of_chunks_lie_where_their_threads_worked(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter, jobs = Meter(), [Slow() for _ in range(4)]
    with Timeline(path) as lines, meter.recording(lines):
        for number, job in enumerate(jobs):
            clock.now = 10 * number
            meter.submitted(job, 100 + number)
        jobs[0].found, jobs[1].found, jobs[2].found = (5_000, 40_000), (40_000, 70_000), (60_000, 75_000)
        clock.now = 90
    rows = simple(rows_of(load(path)))
    assert rows["update"] == [
        ("chunk", 5, 40, {"parameters": 100}),
        ("chunk", 40, 70, {"parameters": 101}),
    ]
    assert rows["update 1"] == [("chunk", 60, 75, {"parameters": 102})], "beside the end of the one before"
    assert rows["update 2"] == [("chunk", 30, 90, {"parameters": 103, "unfinished": True})]


def test_a_long_step_is_written_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    with Timeline(path) as lines, meter.recording(lines):
        for number in range(3 * timeline._BUFFERED):
            meter.moved(Edge.NVME_TO_HOST, 5, Arrived(number, number + 1))
            assert len(lines._spans) + len(lines._under_way[Edge.NVME_TO_HOST.value]) < 2 * timeline._BUFFERED
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


def full_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Of the file's writes so many succeed; the one after leaves a part, and nothing fits from then on."""
    write, seen = os.write, itertools.count(1)

    def limited(descriptor: int, data: Any) -> int:
        number = next(seen)
        if number == calls + 1:
            return write(descriptor, bytes(data)[:20])
        if number == calls + 2:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr("infinity.trace_event.os.write", limited)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_full_disk_ends_the_timeline_and_nothing_else(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    meter = Meter()
    before = len(os.listdir("/proc/self/fd"))
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
    assert len(os.listdir("/proc/self/fd")) == before
    assert meter.snapshot().steps == 2


# --- a run ----------------------------------------------------------------------------------------------


def moved_between(before: Stats, after: Stats) -> dict[Edge, int]:
    return {edge: after.edges[edge].bytes - before.edges[edge].bytes for edge in Edge}


@each_device
@pytest.mark.parametrize("home", ["nvme", "unified-nvme"])
def test_a_run_is_shown_as_it_is_counted(home: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and home.startswith("unified"):
        pytest.skip("a CUDA device has memory of its own")
    pages, path = tmp_path / "pages", tmp_path / "out.json"
    pages.mkdir()
    model = TIED.make(device)
    with opened(model, pages, home=home) as runtime:
        train_step(model, runtime)
        runtime._parts.updater.complete_all()
        before = runtime.stats
        with runtime.timeline(path) as lines:
            for number in (1, 2, 3):
                lines.annotate(loss=train_step(model, runtime, number))
            runtime._parts.updater.complete_all()
        after = runtime.stats
        with torch.no_grad():
            loss_of(model)
    events = load(path)
    check_rows(events)
    rows = rows_of(events)
    moved = moved_between(before, after)
    shown = {edge: sum(each["args"]["bytes"] for each in edge_rows(events, edge)) for edge in Edge}
    assert shown == moved
    used = {Edge.NVME_TO_HOST, Edge.HOST_TO_NVME}
    if home == "nvme":  # the CPU takes gradients where they are
        used = set(Edge) - ({Edge.DEVICE_TO_HOST} if device == "cpu" else set())
    assert {edge for edge in Edge if moved[edge]} == used
    waits = rows["waits"]
    for edge in Edge:
        stalled = [each for each in waits if each["name"] == edge.value]
        faults = [each for each in stalled if each["args"]["for"] == "page fault"]
        one, other = after.edges[edge], before.edges[edge]
        assert seconds(stalled) == pytest.approx(one.stall_seconds - other.stall_seconds, abs=1e-5)
        assert seconds(faults) == pytest.approx(one.fault_seconds - other.fault_seconds, abs=1e-5)
    updates = [each for each in waits if each["name"] == "update"]
    assert seconds(updates) == pytest.approx(after.update_seconds - before.update_seconds, abs=1e-5)
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    chunks = [each for name in rows if name.startswith("update") for each in rows[name]]
    assert sum(each["args"]["parameters"] for each in chunks) == 3 * trainable
    assert {each["name"] for each in rows["compute"]} == {each.value for each in Phase}
    trainer = sorted((each["start"], each["end"]) for each in [*rows["compute"], *waits])
    assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(trainer)), "no gap, no overlap"
    assert [each["name"] for each in rows["step"]] == ["step 2", "step 3", "step 4"]
    assert all(each["args"]["loss"] > 0 for each in rows["step"])


def seconds(found: Sequence[Event]) -> float:
    return sum(each["end"] - each["start"] for each in found) / 1e9


def test_a_request_is_as_long_as_the_disk_took(tmp_path: Path) -> None:
    """Every read is delayed: each has that delay, also where nobody waited for it yet."""
    model, faults = TIED.make(), Faults()
    pages, path = tmp_path / "pages", tmp_path / "out.json"
    pages.mkdir()
    with injected(faults), opened(model, pages) as runtime:
        train_step(model, runtime)
        faults.delay("read", 1, 0.002, times=None)
        with runtime.timeline(path), torch.no_grad():
            loss_of(model)
            runtime._parts.engine.land_all()
        faults.clear()
    reads = edge_rows(load(path), Edge.NVME_TO_HOST)
    assert reads
    assert all(each["end"] - each["start"] >= 2_000_000 for each in reads if "unfinished" not in each["args"])


def test_a_timeline_changes_no_bit_and_keeps_no_slot(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    losses = []
    for path in (None, tmp_path / "out.json"):
        model = TIED.make()
        with opened(model, pages) as runtime:
            if path is None:
                losses.append([train_step(model, runtime, step) for step in range(3)])
                continue
            with runtime.timeline(path):
                losses.append([train_step(model, runtime, step) for step in range(3)])
                runtime._parts.updater.complete_all()
                runtime._parts.store.settle()
                runtime._parts.engine.abandon()
                slots = runtime._parts.store.slots
                assert slots.largest_free == slots.nbytes
    assert losses[0] == losses[1]


def test_a_second_timeline_of_a_runtime_is_refused(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with opened(TIED.make(), pages) as runtime, runtime.timeline(tmp_path / "one.json"):
        refused = pytest.raises(ConfigError, match="being recorded already")
        with refused, runtime.timeline(tmp_path / "two.json"):
            pass
        with pytest.raises(StorageError), runtime.timeline(tmp_path / "absent" / "two.json"):
            pass
    load(tmp_path / "one.json")
    load(tmp_path / "two.json")


# --- copies on a device of its own memory ---------------------------------------------------------------


class FakeEvent:
    """Happens when it is recorded. Counts milliseconds in `times`."""

    times: Iterator[float]

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self, stream: Any) -> None:
        self.at, self.stream = next(self.times), stream

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed and other.timed
        return other.at - self.at


class FakeStream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> FakeEvent:
        return FakeEvent()


def test_events_around_a_copy_tell_its_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.tiers.link.time", clock)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    link = CudaLink(torch.device("cuda", 0))
    source, into = torch.ones(4), torch.zeros(4)
    assert link.to_device(into, source, 0).timing is None
    FakeEvent.times = iter([1000.0, 1000.5, 1002.0, 1003.0, 1004.0, 5000.0, 5000.25, 5000.75])
    clock.now = 7_000
    with link.timed():
        up, again = link.to_device(into, source, 0).timing, link.to_device(into, source, 0).timing
        clock.now = 11_000_000  # so long after, the first anchor would be too coarse
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
    """Nanoseconds that the two clocks may be apart."""
    assert before - slack <= times[0] < times[1] <= after + slack


# --- the command line -----------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyJob:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny(monkeypatch)
    return TinyJob(tmp_path)


def test_train_writes_a_timeline(job: TinyJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, log = tmp_path / "out.json", tmp_path / "log"
    found = job.train(capsys, "--steps", 3, "--trace", path, "--log", log, *job.nvme())
    events = load(path)
    check_rows(events)
    steps = rows_of(events)["step"]
    assert [each["name"] for each in steps] == ["step 1", "step 2", "step 3"]
    assert [each["args"]["loss"] for each in steps] == found["losses"]
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    for edge in Edge:  # the loop alone: the log's first step has the filling of the model, too
        last = sum(each["args"][f"bytes {edge.value}"] for each in steps[1:])
        assert last == sum(line["bytes"][edge.value] for line in logged[1:])
    assert cli.main(job.arguments("train", "--steps", 1, "--trace", path)) == 0
    assert f"timeline in {path}" in " ".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("where", ["absent/out.json", "/dev/full"])
def test_a_timeline_that_cannot_be_is_refused_before_the_plan(
    where: str,
    job: TinyJob,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(*_: object) -> None:
        raise AssertionError("this comes after the refusal")

    monkeypatch.setattr(cli.train, "make_job", planned)
    path = str(tmp_path / where)
    line, everything, error = run_error(capsys, job.arguments("train", "--json", "--trace", path), 1)
    assert error["error"] in ("StorageError", "StorageFull")
    assert path in error["cause"]
    assert everything.strip() == line


def test_a_disk_that_fills_up_does_not_end_the_run(
    job: TinyJob, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    full_after(monkeypatch, 2)
    with pytest.warns(RuntimeWarning, match="The timeline ends here"):
        assert cli.main(job.arguments("train", "--steps", 3, "--trace", path)) == 0
    assert "the timeline broke off: Could not write" in capsys.readouterr().out.replace("\n", " ")
    load(path)


def test_a_run_that_is_ended_leaves_its_timeline(job: TinyJob, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    process = job.start(*job.arguments("train", "--trace", path, "--steps", 1_000_000, *job.nvme()))
    try:
        hung = time.monotonic() + 120.0
        while not path.exists() or "step 3 ends" not in path.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < hung
            time.sleep(0.01)
        if_killed = lines_of(path.read_text())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    for events in (if_killed, load(path)):
        check_rows(events)
        assert [each["name"] for each in rows_of(events)["step"]][:3] == ["step 1", "step 2", "step 3"]
