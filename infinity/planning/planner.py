"""Planner: makes the plan for a model before any data moves, or raises an error if the model cannot fit.
Pure, except for `Available.now`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity.config import Budget, Precision
from infinity.device_update.workspace import largest_workspace
from infinity.errors import ConfigError
from infinity.formats.muon import bytes_on_device
from infinity.formats.optimizer_rules import Rule
from infinity.layout.chunks import build
from infinity.layout.division import Division
from infinity.layout.shards import ALONE, Share
from infinity.layout.units import Survey, survey
from infinity.planning import twin_flow
from infinity.planning.budgets import format_count, nvme_budget_for, shortage, usable_nvme
from infinity.planning.headroom import HEAP, NO_HEADROOM, Headroom, Reserve
from infinity.planning.machine_file import Machine
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind, Placement, Room, line_of
from infinity.planning.plan import Plan
from infinity.planning.predict import UpdateTime, Work
from infinity.planning.ranks import least_bytes, shares_of_budget, wanted_bytes
from infinity.planning.search import Search
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.arena import available_ram, ram_budget
from infinity.tiers.device import available_bytes, left_of
from infinity.tiers.link import is_direct

_UNKNOWN_SHARE = 4
"""If the bytes of activations are unknown, the budget divided by this number is kept free: of all pages on
CUDA, and on the CPU of those that come from other ranks.
"""


@dataclass(frozen=True)
class Available:
    """Bytes of memory that are free now, less a safety margin. These are the budgets if the user gives
    none.
    """

    device: int
    host: int
    headroom: Headroom = NO_HEADROOM
    """Memory that torch takes in addition to live tensors where the model computes. That tier's budget has to
    have room for this memory too.
    """
    device_updates: bool | None = None
    """Whether the device can run optimizer updates; None: as `twin_flow.has_kernels` says of this machine."""

    @staticmethod
    def now(device: torch.device, on_node: int = 1) -> Available:
        """The free bytes of `device` (0 for the CPU) and of this machine's RAM, each less a safety margin.

        on_node: number of ranks that share the RAM equally.
        """
        near = available_bytes(device) if device.type == "cuda" else 0
        return Available(near, available_ram() // on_node, Headroom.of(device))

    @staticmethod
    def of(machine: Machine, on_node: int = 1) -> Available:
        """The bytes of an idle machine, each less a safety margin. on_node: as in `now`."""
        host = ram_budget(machine.host_memory) // on_node
        if machine.device_memory is None or machine.compute_capability is None:
            return Available(0, host, HEAP, device_updates=False)
        headroom = Headroom.for_cuda(machine.compute_capability, {})
        return Available(left_of(machine.device_memory, 0), host, headroom, machine.device_updates)


def make_plan(
    model: nn.Module,
    rule: Rule | None,
    *,
    budget: Budget,
    precision: Precision,
    device: torch.device,
    available: Available,
    speeds: MachineRates | None = None,
    activations: int | None = None,
    activations_unknown: str | None = None,
    work: Work | None = None,
    machine: str | None = None,
    update: UpdateTime = "lazy",
    accumulation: int | None = None,
    commits: bool = False,
    slab_directory: str | None = None,
    prefer: Division | None = None,
    share: Share = ALONE,
    node_cache: int | None = None,
) -> Plan:
    """Make the plan for a model within `budget`. Pure: reads no tensor's data, and measures nothing.

    rule: the optimizer's rule; None for inference. available: bytes that replace budgets that are None, and
    the memory that torch takes on the device in addition to live tensors. speeds: the machine's rates, for
    the prediction. activations: their bytes at the peak of a step, which count against the budget of the
    tier in which the model computes. If `activations` is None, a quarter of a CUDA budget stays free for
    activations. work: of the operations of one forward and backward, for the prediction. activations_unknown,
    machine, update, accumulation: see Plan.

    commits: whether the NVMe tier keeps room for durable images of all parameters and optimizer states; see
    infinity/planning/slab_layout.py. If the budget has no nvme directory, the images lie in `slab_directory`,
    which has no budget, and no page is at home on NVMe. prefer: the division of the model into units and
    chunks that is taken, with working buffers of any size, if it is one of this model and fits the budget.

    share: the rank for which the plan is made; the budgets are this rank's. With several ranks the device
    runs no updates, no unit is mirrored, and the seconds of the network are not part of the prediction.
    node_cache: the most bytes of RAM for parameters of other nodes; None: what is useful.

    Raises BudgetError if a budget is too small; the error's `needed` is the smallest budget that is enough.
    Raises ConfigError for a model that `infinity.layout.units.survey` refuses.
    """
    unified = device.type == "cpu" and budget.device_bytes is None
    surveyed = survey(model, precision)
    budgets = _budgets(budget, available, unified=unified)
    # Activations are gone when a matrix is updated.
    apart = 0 if rule is None or unified else bytes_on_device(rule.matrix)
    reserve = Reserve.of(
        None if activations is None else max(activations, apart),
        _buffer_bytes(model),
        unknown=_UNKNOWN_SHARE if device.type == "cuda" else None,
        headroom=available.headroom,
    )
    search = Search(
        surveyed,
        functools.partial(
            precision.gradient_dtype,
            accumulation=None if accumulation is None else accumulation * share.ranks,
        ),
        rule,
        line=line_of(accumulation),
        own_memory=not (unified or is_direct(device)),
        commits=commits and bool(budget.nvme_bytes),
        prefer=prefer,
        share=share,
    )
    paths = len(budget.nvme_bytes)
    nvme = usable_nvme(budget.nvme_bytes)
    updates = available.device_updates
    if updates is None:
        updates = twin_flow.has_kernels(device)
    draft = _Draft(surveyed, search, budgets, nvme, unified, share, node_cache, updates)
    placement = search.place(draft.room(reserve))
    if placement is None:
        elements = sum(parameter.numel for parameter in surveyed.parameters)
        what = f"{format_count(elements)} parameters" + (" with commits" if commits and paths else "")
        raise shortage(
            search,
            draft.room(reserve),
            budgets,
            paths,
            what,
            reserves={draft.computes_in: reserve},
        )
    smallest = search.smallest(unified=unified, nvme=paths > 0)
    smallest[draft.computes_in] = reserve.budget_for(smallest[draft.computes_in])
    if commits and paths:
        smallest[Tier.NVME] = nvme_budget_for(smallest[Tier.NVME], paths)
    options: dict[str, Any] = {
        "precision": precision,
        "rule": rule,
        "device": device,
        "smallest": smallest,
        "activations": activations,
        "activations_unknown": activations_unknown,
        "machine": machine,
        "update": update,
        "accumulation": accumulation,
        "commits": commits,
        "slab_directory": slab_directory if commits and not paths else None,
    }
    replan = functools.partial(draft.replanned, reserve, options)
    return draft.made(placement, reserve, speeds=speeds, work=work, replan=replan, **options)


@dataclass(frozen=True)
class _Draft:
    """The facts of a plan that are known before pages have homes."""

    surveyed: Survey
    search: Search
    budgets: dict[Tier, int]
    nvme: int
    """Bytes of pages that the NVMe tier can hold."""
    unified: bool
    share: Share
    node_cache: int | None
    """The most bytes of RAM for parameters of other nodes; None: what is useful."""
    device_updates: bool
    """Whether the device can run optimizer updates."""

    @property
    def computes_in(self) -> Tier:
        """The tier in which the model computes. Activations count against the budget of this tier."""
        return Tier.HOST if self.unified else Tier.DEVICE

    def room(self, reserve: Reserve) -> Room:
        """The bytes of each tier that pages and working buffers may take: the budgets less `reserve`.

        reserve: the bytes for activations, new gradients and torch itself. They are subtracted in the tier
        in which the model computes.
        """
        budget = self.budgets[self.computes_in]
        left = {**self.budgets, self.computes_in: budget - reserve.within(budget)}
        return Room(device=None if self.unified else left[Tier.DEVICE], host=left[Tier.HOST], nvme=self.nvme)

    def replanned(self, reserve: Reserve, options: Mapping[str, Any], budget: int) -> Plan | None:
        """Make the plan for a budget of `budget` bytes in the tier that computes; None if nothing fits.

        reserve, options: the arguments of `made`. The plan has no prediction.
        """
        other = replace(self, budgets={**self.budgets, self.computes_in: budget})
        placement = other.search.place(other.room(reserve))
        return None if placement is None else other.made(placement, reserve, **options)

    def made(self, placement: Placement, reserve: Reserve, *, device: torch.device, **others: Any) -> Plan:
        """Make the plan from a placement, and add what is chosen after it: units that the device updates,
        units that are mirrored (see infinity/planning/twin_flow.py), and the prediction.

        placement: the homes of pages and the sizes of working buffers. reserve: the bytes that pages leave
        free in the tier in which the model computes. others: the remaining fields of Plan.
        """
        planned: Callable[..., Plan] = functools.partial(
            self._planned,
            device=device,
            reserved=reserve.within(self.budgets[self.computes_in]),
            headroom=reserve.headroom,
            **others,
        )
        found = planned(placement)
        alone = self.share.ranks == 1
        rule = found.rule
        has_kernels = rule is None or (rule.average is None and not rule.matrix)
        if alone and not self.unified and has_kernels and self.device_updates:
            found = self._with_updates_on_device(
                found, self.room(reserve), planned, preferred=self.search.prefers(placement)
            )
        if alone and not self.unified:
            found = self._with_mirrors(found)
        if self.share.caches_for_node:
            found = self._with_node_cache(found, placement, reserve, planned)
        if not self.share.whole_parameters:
            found = self._with_all_room_for_pages(found, reserve)
        return replace(found, prediction=found.predict())

    def _with_all_room_for_pages(self, plan: Plan, reserve: Reserve) -> Plan:
        """Return the plan with what is left of the tier that computes in the pool of resident pages.

        Every page comes from other ranks, and pages that stay from forward to backward come once. There is
        never more room than for all pages. With several ranks the CPU runs all updates, so gradients and
        optimizer states go from the device to host RAM that is free if the pool can use their room.
        """
        whole = sum(unit.nbytes for unit in plan.layout.units)
        left = self._left(plan, self.computes_in, reserve)
        host, homes = self._left(plan, Tier.HOST, reserve), [dict(home) for home in plan.homes]
        for kind, unit in itertools.product((Kind.OPTIMIZER, Kind.GRADIENT), range(len(homes))):
            nbytes = plan.page_bytes(unit, kind)
            near = not self.unified and homes[unit][kind] is Tier.DEVICE
            if near and nbytes <= host and plan.resident_bytes + left < whole:
                homes[unit][kind] = Tier.HOST
                host, left = host - nbytes, left + nbytes
        plan = replace(plan, homes=tuple(homes))
        return replace(plan, resident_bytes=max(plan.resident_bytes, min(whole, plan.resident_bytes + left)))

    def _left(self, plan: Plan, tier: Tier, reserve: Reserve) -> int:
        """Bytes that a plan leaves of a tier, a multiple of 4096: host or device.

        If activations are unknown, a quarter of the budget of the tier that computes is left to them.
        """
        budget = self.budgets[tier]
        used = plan.host_bytes if tier is Tier.HOST else plan.device_bytes
        if tier is self.computes_in:
            unknown = plan.activations is None and reserve.kept_out_of is None  # else it is reserved already
            used += plan.reserved + (budget // _UNKNOWN_SHARE if unknown else 0)
        return max(0, budget - used) // PAGE_ALIGNMENT * PAGE_ALIGNMENT

    def _with_node_cache(
        self, plan: Plan, placement: Placement, reserve: Reserve, planned: Callable[..., Plan]
    ) -> Plan:
        """Return the plan with room for parameters of other nodes: what is left, or if pages are on NVMe
        anyway, RAM that they would have. The model is divided, and pages are present, as without it.
        """
        wanted = wanted_bytes(plan)
        if self.node_cache is not None:
            wanted = min(wanted, self.node_cache // PAGE_ALIGNMENT * PAGE_ALIGNMENT)
        if self.share.on_node == 1:
            roomy = self._with_all_room_for_pages(plan, reserve)
            if roomy.resident_bytes >= sum(unit.nbytes for unit in plan.layout.units):
                return plan  # each page comes once
        left, least = min(wanted, self._left(plan, Tier.HOST, reserve)), least_bytes(plan)
        if not wanted or wanted < least:
            return plan
        if plan.home_bytes[Tier.NVME]:
            room = self.room(reserve)
            for nbytes in shares_of_budget(wanted, self.budgets[Tier.HOST]):
                if nbytes < least or nbytes <= left:
                    break
                other = self.search.place_alike(placement, replace(room, host=max(0, room.host - nbytes)))
                if other is not None and other.resident_bytes >= placement.resident_bytes:
                    return planned(other, node_cache_bytes=nbytes)
        return replace(plan, node_cache_bytes=left if left >= least else 0)

    def _with_mirrors(self, plan: Plan) -> Plan:
        host_free = self.budgets[Tier.HOST] - plan.host_bytes
        homes, units = twin_flow.mirrored(
            plan.homes, plan.page_sizes, host_free, updated_on_device=plan.updated_on_device
        )
        return replace(plan, homes=homes, mirrored=units)

    def _planned(self, placement: Placement, **others: Any) -> Plan:
        return Plan(
            layout=build(self.surveyed, placement.grouping, placement.chunk_elements, self.share.ranks),
            unified=self.unified,
            homes=placement.homes,
            chunk_update_bytes=placement.chunk_update_bytes,
            staging_bytes=placement.staging_bytes,
            transit_buffer_bytes=placement.transit_buffer_bytes,
            transit_bytes=placement.transit_bytes,
            resident_bytes=placement.resident_bytes,
            ring_bytes=placement.ring_bytes,
            exchange_block_bytes=placement.exchange_block_bytes,
            exchange_bytes=placement.exchange_bytes,
            share=self.share,
            budgets=self.budgets,
            **others,
        )

    def _with_updates_on_device(
        self, plan: Plan, room: Room, planned: Callable[..., Plan], *, preferred: bool
    ) -> Plan:
        """Return a plan in which the device updates whole units, if that saves time; else return `plan`.

        plan: the plan without updates on the device. room: the bytes that pages and working buffers may take
        in `plan`. The returned plan leaves part of the device's bytes to the workspace of these updates.
        planned: a function that makes a Plan from a Placement and further fields of Plan. preferred: whether
        `plan` has the preferred division, which is then not given up for these updates.
        """
        assert room.device is not None
        trained = [parameter.numel for parameter in self.surveyed.parameters if parameter.trainable]
        elements = plan.layout.chunk_elements
        while True:
            most = largest_workspace(trained, elements).nbytes
            placement = self.search.place(replace(room, device=room.device - most))
            if placement is None or (preferred and not self.search.prefers(placement)):
                return plan
            if placement.chunk_elements >= elements:
                break
            elements = placement.chunk_elements  # shorter chunks are more, and need a larger workspace
        shared = planned(placement, updates_there=True)
        host_free = shared.budgets[Tier.HOST] - shared.host_bytes
        shared = replace(shared, homes=twin_flow.gathered(shared.homes, shared.page_sizes, host_free))
        spared = sum(shared.page_bytes(unit, kind) for unit in shared.updated_on_device for kind in Kind)
        return shared if spared and twin_flow.pays(spared, plan.home_bytes, shared.home_bytes) else plan


def check_kinds(budget: Budget | None, precision: Precision | None) -> tuple[Budget, Precision]:
    """Return budget and precision, with defaults for None. Raises ConfigError for values of other types."""
    if not isinstance(budget, Budget | None):
        raise ConfigError(f"The budget is a {type(budget).__name__}.", "Give infinity.Budget(host=..., ...).")
    if not isinstance(precision, Precision | None):
        raise ConfigError(
            f"The precision is a {type(precision).__name__}.", 'Give infinity.Precision(compute="bf16", ...).'
        )
    return budget or Budget(), precision or Precision()


def update_time(update: str, accumulation: int | None, precision: Precision) -> UpdateTime:
    """Check the options `update` and `accumulation`, and return `update`, or "lazy" for "auto".

    update: the time when a step's updates run: "auto", "lazy", "eager" or "sync". accumulation: number of
    backward passes in a step; None if unknown. Raises ConfigError for an unknown `update`, for an
    `accumulation` that is not a positive integer, and for eager updates without `accumulation` or with
    fp16.
    """
    if update not in ("auto", "lazy", "eager", "sync"):
        raise ConfigError(f"The update {update!r} is not known.", 'Give "auto", "lazy", "eager" or "sync".')
    if accumulation is not None and (not isinstance(accumulation, int) or accumulation < 1):
        raise ConfigError(
            f"accumulation={accumulation!r} was declared.", "Give how many backwards a step has: at least 1."
        )
    if update != "eager":
        return "sync" if update == "sync" else "lazy"
    if accumulation is None:
        raise ConfigError(
            "Eager updates run in the last backward of a step, and accumulation= does not say which that is.",
            "Declare how many backwards a step has: accumulation=1, or more.",
        )
    if precision.compute_dtype == torch.float16:
        raise ConfigError(
            "Eager updates were asked for with fp16, whose steps are skipped where any gradient overflows.",
            'Give compute="bf16" or "fp32", or update="lazy".',
        )
    return "eager"


def as_model(model_or_config: Any) -> nn.Module:
    """Return a module unchanged, or build the model of a transformers configuration on the meta device.

    The model is a causal language model if transformers has one for this configuration. Raises ConfigError
    for any other argument, and if transformers is not installed.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    if not hasattr(model_or_config, "model_type"):
        raise ConfigError(
            f"A {type(model_or_config).__name__} was given to plan.",
            "Give an nn.Module, or a transformers configuration (AutoConfig.from_pretrained).",
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "A transformers configuration was given and transformers is not installed.",
            "Install transformers, or give the model, built under torch.device('meta').",
        ) from error
    causal = transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if type(model_or_config) in causal else transformers.AutoModel
    with torch.device("meta"):
        built: nn.Module = kind.from_config(model_or_config)  # type: ignore[no-untyped-call]
    return built


def _budgets(budget: Budget, available: Available, *, unified: bool) -> dict[Tier, int]:
    found = {} if unified else {Tier.DEVICE: _or(budget.device_bytes, available.device)}
    found[Tier.HOST] = _or(budget.host_bytes, available.host)
    if budget.nvme_bytes:
        found[Tier.NVME] = sum(budget.nvme_bytes.values())
    return found


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())
