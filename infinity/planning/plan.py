"""The plan: the home of every page, the size of every pool, and the predicted seconds of a training step.

`infinity.planning.planner` makes plans.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.config import Precision, round_up
from infinity.device_update.kernels import UpdateKind, kinds_of
from infinity.device_update.table import workspace_of
from infinity.formats.encodings import DTYPES
from infinity.formats.muon import bytes_in_ram
from infinity.formats.optimizer_rules import Rule, StateFormat
from infinity.layout.chunks import Chunk
from infinity.layout.shards import ALONE, Share, kept_chunks, part_bytes
from infinity.layout.units import bytes_away
from infinity.planning.machine_rates import MachineRates
from infinity.planning.network import network
from infinity.planning.placement import Kind, Placement
from infinity.planning.plan_text import html_of_plan, text_of
from infinity.planning.predict import PhaseBytes, Prediction, StepBytes, UpdateTime, Work, predict, traffic
from infinity.planning.residual_states import KEEP, Residuals
from infinity.planning.slab_layout import (
    SlabLayout,
    frozen_bytes,
    slab_layout,
    trainable_bytes,
    trained_bytes,
)
from infinity.planning.twin_flow import updated_there
from infinity.telemetry.stats import SECONDS_PER_DAY
from infinity.tiers import PAGE_ALIGNMENT, Tier

UPLOAD_BUFFERS = 8
"""Number of upload buffers: while kernels wait for their turn to add from some, others are filled."""
_LARGEST_UPLOAD = 4 << 20
"""Bytes of the largest upload buffer: enough for the full rate of a link."""
_MOST_WAITING_THERE = 256 << 20
"""Bytes that hold some ranks' parts of the largest weights. What finds no room there waits in RAM."""
_WORTH_TELLING = 16
"""Unused bytes are few if they are at most the device budget divided by this number."""
_WAITING_SHARE = 32
"""The gradients that wait in device memory take at most this share of the device's budget."""


def upload_bytes(longest_chunk: int, ranks: int) -> int:
    """Bytes of an upload buffer; see `Plan.upload_bytes`. longest_chunk: in elements."""
    return min(_LARGEST_UPLOAD, round_up(4 * longest_chunk, PAGE_ALIGNMENT)) if ranks > 1 else 0


