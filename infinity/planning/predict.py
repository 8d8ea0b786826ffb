"""Prediction: the seconds of a step, from its work and the rates of a machine. Pure.

The work is bytes that move and floating-point operations; both are counted, and no operation is timed. A
step takes at least as long as its busiest resource, as in a roofline model (Williams, Waterman, Patterson
2009), and at most as long as all of them in turn. The costs of hooks, of waits and of other processes are
not part of it. A plan that was made without example inputs has no prediction. Once a runtime has finished a
step, its plan shows the measured seconds instead.

Predictions for CUDA can be too short, because no resource waits for another one. Where host RAM has no room
for mirrors (infinity/planning/twin_flow.py), the CPU's update of parameters on the device waits for copies
down and up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from infinity.errors import ConfigError
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge, Stats
from infinity.tiers import Tier
from infinity.tiers.trial_file import MODES

if TYPE_CHECKING:
    from infinity.planning.plan import Plan


@dataclass(frozen=True)
class Work:
    """The amount of work of the operations of one forward and, in training, of its backward."""

    flops: Mapping[torch.dtype, int]
    """Floating-point operations of matrix products, convolutions and attention, by the dtype of operands."""
    nbytes: int
    """Bytes that all operations not counted in `flops` read and write."""

    def seconds(self, rates: MachineRates) -> float:
        """Seconds of all operations, one after the other."""
        products = sum(count / rates.flops_in(dtype) for dtype, count in self.flops.items())
        return products + self.nbytes / rates.compute_memory


UpdateTime = Literal["lazy", "eager", "speculative", "sync"]
"""The time when the optimizer's updates run: "lazy" during the next forward, "eager" during a step's last
backward, "speculative" there too, to be done again if a later gradient shows that they were wrong, "sync"
after the last backward.
"""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The seconds of one step, in total and for each resource. Predicted seconds of a resource are those for
    which it is busy. Measured seconds are those that the training thread spent on computing, on updates, or
    on waiting for the disk, the link or other ranks ("network").
    """

    least: float
    """Seconds of the step if all work overlaps that can overlap."""
    most: float
    """Seconds of the step if no work overlaps. Equal to `least` if the step was measured."""
    limited_by: str
    """The resource on which most of `least` is spent: "compute", "disk", "update", "link", "exchange" or
    "network".
    """
    compute: float
    disk: float
    update: float
    link: float
    exchange: float = 0.0
    """Seconds of copying within RAM what comes from other ranks."""
    network: float = 0.0
    """Seconds in which bytes come to this node from other nodes; 0 if the rate is unknown."""
    measured: bool = False
    """Whether the seconds were measured in a finished step. If not, they were predicted."""

    @staticmethod
    def of_step(step: Stats) -> Prediction:
        """The measured seconds of a finished step."""
        disk = sum(step.edges[edge].stall_seconds for edge in (Edge.NVME_TO_HOST, Edge.HOST_TO_NVME))
        link = sum(step.edges[edge].stall_seconds for edge in (Edge.HOST_TO_DEVICE, Edge.DEVICE_TO_HOST))
        parts = {"compute": step.compute_seconds, "disk": disk, "update": step.update_seconds, "link": link}
        parts["network"] = step.rank_seconds
        longest = max(parts, key=parts.__getitem__)
        return Prediction(least=step.seconds, most=step.seconds, limited_by=longest, **parts, measured=True)

    @property
    def seconds(self) -> float:
        """The middle of the range from `least` to `most`, in seconds."""
        return (self.least + self.most) / 2

    @property
    def text(self) -> str:
        """The range of seconds as text, such as "0.28 to 0.41"."""
        least, most = (f"{each:.0f}" if each >= 99.5 else f"{each:.2g}" for each in (self.least, self.most))
        return least if least == most else f"{least} to {most}"

    def as_dict(self) -> dict[str, Any]:
        """All fields and `seconds` as a dict, for JSON."""
        return {"seconds": self.seconds, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """Bytes that one phase of a step moves, by the resource that moves them."""

    disk_read: int = 0
    disk_write: int = 0
    to_device: int = 0
    to_host: int = 0
    host: int = 0
    """Bytes of RAM that are read and written by updates, and by storing and summing gradients."""

    def __add__(self, other: PhaseBytes) -> PhaseBytes:
        return PhaseBytes(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _EDGES}
        )

    def __mul__(self, times: int) -> PhaseBytes:
        return PhaseBytes(**{each.name: getattr(self, each.name) * times for each in _EDGES})


