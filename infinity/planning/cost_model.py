"""Cost model: the seconds of a step as a range, from each phase's work and each resource's rate. Pure.

A prediction is a roofline. At its lower end everything overlaps that can, at its upper end nothing does.
Between them lies the cost of hooks, waits and a shared machine, which no rate tells. The seconds of the first
step replace the prediction.

A known limit on CUDA: each resource counts as if it never waited for another. Where host RAM has no room for
mirrors, each chunk of parameters on the device goes down and up again for the CPU's update, and the update
waits for it. No phase here contains that wait, so predictions there are too short.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from infinity.errors import ConfigError
from infinity.planning.operator_timing import Seconds
from infinity.planning.placement import Homes, Kind
from infinity.telemetry.stats import Edge, Stats
from infinity.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of this machine, in bytes per second where not said otherwise."""

    disk_read: float | None = None
    """Reads of all paths of the NVMe tier together; None without one."""
    disk_write: float | None = None
    """Writes of the same; None without one."""
    disk_mixed: float | None = None
    """Reads and writes together, half of the bytes each; None without one."""
    host_stream: float
    """Reads and writes of host RAM by the update's threads, in place."""
    link: float | None = None
    """Copies from host to device, or back, one way at a time; None where both are the same memory."""
    flops: float
    """Floating-point operations per second of matrix products in the compute dtype."""


UpdateTime = Literal["lazy", "eager", "sync"]
"""The time when updates run: under the next forward, under the last backward, or after it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of one step, predicted or measured, and of each resource in it.

    `compute`, `disk`, `update` and `link` are the seconds for which a resource is busy; where the step was
    measured, the seconds for which the trainer waited for it.
    """

    least: float
    """Seconds of the step if all resources that can overlap do."""
    most: float
    """Seconds of the step if nothing overlaps. Equal to `least` where the step was measured."""
    limited_by: str
    """The resource that most of `least` is spent on: "compute", "disk", "update" or "link"."""
    compute: float
    disk: float
    update: float
    link: float
    measured: bool = False
    """Whether these are the seconds of a finished step, not a prediction."""

    @staticmethod
    def of_step(step: Stats) -> Prediction:
        """The measured seconds of a finished step."""
        disk = sum(step.edges[edge].stall_seconds for edge in (Edge.NVME_TO_HOST, Edge.HOST_TO_NVME))
        link = sum(step.edges[edge].stall_seconds for edge in (Edge.HOST_TO_DEVICE, Edge.DEVICE_TO_HOST))
        parts = {"compute": step.compute_seconds, "disk": disk, "update": step.update_seconds, "link": link}
        longest = max(parts, key=parts.__getitem__)
        return Prediction(least=step.seconds, most=step.seconds, limited_by=longest, **parts, measured=True)

    @property
    def seconds(self) -> float:
        """The middle of the range."""
        return (self.least + self.most) / 2

    @property
    def text(self) -> str:
        """The range in seconds for people, such as "0.28 to 0.41"."""
        least, most = f"{self.least:.2g}", f"{self.most:.2g}"
        return least if least == most else f"{least} to {most}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and `seconds`, for JSON."""
        return {"seconds": self.seconds, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """Bytes that one phase of a step moves. Phases follow one another; all that is in one runs at once."""

    disk_read: int = 0
    disk_write: int = 0
    to_device: int = 0
    to_host: int = 0
    host: int = 0
    """Bytes of RAM that the update's threads read and write, for updates and for gradients that they store or
    add to."""

    def __add__(self, other: PhaseBytes) -> PhaseBytes:
        return PhaseBytes(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _EDGES}
        )

    def __mul__(self, times: int) -> PhaseBytes:
        return PhaseBytes(**{each.name: getattr(self, each.name) * times for each in _EDGES})


