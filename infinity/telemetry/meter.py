"""The meter: counts bytes, waits and seconds while a run goes on, and tells a recorder of each event."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

from infinity.errors import ConfigError
from infinity.telemetry.stats import Edge, EdgeStats, Phase, Stats, Wait
from infinity.tiers.link import Timing, Transfer


@dataclass
class _EdgeTally:
    bytes: int = 0
    transfers: int = 0
    stall_seconds: float = 0.0
    fault_seconds: float = 0.0

    def add(self, other: _EdgeTally) -> None:
        self.bytes += other.bytes
        self.transfers += other.transfers
        self.stall_seconds += other.stall_seconds
        self.fault_seconds += other.fault_seconds


@dataclass
class _Tally:
    """Sums of a run or of one step, to which more is added."""

    edges: dict[Edge, _EdgeTally] = field(default_factory=lambda: {edge: _EdgeTally() for edge in Edge})
    accesses: int = 0
    misses: int = 0
    steps: int = 0
    skipped_steps: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    compute_seconds: float = 0.0
    peaks: dict[str, int] = field(default_factory=dict)

    def finish(self, seconds: float) -> None:
        """Makes this the tally of one finished step."""
        stalled = sum(edge.stall_seconds for edge in self.edges.values())
        self.steps = 1
        self.seconds = seconds
        # Stalls before the first step, or between two, count for the next one: they may exceed its wall time.
        self.compute_seconds = max(0.0, seconds - stalled - self.update_seconds)

    def add(self, other: _Tally) -> None:
        for edge, theirs in other.edges.items():
            self.edges[edge].add(theirs)
        self.accesses += other.accesses
        self.misses += other.misses
        self.steps += other.steps
        self.skipped_steps += other.skipped_steps
        self.seconds += other.seconds
        self.update_seconds += other.update_seconds
        self.compute_seconds += other.compute_seconds
        for name, peak in other.peaks.items():
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    def freeze(
        self, *, step_seconds: float | None, loss_scale: float | None, last_step: Stats | None
    ) -> Stats:
        sums = {
            **vars(self),
            "edges": {edge: EdgeStats(**asdict(tally)) for edge, tally in self.edges.items()},
            "peaks": dict(self.peaks),
        }
        return Stats(**sums, step_seconds=step_seconds, loss_scale=loss_scale, last_step=last_step)


class Recorder(Protocol):
    """The listener that a meter tells of each event when it happens. Times are nanoseconds of
    time.perf_counter_ns()."""

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None) -> None:
        """Note that a transfer was asked for; None: it is done already."""

    def waited(self, name: str, wait: Wait | None, start: int, end: int) -> None:
        """Note that the training thread did not compute: it waited for an edge, or (None) for updates."""

    def entered(self, phase: Phase) -> None:
        """Note that the training thread is in this phase from now on."""

    def submitted(self, job: Timing, parameters: int) -> None:
        """Note that an update was handed to its threads. parameters: the number of them in it."""

    def stepped(self, number: int, step: Stats) -> None:
        """Note that the `number`th step of the run, from 1 on, is over."""

    def ended(self) -> None:
        """Note that nothing more will be told."""


class _ThreadState(threading.local):
    waits = False
    faults = False


class Meter:
    """Counters of a run. Any thread may call any method; each takes a lock and does a few additions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = _ThreadState()
        self._finished = _Tally()
        self._now = _Tally()
        self._loss_scale: float | None = None
        self._last_step: Stats | None = None
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """A context in which `recorder` is told of each event. Raises ConfigError inside of another one."""
        if self._recorder is not None:
            raise ConfigError(
                "A timeline of this runtime is being recorded already.", "Record one at a time."
            )
        self._recorder = recorder
        recorder.entered(Phase.BETWEEN)
        try:
            yield
        finally:
            self._recorder = None
            recorder.ended()

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None = None) -> None:
        """Count `nbytes` that are on their way over `edge`, or that were moved (transfer: None)."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1
        if (recorder := self._recorder) is not None:
            recorder.moved(edge, nbytes, transfer)

    def copied(self, edge: Edge, nbytes: int, transfer: Transfer, seconds: float) -> None:
        """Count a transfer as `moved` does, and the `seconds` until now that asking for it took as a stall.

        The stall is one of the training thread, for Wait.COPY.
        """
        state = self._thread
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1
            if not state.waits:
                tally.stall_seconds += seconds
                if state.faults:
                    tally.fault_seconds += seconds
        if (recorder := self._recorder) is not None:
            if not state.waits:
                wait = Wait.FAULT if state.faults else Wait.COPY
                recorder.waited(edge.value, wait, *_until_now(seconds))
            recorder.moved(edge, nbytes, transfer)

    def stalled(self, edge: Edge, seconds: float, wait: Wait = Wait.OTHER) -> None:
        """Count the `seconds` until now for which the training thread waited for a transfer over `edge`."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.stall_seconds += seconds
            if wait is Wait.FAULT:
                tally.fault_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited(edge.value, wait, *_until_now(seconds))

    @contextmanager
    def stalling(self, edge: Edge, wait: Wait = Wait.OTHER) -> Iterator[None]:
        """A context whose seconds count as a wait of the training thread for `edge`, also if it raises.

        Inside another such context of the same thread it counts nothing: the outer one has the time.
        """
        state = self._thread
        if state.waits:
            yield
            return
        state.waits = True
        start = time.perf_counter()
        try:
            yield
        finally:
            state.waits = False
            self.stalled(edge, time.perf_counter() - start, Wait.FAULT if state.faults else wait)

    @contextmanager
    def faulting(self) -> Iterator[None]:
        """A context in which every wait of this thread is for a unit that was demanded and is not there."""
        before, self._thread.faults = self._thread.faults, True
        try:
            yield
        finally:
            self._thread.faults = before

    def accessed(self, hit: bool) -> None:
        """Count a use of a unit; it is a `hit` if the unit was there or on its way."""
        with self._lock:
            self._now.accesses += 1
            self._now.misses += not hit

    def updating(self, seconds: float) -> None:
        """Count the `seconds` until now that the training thread spent on updates or waiting for them.

        Stalls are not included. Inside of a stall of the same thread it counts nothing: the stall has the
        time.
        """
        if self._thread.waits:
            return
        with self._lock:
            self._now.update_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited("update", None, *_until_now(seconds))

    def submitted(self, job: Timing, parameters: int) -> None:
        """Tell the recorder that an update of `parameters` parameters was handed to its threads."""
        if (recorder := self._recorder) is not None:
            recorder.submitted(job, parameters)

    def entered(self, phase: Phase) -> None:
        """Tell the recorder that the training thread is in this phase from now on."""
        if (recorder := self._recorder) is not None:
            recorder.entered(phase)

    def peak(self, pool: str, nbytes: int) -> None:
        """Note that `nbytes` of the pool of this name were in use at once."""
        with self._lock:
            self._now.peaks[pool] = max(nbytes, self._now.peaks.get(pool, 0))

    def scaled(self, loss_scale: float) -> None:
        """Note that the loss is scaled by this from now on."""
        with self._lock:
            self._loss_scale = loss_scale

    def skipped(self) -> None:
        """Count a skipped step: the one that runs now ends without an update. `stepped` has to end it too."""
        with self._lock:
            self._now.skipped_steps += 1

    def stepped(self, seconds: float) -> None:
        """End a step of `seconds` wall time. All that was counted since the last one ended belongs to it."""
        with self._lock:
            step, self._now = self._now, _Tally()
            step.finish(seconds)
            self._finished.add(step)
            last = step.freeze(step_seconds=seconds, loss_scale=self._loss_scale, last_step=None)
            self._last_step = last
            number = self._finished.steps
        if (recorder := self._recorder) is not None:
            recorder.stepped(number, last)

    def snapshot(self) -> Stats:
        """The stats up to now, including the step that is not finished."""
        with self._lock:
            total = _Tally()
            total.add(self._finished)
            total.add(self._now)
            last = self._last_step
            return total.freeze(
                step_seconds=None if last is None else last.seconds,
                loss_scale=self._loss_scale,
                last_step=last,
            )


def _until_now(seconds: float) -> tuple[int, int]:
    """The span of `seconds` that ends now: (start, end) in nanoseconds of time.perf_counter_ns()."""
    now = time.perf_counter_ns()
    return now - round(seconds * 1e9), now
