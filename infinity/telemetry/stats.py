"""Stats: the measurements of a run and of its last step, and the resource that limited the step.

All times are times of the training thread. In `stall_seconds` the thread waited for transfers.
`fault_seconds`, which `stall_seconds` include, were spent on page faults: waits for units that were demanded
and not resident. In `update_seconds` the thread worked on updates or waited for updates, and in
`rank_seconds` it waited for other ranks. The rest is `compute_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from html import escape

from infinity.config import format_size

RANKS = "ranks"
"""The name of waits for other ranks in `Stats.limited_by` and in timelines."""

SECONDS_PER_DAY = 86_400


class Edge(Enum):
    """A way for bytes between two neighbouring tiers, in one direction."""

    NVME_TO_HOST = "nvme->host"
    HOST_TO_DEVICE = "host->device"
    DEVICE_TO_HOST = "device->host"
    HOST_TO_NVME = "host->nvme"

    __hash__ = object.__hash__
    """Hash by identity, which is faster than the hash that Enum defines."""


class Wait(Enum):
    """Reasons why the training thread waits for a transfer."""

    FAULT = "page fault"
    """A demanded unit is not resident: it was prefetched too late or not at all."""
    ROOM = "staging"
    """A write or a copy under way still uses memory that is needed."""
    COPY = "copy"
    """A copy between host and device is made, queued on a CUDA stream, or waited for."""
    OTHER = "gradients or states"
    """An update needs gradients or states, gradients are to be added to stored ones, or a write has to end.
    """


class Phase(Enum):
    """The phases of a training step, as seen by the training thread."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The time from the first gradient, or from the first use of a page of which autograd has saved a view,
    to autograd's callback at the end of the pass.
    """
    STEP = "step"
    """The time of the call of `optimizer.step()`."""
    BETWEEN = "between"
    """The time of the training loop's own code: loading data, a loss outside of the model, clipping."""


