"""A timeline of a run for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The timeline has these rows, from the top:

- step: a span for each step, with the step's measurements, and an instant event at the step's end
- compute: the training thread while it neither waits nor works on an update, named by its phase
- waits: the training thread while it waits for a transfer (with the reason), for other ranks (with what it
  wants of them, such as their call of step()) or for an update, or works on one
- update: a span for each chunk's update, from begin to end, with the number of parameter elements
- one for each edge, that is, each direction between two tiers such as NVMe to host: a span for each transfer,
  from the request to the arrival of the last byte, with the bytes moved
- two for each other rank, from it and to it: a span for each payload while it crosses, named by what it is,
  with its bytes and its unit's index

The rows compute and waits show time of the host. On CUDA, compute is the time in which kernels are queued,
not the time in which they run.

What crosses between ranks is shown once it has crossed. So the bytes in these rows are those that the wire
counts, and a payload that is under way when the timeline ends is in neither.

[Note: lanes]
Transfers of one edge overlap in time, but spans of one row in the viewer must not overlap unless they nest.
An edge therefore has several rows, called lanes, and a transfer goes to the first lane that is free. The
number of occupied lanes at a moment is the number of requests in flight, and each lane holds whole requests,
which can be clicked and summed up. Pairs of asynchronous events ("b", "e") would take two lines for each
request, and lose the end of a request in a file that breaks off. A counter of bytes in flight would not show
which request is slow.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from infinity.errors import StorageError
from infinity.system.closing import Closing
from infinity.telemetry.crossing import Crossing, Way
from infinity.telemetry.stats import Edge, Phase, Stats
from infinity.telemetry.trace_event import Args, EventFile, Lanes, Row, Value, instant, row_name, span
from infinity.tiers.link import Timing, Transfer

_THREADS_ROWS = ("update", *(edge.value for edge in Edge))
"""Names of the rows of work that runs beside the training thread: updates, and the transfers of each edge."""
_ROWS = ("step", "compute", "waits", *_THREADS_ROWS)
_MOST_LANES = 1000
"""The most lanes ([Note: lanes]) of each name of a row; spans beyond that are drawn in the last lane.