_EDGES = fields(PhaseBytes)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one step of training (or one forward, without gradients) moves over every edge."""

    forward: PhaseBytes = PhaseBytes()
    """Bytes that the forward of each micro-batch moves."""
    backward: PhaseBytes = PhaseBytes()
    """Bytes that the backward of each micro-batch moves."""
    accumulation: PhaseBytes = PhaseBytes()
    """Bytes that every backward but the first moves besides: it reads the gradients that it adds to."""
    update: PhaseBytes = PhaseBytes()
    """Bytes that the update moves, besides those of the forward or the last backward under which it runs."""
    when: UpdateTime = "lazy"

    def phases(self, micro_batches: int) -> list[tuple[PhaseBytes, int, int]]:
        """The phases of a step in their order: each with how many forwards and backwards it has."""
        more = micro_batches - 1
        backwards = self.backward * micro_batches + self.accumulation * more
        if self.when == "lazy":
            first = (self.forward + self.update, 1, 0)
            return [first, (self.forward * more + backwards, more, micro_batches)]
        computing = self.forward * micro_batches + backwards
        if self.when == "eager":  # updates that outlast the backward go on under the next forward
            return [(computing + self.update, micro_batches, micro_batches)]
        return [(computing, micro_batches, micro_batches), (self.update, 0, 0)]

    @property
    def disk_read(self) -> int:
        """Bytes that a step of one micro-batch reads from disk."""
        return self.forward.disk_read + self.backward.disk_read + self.update.disk_read

    @property
    def disk_write(self) -> int:
        """Bytes that a step of one micro-batch writes to disk."""
        return self.forward.disk_write + self.backward.disk_write + self.update.disk_write


def traffic(
    homes: Homes,
    pages: Mapping[Kind, Sequence[int]],
    trained: Sequence[int],
    *,
    resident: int,
    update: UpdateTime,
    unified: bool,
    computes_in_ram: bool,
    updated_on_device: Collection[int] = (),
    mirrored: Collection[int] = (),
) -> Traffic:
    """The traffic that follows from the pages' homes.

    pages: bytes of every page, by kind and unit. trained: for each unit, the bytes of its parameter page that
    are updated. resident: bytes of the pool of residents. update: see UpdateTime. computes_in_ram: whether
    the device is the CPU, which may have a budget of its own all the same. updated_on_device: units whose
    updates, with all of their pages, are on the device. mirrored: see infinity/planning/mirror.py.

    Parameter pages that are at home elsewhere come up for forward and for backward, except for `resident`
    bytes of them, which are still there. The update reads and writes their trained part. Gradients are
    written once and read once, and with eager updates neither. States are read and written once. Units
    updated on the device move nothing more. Parameters of mirrored units go up once, after the update.
    """
    training = any(pages[Kind.GRADIENT])
    near = (Tier.DEVICE, Tier.HOST) if unified else (Tier.DEVICE,)
    away = sum(
        nbytes
        for unit, (nbytes, home) in enumerate(zip(pages[Kind.PARAMETER], homes, strict=True))
        if home[Kind.PARAMETER] not in near and unit not in mirrored
    )
    missing = 1 - min(1.0, resident / away) if away else 0.0
    forward = backward = accumulation = updating = PhaseBytes()
    for unit, home in enumerate(homes):
        parameter, gradient, states = (pages[kind][unit] for kind in Kind)
        come_up = 0 if unit in mirrored else math.ceil(parameter * missing)
        parameter_home = home[Kind.PARAMETER]
        brought = PhaseBytes(
            disk_read=come_up if parameter_home is Tier.NVME else 0,
            to_device=come_up if not unified and parameter_home is not Tier.DEVICE else 0,
        )
        forward += brought
        if training:
            backward += brought
        if unit in updated_on_device:
            continue
        sizes = {Kind.PARAMETER: trained[unit], Kind.GRADIENT: gradient, Kind.OPTIMIZER: states}
        updating += _updating(home, sizes, update, unified)
        if unit in mirrored:
            updating += PhaseBytes(to_device=trained[unit])
        at_once, later = _gradient(home[Kind.GRADIENT], gradient, update, unified)
        # A fresh gradient is in its parameter's dtype; it is read and stored.
        fresh = trained[unit] if gradient else 0
        backward += at_once + PhaseBytes(host=2 * fresh, to_host=0 if computes_in_ram else fresh)
        accumulation += later
    return Traffic(
        forward=forward, backward=backward, accumulation=accumulation, update=updating, when=update
    )


def _updating(
    home: Mapping[Kind, Tier | None], sizes: Mapping[Kind, int], when: UpdateTime, unified: bool
) -> PhaseBytes:
    """Bytes that a unit's update moves. sizes: bytes of its pages that take part in it, by kind."""
    parameter, gradient, states = (sizes[kind] for kind in Kind)
    moved = PhaseBytes(host=2 * parameter + gradient + 2 * states)
    for kind, nbytes in sizes.items():
        written = 0 if kind is Kind.GRADIENT else nbytes
        if home[kind] is Tier.NVME:
            # In unified memory the update shares the parameters that come up for forward or backward, unless
            # it runs after both. An eager update takes gradients where they arrived.
            shared = when != "sync" and unified and kind is Kind.PARAMETER
            shared = shared or (when == "eager" and kind is Kind.GRADIENT)
            moved += PhaseBytes(disk_read=0 if shared else nbytes, disk_write=written)
        elif home[kind] is Tier.DEVICE and not unified:
            moved += PhaseBytes(to_host=nbytes, to_device=written)
    return moved