def waiting_there_bytes(budget: int, share: Share) -> int:
    """`Plan.waiting_there_bytes` if the device updates units. budget: the device's, in bytes."""
    if share.whole_gradients:
        return 0
    return min(_MOST_WAITING_THERE, budget // _WAITING_SHARE) // PAGE_ALIGNMENT * PAGE_ALIGNMENT


def _sum(live: int | None, residual: int) -> int | None:
    return None if live is None else live + residual


@dataclass(frozen=True, kw_only=True)
class Plan(Placement):
    """The home of every page, the size of every pool, and the predicted seconds of a training step."""

    precision: Precision
    rule: Rule | None
    """The optimizer's rule; None for inference only."""
    device: torch.device
    unified: bool
    """Whether device and host are the same RAM. If so, the model uses pages in the host tier in place."""
    budgets: dict[Tier, int]
    """Bytes that the plan may use in each tier. Tiers without a budget are absent."""
    smallest: dict[Tier, int]
    """The smallest budgets, in bytes by tier, that together are enough for the model. Of several such
    combinations this is the one with the least device memory and host RAM in total.
    """
    activations: int | None
    """Peak bytes of activations and of all other tensors that the operations of a step allocate; None if
    unknown. See `FakeStep.activations` in infinity/planning/fake_step.py.
    """
    activations_unknown: str | None = field(default=None, compare=False)
    """Why the activations are unknown, although `example_inputs` were given. None otherwise."""
    residuals: Residuals = KEEP
    """What becomes of activations between forward and backward. `activations` and `work` are of a step with
    this policy.
    """
    reserved: int
    """Bytes kept free, in the tier that computes, for activations, the model's buffers and `headroom`."""
    headroom: int = 0
    """Bytes, counted in `reserved`, that torch takes besides live tensors; see planning/headroom.py."""
    prediction: Prediction | None = None
    """The predicted seconds of a step of one micro-batch; None if unknown. In the plan of a runtime that has
    finished a step: the measured seconds of its last step.
    """
    speeds: MachineRates | None = None
    work: Work | None = None
    """What the operations of one forward and one backward do; None if unknown."""
    machine: str | None = None
    """The name of the machine whose file has `speeds` and the budgets that were not given, and where its
    figures come from. None for this machine.
    """
    update: UpdateTime = "lazy"
    why: str = field(default="", compare=False)
    """Why `update` was chosen, if it was left to infinity and there was a choice; else empty."""
    accumulation: int | None = None
    """Number of backward passes in a step, as the user declared it; None if unknown."""
    updates_there: bool = False
    """Whether the device runs the optimizer's updates for units whose pages all rest on the device."""
    no_updates_there: str = ""
    """Why the device runs no updates, although it has memory of its own; a sentence, empty if it can."""
    mirrored: frozenset[int] = frozenset()
    """Indices of units whose parameters are at home in host RAM and also have a copy that stays on the
    device; see infinity/planning/twin_flow.py.
    """
    speculating: frozenset[int] = frozenset()
    """Indices of the units whose updates are speculative: those that have no page on the device, and for
    whose second places host RAM has room. Empty unless `update` is "speculative".
    """
    commits: bool = False
    """Whether slab files hold durable images of all parameters and optimizer states; see `slab_layout`."""
    slab_directory: str | None = None
    """The checkpoint's directory, if the slab file with the images lies there. None if the slab files are
    those of the NVMe tier, and without commits.
    """
    commit_interval: int | None = None
    """Steps between commits; None if unknown, and without commits."""
    share: Share = ALONE
    """The rank that follows this plan, and what it keeps of each kind of page. All bytes are this rank's."""
    node_cache_bytes: int = 0
    """Bytes of host RAM in which this rank keeps parameters of other nodes for the ranks of its node; 0 if
    each rank of the node asks for its own.
    """
    mates: tuple[int, int] | None = field(default=None, compare=False)
    """(number of other ranks on this node, how many of them this rank copies parameters from, without their
    help); None where the ranks have not met.
    """
    unreached: int = field(default=0, compare=False)
    """Number of ranks on this node with parameters on devices that this rank's device cannot reach."""
    off: tuple[str, ...] = field(default=(), compare=False)
    """Facilities of this machine that a runtime does without, because they failed when it opened its tiers,
    each with the reason.
    """
    messages: str = field(default="", compare=False)
    """How the ranks' messages travel, and the RAM that they take beside all pools; empty for one rank."""
    pinned: str = field(default="", compare=False)
    """How long it took to page-lock RAM, in the plan of a runtime with a device that needs it; else empty."""
    replan: Callable[[int], Plan | None] | None = field(default=None, compare=False, repr=False)
    """Function (budget of the tier that computes, in bytes) that makes a plan with otherwise the same inputs,
    or returns None if the model does not fit.
    """

    def page_bytes(self, unit: int, kind: Kind) -> int:
        """Bytes of a page's home on this rank, which may hold only some of its chunks; a multiple of 4096."""
        return self.page_sizes[kind][unit]

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the elements of a gradient page, for parameters whose page has the dtype `dtype`."""
        gradients = None if self.accumulation is None else self.accumulation * self.share.ranks
        return self.precision.gradient_dtype(dtype, gradients)

    def gradient_offset(self, unit: int, chunk: int) -> int:
        """Bytes from the start of a unit's gradient page to the gradients of its chunk number `chunk`; a
        multiple of 4096. A chunk whose gradients this rank does not keep takes no bytes.
        """
        return self._offsets[Kind.GRADIENT][unit][chunk]

    def state_offset(self, unit: int, chunk: int) -> int:
        """Bytes from the start of a unit's optimizer page to the states of its chunk number `chunk`; a
        multiple of 4096. A chunk whose states this rank does not keep takes no bytes.
        """
        return self._offsets[Kind.OPTIMIZER][unit][chunk]

    def state_format(self, unit: int, chunk: int) -> StateFormat:
        """The arrays of optimizer states that the optimizer page holds for a chunk, and their byte offsets
        from `state_offset(unit, chunk)`. Without an optimizer there are no arrays.
        """
        layout = self.layout.units[unit]
        dtype = layout.regions[layout.chunks[chunk].region].dtype
        arrays = self.rule.arrays(dtype) if self.rule else ()
        return StateFormat(arrays, layout.chunks[chunk].count)

    @functools.cached_property
    def updated_on_device(self) -> frozenset[int]:
        """Indices of the units that the device updates, because all of their pages rest on the device."""
        return updated_there(self.homes) if self.updates_there else frozenset()

    @functools.cached_property
    def visiting_units(self) -> frozenset[int]:
        """Indices of the units whose chunks may visit the device to be updated: those whose parameters are
        there, too, and whose pages are all at home in host RAM.
        """
        if not self.visiting_bytes:
            return frozenset()
        in_ram = (Tier.HOST, None)
        return frozenset(
            unit for unit in self.mirrored if all(tier in in_ram for tier in self.homes[unit].values())
        )

    @property
    def updates_in_backward(self) -> bool:
        """Whether the device updates its units in the backward, so that these have no gradient pages; see
        [Note: updates in the backward] in infinity/gradients/device.py.
        """
        return self.update == "eager" and self.accumulation == 1 and self.share.ranks == 1

    @functools.cached_property
    def fresh_bytes(self) -> int:
        """Bytes of the largest unit's gradients, of those units that the device updates in the backward. They
        stay where autograd allocates them. 0 if there are no such units.
        """
        if not self.updates_in_backward:
            return 0
        return max((self.gradient_bytes[unit] for unit in self.updated_on_device), default=0)

    @property
    def update_kinds(self) -> frozenset[UpdateKind]:
        """The kinds of kernels that updates on the device need."""
        if self.rule is None:
            return frozenset()
        moments = DTYPES[self.rule.states] if self.rule.moments else torch.float32
        units = (self.layout.units[unit] for unit in self.updated_on_device | self.visiting_units)
        dtypes = {layout.regions[chunk.region].dtype for layout in units for chunk in layout.chunks}
        kinds = (kinds_of(self.rule.name, self.gradient_dtype(each), each, moments) for each in dtypes)
        return frozenset().union(*kinds)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that updates on the device take beside the pages; 0 without such updates.
        With several ranks the upload buffers are part of them.
        """
        if not self.updated_on_device:
            return 0
        return workspace_of(self._chunks_on_device).nbytes + UPLOAD_BUFFERS * self.upload_bytes

    @functools.cached_property
    def upload_bytes(self) -> int:
        """Bytes of each of the UPLOAD_BUFFERS on the device through which gradients of ranks come up from RAM
        to sums that rest on the device; 0 with one rank.
        """
        longest = max((chunk.count for chunk in self._chunks_on_device), default=0)
        return upload_bytes(longest, self.share.ranks)

    @property
    def waiting_there_bytes(self) -> int:
        """The most bytes of this rank's gradients that wait in device memory for the devices that keep their
        sums; 0 where no sums rest on this rank's device.
        """
        if not self.updated_on_device:
            return 0
        return waiting_there_bytes(self.budgets[Tier.DEVICE], self.share)

    @property
    def _chunks_on_device(self) -> list[Chunk]:
        """The chunks that the device updates on this rank."""
        return [
            self.layout.units[unit].chunks[index]
            for unit in sorted(self.updated_on_device)
            for index in kept_chunks(self.layout.units[unit], self.share, whole=self.share.whole_states)
        ]

    @functools.cached_property
    def home_bytes(self) -> dict[Tier, int]:
        """Bytes of the pages at home in each tier."""
        return {tier: sum(self._home_bytes[tier, kind] for kind in Kind) for tier in Tier}

    @functools.cached_property
    def _home_bytes(self) -> Counter[tuple[Tier | None, Kind]]:
        """Bytes of the pages of each kind at home in each tier."""
        found: Counter[tuple[Tier | None, Kind]] = Counter()
        for unit, homes in enumerate(self.homes):
            for kind, tier in homes.items():
                found[tier, kind] += self.page_sizes[kind][unit]
        return found

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that all pages and buffers of the plan, and gradients that leave the device,
        take together; 0 if `unified`.
        """
        if self.unified:
            return 0
        return self.home_bytes[Tier.DEVICE] + self.mirror_bytes + self._working_there

    @property
    def device_tier_bytes(self) -> int:
        """Bytes of the device tier: `device_bytes` without those that autograd allocates."""
        return self.device_bytes - self._allocated_there

    @property
    def _allocated_there(self) -> int:
        """Bytes of device memory that gradients take where autograd has allocated them."""
        return self.leaving_bytes + self.staying_bytes + self.fresh_bytes

    @property
    def _working_there(self) -> int:
        buffers = self.resident_bytes + self.workspace_bytes + self.visiting_bytes + self.waiting_there_bytes
        return buffers + self._allocated_there

    @functools.cached_property
    def mirror_bytes(self) -> int:
        """Bytes of device memory for the copies of the `mirrored` units' parameters."""
        return sum(self.page_bytes(unit, Kind.PARAMETER) for unit in self.mirrored)

    @property
    def waiting_bytes(self) -> int:
        """The most bytes of this rank's gradients that wait in RAM for the ranks that keep their sums.

        They are part of `exchange_bytes`. 0 at stages 0 and 1, where a rank adds its gradients up by itself
        first. Also 0 with the smallest exchange buffers: then only one gradient waits at a time, in
        autograd's tensor, which is not counted.
        """
        blocks = self.exchange_bytes // self.exchange_block_bytes if self.exchange_block_bytes else 0
        return 0 if self.share.whole_gradients else blocks // 4 * self.exchange_block_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of the host arena: all memory of the host tier except `matrix_bytes`."""
        return self.host_bytes - self.matrix_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of RAM in which torch updates a whole matrix, for Muon; else 0."""
        return 0 if self.rule is None else bytes_in_ram(self.rule.matrix)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier that all pages and buffers of the plan take together."""
        resident = self.resident_bytes if self.unified else 0
        return self.home_bytes[Tier.HOST] + self._working_in_ram + resident

    @property
    def _working_in_ram(self) -> int:
        buffers = self.staging_bytes + self.transit_bytes + self.landing_bytes + self.squares_bytes
        others = self.node_cache_bytes + self.matrix_bytes + self.second_bytes + self.tile_sum_bytes
        return buffers + self.exchange_bytes + others + self.residuals.ram

    @property
    def tile_sum_bytes(self) -> int:
        """Bytes of RAM in which gradients of tied tiles wait, if the model computes elsewhere; see
        [Note: gradients of tied tiles] in infinity/gradients/tile_sums.py.
        """
        return self._tile_sums[0]

    @functools.cached_property
    def _tile_sums(self) -> tuple[int, int]:
        """See `bytes_away`."""
        if self.rule is None or self.unified:
            return 0, 0
        return bytes_away(each for unit in self.layout.units for each in unit.parameters)

    @functools.cached_property
    def relayed_bytes(self) -> int:
        """Bytes of all parameters that this rank brings from other nodes for the ranks of its own node; 0
        with one node.
        """
        parts = sum(part_bytes(unit, self.share.ranks) for unit in self.layout.units)
        return self.share.caches_for_node * parts

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that the plan uses: the host tier and, if the device is the CPU, also the device
        tier and `reserved`.
        """
        return self.host_bytes + (self.device_bytes + self.reserved if self.device.type == "cpu" else 0)

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM that the budgets allow: the host budget and, if the device is the CPU, also the
        device budget.
        """
        on_cpu = self.device.type == "cpu"
        return self.budgets[Tier.HOST] + (self.budgets.get(Tier.DEVICE, 0) if on_cpu else 0)

    @property
    def nvme_bytes(self) -> int:
        """Bytes that slab files hold: the images of parameter and optimizer pages, wherever the slab files
        lie, and the gradient pages at home on NVMe. Without images, these are the pages at home on NVMe.
        """
        if self.slab_layout is None:
            return self.home_bytes[Tier.NVME]
        gradients = self.page_sizes[Kind.GRADIENT]
        return self.durable_bytes + sum(gradients) - self._bytes_off_disk(Kind.GRADIENT, gradients)

    @functools.cached_property
    def slab_layout(self) -> SlabLayout | None:
        """The layout of all page images in the slab files; None without commits and speculative updates."""
        images = 1 + self.commits + self.speculative
        if images == 1 or not (self.commits or Tier.NVME in self.budgets):
            return None
        states, homes = self.page_sizes[Kind.OPTIMIZER], None if self.commits else self.homes
        return slab_layout(self.layout.units, self.share, states, images, homes)

    @property
    def speculative(self) -> bool:
        """Whether updates begin before all gradients are known, and are done again if they were wrong."""
        return self.update == "speculative"

    def second_places(self, unit: int) -> int:
        """Bytes of host RAM that the second places of a unit's pages at home there would take. A speculative
        update of the unit needs them.
        """
        home = self.homes[unit]
        parameters = trained_bytes(self.layout.units[unit], self.share) * (home[Kind.PARAMETER] is Tier.HOST)
        return parameters + self.page_sizes[Kind.OPTIMIZER][unit] * (home[Kind.OPTIMIZER] is Tier.HOST)

    @functools.cached_property
    def second_bytes(self) -> int:
        """Bytes of host RAM for the second places of the units in `speculating`."""
        return sum(map(self.second_places, self.speculating))

    @property
    def durable_bytes(self) -> int:
        """Bytes of the images of pages in the slab files."""
        return self.slab_layout.nbytes if self.slab_layout else 0

    @functools.cached_property
    def commit_bytes(self) -> int:
        """Bytes of pages that a commit writes to disk if every chunk was updated since the commit before; 0
        without commits. Pages at home on NVMe are written by updates, and not counted.
        """
        if not self.commits:
            return 0
        trained = [trained_bytes(unit, self.share) for unit in self.layout.units]
        states = self.page_sizes[Kind.OPTIMIZER]
        return self._bytes_off_disk(Kind.PARAMETER, trained) + self._bytes_off_disk(Kind.OPTIMIZER, states)

    @property
    def first_commit_bytes(self) -> int:
        """Bytes that the first commit writes to disk: `commit_bytes`, and the frozen regions of parameter
        pages at home in RAM or on the device.
        """
        frozen = [frozen_bytes(unit, self.share) for unit in self.layout.units]
        return self.commit_bytes + self._bytes_off_disk(Kind.PARAMETER, frozen) * self.commits

    @property
    def bytes_per_step(self) -> float:
        """Bytes that are written to disk for a step of one micro-batch, plus `commit_bytes` divided by
        `commit_interval` if that is known.
        """
        share = self.commit_bytes / self.commit_interval if self.commit_interval else 0
        return self.traffic.disk_write + share

    @property
    def bytes_per_day(self) -> float | None:
        """Bytes written to disk in a day of such steps; None if the seconds of a step are unknown."""
        if self.prediction is None:
            return None
        return self.bytes_per_step * SECONDS_PER_DAY / self.prediction.seconds

    @functools.cached_property
    def traffic(self) -> StepBytes:
        """Bytes that each phase of a step moves between disk, host RAM and the device."""
        moved = traffic(self, [trainable_bytes(unit) if self.rule else 0 for unit in self.layout.units])
        room, sums = self.residuals.room, self._tile_sums[1]
        moved = moved.with_activations(PhaseBytes(), PhaseBytes(to_host=sums, to_device=sums))
        return moved if room is None else moved.with_activations(*room.passes(unified=self.unified))

    def predict(self, micro_batches: int = 1) -> Prediction | None:
        """The predicted seconds of a step that runs forward and backward `micro_batches` times, with inputs
        like the plan's example inputs. None if the work of a step is unknown, and for Muon, whose products of
        matrices are not counted.
        """
        if self.speeds is None or self.work is None or (self.rule is not None and self.rule.matrix):
            return None
        others = network(self, self.speeds.network, micro_batches)
        moved = self.traffic.with_ranks(*others.brought, micro_batches)
        return predict(moved, self.speeds, self.work.passes(self.speeds), micro_batches)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the plan's table: a dict for each tier, with the tier's name and numbers of bytes.

        "params" counts the parameters of mirrored units twice, in host RAM and on the device. "working" is
        all working buffers, and `headroom` in the tier where the model computes. On NVMe, "working" is what
        commits take in addition to the pages at home there. "activations" is None in the tier where the model
        computes if they are unknown.
        """
        working = {Tier.DEVICE: self._working_there, Tier.HOST: self._working_in_ram - self.residuals.ram}
        working[Tier.NVME] = self.nvme_bytes - self.home_bytes[Tier.NVME]
        residual = {Tier.HOST: self.residuals.ram, Tier.NVME: self.residuals.disk}
        if self.unified:
            working[Tier.HOST] += self.resident_bytes
        kinds = self._home_bytes + Counter({(Tier.DEVICE, Kind.PARAMETER): self.mirror_bytes})
        computes_in = self.computes_in
        working[computes_in] += self.headroom
        return [
            {
                "tier": tier.value,
                "budget": budget,
                "params": kinds[tier, Kind.PARAMETER],
                "gradients": kinds[tier, Kind.GRADIENT],
                "optimizer": kinds[tier, Kind.OPTIMIZER],
                "working": working[tier],
                "activations": _sum(self.activations if tier is computes_in else 0, residual.get(tier, 0)),
                "free": self.free(tier),
            }
            for tier, budget in self.budgets.items()
        ]

    def free(self, tier: Tier) -> int:
        """Bytes of a tier's budget that the plan leaves free."""
        used = {
            Tier.DEVICE: self.device_bytes,
            Tier.HOST: self.host_bytes,
            Tier.NVME: self.nvme_bytes + self.residuals.disk,
        }
        reserved = self.reserved if tier is self.computes_in else 0
        return self.budgets[tier] - used[tier] - reserved

    def stays(self, unit: int) -> bool:
        """Whether a unit's parameter page is permanent: always in the memory where the model computes."""
        if not self.share.whole_parameters:
            return False
        return self.homes[unit][Kind.PARAMETER] is self.computes_in or unit in self.mirrored

    @property
    def computes_in(self) -> Tier:
        """The tier in which the model computes."""
        return Tier.HOST if self.unified else Tier.DEVICE

    def shortfall(self, activations: int) -> int:
        """Bytes that are missing from the budget of the tier that computes if activations take `activations`
        bytes; 0 if they fit.
        """
        used = self.host_bytes if self.unified else self.device_bytes
        return max(0, activations - (self.budgets[self.computes_in] - used))

    def idle(self, peak: int) -> int:
        """Bytes of the device budget that a step has not used, if pages could use them; 0 if they are few.

        peak: the most bytes that all tensors on the device, with pages, took in the step.
        """
        budget = self.budgets[Tier.DEVICE]
        away = any(tier not in (Tier.DEVICE, None) for homes in self.homes for tier in homes.values())
        return budget - peak if away and budget - peak > budget // _WORTH_TELLING else 0

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        """The table and lines of `str()` as HTML, which a notebook shows."""
        return html_of_plan(self)

    @functools.cached_property
    def page_sizes(self) -> dict[Kind, list[int]]:
        """Bytes of the homes of all pages: for each kind, a list indexed by unit."""
        ranks = 1 if self.share.whole_parameters else self.share.ranks
        without = self.updated_on_device if self.updates_in_backward else ()
        return {
            Kind.PARAMETER: [part_bytes(unit, ranks) for unit in self.layout.units],
            Kind.GRADIENT: [
                0 if unit in without else nbytes for unit, nbytes in enumerate(self.gradient_bytes)
            ],
            Kind.OPTIMIZER: [offsets[-1] for offsets in self._offsets[Kind.OPTIMIZER]],
        }

    @functools.cached_property
    def gradient_bytes(self) -> list[int]:
        """Bytes of the gradients of each unit, also of those that keep them in no page."""
        return [offsets[-1] for offsets in self._offsets[Kind.GRADIENT]]

    @functools.cached_property
    def _offsets(self) -> dict[Kind, list[list[int]]]:
        """The places of chunks in gradient and optimizer pages, in bytes from the start of the page: for each
        kind and unit, the offset of every chunk, and last the end of the page.

        A chunk that this rank does not keep takes 0 bytes.
        """
        kept = {Kind.GRADIENT: self.share.whole_gradients, Kind.OPTIMIZER: self.share.whole_states}
        found: dict[Kind, list[list[int]]] = {kind: [] for kind in kept}
        for (kind, whole), (unit, layout) in itertools.product(kept.items(), enumerate(self.layout.units)):
            sizes = (
                self._chunk_bytes(kind, unit, index) if whole or chunk.owner == self.share.rank else 0
                for index, chunk in enumerate(layout.chunks)
            )
            found[kind].append([0, *itertools.accumulate(sizes)])
        return found

    def _chunk_bytes(self, kind: Kind, unit: int, chunk: int) -> int:
        """Bytes of a chunk's gradients or optimizer states."""
        if self.rule is None or kind is Kind.OPTIMIZER:
            return self.state_format(unit, chunk).nbytes
        layout = self.layout.units[unit]
        dtype = self.gradient_dtype(layout.regions[layout.chunks[chunk].region].dtype)
        return round_up(layout.chunks[chunk].count * dtype.itemsize, PAGE_ALIGNMENT)

    def _bytes_off_disk(self, kind: Kind, sizes: Sequence[int]) -> int:
        return sum(size for home, size in zip(self.homes, sizes, strict=True) if home[kind] is not Tier.NVME)