_EDGES = fields(PhaseBytes)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that the phases of a step move between disk, host RAM and the device."""

    forward: PhaseBytes = PhaseBytes()
    """Bytes of one micro-batch's forward. `backward` has the bytes of its backward."""
    backward: PhaseBytes = PhaseBytes()
    accumulation: PhaseBytes = PhaseBytes()
    """Bytes that each backward after a step's first moves in addition to `backward`, to add to earlier
    gradients.
    """
    update: PhaseBytes = PhaseBytes()
    when: UpdateTime = "lazy"

    def phases(self, micro_batches: int) -> tuple[PhaseBytes, PhaseBytes]:
        """(bytes that a step moves while its forwards and backwards run, bytes that it moves after them)."""
        more = micro_batches - 1
        computing = (self.forward + self.backward) * micro_batches + self.accumulation * more
        if self.when == "sync":
            return computing, self.update
        return computing + self.update, PhaseBytes()

    @property
    def disk_read(self) -> int:
        """Bytes that are read from disk in a step with one micro-batch. `disk_write` are those written."""
        return self.forward.disk_read + self.backward.disk_read + self.update.disk_read

    @property
    def disk_write(self) -> int:
        return self.forward.disk_write + self.backward.disk_write + self.update.disk_write


def traffic(plan: Plan, trained: Sequence[int]) -> StepBytes:
    """Compute, from the homes of all pages, the bytes that one step of this rank moves.

    trained: for each unit, the bytes of its parameter page that all ranks together update.

    Of the parameter pages that are not at home where the model computes, `resident_bytes` stay in the pool.
    All others are brought up for forward, and again for backward. An update reads and writes the trained part
    of each parameter page and all optimizer states. Gradients are written once in the backward and read once
    in the update. With eager updates, gradients whose home is on NVMe are neither written nor read in the
    last backward. Parameters of mirrored units go to the device once, after the update. The share of chunks
    that visit the device is known only when it is measured: they count as updated by the CPU.

    Bytes from other ranks are counted by infinity/planning/network.py. Homes that hold only some chunks of
    parameter pages are read whenever the whole pages are brought up. Homes that hold whole pages also receive
    the chunks that other ranks have updated.
    """
    share, unified = plan.share, plan.unified
    training = any(plan.gradient_bytes)
    missing = missing_share(plan)
    forward = backward = accumulation = updating = PhaseBytes()
    for unit, home in enumerate(plan.homes):
        parameter, gradient, states = (plan.page_sizes[kind][unit] for kind in Kind)
        come_up = 0 if unit in plan.mirrored else math.ceil(parameter * missing)
        parameter_home = home[Kind.PARAMETER]
        far = not unified and parameter_home is not Tier.DEVICE
        of_others = 0 if share.whole_parameters or unified else plan.layout.units[unit].nbytes - parameter
        brought = PhaseBytes(
            disk_read=come_up if parameter_home is Tier.NVME else 0,
            to_device=come_up * far + math.ceil(of_others * missing),
        )
        forward += brought
        if training:
            backward += brought
        own = share.kept(trained[unit], whole=share.whole_states)
        others = PhaseBytes()
        if share.whole_parameters and own < trained[unit]:
            outdated = trained[unit] - own
            others = PhaseBytes(
                host=outdated,
                to_device=outdated if parameter_home is Tier.DEVICE and not unified else 0,
                disk_write=outdated if parameter_home is Tier.NVME else 0,
            )
        updating += others
        if unit in plan.updated_on_device:
            if not share.whole_gradients:  # to RAM for all ranks, and from there to the sums of this rank
                fresh = trained[unit]
                backward += PhaseBytes(host=2 * fresh, to_host=fresh, to_device=fresh)
            elif share.ranks > 1:
                updating += PhaseBytes(to_host=gradient, to_device=gradient // share.ranks)
            continue
        sizes = {Kind.PARAMETER: own, Kind.GRADIENT: gradient, Kind.OPTIMIZER: states}
        updating += _updating(home, sizes, plan.update, unified)
        if unit in plan.mirrored:
            updating += PhaseBytes(to_device=trained[unit])
        at_once, later = _gradient(home[Kind.GRADIENT], gradient, plan.update, unified)
        # A fresh gradient is in its parameter's dtype; it is read and stored.
        fresh = trained[unit] if gradient else 0
        backward += at_once + PhaseBytes(host=2 * fresh, to_host=0 if plan.device.type == "cpu" else fresh)
        accumulation += later
    return StepBytes(
        forward=forward, backward=backward, accumulation=accumulation, update=updating, when=plan.update
    )


def missing_share(plan: Plan) -> float:
    """The fraction of the parameter pages' bytes that leave the pool between two uses, from 0 to 1."""
    away = sum(each.nbytes for unit, each in enumerate(plan.layout.units) if not plan.stays(unit))
    return 1 - min(1.0, plan.resident_bytes / away) if away else 0.0


def _updating(
    home: Mapping[Kind, Tier | None], sizes: Mapping[Kind, int], when: UpdateTime, unified: bool
) -> PhaseBytes:
    """Bytes that a unit's update moves. sizes: for each kind of page, the bytes that are updated or used."""
    parameter, gradient, states = (sizes[kind] for kind in Kind)
    moved = PhaseBytes(host=2 * parameter + gradient + 2 * states)
    for kind, nbytes in sizes.items():
        written = 0 if kind is Kind.GRADIENT else nbytes
        if home[kind] is Tier.NVME:
            # In unified memory the update shares the parameters that come up for forward or backward, unless
            # the update runs after both. An eager update takes gradients from where they arrived.
            shared = when != "sync" and unified and kind is Kind.PARAMETER
            shared = shared or (when == "eager" and kind is Kind.GRADIENT)
            moved += PhaseBytes(disk_read=0 if shared else nbytes, disk_write=written)
        elif home[kind] is Tier.DEVICE and not unified:
            moved += PhaseBytes(to_host=nbytes, to_device=written)
    return moved


def _gradient(
    home: Tier | None, nbytes: int, when: UpdateTime, unified: bool
) -> tuple[PhaseBytes, PhaseBytes]:
    """(bytes that a unit's gradients move in every backward, further bytes in a backward that adds to
    gradients of earlier backwards).
    """
    stored = added = PhaseBytes()
    if home is Tier.NVME:
        stored, added = PhaseBytes(disk_write=nbytes), PhaseBytes(disk_read=nbytes)
        if when == "eager":  # the last micro-batch's gradients go to the update without being stored
            stored, added = PhaseBytes(), stored + added
    elif home is Tier.DEVICE and not unified:
        stored, added = PhaseBytes(to_device=nbytes), PhaseBytes(to_host=nbytes)
    return stored, added + PhaseBytes(host=nbytes)


def predict(
    moved: StepBytes,
    speeds: MachineRates,
    compute: float,
    micro_batches: int = 1,
    *,
    received: int = 0,
    crossing: int = 0,
) -> Prediction:
    """Predict the seconds of a step. compute: seconds of the operations of one forward and one backward.
    received, crossing: bytes of a step that this rank gets from other ranks, and that its node gets from
    other nodes; see infinity/planning/network.py.

    An update that is not "sync" runs beside forwards and backwards, and so does what comes from other ranks.
    Without a link the device is the CPU: the seconds of compute, updates and copies add up, and only the disk
    and the network between nodes work at the same time. Equal amounts of bytes read from disk and written to
    disk go at the mixed rate, and what remains at the rate of reads or of writes. Raises ConfigError if
    `micro_batches` is less than 1.
    """
    if micro_batches < 1:
        raise ConfigError(f"A step has {micro_batches} micro-batches.", "Give at least 1.")
    computing, after = (_busy(phase, speeds) for phase in moved.phases(micro_batches))
    computing["compute"] = compute * micro_batches
    computing["exchange"] = _copying(received, speeds)
    computing["network"] = crossing / speeds.network if speeds.network else 0.0
    busy, spent = (dict.fromkeys(computing, 0.0) for _ in range(2))
    for parts in (computing, after):
        for resource, seconds in parts.items():
            busy[resource] += seconds
        for resource in _limits(parts, together=speeds.link is not None):
            spent[resource] += parts[resource]
    return Prediction(
        least=sum(spent.values()),
        most=sum(busy.values()),
        limited_by=max(spent, key=spent.__getitem__),
        compute=busy["compute"],
        disk=busy["disk"],
        update=busy["update"],
        link=busy["link"],
        exchange=busy["exchange"],
        network=busy["network"],
    )


def _busy(phase: PhaseBytes, speeds: MachineRates) -> dict[str, float]:
    """Seconds for which a phase's bytes keep each resource busy."""
    if speeds.link is None:
        link = _copying(phase.to_device + phase.to_host, speeds)
    else:
        link = max(phase.to_device, phase.to_host) / speeds.link
    busy = {"disk": _disk_seconds(phase, speeds), "update": phase.host / speeds.host_stream, "link": link}
    return {"compute": 0.0, "exchange": 0.0, "network": 0.0, **busy}


def _copying(nbytes: int, speeds: MachineRates) -> float:
    """Seconds of copies within RAM, which read and write every byte."""
    return 2 * nbytes / speeds.host_stream


def _limits(busy: Mapping[str, float], *, together: bool) -> list[str]:
    """Return the resources that limit a phase: the sum of their seconds is the least time it can take.

    busy: resource -> seconds of its work. together: whether all resources work at the same time. If not, the
    disk and the network work at the same time as the others, and these work one after the other.
    """
    if together:
        return [max(busy, key=busy.__getitem__)]
    beside = max(("disk", "network"), key=busy.__getitem__)
    on_cpu = [each for each in busy if each not in ("disk", "network")]
    return [beside] if busy[beside] >= sum(busy[each] for each in on_cpu) else on_cpu


def _disk_seconds(moved: PhaseBytes, speeds: MachineRates) -> float:
    if speeds.disk is None:
        return 0.0
    read, write, mixed = (speeds.disk[mode] for mode in MODES)
    both = min(moved.disk_read, moved.disk_write)
    return 2 * both / mixed + (moved.disk_read - both) / read + (moved.disk_write - both) / write