Each lane is a row of the viewer, and each name has this many row numbers, one for each lane.
"""
_FIRST = {row: 1 + place * _MOST_LANES for place, row in enumerate(_ROWS)}
_WAYS = tuple(Way)
"""For each other rank there is a row for each of these, in the order of ranks below all of `_ROWS`."""
_BUFFERED = 4096
"""Number of unwritten events at which all events are written to the file, even in the middle of a step."""


class _UnderWay(NamedTuple):
    """A transfer or a chunk's update whose end is not known yet.

    asked: the time of the request in nanoseconds of time.perf_counter_ns(). name, args: the name and the
    arguments of the span.
    """

    asked: int
    name: str
    args: Args
    timing: Timing | None
    """Gives the times of begin and end. None if the transfer had already ended when it was reported."""


class _Boundary(NamedTuple):
    """A finished step whose span is not written yet, so that `annotate` can still add figures."""

    name: str
    start: int
    end: int
    args: dict[str, Value]


class Timeline(Closing):
    """A file to which the events of a runtime are written during a run; see `Runtime.timeline`.

    A Timeline is a context manager, which closes the file. All finished events are written to the file at
    the end of each step, so that memory holds the events of one step at most. If a write fails, the timeline
    ends, training goes on, a RuntimeWarning is issued once, and `failure` holds the error. The constructor
    raises StorageError or StorageFull if the file cannot be opened or its first line cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int | None = None, since: int | None = None
    ) -> None:
        """rank: this process's number, by which files of several ranks can be joined; None: it is alone.
        since: time zero of the file, which these files have in common, in nanoseconds of time.time_ns();
        None: the begin of the first recording.
        """
        self._process = 1 if rank is None else 1 + rank
        name = "infinity" if rank is None else f"infinity rank {rank}"
        self._file = EventFile(path, self._process, name, "" if since is None else f"time 0 is {_utc(since)}")
        self.failure: StorageError | None = None
        """The error that ended the timeline early; None if no write has failed."""
        self._lock = threading.RLock()
        self._origin = None if since is None else since - time.time_ns() + time.perf_counter_ns()
        """Time zero of the file in nanoseconds of time.perf_counter_ns(); None if it is not known yet."""
        self._phase: Phase | None = None
        """What the training thread is in, such as the forward pass; None while nothing is recorded."""
        self._mark = 0
        """The time up to which spans of the training thread have been made, by time.perf_counter_ns()."""
        self._step_began = 0
        self._boundary: _Boundary | None = None
        self._spans: list[tuple[str, str, int, int, Args]] = []
        """Spans that are not written yet, each as (row, name, start, end, args), with start and end in
        nanoseconds of time.perf_counter_ns().

        Because the conversion of spans to text takes long, it is put off until they are written.
        """
        self._first = dict(_FIRST)
        """Name of a row -> number of the row of its first lane."""
        self._lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self._rows: set[int] = set()
        """Numbers of the rows whose names have been written to the file."""
        self._under_way: dict[str, deque[_UnderWay]] = {row: deque() for row in _THREADS_ROWS}
        self._noted = 0
        """Number of events since the last write to the file."""

    @property
    def path(self) -> str:
        return self._file.path

    def annotate(self, **args: Value) -> None:
        """Add named figures, such as the loss, to the span of the last finished step.

        Figures can be added until the next step ends.
        """
        with self._lock:
            if self._boundary is not None:
                self._boundary.args.update(args)

    def close(self) -> None:
        """Write the remaining events and close the file. Another call does nothing."""
        with self._lock:
            self.ended()
            if self.failure is None:
                try:
                    self._file.close()
                except StorageError as error:
                    self._fail(error)

    # --- the methods of Recorder, which a meter calls --------------------------------------------------

    def entered(self, phase: Phase) -> None:
        with self._lock:
            if self.failure is not None or phase is self._phase:
                return
            now = time.perf_counter_ns()
            if self._phase is None:
                self._mark = self._step_began = now
                self._origin = now if self._origin is None else self._origin
            self._compute_until(now)
            self._phase = phase

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None) -> None:
        self._asked(edge.value, "moves", {"bytes": nbytes}, None if transfer is None else transfer.timing)

    def crossed(self, crossing: Crossing) -> None:
        with self._lock:
            if self._phase is None:
                return
            row = f"{crossing.way.value} rank {crossing.peer}"
            place = len(_ROWS) + crossing.peer * len(_WAYS) + _WAYS.index(crossing.way)
            self._first.setdefault(row, 1 + place * _MOST_LANES)
            args: dict[str, Value] = {"bytes": crossing.nbytes}
            if crossing.unit is not None:
                args["unit"] = crossing.unit
            start = max(crossing.began, self._origin or 0)  # it may have begun before the recording
            self._span(row, crossing.label, start, max(start, crossing.ended), args)
            self._note()

    def waited(self, name: str, reason: str | None, start: int, end: int) -> None:
        with self._lock:
            if self._phase is None:
                return
            start = max(start, self._mark)  # the wait may have begun before the recording
            end = max(start, end)
            self._compute_until(start)
            self._span("waits", name, start, end, {} if reason is None else {"for": reason})
            self._mark = end
            self._note()

    def submitted(self, job: Timing, parameters: int) -> None:
        self._asked("update", "chunk", {"parameters": parameters}, job)

    def stepped(self, number: int, step: Stats) -> None:
        with self._lock:
            if self._phase is None:
                return
            now = time.perf_counter_ns()
            self._compute_until(now)
            self._note()
            self._finish_boundary()
            self._write()
            self._boundary = _Boundary(f"step {number}", self._step_began, now, _figures(step))
            self._step_began = now

    def ended(self) -> None:
        with self._lock:
            if self._phase is None:
                return
            now = time.perf_counter_ns()
            self._compute_until(now)
            self._phase = None
            self._note()
            self._finish_boundary()
            self._take_ended()
            for row, under_way in self._under_way.items():
                for asked, name, args, _ in under_way:
                    self._span(row, name, asked, now, {**args, "unfinished": True})
                under_way.clear()
            self._write()

    # --- inside ----------------------------------------------------------------------------------------

    def _span(self, row: str, name: str, start: int, end: int, args: Args) -> None:
        self._spans.append((row, name, start, end, args))

    def _compute_until(self, now: int) -> None:
        if self._phase is not None and now > self._mark:
            self._span("compute", self._phase.value, self._mark, now, {})
            self._mark = now

    def _asked(self, row: str, name: str, args: Args, timing: Timing | None) -> None:
        with self._lock:
            if self._phase is not None:
                self._under_way[row].append(_UnderWay(time.perf_counter_ns(), name, args, timing))
                self._note()

    def _note(self) -> None:
        """Count one more unwritten event, and write all to the file once _BUFFERED events are unwritten."""
        self._noted += 1
        if self._noted >= _BUFFERED:
            self._write()

    def _take_ended(self) -> None:
        """Turn finished transfers and updates in `_under_way` into spans, and drop them from `_under_way`.

        Each row's entries are taken in the order of their requests, up to the first unfinished entry.
        """
        for row, under_way in self._under_way.items():
            while under_way:
                asked, name, args, timing = under_way[0]
                times = (asked, asked) if timing is None else timing.times()
                if times is None:
                    break
                under_way.popleft()
                self._span(row, name, *times, args)

    def _finish_boundary(self) -> None:
        if self._boundary is not None:
            name, start, end, args = self._boundary
            self._boundary = None
            self._span("step", name, start, end, args)

    def _write(self) -> None:
        self._noted = 0
        self._take_ended()
        spans, self._spans = self._spans, []
        try:
            self._file.append(list(self._texts(spans)))
        except StorageError as error:
            self._fail(error)

    def _texts(self, spans: list[tuple[str, str, int, int, Args]]) -> Iterator[str]:
        origin = self._origin or 0
        for row, name, start, end, args in spans:
            lane = self._lanes[row].place(start, end)
            at = Row(self._process, self._first[row] + min(lane, _MOST_LANES - 1))
            if at.number not in self._rows:
                self._rows.add(at.number)
                yield from row_name(at, f"{row} {lane}" if lane else row)
            yield span(at, name, start - origin, end - origin, args)
            if row == "step":
                yield instant(at, f"{name} ends", end - origin, args)

    def _fail(self, error: StorageError) -> None:
        self.failure = error
        self._phase = None
        self._boundary = None
        with contextlib.suppress(StorageError):
            self._file.close()
        self._spans.clear()
        for under_way in self._under_way.values():
            under_way.clear()
        warnings.warn(
            f"The timeline ends here, and training goes on without it. {error}", RuntimeWarning, stacklevel=3
        )


def _utc(nanoseconds: int) -> str:
    """A time of time.time_ns() as text, to the microsecond."""
    seconds, rest = divmod(nanoseconds, 10**9)
    at = datetime.fromtimestamp(seconds, timezone.utc).replace(microsecond=rest // 1000)
    return at.isoformat(timespec="microseconds")


def _figures(step: Stats) -> dict[str, Value]:
    """The figures that the timeline shows with a step: times in seconds, and bytes moved over each edge."""
    return {
        "limited by": step.limited_by or "",
        "seconds": step.seconds,
        "compute": step.compute_seconds,
        "update": step.update_seconds,
        **({"other ranks": step.rank_seconds} if step.rank_seconds else {}),
        "page faults": step.fault_seconds,
        **{f"stalled {edge.value}": each.stall_seconds for edge, each in step.edges.items()},
        **{f"bytes {edge.value}": each.bytes for edge, each in step.edges.items()},
    }
