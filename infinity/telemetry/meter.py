"""The meter: counts the bytes, waits and seconds of a run, and reports each event to a recorder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

from infinity.errors import ConfigError
from infinity.telemetry.crossing import Crossing
from infinity.telemetry.stats import RANKS, Edge, EdgeStats, Phase, Stats, Wait, Written
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
    """Running sums of the measurements of a run or of one step. The fields are those of `Stats`."""

    edges: dict[Edge, _EdgeTally] = field(default_factory=lambda: {edge: _EdgeTally() for edge in Edge})
    accesses: int = 0
    misses: int = 0
    steps: int = 0
    skipped_steps: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    rank_seconds: float = 0.0
    compute_seconds: float = 0.0
    peaks: dict[str, int] = field(default_factory=dict)

    def finish(self, seconds: float) -> None:
        """Complete the sums of one step at its end: count the step, its wall time and its seconds of compute.

        seconds: the wall time of the step. The seconds of compute are this time less the seconds of stalls,
        of updates and of waits for other ranks, and at least 0.
        """
        stalled = sum(edge.stall_seconds for edge in self.edges.values())
        self.steps = 1
        self.seconds = seconds
        # A stall between two steps, or before the first step, counts for the next step. The sum of stalls may
        # therefore exceed the step's time.
        self.compute_seconds = max(0.0, seconds - stalled - self.update_seconds - self.rank_seconds)

    def add(self, other: _Tally) -> None:
        for edge, theirs in other.edges.items():
            self.edges[edge].add(theirs)
        self.accesses += other.accesses
        self.misses += other.misses
        self.steps += other.steps
        self.skipped_steps += other.skipped_steps
        self.seconds += other.seconds
        self.update_seconds += other.update_seconds
        self.rank_seconds += other.rank_seconds
        self.compute_seconds += other.compute_seconds
        for name, peak in other.peaks.items():
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    @property
    def written(self) -> Written:
        """What was written to disk; the sums have to be those of finished steps."""
        return Written(bytes=self.edges[Edge.HOST_TO_NVME].bytes, steps=self.steps, seconds=self.seconds)

    def freeze(
        self,
        *,
        step_seconds: float | None,
        loss_scale: float | None,
        written: Written,
        last_step: Stats | None,
    ) -> Stats:
        sums = {
            **vars(self),
            "edges": {edge: EdgeStats(**asdict(tally)) for edge, tally in self.edges.items()},
            "peaks": dict(self.peaks),
        }
        return Stats(
            **sums, step_seconds=step_seconds, loss_scale=loss_scale, written=written, last_step=last_step
        )


class Recorder(Protocol):
    """A listener to which a meter reports each event as soon as the event happens.

    All times are nanoseconds of time.perf_counter_ns().
    """

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None) -> None:
        """Record that a transfer of `nbytes` bytes over `edge` was requested.

        edge: the direction between two neighbouring tiers, such as NVMe to host. transfer: the handle of the
        transfer; None if the transfer has already ended.
        """

    def crossed(self, crossing: Crossing) -> None:
        """Record that a payload has crossed to or from another rank."""

    def waited(self, name: str, reason: str | None, start: int, end: int) -> None:
        """Record that the training thread did not compute from `start` to `end`.

        name: the value of the `Edge` for which the thread waited, RANKS, or "update". reason: of the wait for
        the edge, or what the thread wanted of other ranks; None if it worked on updates or waited for them.
        """

    def entered(self, phase: Phase) -> None:
        """Record that the training thread enters `phase` now."""

    def submitted(self, job: Timing, parameters: int) -> None:
        """Record that an update was submitted to the update threads.

        job: the handle that gives the begin and the end of the update. parameters: the number of parameter
        elements in the update.
        """

    def stepped(self, number: int, step: Stats) -> None:
        """Record the end of a step.

        number: the number of the step in the run, counted from 1. step: the measurements of the step.
        """

    def ended(self) -> None:
        """Record that the recording ends. The meter calls no other method afterwards."""


class _ThreadState(threading.local):
    waits = False
    """Whether the thread is within `stalling` or `awaiting`."""
    awaits = False
    """Whether it is within `awaiting`."""
    stall: tuple[Edge, Wait] | None = None
    """The arguments of the outermost `stalling`."""
    began = 0.0
    """The time up to which that has been counted, by time.perf_counter()."""
    faults = False


class Meter:
    """Counters of the events of a run. Any thread may call any method, and every call is short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = _ThreadState()
        self._finished = _Tally()
        self._now = _Tally()
        self._loss_scale: float | None = None
        self._last_step: Stats | None = None
        self._written = Written()
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """A context manager within which each event is reported to `recorder`.

        Raises ConfigError if another recorder is active.
        """
        if self._recorder is not None:
            raise ConfigError(
                "A timeline of this runtime is being recorded already.", "Record one timeline at a time."
            )
        self._recorder = recorder
        recorder.entered(Phase.BETWEEN)
        try:
            yield
        finally:
            self._recorder = None
            recorder.ended()

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None = None) -> None:
        """Count a transfer of `nbytes` bytes over `edge`, as soon as it has been requested.

        edge: the direction between two neighbouring tiers, such as NVMe to host. transfer: the handle of the
        transfer; None if the transfer has already ended.
        """
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1
        if (recorder := self._recorder) is not None:
            recorder.moved(edge, nbytes, transfer)

    def crossed(self, crossing: Crossing) -> None:
        """Report to the recorder that a payload has crossed to or from another rank. The wire counts it."""
        if (recorder := self._recorder) is not None:
            recorder.crossed(crossing)

    def copied(self, edge: Edge, nbytes: int, transfer: Transfer, seconds: float) -> None:
        """Count a transfer as `moved` does, and count the call that requested it as a stall of the training
        thread, which does not compute meanwhile.

        seconds: how long that call took; it must have returned just now. The reason of the stall is
        Wait.COPY, or Wait.FAULT within `faulting`. Within `stalling` no stall is counted here, because
        `stalling` counts this time too.
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
                recorder.waited(edge.value, wait.value, *_until_now(seconds))
            recorder.moved(edge, nbytes, transfer)

    def stalled(self, edge: Edge, seconds: float, wait: Wait = Wait.OTHER) -> None:
        """Count a wait of the training thread for a transfer over `edge`.

        edge: the direction between two neighbouring tiers, such as NVMe to host. seconds: the length of the
        wait, which ended now. wait: the reason of the wait.
        """
        with self._lock:
            tally = self._now.edges[edge]
            tally.stall_seconds += seconds
            if wait is Wait.FAULT:
                tally.fault_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited(edge.value, wait.value, *_until_now(seconds))

    @contextmanager
    def stalling(self, edge: Edge, wait: Wait = Wait.OTHER) -> Iterator[None]:
        """A context manager whose duration counts as a wait of the training thread for transfers on `edge`.

        wait: the reason of the wait; within `faulting`, the reason is Wait.FAULT instead. The duration
        counts even if the body raises. Within another `stalling` or `awaiting` of the same thread nothing is
        counted, since the outer context counts the time.
        """
        state = self._thread
        if state.waits:
            yield
            return
        state.waits, state.stall = True, (edge, wait)
        state.began = time.perf_counter()
        try:
            yield
        finally:
            state.waits, state.stall = False, None
            self._stalled_since(state.began, edge, wait)

    def _stalled_since(self, began: float, edge: Edge, wait: Wait) -> None:
        self.stalled(edge, time.perf_counter() - began, Wait.FAULT if self._thread.faults else wait)

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """A context manager whose duration counts as a wait of the training thread for other ranks.

        what: what the thread wants of them, such as the call that all ranks have to make. The duration counts
        even if the body raises. It is cut out of a `stalling` around it, and within another `awaiting` of the
        same thread nothing is counted.
        """
        state = self._thread
        if state.awaits:
            yield
            return
        if state.stall is not None:
            self._stalled_since(state.began, *state.stall)
        state.waits = state.awaits = True
        start = time.perf_counter()
        try:
            yield
        finally:
            state.awaits, state.waits = False, state.stall is not None
            state.began = time.perf_counter()
            seconds = state.began - start
            with self._lock:
                self._now.rank_seconds += seconds
            if (recorder := self._recorder) is not None:
                recorder.waited(RANKS, what, *_until_now(seconds))

    @contextmanager
    def faulting(self) -> Iterator[None]:
        """A context manager within which every stall of the calling thread counts as a page fault.

        A page fault is a wait for a unit that was demanded and is not resident.
        """
        before, self._thread.faults = self._thread.faults, True
        try:
            yield
        finally:
            self._thread.faults = before

    def accessed(self, hit: bool) -> None:
        """Count an access to a unit. hit: whether the unit was resident or on its way."""
        with self._lock:
            self._now.accesses += 1
            self._now.misses += not hit

    def updating(self, seconds: float) -> None:
        """Count time in which the training thread worked on updates or waited for updates.

        seconds: the length of this time, which ended now. The caller leaves out stalls that were counted in
        that time. Within `stalling` or `awaiting` of the same thread nothing is counted, since these count
        that time.
        """
        if self._thread.waits:
            return
        with self._lock:
            self._now.update_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited("update", None, *_until_now(seconds))

    def submitted(self, job: Timing, parameters: int) -> None:
        """Report to the recorder that an update was submitted to the update threads.

        job: the handle that gives the begin and the end of the update. parameters: the number of parameter
        elements in the update.
        """
        if (recorder := self._recorder) is not None:
            recorder.submitted(job, parameters)

    def entered(self, phase: Phase) -> None:
        """Report to the recorder that the training thread enters `phase` now."""
        if (recorder := self._recorder) is not None:
            recorder.entered(phase)

    def peak(self, pool: str, nbytes: int) -> None:
        """Note that `nbytes` bytes of the pool named `pool` are or were in use. The largest number counts."""
        with self._lock:
            self._now.peaks[pool] = max(nbytes, self._now.peaks.get(pool, 0))

    def scaled(self, loss_scale: float) -> None:
        """Note that the loss is multiplied by `loss_scale` from now on."""
        with self._lock:
            self._loss_scale = loss_scale

    def skipped(self) -> None:
        """Count the current step as skipped: the step ends without an update.

        The caller has to end the step by `stepped`, like any other step.
        """
        with self._lock:
            self._now.skipped_steps += 1

    def stepped(self, seconds: float) -> None:
        """End the current step. seconds: the wall time of the step.

        Everything that was counted since the end of the previous step belongs to the current step.
        """
        with self._lock:
            step, self._now = self._now, _Tally()
            step.finish(seconds)
            self._finished.add(step)
            last = step.freeze(
                step_seconds=seconds, loss_scale=self._loss_scale, written=step.written, last_step=None
            )
            self._last_step = last
            number = self._finished.steps
            # The first step counts only as long as it is the only one, see `Stats.written`.
            self._written = step.written + (self._written if number > 2 else Written())
        if (recorder := self._recorder) is not None:
            recorder.stepped(number, last)

    def snapshot(self) -> Stats:
        """Return the measurements of the run up to now, including those of the unfinished step."""
        with self._lock:
            total = _Tally()
            total.add(self._finished)
            total.add(self._now)
            last = self._last_step
            return total.freeze(
                step_seconds=None if last is None else last.seconds,
                loss_scale=self._loss_scale,
                written=self._written,
                last_step=last,
            )


def _until_now(seconds: float) -> tuple[int, int]:
    """The interval that ends now and lasts `seconds`, as (start, end) in nanoseconds of
    time.perf_counter_ns().
    """
    now = time.perf_counter_ns()
    return now - round(seconds * 1e9), now
