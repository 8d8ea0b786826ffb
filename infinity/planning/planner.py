"""Planner: makes the plan for a model before any data moves, or raises an error if the model cannot fit.
Pure, except for `Available.now`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infinity.config import Budget, Precision, format_size, round_up
from infinity.device_update.table import largest_workspace
from infinity.errors import BudgetError, ConfigError
from infinity.formats.muon import bytes_on_device
from infinity.formats.optimizer_rules import Rule
from infinity.layout.chunks import Division
from infinity.layout.names import named_modules
from infinity.layout.shards import ALONE, Share, longest_own_chunk
from infinity.layout.tiles import row_ranges
from infinity.layout.units import Survey, survey
from infinity.planning import twin_flow
from infinity.planning.budgets import format_count, nvme_budget_for, shortage, usable_nvme
from infinity.planning.headroom import HEAP, NO_HEADROOM, Headroom, Reserve
from infinity.planning.homes import Search
from infinity.planning.machine_file import Machine
from infinity.planning.machine_rates import MachineRates
from infinity.planning.placement import Kind, Placement, Room
from infinity.planning.plan import UPLOAD_BUFFERS, Plan, upload_bytes, waiting_there_bytes
from infinity.planning.predict import WORTH_CHOOSING, UpdateTime, Work
from infinity.planning.residual_states import KEEP, Residuals
from infinity.tiers import PAGE_ALIGNMENT, Tier
from infinity.tiers.arena import available_ram, ram_budget
from infinity.tiers.device import available_bytes, left_of
from infinity.tiers.link import is_direct

_UNKNOWN_SHARE = 4
"""If the bytes of activations are unknown, the budget divided by this number is kept free: of all pages on
CUDA, and on the CPU of those that come from other ranks.
"""
_CACHE_SHARES = (4, 8, 16)
"""If pages are on NVMe for lack of RAM, a node's cache takes at most the host budget divided by one of these
numbers: the first for which the model is divided as without a cache, and the pool of resident pages is no
smaller.
"""
_LEAST_CACHE = 4
"""A node's cache has room for at least this number of exchange blocks, or for all it could hold if less."""
_NO_NVRTC = (
    "No NVRTC of torch's CUDA is found, which compiles the device's kernels (pip install nvidia-cuda-nvrtc)."
)


