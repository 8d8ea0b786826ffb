"""Prediction: the seconds of a step, from its work and the rates of a machine. Pure.

The work is bytes that move and floating-point operations; both are counted, and no operation is timed. A
step is a row of phases: each forward and each backward is one. A phase takes at least as long as its busiest
resource, as in a roofline model (Williams, Waterman, Patterson 2009), and at most as long as all of them in
turn. The costs of hooks and of other processes are not part of it; see [Note: chunks in staging] for those of
waits. A plan that was made without example inputs has no prediction. Once a runtime has finished a step, its
plan shows the measured seconds instead.

[Note: chunks in staging] A chunk with a page on NVMe is updated in staging, and costs the training thread
calls, however few bytes it has. Where staging holds few chunks, few of their reads and writes are on their
way at the same time, and the others wait. Both are counted with the updates. With little RAM they are most of
a step, so that a step in which blocks run again, with room for longer chunks, may be faster.

[Note: when updates move their bytes] Lazy updates can begin when all gradients are known, and end before the
next forward uses the parameters: their bytes move beside the next forward. Eager and speculative ones begin
with a unit's last gradient: their bytes move beside the last backward, the next forward, or both. A step then
takes at least as long as the two passes without these bytes, one after the other, and at least as long as the
busiest resource needs for all that moves in both. The updates of a step that is speculative as a whole may be
late for some units, which have no second place (`Plan.speculating`): these are as lazy ones.

[Note: share of visits] Where chunks can visit the device to be updated there (infinity/optim/visits.py), the
more do so, the less is moved in host RAM, and the more over the link. Training balances the two by what it
has measured (infinity/optim/balance.py). The prediction takes the share with which both are busy for equally
long. Early visits go in the order of the backward, and the next forward begins with the units that come last,
so that the link has nothing to do for them while the forward computes.

Predictions for CUDA can be too short, because no resource waits for another one within a phase. Where host
RAM has no room for mirrors (infinity/planning/twin_flow.py), the CPU's update of parameters on the device
waits for copies down and up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from infinity.errors import ConfigError
from infinity.layout.shards import kept_chunks
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge, Stats
from infinity.tiers import Tier
from infinity.tiers.trial_file import MODES

if TYPE_CHECKING:
    from infinity.planning.plan import Plan


WORTH_CHOOSING = 0.05
"""Of two ways to run a step the less simple one is chosen if it saves this part of the predicted seconds."""
LEAST_SHARE = 1 / 32
"""The least share of visiting chunks that the device updates, and of those that the CPU does, so that the
rates of both are always measured.
"""
_CALLS, _WAIT = 0.4e-3, 0.1e-3
"""Seconds of the calls with which the training thread takes a chunk through staging, and of one wait for a
disk. Steps of 10M with 160 to 1024 MiB, which have 44 to 2,437 such chunks, took 0.4 to 1.1 ms more for each
than the step without any: the most with staging for one chunk.
"""
_HALVINGS = 20
"""Steps of the search for the share of visits: it is exact to a millionth."""


@dataclass(frozen=True)
class Work:
    """The amount of work of the operations of one forward and, in training, of its backward."""

    flops: Mapping[torch.dtype, int]
    """Floating-point operations of matrix products, convolutions and attention, by the dtype of operands."""
    nbytes: int
    """Bytes that all operations not counted in `flops` read and write."""
    forward: Work | None = None
    """The part of this work that is the forward's; None: all of it."""

    def __add__(self, other: Work) -> Work:
        """This work and then `other`, which is no part of the forward."""
        flops = Counter(self.flops) + Counter(other.flops)
        return Work(dict(flops), self.nbytes + other.nbytes, self.forward or self)

    def __sub__(self, earlier: Work) -> Work:
        """This work without what was done before: without `earlier`, a part of it."""
        flops = Counter(self.flops) - Counter(earlier.flops)
        return Work(dict(flops), self.nbytes - earlier.nbytes)

    def seconds(self, rates: MachineRates) -> float:
        """Seconds of all operations, one after the other."""
        products = sum(count / rates.flops_in(dtype) for dtype, count in self.flops.items())
        return products + self.nbytes / rates.compute_memory

    def passes(self, rates: MachineRates) -> tuple[float, float]:
        """(seconds of the operations of the forward, of those of the backward)."""
        forward = (self.forward or self).seconds(rates)
        return forward, self.seconds(rates) - forward


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
    """Seconds of the step if all work overlaps that can overlap in the same phase."""
    most: float
    """Seconds of the step if no work overlaps. Equal to `least` if the step was measured."""
    limited_by: str
    """The resource on which most of `least` is spent: "compute", "disk", "update", "link", "exchange" or
    "network".
    """
    compute: float
    disk: float
    update: float
    """Seconds in which updates, gradients and, beside a device with memory of its own, copies from and to it
    move bytes in host RAM.
    """
    link: float
    exchange: float = 0.0
    """Seconds of copying within RAM what comes from other ranks."""
    network: float = 0.0
    """Seconds in which bytes come to this node from other nodes; 0 if the rate is unknown."""
    visiting_share: float | None = None
    """Of the elements that may visit the device, the share that is updated there; None if none may."""
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
        return Prediction(
            least=step.seconds,
            most=step.seconds,
            limited_by=longest,
            **parts,
            visiting_share=step.visiting_share,
            measured=True,
        )

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
    """Bytes that one phase of a step moves, by the resource that moves them, and chunks in staging."""

    disk_read: int = 0
    disk_write: int = 0
    to_device: int = 0
    to_host: int = 0
    host: int = 0
    """Bytes of RAM that are read and written by updates, and by storing and summing gradients."""
    received: int = 0
    """Bytes that come from other ranks. `crossing` are those that come to this node from other nodes."""
    crossing: int = 0
    staged: int = 0
    """Number of chunks that are updated in staging, because a page of theirs is on NVMe."""
    waits: int = 0
    """Number of waits for the disk, one after the other, of these chunks, of which staging holds few."""

    def __add__(self, other: PhaseBytes) -> PhaseBytes:
        return PhaseBytes(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _EDGES}
        )

    def __mul__(self, times: float) -> PhaseBytes:
        return PhaseBytes(**{each.name: round(getattr(self, each.name) * times) for each in _EDGES})


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
    early: PhaseBytes = PhaseBytes()
    """The part of `update` that can move in the last backward, too; see [Note: when updates move their
    bytes].
    """
    visits: StepBytes | None = None
    """By how much the bytes change if all chunks visit the device that may, so that some are negative; None
    if none may.
    """
    when: UpdateTime = "lazy"

    def visited(self, share: float) -> StepBytes:
        """The bytes if the given share, from 0 to 1, of the chunks that may visit the device does."""
        if self.visits is None:
            return self
        names = ("backward", "update", "early")
        changed = {name: getattr(self, name) + getattr(self.visits, name) * share for name in names}
        return replace(self, **changed, visits=None)

    def with_ranks(self, parameters: PhaseBytes, gradients: PhaseBytes, micro_batches: int) -> StepBytes:
        """The bytes with those that parameters and gradients of other ranks bring in a step of
        `micro_batches` micro-batches: parameters in equal parts in all passes, gradients in the backwards.
        """
        brought = parameters * (1 / (2 * micro_batches))
        return replace(
            self,
            forward=self.forward + brought,
            backward=self.backward + brought + gradients * (1 / micro_batches),
        )

    def with_activations(self, forward: PhaseBytes, backward: PhaseBytes) -> StepBytes:
        """The bytes with those of activations that leave in a forward and come back in its backward."""
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)

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
    last backward. Parameters of mirrored units go to the device once, after the update. A speculative update
    reads one place and writes another, which moves no more bytes than an update in place.

    Bytes from other ranks are counted by infinity/planning/network.py. Homes that hold only some chunks of
    parameter pages are read whenever the whole pages are brought up. Homes that hold whole pages also receive
    the chunks that other ranks have updated.
    """
    share, unified = plan.share, plan.unified
    training = any(plan.gradient_bytes)
    missing = missing_share(plan)
    forward = backward = accumulation = updating = early = PhaseBytes()
    staying = visiting = visiting_early = PhaseBytes()
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
        moved = _updating(home, sizes, plan.update, unified) + _staged(plan, unit)
        if unit in plan.mirrored:
            moved += PhaseBytes(to_device=trained[unit])
        updating += moved
        at_once, later = _gradient(home[Kind.GRADIENT], gradient, plan.update, unified)
        # A fresh gradient is in its parameter's dtype.
        fresh = trained[unit] if gradient else 0
        apart = plan.device.type != "cpu"
        straight = apart and plan.accumulation == 1 and home[Kind.GRADIENT] is Tier.HOST
        stored = 0 if straight else 2 * fresh  # read and stored, unless the copy to RAM has stored it
        backward += at_once + PhaseBytes(host=stored, to_host=fresh if apart else 0)
        accumulation += later
        begins_early = plan.update == "eager" or unit in plan.speculating
        early += moved * begins_early
        if unit in plan.visiting_units:
            waits = plan.update == "eager"  # gradients stay there until they are used; others come up again
            staying += PhaseBytes(to_host=-fresh * waits)
            up = states + gradient * (not waits)
            there = PhaseBytes(host=-moved.host, to_device=up - own, to_host=own + states)
            visiting += there
            visiting_early += there * begins_early
    visits = StepBytes(backward=staying, update=visiting, early=visiting_early)
    return StepBytes(
        forward=forward,
        backward=backward,
        accumulation=accumulation,
        update=updating,
        early=early,
        visits=visits if plan.visiting_units else None,
        when=plan.update,
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


def _staged(plan: Plan, unit: int) -> PhaseBytes:
    """The chunks of a unit that an update takes through staging."""
    if Tier.NVME not in plan.homes[unit].values():
        return PhaseBytes()
    layout, share = plan.layout.units[unit], plan.share
    kept = kept_chunks(layout, share, whole=share.whole_states)
    chunks = sum(layout.regions[layout.chunks[index].region].trainable for index in kept)
    together = max(1, plan.staging_bytes // max(1, plan.chunk_update_bytes))
    return PhaseBytes(staged=chunks, waits=2 * chunks // together)


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


@dataclass(frozen=True)
class _Phase:
    """The work of a phase: bytes that move, and seconds of the model's operations."""

    moved: PhaseBytes
    compute: float = 0.0

    def __add__(self, other: _Phase) -> _Phase:
        return _Phase(self.moved + other.moved, self.compute + other.compute)

    def busy(self, speeds: MachineRates) -> dict[str, float]:
        """Seconds for which the phase keeps each resource busy."""
        moved = self.moved
        over_link = moved.to_device + moved.to_host
        if speeds.link is None:
            link, in_ram = _copying(over_link, speeds), moved.host
        else:
            link, in_ram = max(moved.to_device, moved.to_host) / speeds.link, moved.host + over_link
        return {
            "compute": self.compute,
            "disk": _disk_seconds(moved, speeds),
            "update": in_ram / speeds.host_stream + moved.staged * _CALLS + moved.waits * _WAIT,
            "link": link,
            "exchange": _copying(moved.received, speeds),
            "network": moved.crossing / speeds.network if speeds.network else 0.0,
        }

    def limits(self, speeds: MachineRates) -> dict[str, float]:
        """The resources whose seconds add up to the least time that the phase can take, and these seconds.

        With a link all resources work at the same time. Without one, the disk and the network work at the
        same time as the others, and these work one after the other.
        """
        busy = self.busy(speeds)
        beside = max(busy if speeds.link is not None else ("disk", "network"), key=busy.__getitem__)
        on_cpu = [each for each in busy if each not in ("disk", "network")]
        alone = speeds.link is not None or busy[beside] >= sum(busy[each] for each in on_cpu)
        return {each: busy[each] for each in ([beside] if alone else on_cpu)}


