"""Stats: what a run has measured of itself, and what limited a step.

The seconds of a step are the training thread's: those in which it waited for a transfer (`stall_seconds`, of
which `fault_seconds` for pages that were demanded and not there), those in which it worked on updates or
waited for them (`update_seconds`), and all others (`compute_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.config import format_size


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