@dataclass(frozen=True, kw_only=True)
class EdgeStats:
    """Measurements of the transfers over one edge."""

    bytes: int = 0
    """Bytes of all transfers that were requested."""
    transfers: int = 0
    stall_seconds: float = 0.0
    """Seconds in which the training thread waited for transfers, for any reason."""
    fault_seconds: float = 0.0
    """Those of `stall_seconds` that were spent on page faults."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measurements of a run up to one moment, or of one step.

    All fields are sums, except `step_seconds`, `loss_scale`, `peaks`, `last_step`, `written_per_step` and
    `written_per_day`.
    """

    edges: dict[Edge, EdgeStats]
    """The measurements of every edge, including edges without transfers."""

    accesses: int
    """Number of demands of a unit's parameters. A demand of the same unit as the previous one is not counted.
    """

    misses: int
    """Number of accesses at which the unit was neither resident nor on its way, nor being updated."""

    steps: int
    """Finished steps, including skipped ones."""

    skipped_steps: int
    """Steps without an update, because gradients overflowed under loss scaling."""

    confirmed_updates: int
    """Speculative updates of units that `step()` has confirmed."""

    undone_updates: int
    """Speculative updates of units that were undone, to be done again with another scale or not at all."""

    seconds: float
    """Wall time of the finished steps."""

    update_seconds: float
    """Seconds in which the training thread worked on updates or waited for updates, without stalls."""

    compute_seconds: float
    """Wall time of the finished steps without stalls, updates and waits for other ranks: forward, backward,
    and the training loop's own code.
    """

    step_seconds: float | None
    """Wall time of the last finished step; None if none has finished."""

    loss_scale: float | None
    """The latest loss scale; None unless the model computes in fp16."""

    visiting_share: float | None = None
    """The share of parameter elements, in the last step that was measured, which the device updated while
    their optimizer states visited it from RAM, from 0 to 1; None if it was not measured.
    """

    rank_seconds: float = 0.0
    """Seconds in which the training thread waited for other ranks: for bytes of pages, for gradients, or for
    a call that all ranks make. Always 0 with one rank.
    """

    peaks: dict[str, int]
    """For each pool's name, the most bytes that were in use at one time."""

    written_per_step: float | None = None
    """Bytes written to disk in a step, including commits, on average over all finished steps; None if none
    has finished. The first step counts only as long as it is the only one, because it includes the writes of
    filling the model. The average needs many steps, since only some of them write a commit. In the
    measurements of one step: the bytes of this step.
    """

    written_per_day: float | None = None
    """Bytes written to disk in a day of steps like those of `written_per_step`; None if no step has finished.
    """

    last_step: Stats | None = None
    """The measurements of the last finished step alone; None if no step has finished."""

    @property
    def hit_rate(self) -> float | None:
        """The fraction of accesses that were not misses; None without accesses."""
        return 1 - self.misses / self.accesses if self.accesses else None

    @property
    def stall_seconds(self) -> float:
        """Seconds in which the training thread waited for transfers."""
        return sum(edge.stall_seconds for edge in self.edges.values())

    @property
    def fault_seconds(self) -> float:
        """The part of `stall_seconds` that was spent on page faults."""
        return sum(edge.fault_seconds for edge in self.edges.values())

    @property
    def limited_by(self) -> str | None:
        """The name of what took the most time in the last finished step: "compute", "update", RANKS (waits
        for other ranks), or for stalls on a transfer, the value of its `Edge`, such as "nvme->host". None if
        no step has finished.
        """
        step = self.last_step or self
        if not step.steps:
            return None
        shares = {"compute": step.compute_seconds, "update": step.update_seconds}
        shares[RANKS] = step.rank_seconds
        shares |= {edge.value: stats.stall_seconds for edge, stats in step.edges.items()}
        return max(shares, key=shares.__getitem__)

    def flat(self) -> dict[str, int | float]:
        """Return all measurements that are numbers as a flat dict by name, for a logger of metrics.
        Measurements that are None are left out.

        A name is that of a field or property, or has a prefix, as in "nvme_to_host/bytes", "peak/transit" and
        "last_step/steps".
        """
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("hit_rate", "stall_seconds", "fault_seconds"):
            numbers[name] = getattr(self, name)
        for edge, stats in self.edges.items():
            way = edge.value.replace("->", "_to_")
            numbers |= {f"{way}/{name}": value for name, value in asdict(stats).items()}
        numbers |= {f"peak/{name.replace(' ', '_')}": nbytes for name, nbytes in self.peaks.items()}
        if self.last_step is not None:
            numbers |= {f"last_step/{name}": value for name, value in self.last_step.flat().items()}
        return {name: value for name, value in numbers.items() if isinstance(value, (int, float))}

    def __str__(self) -> str:
        lines = [
            f"{name:<14}{moved:>10}" + "".join(f"{each:>12}" for each in more)
            for name, moved, *more in self._rows()
        ]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        """The table and lines of `str()` as HTML, which a notebook shows."""
        return html_of(self._rows(), self._notes())

    def _rows(self) -> list[list[str]]:
        """The table of edges over which bytes have moved, with its titles."""
        rows = [["edge", "moved", "transfers", "stalled", "for faults"]]
        for edge, stats in self.edges.items():
            if stats != EdgeStats():
                seconds = [f"{each:.3f} s" for each in (stats.stall_seconds, stats.fault_seconds)]
                rows.append([edge.value, format_size(stats.bytes), str(stats.transfers), *seconds])
        return rows

    def _notes(self) -> list[str]:
        """The lines below the table."""
        lines = []
        if self.last_step is not None:
            lines.append(self.last_step._step_line())
        counts = [f"steps {self.steps}" + (f" ({self.skipped_steps} skipped)" if self.skipped_steps else "")]
        if self.confirmed_updates or self.undone_updates:
            counts.append(f"speculative updates {self.confirmed_updates}, {self.undone_updates} undone")
        if self.visiting_share is not None:
            counts.append(f"{self.visiting_share:.0%} updated on the device by visits")
        if self.hit_rate is not None:
            counts.append(f"accesses {self.accesses}, {self.hit_rate:.1%} hits")
        if self.loss_scale is not None:
            counts.append(f"loss scale {self.loss_scale:g}")
        lines.append(" · ".join(counts))
        if self.peaks:
            lines.append(
                "peak " + ", ".join(f"{name} {format_size(peak)}" for name, peak in self.peaks.items())
            )
        return lines

    def _step_line(self) -> str:
        ranks = f"other ranks {self.rank_seconds:.3f} s, " if self.rank_seconds else ""
        return (
            f"last step {self.seconds:.3f} s: compute {self.compute_seconds:.3f} s, "
            f"update {self.update_seconds:.3f} s, {ranks}stalls {self.stall_seconds:.3f} s "
            f"({self.fault_seconds:.3f} s for page faults) · "
            f"limited by {self.limited_by}"
        )


def html_of(rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """A table whose first row has the titles, and lines below the table, as HTML. All texts are escaped."""
    lines = ["<table>"]
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(each)}</{tag}>" for each in row) + "</tr>")
    return "\n".join([*lines, "</table>", *(f"<div>{escape(each)}</div>" for each in notes)])
