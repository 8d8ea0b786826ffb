"""How long a step should take: bytes over every edge against what each edge can do. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.placement import Homes, Kind
from infinity.telemetry import Edge, Stats
from infinity.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """What this machine does, in bytes per second where not said otherwise."""

    disk_read: float | None = None
    """Of all paths of the NVMe tier together; None without one."""
    disk_write: float | None = None
    disk_mixed: float | None = None
    """Reads and writes together, half of the bytes each."""
    host_stream: float
    """Reads and writes of the update's threads in place."""
    link: float | None = None
    """Host to device or back, one way; None where they are the same memory."""
    flops: float
    """Floating-point operations per second of matrix products in the compute dtype."""


@dataclass(frozen=True)
class Prediction:
    """Seconds per step, and the seconds that each resource is busy in it (measured: is waited for)."""

    seconds: float
    limited_by: str
    """"compute", "disk", "update" or "link"."""
    compute: float
    disk: float
    update: float
    link: float
    measured: bool = False
    """Of a step that was, not of one to come."""

    @staticmethod
    def of_step(step: Stats) -> Prediction:
        """What a finished step took."""
        disk = sum(step.edges[edge].stall_seconds for edge in (Edge.NVME_TO_HOST, Edge.HOST_TO_NVME))
        link = sum(step.edges[edge].stall_seconds for edge in (Edge.HOST_TO_DEVICE, Edge.DEVICE_TO_HOST))
        parts = {"compute": step.compute_seconds, "disk": disk, "update": step.update_seconds, "link": link}
        return Prediction(step.seconds, max(parts, key=parts.__getitem__), **parts, measured=True)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step of training (or one forward, without gradients) moves over every edge."""

    disk_read: int
    disk_write: int
    to_device: int
    to_host: int
    update: int
    """Read and written by the update's threads."""


def traffic(
    homes: Homes, pages: Mapping[Kind, Sequence[int]], trained: Sequence[int], *, unified: bool
) -> Traffic:
    """What follows from where pages rest.

    pages: bytes per unit of every kind; trained: bytes per unit of the parameter page that are updated. A
    parameter page that is not at home where it is used comes up for forward and for backward, and its
    trained part goes through the update; gradients are written once and read once; states are read
    and written.
    """
    training = any(pages[Kind.GRADIENT])
    read = write = up = down = update = 0
    for unit, home in enumerate(homes):
        parameter, gradient, states = (pages[kind][unit] for kind in Kind)
        uses = (1 + training) * parameter
        if home[Kind.PARAMETER] is Tier.NVME:
            read += uses + trained[unit]
            write += trained[unit]
        if not unified:
            # New parameters are made on the host; gradients are made on the device.
            at_home = home[Kind.PARAMETER] is Tier.DEVICE
            up += trained[unit] if at_home else uses
            down += trained[unit] if at_home else 0
            down += gradient
            if home[Kind.OPTIMIZER] is Tier.DEVICE:
                up += states
                down += states
        if home[Kind.GRADIENT] is Tier.NVME:
            read += gradient
            write += gradient
        if home[Kind.OPTIMIZER] is Tier.NVME:
            read += states
            write += states
        update += 2 * trained[unit] + gradient + 2 * states
    return Traffic(read, write, up, down, update)


def predict(moved: Traffic, speeds: Bandwidths, flops: int) -> Prediction:
    """The step's seconds: the busiest resource's, as all others run beside it.

    flops: floating-point operations of forward and backward. Without a link (on the CPU) compute and update
    share the CPU and add up. Disk time takes as many bytes as can at the mixed rate, the rest at its own.
    """
    compute = flops / speeds.flops
    update = moved.update / speeds.host_stream
    disk = _disk_seconds(moved, speeds)
    link = max(moved.to_device, moved.to_host) / speeds.link if speeds.link else 0.0
    busy = {"compute": compute, "update": update, "disk": disk, "link": link}
    limited_by = max(busy, key=lambda name: busy[name])
    seconds = busy[limited_by]
    if speeds.link is None:
        seconds = max(compute + update, disk)
        limited_by = "disk" if seconds == disk else "compute" if compute >= update else "update"
    return Prediction(seconds, limited_by, compute=compute, disk=disk, update=update, link=link)


def _disk_seconds(moved: Traffic, speeds: Bandwidths) -> float:
    if speeds.disk_read is None or speeds.disk_write is None or speeds.disk_mixed is None:
        return 0.0
    both = min(moved.disk_read, moved.disk_write)
    alone = (moved.disk_read - both) / speeds.disk_read + (moved.disk_write - both) / speeds.disk_write
    return 2 * both / speeds.disk_mixed + alone
