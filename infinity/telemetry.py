"""What a run measures of itself: bytes over tier edges, stalls, hits, and what limited a step.

The seconds of a step are the training thread's: those in which it waited for a transfer (`stall_seconds`, of
which `fault_seconds` for pages that were demanded and not there), those in which it worked on updates or
waited for them (`update_seconds`), and all others (`compute_seconds`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol

from infinity.config import format_size
from infinity.errors import ConfigError
from infinity.tiers.link import Timing, Transfer


class Edge(Enum):
    """A way between two neighbouring tiers."""

    NVME_TO_HOST = "nvme->host"
    HOST_TO_DEVICE = "host->device"
    DEVICE_TO_HOST = "device->host"
    HOST_TO_NVME = "host->nvme"

    __hash__ = object.__hash__
    """By identity, without a call of Enum's."""


class Wait(Enum):
    """What the training thread waits for when it waits for a transfer."""

    FAULT = "page fault"
    """A unit that was demanded and was not there, prefetched too late or not at all."""
    ROOM = "staging"
    """A write has to land before its memory can be used again."""
    COPY = "copy"
    """The copy between host and device is being made (by the CPU) or queued (CUDA)."""
    OTHER = "gradients or states"
    """Pages that an update works on, gradients that are added to, writes that must be done."""


class Phase(Enum):
    """What the training thread is in when it computes."""

    FORWARD = "forward"
    """The root module's forward."""
    BACKWARD = "backward"
    """From the first saved page or gradient of a backward to its end callback."""
    STEP = "step"
    """`optimizer.step()`."""
    BETWEEN = "between"
    """The training loop's own code: data, the loss outside of the model, clipping."""


@dataclass(frozen=True, kw_only=True)
class EdgeStats:
    """What crossed one edge."""

    bytes: int = 0
    """Of all transfers that were asked for."""
    transfers: int = 0
    stall_seconds: float = 0.0
    """Seconds that the training thread waited for it, for any reason."""
    fault_seconds: float = 0.0
    """Those of them in which it waited for a unit that was demanded and was not there. The others are for
    room, a write, a copy, gradients or states of an update."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measurements up to one moment, or of one step. Sums, but for `step_seconds` and `loss_scale`."""

    edges: dict[Edge, EdgeStats]
    """Every edge, also those that nothing crossed."""

    accesses: int
    """Uses of units."""

    misses: int
    """Uses of units that were not there, nor on their way."""

    steps: int
    """Finished steps, those skipped included."""

    skipped_steps: int
    """Steps without an update, because gradients overflowed under loss scaling."""

    seconds: float
    """Wall time of the finished steps."""

    update_seconds: float
    """Seconds that the training thread spent on updates or waited for them, stalls not included."""

    compute_seconds: float
    """Wall time of the finished steps less their stalls and updates: forward, backward, the loop's own."""

    step_seconds: float | None
    """Wall time of the last finished step; None before one."""

    loss_scale: float | None
    """The latest loss scale; None unless compute is fp16."""

    peaks: dict[str, int]
    """Most bytes in use, by the name of the pool."""

    last_step: Stats | None = None
    """The same of the last finished step alone (all since the one before ended); None before one."""

    @property
    def hit_rate(self) -> float | None:
        """The share of accesses that were no misses; None without accesses."""
        return 1 - self.misses / self.accesses if self.accesses else None

    @property
    def stall_seconds(self) -> float:
        """Seconds stalled over all edges."""
        return sum(edge.stall_seconds for edge in self.edges.values())

    @property
    def fault_seconds(self) -> float:
        """Seconds stalled for units that were demanded and were not there, over all edges."""
        return sum(edge.fault_seconds for edge in self.edges.values())

    @property
    def limited_by(self) -> str | None:
        """The largest share of the last step: "compute", "update" or an edge's name; None before one."""
        step = self.last_step or self
        if not step.steps:
            return None
        shares = {"compute": step.compute_seconds, "update": step.update_seconds}
        shares |= {edge.value: stats.stall_seconds for edge, stats in step.edges.items()}
        return max(shares, key=shares.__getitem__)

    def __str__(self) -> str:
        rows = [["edge", "moved", "transfers", "stalled", "for faults"]]
        for edge, stats in self.edges.items():
            if stats != EdgeStats():
                seconds = [f"{each:.3f} s" for each in (stats.stall_seconds, stats.fault_seconds)]
                rows.append([edge.value, format_size(stats.bytes), str(stats.transfers), *seconds])
        lines = [
            f"{name:<14}{moved:>10}" + "".join(f"{each:>12}" for each in more) for name, moved, *more in rows
        ]
        if self.last_step is not None:
            lines.append(self.last_step._step_line())
        counts = [f"steps {self.steps}" + (f" ({self.skipped_steps} skipped)" if self.skipped_steps else "")]
        if self.hit_rate is not None:
            counts.append(f"accesses {self.accesses}, {self.hit_rate:.1%} hits")
        if self.loss_scale is not None:
            counts.append(f"loss scale {self.loss_scale:g}")
        lines.append(" · ".join(counts))
        if self.peaks:
            lines.append(
                "peak " + ", ".join(f"{name} {format_size(peak)}" for name, peak in self.peaks.items())
            )
        return "\n".join(lines)

    def _step_line(self) -> str:
        return (
            f"last step {self.seconds:.3f} s: compute {self.compute_seconds:.3f} s, "
            f"update {self.update_seconds:.3f} s, stalls {self.stall_seconds:.3f} s "
            f"({self.fault_seconds:.3f} s for page faults) · "
            f"limited by {self.limited_by}"
        )


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
    """Sums that still grow."""

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
        # Stalls before the first step or between two are theirs too, so that they may exceed the wall time.
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
    """Is told of everything when it happens. Times are nanoseconds of time.perf_counter_ns()."""

    def moved(self, edge: Edge, nbytes: int, transfer: Transfer | None) -> None:
        """A transfer was asked for; None: it is over."""

    def waited(self, name: str, wait: Wait | None, start: int, end: int) -> None:
        """The training thread did not compute: it waited for an edge, or (None) for updates."""

    def entered(self, phase: Phase) -> None:
        """The training thread is in this phase from now on."""

    def submitted(self, job: Timing, parameters: int) -> None:
        """The update of so many parameters was handed to its threads."""

    def stepped(self, number: int, step: Stats) -> None:
        """A step is over, the `number`th of the run, from 1 on."""

    def ended(self) -> None:
        """Nothing more will be told."""