@dataclass(frozen=True)
class Available:
    """Bytes of memory that are free now, less a safety margin: the budgets if the user gives none."""

    device: int
    host: int
    headroom: Headroom = NO_HEADROOM
    """Bytes that torch takes, besides live tensors, of the budget of the tier that computes."""
    device_updates: bool | None = None
    """Whether the device can run optimizer updates; None: as `twin_flow.has_kernels` says of this machine."""
    no_updates_there: str = ""
    """Why the device runs no updates, as in `Plan`."""

    @staticmethod
    def now(device: torch.device, on_node: int = 1, own: int = 0) -> Available:
        """The free bytes of `device` (0 for the CPU) and of this machine's RAM, each less a safety margin.

        on_node: number of ranks that share the RAM equally. own: bytes on `device` of the model that is to be
        offloaded, which count as free.
        """
        if device.type != "cuda":
            return Available(0, available_ram() // on_node, Headroom.of(device))
        without = "" if twin_flow.has_kernels(device) else _NO_NVRTC
        near = available_bytes(device, own)
        return Available(near, available_ram() // on_node, Headroom.of(device), no_updates_there=without)

    @staticmethod
    def of(machine: Machine, on_node: int = 1) -> Available:
        """The bytes of memory of an idle `machine`, each less a safety margin. on_node: as in `now`."""
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
    residuals: Residuals = KEEP,
    work: Work | None = None,
    machine: str | None = None,
    update: UpdateTime = "lazy",
    accumulation: int | None = None,
    commits: bool = False,
    slab_directory: str | None = None,
    prefer: Division | None = None,
    share: Share = ALONE,
    node_cache: int | None = None,
    searches: dict[Any, Search] | None = None,
) -> Plan:
    """Make the plan for a model within `budget`. Pure: reads no tensor's data, and measures nothing.

    rule: the optimizer's rule; None for inference. available: what is free now; its bytes replace budgets
    that are None. residuals: the policy of activations, to which the other figures of a step apply.
    activations: bytes of the activations at the peak of a step, which count against the budget
    of the tier that computes; if None, a quarter of a CUDA budget stays free for them. speeds, work,
    activations_unknown, machine, update, accumulation: see Plan.

    commits: whether the NVMe tier keeps room for durable images of all parameters and optimizer states; see
    infinity/planning/slab_layout.py. If the budget has no nvme directory, the images lie in `slab_directory`,
    which has no budget, and no page is at home on NVMe. prefer: a division of the model into units and
    chunks, which is used if it is of this model and fits the budget with working buffers of any size.

    share: the rank for which the plan is made; the budgets are this rank's.
    node_cache: the most bytes of RAM for parameters of other nodes; None: as many as are useful.
    searches: keeps what does not depend on bytes of activations, for calls with otherwise equal arguments.

    Raises BudgetError if a budget is too small; the error's `needed` is the smallest budget that is enough.
    Raises ConfigError for a model that `infinity.layout.units.survey` refuses.
    """
    unified = budget.is_unified(device)
    computes_in = Tier.HOST if unified else Tier.DEVICE
    paths = len(budget.nvme_bytes)
    # Activations are gone when a matrix is updated.
    apart = 0 if rule is None or unified else bytes_on_device(rule.matrix)
    reserve = Reserve.of(
        None if activations is None else max(activations, apart),
        sum(buffer.nbytes for buffer in model.buffers()),
        unknown=_UNKNOWN_SHARE if device.type == "cuda" else None,
        headroom=available.headroom,
    )
    micro_batches = None if accumulation is None else accumulation * share.ranks
    found = available.device_updates
    kernels = twin_flow.has_kernels(device) if found is None else found
    searches, key = {} if searches is None else searches, (update, kernels, prefer)
    if key not in searches:
        surveyed = survey(model, precision)
        _check_tiles(surveyed, rule)
        searches[key] = Search(
            surveyed=surveyed,
            gradient_dtype=functools.partial(precision.gradient_dtype, accumulation=micro_batches),
            rule=rule,
            accumulation=accumulation,
            apart=not (unified or is_direct(device)),
            commits=commits and paths > 0,
            speculative=update == "speculative",
            visits=kernels and _by_elements(rule) and _may_visit(update, micro_batches, share),
            gradients_wait=update == "eager",
            share=share,
            prefer=prefer,
        )
    search = searches[key]
    planner = _Planner(
        search,
        _budgets(budget, available, unified=unified),
        usable_nvme(budget.nvme_bytes),
        computes_in,
        reserve,
        node_cache,
        kernels,
        residuals,
    )
    placement = search.place(planner.room)
    if placement is None:
        elements = sum(parameter.numel for parameter in search.surveyed.parameters)
        what = f"{format_count(elements)} parameters" + (" with commits" if search.commits else "")
        error = shortage(search, planner.room, planner.budgets, paths, what, reserves=planner.reserves)
        raise _with_tiles(error, search, computes_in, model)
    smallest = dict(search.smallest(unified, paths > 0))
    for tier, each in planner.reserves.items():
        smallest[tier] = each.budget_for(smallest.get(tier, 0))
    if search.commits or residuals.disk:
        smallest[Tier.NVME] = nvme_budget_for(smallest[Tier.NVME], paths)
    facts = {
        "precision": precision,
        "rule": rule,
        "device": device,
        "smallest": smallest,
        "activations": activations,
        "activations_unknown": activations_unknown,
        "residuals": residuals,
        "machine": machine,
        "update": update,
        "accumulation": accumulation,
        "commits": commits,
        "slab_directory": slab_directory if commits and not paths else None,
        "no_updates_there": available.no_updates_there,
    }
    replan = functools.partial(planner.replan, facts)
    return planner.plan(placement, {**facts, "speeds": speeds, "work": work, "replan": replan})


def quickest(
    make: Callable[[UpdateTime], Plan],
    disks_hold: Callable[[Plan], bool] = lambda plan: True,
    adopts: Callable[[Plan], bool] | None = None,
) -> Plan:
    """Choose between lazy and speculative updates by the predicted seconds of a step with the declared number
    of backwards. make: function that makes the plan for either; the speculative one may raise BudgetError.
    disks_hold: tells whether there is room on disk for the slabs of a plan that are made anew. adopts: tells
    whether the slabs of the commit that the run continues can be a plan's; None: there is no such commit.

    Speculative updates are chosen if a step takes at least 5% less at the least, and the disk is not busy for
    longer. The second condition excludes plans whose second places send other pages to the disk: a CPU that
    computes the model hides less of the disk's time than the least time says. Updates are lazy without a
    choice if the number of backwards or the seconds are unknown, for several ranks, and where no update can
    be speculative or would be faster in any homes. Where there is a choice, the plan tells the reason.

    Slabs have two places for what is trained with lazy updates, and three with speculative ones. Written
    anew, all bytes move, and the disk holds both slabs until the first commit. So updates stay lazy where the
    slabs of lazy ones can be adopted, and those of speculative ones are kept if a step takes no longer.
    """
    lazy = make("lazy")
    rule, backwards = lazy.rule, lazy.accumulation
    possible = rule is not None and rule.average is None and lazy.share.ranks == 1
    late = None if backwards is None or not possible else lazy.predict(backwards)
    if late is None or backwards is None:
        return lazy
    if adopts is not None and adopts(lazy):
        return replace(lazy, why="as in the commit that is continued")
    enough = (1 - WORTH_CHOOSING) * late.least
    bound = replace(lazy, update="eager").predict(backwards)
    if bound is None or bound.least > (enough if adopts is None else late.least):
        return lazy
    try:
        speculative = make("speculative")
    except BudgetError:  # there is no room for second places
        return lazy
    early = speculative.predict(backwards)
    assert early is not None
    kept = adopts is not None and adopts(speculative)
    enough = late.least if kept else enough
    if early.least <= enough and early.disk <= late.disk and (kept or disks_hold(speculative)):
        return replace(speculative, why=f"predicted {early.text} s against {late.text} s lazy")
    return replace(lazy, why=f"predicted {late.text} s against {early.text} s speculative")


def _may_visit(update: str, micro_batches: int | None, share: Share) -> bool:
    """Whether chunks may visit the device: with lazy updates, and eager ones of one gradient a step."""
    return share.ranks == 1 and (update == "lazy" or (update == "eager" and micro_batches == 1))


def _by_elements(rule: Rule | None) -> bool:
    """Whether the device's kernels can do all updates of a rule."""
    return rule is None or (rule.average is None and not rule.matrix)


def _check_tiles(surveyed: Survey, rule: Rule | None) -> None:
    """Raise ConfigError if a model has tiles, and the optimizer would take each as a whole matrix."""
    name = next((each.tile_of for each in surveyed.parameters if each.tile_of is not None), None)
    if name is not None and rule is not None and rule.matrix:
        raise ConfigError(
            f"{name} is tiled, and {rule.name} updates whole matrices.",
            "Leave out infinity.tiled for this module, or train with an optimizer that updates each element.",
        )


def _with_tiles(error: BudgetError, search: Search, computes_in: Tier, model: nn.Module) -> BudgetError:
    """Add infinity.tiled to the cure if one weight that it takes is most of what the error asks for."""
    largest = max(search.surveyed.parameters, key=lambda each: each.nbytes)
    most = error.tier == computes_in.value and 2 * largest.nbytes >= (error.needed or 0)
    if not most or largest.tile_of is not None:
        return error
    modules = dict(named_modules(model, remove_duplicate=False))
    paths = [name.rpartition(".")[0] for name in largest.names]
    tiles = len(row_ranges(largest.shape)) if len(largest.shape) == 2 else 1
    if tiles > 1 and all(type(modules[path]) in (nn.Linear, nn.Embedding) for path in paths):
        calls = " and ".join(f"infinity.tiled({'.'.join(filter(None, ('model', path)))})" for path in paths)
        size = format_size(largest.nbytes)
        error.cure += f" Or call {calls} before: then {largest.names[0]}, {size}, moves in {tiles} tiles."
    return error


@dataclass(frozen=True)
class _Planner:
    """The facts about a plan that are known before pages have homes."""

    search: Search
    budgets: dict[Tier, int]
    nvme: int
    """Bytes of pages that the NVMe tier can hold."""
    computes_in: Tier
    reserve: Reserve
    """The bytes that pages leave free in the tier that computes."""
    node_cache: int | None
    device_updates: bool
    """Whether the device can run optimizer updates."""
    residuals: Residuals
    """What becomes of activations; its bytes of RAM and disk come off the budgets."""

    @property
    def unified(self) -> bool:
        return self.computes_in is Tier.HOST

    @property
    def reserves(self) -> dict[Tier, Reserve]:
        """What pages leave free in each tier: `reserve`, and the room of residual pages."""
        found = {self.computes_in: self.reserve}
        for tier, nbytes in ((Tier.HOST, self.residuals.ram), (Tier.NVME, self.residuals.disk)):
            if nbytes:
                found[tier] = found.get(tier, Reserve(0)).beside(nbytes)
        return found

    @property
    def room(self) -> Room:
        """The budgets less `reserves`."""
        left = {tier: budget - self._reserved(tier) for tier, budget in self.budgets.items()}
        device = None if self.unified else left[Tier.DEVICE]
        return Room(device=device, host=left[Tier.HOST], nvme=self.nvme - self._reserved(Tier.NVME))

    def _reserved(self, tier: Tier) -> int:
        found = self.reserves.get(tier)
        return 0 if found is None else found.within(self.budgets.get(tier, 0))

    def replan(self, facts: Mapping[str, Any], budget: int) -> Plan | None:
        """Make the plan for a budget of `budget` bytes in the tier that computes; None if nothing fits."""
        other = replace(self, budgets={**self.budgets, self.computes_in: budget})
        placement = other.search.place(other.room)
        return None if placement is None else other.plan(placement, facts)

    def plan(self, placement: Placement, facts: Mapping[str, Any]) -> Plan:
        """Make the plan from a placement, and add what is chosen after it: units that the device updates,
        units that are mirrored (see infinity/planning/twin_flow.py), the room of several ranks, and the
        prediction. facts: the fields of Plan that no placement changes.
        """
        share, rule = self.search.share, self.search.rule
        found = self._planned(placement, facts)
        if not self.unified:
            speculative = self.search.speculative
            if self.device_updates and _by_elements(rule) and not speculative:
                found = self._with_updates_on_device(found, self.search.prefers(placement), facts)
            over_a_link = found.device.type == "cuda" or found.no_updates_there
            if over_a_link and not found.updated_on_device and not (rule is not None and rule.matrix):
                host_free = self.budgets[Tier.HOST] - found.host_bytes
                homes = twin_flow.gathered(found.homes, found.page_sizes, host_free, whole_units=False)
                found = replace(found, homes=homes)
            if share.whole_parameters:
                host_free = self.budgets[Tier.HOST] - found.host_bytes - self._wanted_by_cache(found)
                sizes = found.page_sizes[Kind.PARAMETER]
                homes, units = twin_flow.mirrored(
                    found.homes, sizes, host_free, updated_on_device=found.updated_on_device
                )
                found = replace(found, homes=homes, mirrored=units)
            if not found.visiting_units:
                found = replace(found, visiting_bytes=0, staying_bytes=0)
        if share.caches_for_node:
            found = self._with_node_cache(found, placement, facts)
        if not share.whole_parameters:
            found = self._with_all_room_for_pages(found)
        if self.search.speculative:
            found = replace(found, speculating=self._speculating(found))
        return replace(found, prediction=found.predict())

    def _planned(self, placement: Placement, facts: Mapping[str, Any], **more: Any) -> Plan:
        return Plan(
            **vars(placement),
            **facts,
            **more,
            unified=self.unified,
            share=self.search.share,
            budgets=self.budgets,
            reserved=self.reserve.within(self.budgets[self.computes_in]),
            headroom=self.reserve.headroom,
        )

    def _speculating(self, plan: Plan) -> frozenset[int]:
        """Choose the units whose updates are speculative, as many as host RAM has room for.

        The last units come first: the backward brings their gradients first, and their updates hide under all
        of it. The first units' gradients come when the backward is nearly over, and the first updates of
        `step()` are theirs anyway. Where the CPU computes the model, a unit in RAM would gain nothing.
        """
        left, found = self.room.host - plan.host_bytes, set()
        for unit in reversed(range(len(plan.homes))):
            homes, nbytes = plan.homes[unit], plan.second_places(unit)
            there = Tier.DEVICE in (homes[Kind.PARAMETER], homes[Kind.OPTIMIZER])
            in_ram = self.unified and Tier.NVME not in homes.values()
            if homes[Kind.GRADIENT] is not None and nbytes <= left and not (there or in_ram):
                left -= nbytes
                found.add(unit)
        return frozenset(found)

    def _with_updates_on_device(self, plan: Plan, preferred: bool, facts: Mapping[str, Any]) -> Plan:
        """Return a plan in which the device updates whole units, if that saves time; else return `plan`.

        The returned plan leaves some of the device's bytes to the workspace of these updates. preferred:
        whether `plan` has the preferred division into units and chunks; if so, the returned plan has it, too.
        """
        room = self.room
        assert room.device is not None
        trained = [each.numel for each in self.search.surveyed.parameters if each.trainable]
        ranks = plan.share.ranks
        divided = 1 if plan.share.whole_states else ranks
        waiting = waiting_there_bytes(self.budgets[Tier.DEVICE], plan.share)

        def buffers(elements: int) -> int:
            """Bytes for chunks of this length: shorter ones need a larger workspace, longer ones uploads."""
            uploads = UPLOAD_BUFFERS * upload_bytes(longest_own_chunk(sum(trained), elements, ranks), ranks)
            return largest_workspace(trained, elements, divided).nbytes + uploads + waiting

        lengths = {plan.layout.chunk_elements}
        while True:
            most = max(map(buffers, lengths))
            placement = self.search.place(replace(room, device=room.device - most))
            if placement is None or (preferred and not self.search.prefers(placement)):
                return plan
            if placement.layout.chunk_elements in lengths:
                break
            lengths.add(placement.layout.chunk_elements)
        shared = self._planned(placement, facts, updates_there=True)
        host_free = shared.budgets[Tier.HOST] - shared.host_bytes
        homes = twin_flow.gathered(
            shared.homes,
            shared.page_sizes | {Kind.GRADIENT: shared.gradient_bytes},
            host_free,
            in_backward=shared.updates_in_backward,
        )
        shared = replace(shared, homes=homes)
        spared = sum(shared.page_bytes(unit, kind) for unit in shared.updated_on_device for kind in Kind)
        return shared if spared and twin_flow.pays(spared, plan.home_bytes, shared.home_bytes) else plan

    def _with_node_cache(self, plan: Plan, placement: Placement, facts: Mapping[str, Any]) -> Plan:
        """Return the plan with a cache for parameters of other nodes. The cache takes RAM that is left or, if
        pages are on NVMe anyway, RAM that pages would have, unless the device updates or mirrors some. The
        division of the model stays as it is, and the pool of resident pages gets no smaller.
        """
        share, wanted = self.search.share, self._wanted_by_cache(plan)
        least = min(plan.relayed_bytes, _LEAST_CACHE * plan.exchange_block_bytes)
        if share.on_node == 1:
            roomy = self._with_all_room_for_pages(plan)
            if roomy.resident_bytes >= sum(unit.nbytes for unit in plan.layout.units):
                return plan  # each page comes once
        if wanted < max(1, least):
            return plan
        left, room, budget = min(wanted, self._left(plan, Tier.HOST)), self.room, self.budgets[Tier.HOST]
        from_pages = plan.home_bytes[Tier.NVME] and not (plan.updated_on_device or plan.mirrored)
        for divisor in _CACHE_SHARES if from_pages else ():
            nbytes = min(
                round_up(wanted, PAGE_ALIGNMENT), budget // divisor // PAGE_ALIGNMENT * PAGE_ALIGNMENT
            )
            if nbytes < least or nbytes <= left:
                break
            other = self.search.place_alike(placement, replace(room, host=max(0, room.host - nbytes)))
            if other is not None and other.resident_bytes >= placement.resident_bytes:
                return self._planned(other, facts, node_cache_bytes=nbytes)
        return replace(plan, node_cache_bytes=left if left >= least else 0)

    def _wanted_by_cache(self, plan: Plan) -> int:
        """Bytes of a cache that has room for all parameters of other nodes; 0 if a cache gains nothing."""
        share = self.search.share
        if share.stage == 0 or (share.on_node == 1 and share.stage < 3):
            return 0  # each parameter comes to a node at most once a step anyway
        most = plan.relayed_bytes if self.node_cache is None else self.node_cache
        return min(plan.relayed_bytes, most // PAGE_ALIGNMENT * PAGE_ALIGNMENT)

    def _with_all_room_for_pages(self, plan: Plan) -> Plan:
        """Return the plan with the free bytes of the tier that computes added to the pool of resident pages.

        For use where every page comes from other ranks: a page that stays resident from forward to backward
        is fetched once instead of twice. The pool never gets more bytes than all pages have. To free more
        bytes for it, all pages of trained units move from the device to free host RAM. Those that the CPU
        updates move first and in any case, because an update would bring them down and up again.
        """
        whole = sum(unit.nbytes for unit in plan.layout.units)
        left = self._left(plan, self.computes_in)
        host, homes = self._left(plan, Tier.HOST), [dict(home) for home in plan.homes]
        there = plan.updated_on_device
        for unit in sorted(range(len(homes) * (not self.unified)), key=there.__contains__):
            near = [kind for kind in Kind if homes[unit][kind] is Tier.DEVICE]
            nbytes = sum(plan.page_bytes(unit, kind) for kind in near)
            wanted = unit not in there or plan.resident_bytes + left < whole
            if homes[unit][Kind.GRADIENT] is not None and nbytes <= host and wanted:
                homes[unit] |= dict.fromkeys(near, Tier.HOST)
                host, left = host - nbytes, left + nbytes
        resident = max(plan.resident_bytes, min(whole, plan.resident_bytes + left))
        return replace(plan, homes=tuple(homes), resident_bytes=resident)

    def _left(self, plan: Plan, tier: Tier) -> int:
        """Bytes that a plan leaves free in a tier, host or device; a multiple of 4096.

        If activations are unknown, a quarter of the budget of the tier that computes is left to them.
        """
        budget = self.budgets[tier]
        used = plan.host_bytes if tier is Tier.HOST else plan.device_bytes
        if tier is self.computes_in:
            unknown = plan.activations is None and self.reserve.kept_out_of is None  # else it is reserved
            used += plan.reserved + (budget // _UNKNOWN_SHARE if unknown else 0)
        return max(0, budget - used) // PAGE_ALIGNMENT * PAGE_ALIGNMENT


def _budgets(budget: Budget, available: Available, *, unified: bool) -> dict[Tier, int]:
    found = {Tier.DEVICE: budget.device_bytes, Tier.HOST: budget.host_bytes}
    free = {Tier.DEVICE: available.device, Tier.HOST: available.host}
    sizes = {tier: free[tier] if given is None else given for tier, given in found.items()}
    if unified:
        del sizes[Tier.DEVICE]
    return sizes | ({Tier.NVME: sum(budget.nvme_bytes.values())} if budget.nvme_bytes else {})
