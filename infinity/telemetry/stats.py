"""Stats: the measurements of a run and of its last step, and the resource that limited the step.

The seconds of a step are the training thread's. It waited for a transfer in `stall_seconds`, which include
`fault_seconds` for units that were demanded and not there. It worked on updates or waited for them in
`update_seconds`. All other seconds are `compute_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.config import format_size


class Edge(Enum):
    """An edge: one direction between two neighbouring tiers."""

    NVME_TO_HOST = "nvme->host"
    HOST_TO_DEVICE = "host->device"
    DEVICE_TO_HOST = "device->host"
    HOST_TO_NVME = "host->nvme"

    __hash__ = object.__hash__
    """The hash by identity, which needs no call of Enum's."""


class Wait(Enum):
    """The reasons for which the training thread waits for a transfer."""

    FAULT = "page fault"
    """A unit that was demanded and was not there, prefetched too late or not at all."""
    ROOM = "staging"
    """Memory that a write has to finish with before it can be used again."""
    COPY = "copy"
    """A copy between host and device that the CPU makes, or that is being queued (CUDA)."""
    OTHER = "gradients or states"
    """Pages that an update works on, gradients that others are added to, writes that have to be done."""


class Phase(Enum):
    """The phases in which the training thread computes."""

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
    """Measurements of one edge."""

    bytes: int = 0
    """Bytes of all transfers that were asked for."""
    transfers: int = 0
    stall_seconds: float = 0.0
    """Seconds for which the training thread waited for the edge, for any reason."""
    fault_seconds: float = 0.0
    """Seconds within `stall_seconds` for units that were demanded and not there. The others are for room, a
    write, a copy, or an update's gradients or states."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measurements up to one moment, or of one step: sums, but for `step_seconds`, `loss_scale`, `peaks`."""

    edges: dict[Edge, EdgeStats]
    """Every edge, also those that nothing crossed."""

    accesses: int
    """Uses of units."""

    misses: int
    """Uses of units that were neither there nor on their way."""

    steps: int
    """Finished steps, those skipped included."""

    skipped_steps: int
    """Steps without an update, because gradients overflowed under loss scaling."""

    seconds: float
    """Wall time of the finished steps."""

    update_seconds: float
    """Seconds that the training thread spent on updates or waited for them, stalls not included."""

    compute_seconds: float
    """Wall time of the finished steps less stalls and updates: forward, backward, the loop's own code."""

    step_seconds: float | None
    """Wall time of the last finished step; None before one."""

    loss_scale: float | None
    """The latest loss scale; None unless compute is fp16."""

    peaks: dict[str, int]
    """The most bytes in use at one time, by the name of the pool."""

    last_step: Stats | None = None
    """These figures for the last finished step alone; None until a step has finished."""

    @property
    def hit_rate(self) -> float | None:
        """The share of accesses that were not misses; None without accesses."""
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