class _ThreadState(threading.local):
    waits = False
    faults = False


class Meter:
    """Counts while a run goes on. Any thread may call any method; each is a lock and a few additions."""

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
        """Inside, `recorder` is told of everything. Raises ConfigError inside of another recording."""
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
        """`nbytes` are on their way over `edge`, or were moved (transfer: None)."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1
        if (recorder := self._recorder) is not None:
            recorder.moved(edge, nbytes, transfer)

    def copied(self, edge: Edge, nbytes: int, transfer: Transfer, seconds: float) -> None:
        """`moved`, and the training thread spent `seconds` until now to ask for it: `stalling`, Wait.COPY."""
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
        """The training thread waited until now, for `seconds`, for a transfer over `edge`."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.stall_seconds += seconds
            if wait is Wait.FAULT:
                tally.fault_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited(edge.value, wait, *_until_now(seconds))

    @contextmanager
    def stalling(self, edge: Edge, wait: Wait = Wait.OTHER) -> Iterator[None]:
        """What runs inside is a wait of the training thread for `edge`, also if it raises.

        Inside another one of the same thread it counts nothing: that one has the time.
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
        """Whatever this thread waits for inside, it waits for a unit that was demanded and is not there."""
        before, self._thread.faults = self._thread.faults, True
        try:
            yield
        finally:
            self._thread.faults = before

    def accessed(self, hit: bool) -> None:
        """A unit is used; a `hit` if it was there or on its way."""
        with self._lock:
            self._now.accesses += 1
            self._now.misses += not hit

    def updating(self, seconds: float) -> None:
        """Until now the training thread spent `seconds` on updates or waited for one; stalls not included.

        Inside of a stall of the same thread it counts nothing: that one has the time.
        """
        if self._thread.waits:
            return
        with self._lock:
            self._now.update_seconds += seconds
        if (recorder := self._recorder) is not None:
            recorder.waited("update", None, *_until_now(seconds))

    def submitted(self, job: Timing, parameters: int) -> None:
        """The update of so many parameters was handed to its threads. Counts nothing; timelines show it."""
        if (recorder := self._recorder) is not None:
            recorder.submitted(job, parameters)

    def entered(self, phase: Phase) -> None:
        """The training thread is in this phase from now on. Counts nothing; timelines show it."""
        if (recorder := self._recorder) is not None:
            recorder.entered(phase)

    def peak(self, pool: str, nbytes: int) -> None:
        """`nbytes` of the pool of this name were in use at once."""
        with self._lock:
            self._now.peaks[pool] = max(nbytes, self._now.peaks.get(pool, 0))

    def scaled(self, loss_scale: float) -> None:
        """The loss is scaled by this from now on."""
        with self._lock:
            self._loss_scale = loss_scale

    def skipped(self) -> None:
        """The step that runs now ends without an update. `stepped` ends it all the same."""
        with self._lock:
            self._now.skipped_steps += 1

    def stepped(self, seconds: float) -> None:
        """A step of `seconds` wall time is done: all that was counted since the one before is its own."""
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
        """All up to now, with the step that is not finished."""
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
    """(start, end) of a span that ends now."""
    now = time.perf_counter_ns()
    return now - round(seconds * 1e9), now
