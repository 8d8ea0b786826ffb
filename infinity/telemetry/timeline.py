"""A timeline of a run for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The timeline has these rows, from the top:

- step: a span for each step, with the step's measurements
- compute: the training thread while it neither waits nor works on an update, named by its phase
- waits: the training thread while it waits for a transfer (with the reason), for other ranks (with what it
  wants of them, such as their call of step()) or for an update, or works on one
- update: each chunk's update, from begin to end, with the number of parameter elements
- one for each edge, that is, each direction between two tiers such as NVMe to host: each transfer, from the
  request to the arrival of the last byte, with the bytes moved
- two for each other rank, from it and to it: each payload while it crosses, with what it is, its bytes and
  its unit's index

On CUDA, compute is the time in which kernels are queued, not the time in which they run. What crosses between
ranks is shown once it has crossed.

The file is a JSON array of Chrome's trace format, one event in each line. Readers accept an array without its
end, so a run that was killed leaves a readable timeline up to the last write. The first three rows have
complete events ("X"). Work of the others overlaps in time, so it has pairs of asynchronous events ("b", "e"),
which the viewer puts one above another; both of a pair are written when the work has ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone

from infinity.errors import StorageError, storage_errors
from infinity.system.closing import Closing
from infinity.telemetry.stats import Edge, Phase, Stats
from infinity.tiers.link import Timing, Transfer

Value = str | int | float | bool
Args = Mapping[str, Value]
"""Values that the viewer shows with a span, by name."""

_THREAD_ROWS = ("step", "compute", "waits")
_BUFFERED = 4096
"""Number of unwritten events at which all events are written to the file, even in the middle of a step."""
_END = b"\n]\n"


class Timeline(Closing):
    """A file to which the events of a runtime are written during a run; see `Runtime.timeline`.

    All finished events are written at the end of each step. If a write fails, the timeline ends, training
    goes on, a RuntimeWarning is issued once, and `failure` holds the error. The constructor deletes what the
    file held, and raises StorageError or StorageFull if it cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int | None = None, since: int | None = None
    ) -> None:
        """rank: this rank's number, which tells its events from those of other ranks when files are joined;
        None: there is one rank. since: time zero of the files of all ranks, in nanoseconds of time.time_ns();
        None: the start of the first recording.
        """
        self.path = os.fspath(path)
        self.failure: StorageError | None = None
        """The error that ended the timeline early; None if no write has failed."""
        self._lock = threading.RLock()
        self._process = 1 if rank is None else 1 + rank
        self._origin = None if since is None else since - time.time_ns() + time.perf_counter_ns()
        """Time zero of the file in nanoseconds of time.perf_counter_ns(); None if it is not known yet."""
        self._phase: Phase | None = None
        """The present phase of the training thread; None while nothing is recorded."""
        self._mark = 0
        """The time up to which spans of the training thread have been made, by time.perf_counter_ns()."""
        self._step_began = 0
        self._last_step: tuple[str, int, int, dict[str, Value]] | None = None
        """(name, start, end, args) of the last finished step, to which `annotate` can still add."""
        self._spans: list[tuple[str, str, int, int, Args]] = []
        """(row, name, start, end, args) of spans that are not written yet, with times of
        time.perf_counter_ns().

        Making text of a span takes long, and is put off until the file is written.
        """
        self._under_way: list[tuple[str, int, Args, Timing]] = []
        """(row, time of the request, args, timing) of transfers and updates whose end is not known yet."""
        self._ids = itertools.count(1)
        self._noted = 0
        """Number of events since the last write to the file."""
        self._whole = 0
        """Bytes of the file up to the end of its last event; 0 after a write that has failed."""
        with storage_errors("open", self.path):
            self._descriptor: int | None = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        try:
            self._put(
                "[\n" + ",\n".join(self._head("infinity" if rank is None else f"infinity rank {rank}", since))
            )
        except BaseException:
            self._close_file()
            raise

    def annotate(self, **args: Value) -> None:
        """Add named figures, such as the loss, to the last finished step, until the next one ends."""
        with self._lock:
            if self._last_step is not None:
                self._last_step[-1].update(args)

    def close(self) -> None:
        """Write the remaining events and close the file. Another call does nothing."""
        with self._lock:
            self.ended()
            try:
                self._close_file()
            except StorageError as error:
                self._fail(error)

    # --- what a meter reports, with times of time.perf_counter_ns() ---------------------------------------

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
        now = time.perf_counter_ns()
        timing = None if transfer is None else transfer.timing
        self._work(edge.value, {"bytes": nbytes}, now, now if timing is None else timing)

    def submitted(self, job: Timing, parameters: int) -> None:
        self._work("update", {"parameters": parameters}, time.perf_counter_ns(), job)

    def crossed(self, row: str, args: Args, began: int) -> None:
        now = time.perf_counter_ns()
        start = max(began, self._origin or 0)  # it may have begun before the recording
        self._work(row, args, start, max(start, now))

    def waited(self, name: str, reason: str | None, start: int, end: int) -> None:
        with self._lock:
            if self._phase is None:
                return
            start = max(start, self._mark)  # the wait may have begun before the recording
            self._compute_until(start)
            self._mark = max(start, end)
            self._spans.append(("waits", name, start, self._mark, {} if reason is None else {"for": reason}))
            self._note()

    def stepped(self, number: int, step: Stats) -> None:
        with self._lock:
            if self._phase is None:
                return
            now = time.perf_counter_ns()
            self._compute_until(now)
            self._write(finish=True)
            self._last_step = f"step {number}", self._step_began, now, _figures(step)
            self._step_began = now

    def ended(self) -> None:
        with self._lock:
            if self._phase is None:
                return
            now = time.perf_counter_ns()
            self._compute_until(now)
            self._phase = None
            self._take_ended()
            for row, asked, args, _ in self._under_way:
                self._spans.append((row, row, asked, now, {**args, "unfinished": True}))
            self._under_way.clear()
            self._write(finish=True)

    # --- events -------------------------------------------------------------------------------------------

    def _work(self, row: str, args: Args, start: int, end: int | Timing) -> None:
        """Add a span of work that is not the training thread's. end: its end, or a Timing that gives begin
        and end once the work is over.
        """
        with self._lock:
            if self._phase is None:
                return
            if isinstance(end, int):
                self._spans.append((row, row, start, end, args))
            else:
                self._under_way.append((row, start, args, end))
            self._note()

    def _compute_until(self, now: int) -> None:
        if self._phase is not None and now > self._mark:
            self._spans.append(("compute", self._phase.value, self._mark, now, {}))
            self._mark = now

    def _note(self) -> None:
        """Count one more unwritten event, and write all to the file once _BUFFERED events are unwritten."""
        self._noted += 1
        if self._noted >= _BUFFERED:
            self._write()

    def _take_ended(self) -> None:
        """Move transfers and updates that have ended from `_under_way` to `_spans`."""
        under_way, self._under_way = self._under_way, []
        for row, asked, args, timing in under_way:
            if (times := timing.times()) is None:
                self._under_way.append((row, asked, args, timing))
            else:
                self._spans.append((row, row, *times, args))

    def _write(self, *, finish: bool = False) -> None:
        """Write the spans of all work that has ended. finish: whether to add the last finished step."""
        if finish and self._last_step is not None:
            self._spans.append(("step", *self._last_step))
            self._last_step = None
        self._noted = 0
        self._take_ended()
        spans, self._spans = self._spans, []
        try:
            self._put("".join(",\n" + self._text(*each) for each in spans))
        except StorageError as error:
            self._fail(error)

    def _head(self, name: str, since: int | None) -> list[str]:
        """Return the JSON of the events that name the process and the rows of the training thread.

        since: time zero of the file in nanoseconds of time.time_ns(), for a label; None: no label.
        """

        def named(what: str, row: int, **args: Value) -> str:
            return self._event(what, '"ph":"M"', row, args)

        events = [named("process_name", 0, name=name)]
        if since is not None:
            events.append(named("process_labels", 0, labels=f"time 0 is {_utc(since)}"))
        for index, row in enumerate(_THREAD_ROWS, 1):
            events.append(named("thread_name", index, name=row))
            events.append(named("thread_sort_index", index, sort_index=index))
        return events

    def _text(self, row: str, name: str, start: int, end: int, args: Args) -> str:
        """The JSON of a span: one event, or two in two lines."""
        began, ended = ((each - (self._origin or 0)) / 1e3 for each in (start, end))
        if row in _THREAD_ROWS:
            number = 1 + _THREAD_ROWS.index(row)
            return self._event(name, f'"ph":"X","ts":{began},"dur":{(end - start) / 1e3}', number, args)
        pair = f'"cat":{_json(row)},"id":{next(self._ids)}'
        return ",\n".join(
            self._event(name, f'"ph":"{phase}",{pair},"ts":{at}', 0, given)
            for phase, at, given in (("b", began, args), ("e", ended, {}))
        )

    def _event(self, name: str, what: str, row: int, args: Args) -> str:
        """The JSON of an event. what: the fields of the event's type and times, as JSON without braces.

        json.dumps would take several times as long, in the training thread.
        """
        more = ",".join(f"{_json(key)}:{_json(value)}" for key, value in args.items())
        return f'{{"name":{_json(name)},{what},"pid":{self._process},"tid":{row},"args":{{{more}}}}}'

    # --- the file -----------------------------------------------------------------------------------------

    def _put(self, text: str) -> None:
        """Append text to the file. Raises StorageError if that fails.

        In that case what was written of the text is cut off and the JSON array is closed after the earlier
        events, so that the file can still be read, unless these writes fail, too.
        """
        if self._descriptor is None:
            return
        data = text.encode()
        try:
            self._put_bytes(data)
        except StorageError:
            with contextlib.suppress(OSError):  # the file may be a device or a pipe, or the disk may be full
                os.ftruncate(self._descriptor, self._whole)
                if self._whole:
                    os.write(self._descriptor, _END)
            self._whole = 0
            raise
        self._whole += len(data)

    def _put_bytes(self, data: bytes) -> None:
        assert self._descriptor is not None
        left = memoryview(data)
        with storage_errors("write", self.path):
            while left:
                left = left[os.write(self._descriptor, left) :]

    def _close_file(self) -> None:
        """Write the array's end, unless a write has failed, and close the file in any case."""
        if self._descriptor is None:
            return
        try:
            if self._whole:
                self._put_bytes(_END)
        finally:
            descriptor, self._descriptor = self._descriptor, None
            with storage_errors("close", self.path):  # a network file system may report late that it is full
                os.close(descriptor)

    def _fail(self, error: StorageError) -> None:
        self.failure = error
        self._phase = self._last_step = None
        with contextlib.suppress(StorageError):
            self._close_file()
        self._spans.clear()
        self._under_way.clear()
        warnings.warn(
            f"The timeline ends here, and training goes on without it. {error}", RuntimeWarning, stacklevel=3
        )


def _json(value: Value) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if math.isfinite(value) else _quoted(str(value))  # JSON has no such numbers


@functools.lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return json.dumps(text)


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