def predict(
    moved: StepBytes, speeds: MachineRates, compute: tuple[float, float], micro_batches: int = 1
) -> Prediction:
    """Predict the seconds of a step. compute: seconds of the operations of one forward, and of one backward.

    What comes from other ranks moves beside all else. Without a link the device is the CPU: the seconds of
    compute, updates and copies add up, and only the disk and the network between nodes work at the same time.
    Equal amounts of bytes read from disk and written to disk in a phase go at the mixed rate, and what
    remains at the rate of reads or of writes. Raises ConfigError if `micro_batches` is less than 1.
    """
    if micro_batches < 1:
        raise ConfigError(f"A step has {micro_batches} micro-batches.", "Give at least 1.")
    visiting_share = None
    if moved.visits is not None:
        visiting_share = _balanced(moved, speeds, compute[0])
        moved = moved.visited(visiting_share)
    forward, backward = _Phase(moved.forward, compute[0]), _Phase(moved.backward, compute[1])
    adding = backward + _Phase(moved.accumulation)
    first, last = forward, backward if micro_batches == 1 else adding
    others = [backward, forward] * (micro_batches > 1) + [adding, forward] * (micro_batches - 2)
    early, late = _Phase(moved.early), _Phase(moved.update + moved.early * -1)
    if moved.when == "sync":
        others.append(late)
    else:
        first += late
    ways = [[first, last, *others]]
    if moved.early != PhaseBytes():
        ways.append([first + last + early, *others])
        if visiting_share is not None:
            sent = (last + early).moved
            over_link = PhaseBytes(to_device=sent.to_device, to_host=sent.to_host)
            ways.insert(0, [_Phase(PhaseBytes(), compute[0]), _Phase(over_link), *others])
    spent = max(
        (_total(each.limits(speeds) for each in way) for way in ways), key=lambda each: sum(each.values())
    )
    busy = _total(each.busy(speeds) for each in ways[-1])
    least = sum(spent.values())
    return Prediction(
        least=least,
        most=max(least, sum(busy.values())),
        limited_by=max(spent, key=spent.__getitem__),
        visiting_share=visiting_share,
        compute=busy["compute"],
        disk=busy["disk"],
        update=busy["update"],
        link=busy["link"],
        exchange=busy["exchange"],
        network=busy["network"],
    )


