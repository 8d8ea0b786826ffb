"""The meter: counts the bytes, waits and seconds of a run, and reports each event to a timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError
from infinity.telemetry.stats import RANKS, SECONDS_PER_DAY, Edge, EdgeStats, Phase, Stats, Wait
from infinity.tiers.link import Timing, Transfer

if TYPE_CHECKING:
    from infinity.telemetry.timeline import Timeline


@dataclass
class _EdgeTally:
    bytes: int = 0
    transfers: int = 0
    stall_seconds: float = 0.0
    fault_seconds: float = 0.0


@dataclass
class _Tally:
    """Running sums of the measurements of a run or of one step. The fields are those of `Stats`."""

    edges: dict[Edge, _EdgeTally] = field(default_factory=lambda: {edge: _EdgeTally() for edge in Edge})
    peaks: dict[str, int] = field(default_factory=dict)
    accesses: int = 0
    misses: int = 0
    steps: int = 0
    skipped_steps: int = 0
    confirmed_updates: int = 0
    undone_updates: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    rank_seconds: float = 0.0
    compute_seconds: float = 0.0

    def finish(self, seconds: float) -> None:
        """End a step that took `seconds` of wall time. Compute is the time without stalls, updates and waits
        for other ranks. It is at least 0, since stalls between two steps count for the latter.
        """
        stalled = sum(edge.stall_seconds for edge in self.edges.values())
        self.steps = 1
        self.seconds = seconds
        self.compute_seconds = max(0.0, seconds - stalled - self.update_seconds - self.rank_seconds)

    def add(self, other: _Tally) -> None:
        for edge, theirs in other.edges.items():
            _add(self.edges[edge], theirs)
        _add(self, other)
        for name, peak in other.peaks.items():
            self.peaks[name] = max(peak, self.peaks.get(name, 0))

    @property
    def written(self) -> tuple[int, int, float]:
        """For the sums of finished steps: (bytes written to disk, number of steps, seconds of the steps)."""
        return self.edges[Edge.HOST_TO_NVME].bytes, self.steps, self.seconds

    def freeze(self, written: tuple[int, int, float], **more: Any) -> Stats:
        """Make Stats of these sums. written: the value of the property `written` of the tally whose steps
        give the averages of bytes written. more: the fields of Stats that are not sums.
        """
        nbytes, steps, seconds = written
        sums = {
            **vars(self),
            "edges": {edge: EdgeStats(**asdict(tally)) for edge, tally in self.edges.items()},
            "peaks": dict(self.peaks),
            "written_per_step": nbytes / steps if steps else None,
            "written_per_day": nbytes * SECONDS_PER_DAY / seconds if seconds else None,
        }
        return Stats(**sums, **more)


def _add(sums: Any, others: Any) -> None:
    """Add the numbers of one dataclass to those of another."""
    for name, value in vars(others).items():
        if isinstance(value, (int, float)):
            setattr(sums, name, getattr(sums, name) + value)


class _ThreadState(threading.local):
    waits = False
    """Whether the thread is within `stalling` or `awaiting`."""
    awaits = False
    """Whether it is within `awaiting`."""
    stall: tuple[Edge, Wait] | None = None
    """The arguments of the outermost `stalling`."""
    began = 0.0
    """The time, by time.perf_counter(), up to which the outermost `stalling` has been counted."""
    faults = False


class Meter:
    """Counters of the events of a run. Any thread may call any method, and every call is short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = _ThreadState()
        self._finished = _Tally()
        self._now = _Tally()
        self._loss_scale: float | None = None
        self._visiting_share: float | None = None
        self._last_step: Stats | None = None
        self._written = (0, 0, 0.0)
        self._recorder: Timeline | None = None

    @contextmanager
    def recording(self, recorder: Timeline) -> Iterator[None]:
        """Context in which each event is reported to `recorder`. Raises ConfigError within another such
        context.
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
        """Count a transfer, which was just requested. transfer: its handle; None if it has ended."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1
        if (recorder := self._recorder) is not None:
            recorder.moved(edge, nbytes, transfer)

    def crossed(self, way: str, what: str, unit: int | None, nbytes: int, began: int) -> None:
        """Report a payload that has just finished crossing to or from another rank. Does not count the bytes:
        the wire does.

        way: such as "from rank 2". what: such as "gradients". unit: its index, if that is known. began: time
        in nanoseconds of time.perf_counter_ns() at which the network got a payload that was sent, or at which
        the message that announces a received payload came.
        """
        if (recorder := self._recorder) is not None:
            args: dict[str, str | int] = {"what": what, "bytes": nbytes}
            recorder.crossed(way, args if unit is None else args | {"unit": unit}, began)

    def copied(self, edge: Edge, nbytes: int, transfer: Transfer, seconds: float) -> None:
        """Count a transfer as `moved` does, and count a stall of the training thread.

        seconds: duration, up to now, of the call that requested the transfer. It is counted as Wait.FAULT
        within `faulting`, else as Wait.COPY. Within `stalling` or `awaiting` it is not counted here, because
        these contexts count it already.
        """
        state = self._thread
        if not state.waits:
            self.stalled(edge, seconds, Wait.FAULT if state.faults else Wait.COPY)
        self.moved(edge, nbytes, transfer)

    def stalled(self, edge: Edge, seconds: float, wait: Wait = Wait.OTHER) -> None:
        """Count a wait of the training thread for transfers over `edge`, of `seconds` up to now."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.stall_seconds += seconds
            if wait is Wait.FAULT:
                tally.fault_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited(edge.value, wait.value, *_until_now(seconds))

    @contextmanager
    def stalling(self, edge: Edge, wait: Wait = Wait.OTHER) -> Iterator[None]:
        """Count the context's duration as a wait of the training thread for transfers on `edge`, also if the
        body raises.

        wait: the reason for the wait. Within `faulting`, Wait.FAULT takes its place. Within another
        `stalling` or `awaiting`, only the outer context counts.
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
        """Context whose duration counts as a wait of the training thread for other ranks, also if the body
        raises. A `stalling` around it does not count this time. Within another `awaiting`, only the outer
        context counts.

        what: the reason for the wait, such as the name of the call that all ranks have to make.
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
        """Context in which every stall of the calling thread counts as a page fault."""
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
        """Count `seconds` up to now in which the training thread worked on updates or waited for them,
        without stalls. Within `stalling` or `awaiting` nothing is counted, since these count that time.
        """
        if self._thread.waits:
            return
        with self._lock:
            self._now.update_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited("update", None, *_until_now(seconds))

    @property
    def records(self) -> bool:
        """Whether a timeline is recorded. Without one, some reports do nothing."""
        return self._recorder is not None

    def submitted(self, job: Timing, parameters: int) -> None:
        """Report that an update of `parameters` elements was submitted. job: gives its begin and end."""
        if (recorder := self._recorder) is not None:
            recorder.submitted(job, parameters)

    def entered(self, phase: Phase) -> None:
        """Report that the training thread enters `phase` now."""
        if (recorder := self._recorder) is not None:
            recorder.entered(phase)

    def peak(self, pool: str, nbytes: int) -> None:
        """Note the number of a pool's bytes in use; the largest number of a run is kept."""
        with self._lock:
            self._now.peaks[pool] = max(nbytes, self._now.peaks.get(pool, 0))

    def scaled(self, loss_scale: float) -> None:
        """Note that the loss is multiplied by `loss_scale` from now on."""
        with self._lock:
            self._loss_scale = loss_scale

    def skipped(self) -> None:
        """Count the current step as skipped. It ends by `stepped`, like any other step."""
        with self._lock:
            self._now.skipped_steps += 1

    def confirmed(self) -> None:
        """Count the speculative update of a unit as confirmed."""
        with self._lock:
            self._now.confirmed_updates += 1

    def visited(self, share: float) -> None:
        """Note the share of the elements updated in a step whose update ran on the device, which their
        optimizer states visited.
        """
        with self._lock:
            self._visiting_share = share

    def undone(self) -> None:
        """Count the speculative update of a unit as undone."""
        with self._lock:
            self._now.undone_updates += 1

    def stepped(self, seconds: float) -> None:
        """End the current step, which began at the end of the previous one."""
        with self._lock:
            step, self._now = self._now, _Tally()
            step.finish(seconds)
            self._finished.add(step)
            last = step.freeze(
                step.written,
                step_seconds=seconds,
                loss_scale=self._loss_scale,
                visiting_share=self._visiting_share,
                last_step=None,
            )
            self._last_step = last
            number = self._finished.steps
            # The first step counts only as long as it is the only one, see `Stats.written_per_step`.
            nbytes, steps, before = self._written if number > 2 else (0, 0, 0.0)
            self._written = nbytes + step.written[0], steps + 1, before + seconds
        if (recorder := self._recorder) is not None:
            recorder.stepped(number, last)

    def snapshot(self) -> Stats:
        """The measurements of the run up to now, including those of the unfinished step."""
        with self._lock:
            total = _Tally()
            total.add(self._finished)
            total.add(self._now)
            last = self._last_step
            return total.freeze(
                self._written,
                step_seconds=None if last is None else last.seconds,
                loss_scale=self._loss_scale,
                visiting_share=self._visiting_share,
                last_step=last,
            )


def _until_now(seconds: float) -> tuple[int, int]:
    """(start, end) of the interval that ends now, by time.perf_counter_ns()."""
    now = time.perf_counter_ns()
    return now - round(seconds * 1e9), now
