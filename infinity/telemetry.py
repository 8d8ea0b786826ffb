"""What a run measures of itself: bytes over tier edges, stalls, hits, and what limited a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from infinity.config import format_size


class Edge(Enum):
    """A way between two neighbouring tiers."""

    NVME_TO_HOST = "nvme->host"
    HOST_TO_DEVICE = "host->device"
    DEVICE_TO_HOST = "device->host"
    HOST_TO_NVME = "host->nvme"


@dataclass(frozen=True, kw_only=True)
class EdgeStats:
    """What crossed one edge."""

    bytes: int = 0
    transfers: int = 0
    stall_seconds: float = 0.0
    """Seconds that the training thread waited for it."""


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
    """Seconds that the training thread spent on updates or waited for them."""

    compute_seconds: float
    """Wall time of the finished steps less their stalls and updates."""

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
    def limited_by(self) -> str | None:
        """The largest share of the last step: "compute", "update" or an edge's name; None before one."""
        step = self.last_step or self
        if not step.steps:
            return None
        shares = {"compute": step.compute_seconds, "update": step.update_seconds}
        shares |= {edge.value: stats.stall_seconds for edge, stats in step.edges.items()}
        return max(shares, key=shares.__getitem__)

    def __str__(self) -> str:
        rows = [("edge", "moved", "transfers", "stalled")]
        for edge, stats in self.edges.items():
            if stats != EdgeStats():
                moved, stalled = format_size(stats.bytes), f"{stats.stall_seconds:.3f} s"
                rows.append((edge.value, moved, str(stats.transfers), stalled))
        lines = [f"{name:<14}{moved:>10}{count:>12}{stalled:>12}" for name, moved, count, stalled in rows]
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
            f"update {self.update_seconds:.3f} s, stalls {self.stall_seconds:.3f} s · "
            f"limited by {self.limited_by}"
        )


@dataclass
class _EdgeTally:
    bytes: int = 0
    transfers: int = 0
    stall_seconds: float = 0.0


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
            mine = self.edges[edge]
            mine.bytes += theirs.bytes
            mine.transfers += theirs.transfers
            mine.stall_seconds += theirs.stall_seconds
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
        return Stats(
            edges={
                edge: EdgeStats(bytes=e.bytes, transfers=e.transfers, stall_seconds=e.stall_seconds)
                for edge, e in self.edges.items()
            },
            accesses=self.accesses,
            misses=self.misses,
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            seconds=self.seconds,
            update_seconds=self.update_seconds,
            compute_seconds=self.compute_seconds,
            step_seconds=step_seconds,
            loss_scale=loss_scale,
            peaks=dict(self.peaks),
            last_step=last_step,
        )


class Meter:
    """Counts while a run goes on. Any thread may call any method; each is a lock and a few additions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._finished = _Tally()
        self._now = _Tally()
        self._loss_scale: float | None = None
        self._last_step: Stats | None = None

    def moved(self, edge: Edge, nbytes: int) -> None:
        """One transfer of `nbytes` over `edge` is done."""
        with self._lock:
            tally = self._now.edges[edge]
            tally.bytes += nbytes
            tally.transfers += 1

    def stalled(self, edge: Edge, seconds: float) -> None:
        """The training thread waited `seconds` for a transfer over `edge`."""
        with self._lock:
            self._now.edges[edge].stall_seconds += seconds

    @contextmanager
    def stalling(self, edge: Edge) -> Iterator[None]:
        """What runs inside is a wait of the training thread for `edge`, also if it raises.

        Inside another one of the same thread it counts nothing: that one has the time.
        """
        if getattr(self._thread, "waits", False):
            yield
            return
        self._thread.waits = True
        start = time.perf_counter()
        try:
            yield
        finally:
            self._thread.waits = False
            self.stalled(edge, time.perf_counter() - start)

    def accessed(self, hit: bool) -> None:
        """A unit is used; a `hit` if it was there or on its way."""
        with self._lock:
            self._now.accesses += 1
            self._now.misses += not hit

    def updating(self, seconds: float) -> None:
        """The training thread spent `seconds` on updates, or waited so long for one; stalls not included."""
        with self._lock:
            self._now.update_seconds += seconds

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
            self._last_step = step.freeze(step_seconds=seconds, loss_scale=self._loss_scale, last_step=None)

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