def _gradient(
    home: Tier | None, nbytes: int, when: UpdateTime, unified: bool
) -> tuple[PhaseBytes, PhaseBytes]:
    """Bytes that a unit's gradients move: in every backward, and besides in each that adds to them.

    home: the tier in which they rest. nbytes: their bytes.
    """
    stored = added = PhaseBytes()
    if home is Tier.NVME:
        stored, added = PhaseBytes(disk_write=nbytes), PhaseBytes(disk_read=nbytes)
        if when == "eager":  # the last micro-batch's gradients go to the update without being stored
            stored, added = PhaseBytes(), stored + added
    elif home is Tier.DEVICE and not unified:
        stored, added = PhaseBytes(to_device=nbytes), PhaseBytes(to_host=nbytes)
    return stored, added + PhaseBytes(host=nbytes)


_FORWARD_SHARE = 1 / 3
"""The forward's share of compute: a backward has two matrix products for each one of the forward."""

_RESOURCES = ("compute", "disk", "update", "link")


def predict(moved: Traffic, speeds: MachineRates, operations: Seconds, micro_batches: int = 1) -> Prediction:
    """The seconds of a step: each of its phases takes at least as long as the busiest resource in it.

    operations: seconds of the operations of one forward and backward. On the CPU (without a link) compute,
    updates and copies share the CPU and add up, and only the disk works beside them. Bytes read from disk are
    paired with bytes written, at the mixed rate; the rest goes at the rate of reads or of writes. Raises
    ConfigError for a step without micro-batches.
    """
    if micro_batches < 1:
        raise ConfigError(f"A step has {micro_batches} micro-batches.", "Give at least 1.")
    forward_share = 1.0 if moved.backward == PhaseBytes() else _FORWARD_SHARE
    busy, spent = (dict.fromkeys(_RESOURCES, 0.0) for _ in range(2))
    slower = operations.most - operations.least
    most = 0.0
    for phase, forwards, backwards in moved.phases(micro_batches):
        share = forwards * forward_share + backwards * (1 - forward_share)
        parts = _busy(phase, speeds, compute=operations.least * share, in_turn=backwards > 0)
        most += sum(parts.values()) + slower * share
        for resource, seconds in parts.items():
            busy[resource] += seconds
        for resource, seconds in _spent(parts, together=speeds.link is not None).items():
            spent[resource] += seconds
    return Prediction(
        least=sum(spent.values()),
        most=most,
        limited_by=max(spent, key=spent.__getitem__),
        compute=busy["compute"],
        disk=busy["disk"],
        update=busy["update"],
        link=busy["link"],
    )


def _busy(phase: PhaseBytes, speeds: MachineRates, *, compute: float, in_turn: bool) -> dict[str, float]:
    """Seconds for which every resource is busy in a phase.

    compute: seconds of its operations. in_turn: whether the trainer waits while the CPU stores each gradient;
    the storing then counts as compute.
    """
    if speeds.link is None:  # a copy within RAM reads and writes every byte
        link = 2 * (phase.to_device + phase.to_host) / speeds.host_stream
    else:
        link = max(phase.to_device, phase.to_host) / speeds.link
    update = phase.host / speeds.host_stream
    if in_turn:
        compute, update = compute + update, 0.0
    return {"compute": compute, "disk": _disk_seconds(phase, speeds), "update": update, "link": link}


def _spent(busy: Mapping[str, float], *, together: bool) -> dict[str, float]:
    """A phase's least seconds, by the resources that they are spent on.

    busy: seconds for which each resource is busy. together: whether all of them overlap; else only the disk
    overlaps with the others.
    """
    if not together:
        on_cpu = {each: seconds for each, seconds in busy.items() if each != "disk"}
        if busy["disk"] < sum(on_cpu.values()):
            return on_cpu
    longest = "disk" if not together else max(busy, key=lambda each: busy[each])
    return {longest: busy[longest]}


def _disk_seconds(moved: PhaseBytes, speeds: MachineRates) -> float:
    if speeds.disk_read is None or speeds.disk_write is None or speeds.disk_mixed is None:
        return 0.0
    both = min(moved.disk_read, moved.disk_write)
    alone = (moved.disk_read - both) / speeds.disk_read + (moved.disk_write - both) / speeds.disk_write
    return 2 * both / speeds.disk_mixed + alone