def _balanced(moved: StepBytes, speeds: MachineRates, forward: float) -> float:
    """The share of visits with which host RAM and the link are busy for equally long in the phases in which
    updates move their bytes; see [Note: share of visits]. forward: seconds of the operations of a forward.
    """
    least, most = LEAST_SHARE, 1 - LEAST_SHARE
    for _ in range(_HALVINGS):
        share = (least + most) / 2
        there = moved.visited(share)
        beside, pause = there.forward + there.update, 0.0
        if moved.early != PhaseBytes():
            beside, pause = beside + there.backward, forward
        busy = _Phase(beside).busy(speeds)
        if busy["link"] + pause < busy["update"]:
            least = share
        else:
            most = share
    return (least + most) / 2


def _total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each resource's seconds."""
    found: Counter[str] = Counter()
    for each in parts:
        found.update(each)
    return dict(found)


def _copying(nbytes: int, speeds: MachineRates) -> float:
    """Seconds of copies within RAM, which read and write every byte."""
    return 2 * nbytes / speeds.host_stream


def _disk_seconds(moved: PhaseBytes, speeds: MachineRates) -> float:
    if speeds.disk is None:
        return 0.0
    read, write, mixed = (speeds.disk[mode] for mode in MODES)
    both = min(moved.disk_read, moved.disk_write)
    return 2 * both / mixed + (moved.disk_read - both) / read + (moved.disk_write - both) / write
