"""Builder: makes a runtime from a plan. It opens the tiers, has pages filled, and connects the components."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from infinity import cpu_adam
from infinity.activations.heap import HeapGuard
from infinity.activations.residual_pages import ResidualPages
from infinity.activations.residual_room import ResidualRoom
from infinity.checkpoint.committer import Committer
from infinity.checkpoint.directory import Checkpoint
from infinity.checkpoint.initial_pages import InitialPages
from infinity.checkpoint.record import Recorder
from infinity.config import Budget
from infinity.errors import ConfigError
from infinity.gradients.device import DeviceUnits
from infinity.gradients.gradients import Gradients
from infinity.gradients.loss_scale import LossScale
from infinity.gradients.sums_in_ram import SumsInRam
from infinity.model.materialize import registered
from infinity.model.paged_parameter import Place
from infinity.model.paged_parameter import adopt as adopt_parameter
from infinity.model.pager import Pager
from infinity.model.placeholder import Placeholders
from infinity.model.tiled_parameter import adopt_tiled, is_paged, paged
from infinity.optim.paged_optimizer import PagedOptimizer, retire
from infinity.optim.scheduler import UpdateScheduler
from infinity.pages.edits import EditTracker
from infinity.pages.gradient_copies import GradientCopies
from infinity.pages.gradient_page import GradientPage
from infinity.pages.health import Health
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.planning.placement import Kind
from infinity.planning.plan import Plan
from infinity.prefetch.engine import PrefetchEngine, Updates
from infinity.prefetch.trace import Trace
from infinity.ranks import SingleRank
from infinity.runtime import Runtime
from infinity.system import machine
from infinity.system.directory import check_directory
from infinity.telemetry.meter import Meter
from infinity.tiers.device import available_bytes, partly_used_bytes

_GUARD_MARGINS = 12 << 20, 16 << 20
"""The heap guard limits the growth of resident memory to the RAM budget less a margin. The margin is a
sixteenth of the budget, but at least and at most as many bytes as these, and at most a quarter of the budget.

What a step allocates between two checks of the guard is not less with a small budget: with 60, 110 and 160
MiB 10M took 66, 111 and 161 MiB with a sixteenth, and 59, 105 and 158 MiB with 10 to 12 MiB.
"""


@dataclass(frozen=True, kw_only=True)
class Components:
    """The connected components of one runtime. `gradients`, `states` and `scheduler` are None for inference.

    The model is not a component: its hooks refer to the runtime, and components may outlive the runtime.
    `committer` and `checkpoint` are None if commits are off.
    """

    plan: Plan
    health: Health
    store: Store
    meter: Meter
    threads: cpu_adam.ThreadPool
    scale: LossScale
    pages: list[ParameterPage]
    edits: EditTracker
    prefetch_engine: PrefetchEngine
    pager: Pager
    gradients: Gradients | None
    states: States | None
    scheduler: UpdateScheduler | None
    ranks: SingleRank
    committer: Committer | None
    checkpoint: Checkpoint | None


def carry_out(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: Budget,
    weights: str | os.PathLike[str] | None = None,
    checkpoint: Checkpoint | None = None,
    ranks: SingleRank,
) -> Runtime:
    """Move the parameters and states of `model` into pages as `plan` says; return the model's runtime.

    plan: a plan made for the same model, optimizer and budget. optimizer, weights: as in `infinity.offload`.
    checkpoint: the directory of commits and the commit to continue; None if commits are off. ranks: connects
    with the other ranks. `checkpoint` and `ranks` are closed with the runtime; `checkpoint` also if this call
    fails.
    """
    heap, filling = _guard(plan), _limited(plan)
    with ExitStack() as cleanup:
        if checkpoint is not None:
            cleanup.callback(checkpoint.close)
        if waiting := bytes_set_aside(plan, bytes_on(model, plan.device)):
            cleanup.callback(_set_aside(model, plan.device, waiting))  # if this call fails
        for directory in budget.nvme_bytes:  # also of a budget that no page needs now
            check_directory(directory)
        adopted = None if checkpoint is None else checkpoint.adopted(plan, budget)
        store = Store(
            plan,
            budget,
            ranks.meter,
            others=_kept_by_others(model, plan.device),
            adopted=adopted,
            locks=None if checkpoint is None else checkpoint.locks,
            shared=bool(ranks.mates or plan.node_cache_bytes),
        )
        cleanup.callback(store.close)
        if checkpoint is not None:
            assert store.nvme is not None
            checkpoint.begin(store.nvme)
        pages = InitialPages(model, plan, store, ranks)
        if checkpoint is not None and checkpoint.saved is not None:
            assert optimizer is not None
            pages.resume(checkpoint, optimizer, budget, streamed=adopted is None)
        else:
            pages.fill(weights, filling)
            if optimizer is not None:
                pages.adopt_states(optimizer)
        threads = cleanup.enter_context(_threads(plan, ranks))
        runtime = _Wiring(pages, checkpoint).runtime(threads, heap)
        cleanup.pop_all()
    if optimizer is not None:
        _take_over(optimizer, runtime)
    return runtime


class _Wiring:
    """Makes the components of a runtime, once its pages have their values, and connects them."""

    def __init__(self, initial: InitialPages, checkpoint: Checkpoint | None) -> None:
        """initial: the pages with their values. checkpoint: the directory of commits; None if commits are
        off.
        """
        self.initial = initial
        self.checkpoint = checkpoint
        self.model, self.plan, self.store = initial.model, initial.plan, initial.store
        self.ranks = initial.ranks

    def runtime(self, threads: cpu_adam.ThreadPool, heap: HeapGuard) -> Runtime:
        """Convert the parameters to paged parameters, and make and connect all components.

        threads: the pool that computes updates. heap: the heap guard.
        """
        checkpoint = self.checkpoint
        plan, store, states = self.plan, self.store, self.initial.states
        dynamic = plan.rule is not None and plan.precision.compute_dtype == torch.float16
        scale = LossScale(dynamic=dynamic, ranks=plan.share.ranks)
        if checkpoint is not None and checkpoint.saved is not None:
            checkpoint.saved.run.set_module_state(self.model, scale, plan.device)
        addresses: dict[int, ParameterPage] = {}
        pages = self._converted(addresses)
        self._move_buffers()
        lock = self.ranks.lock
        health = Health(lock)
        gradients, scheduler = None, None
        if states is not None:
            copies = None if store.landing is None else GradientCopies(store, threads)
            gradient_pages = self._gradient_pages(copies)
            on_device = DeviceUnits(pages, gradient_pages, states, store) if plan.updated_on_device else None
            gradients = Gradients(gradient_pages, store, threads, scale, on_device=on_device, copies=copies)
            scheduler = UpdateScheduler(
                pages, gradients, states, store, threads=threads, on_device=on_device, health=health
            )
        edits = EditTracker(
            pages,
            store,
            states,
            health=health,
            agree=self.ranks.gather,
            free=self.ranks.edited_freely(len(pages)),
        )
        resumed = checkpoint is not None and checkpoint.saved is not None
        engine = PrefetchEngine(
            pages,
            store,
            Trace(),
            meter=self.ranks.meter,
            updates=scheduler or Updates(),
            edits=edits,
            remote=self.initial.remote,
            resumed=resumed,
        )
        residual = None
        if (room := plan.residuals.room) is not None and store.activations is not None:
            residual = ResidualPages(
                ResidualRoom(store, store.activations, store.scratch, health),
                kept_bytes=room.kept,
                window=room.window,
                lock=lock,
            )
        pager = Pager(
            pages,
            addresses,
            engine,
            edits,
            scale=scale,
            health=health,
            heap=heap,
            lock=lock,
            residual=residual,
        )
        for page in pages:
            for index, parameter in enumerate(page.parameters):
                adopt_parameter(parameter, Place(pager, page, index))
        self._adopt_tiled()
        committer = None
        if checkpoint is not None:
            assert states is not None and scheduler is not None and store.nvme is not None
            committer = Committer(
                checkpoint.directory,
                pages=pages,
                states=states,
                store=store,
                scheduler=scheduler,
                edits=edits,
                health=health,
                recorder=Recorder(
                    self.model, plan, pages=pages, states=states, scale=scale, volume=store.nvme.record
                ),
                lock=lock,
                generation=checkpoint.generation,
                superseded=checkpoint.superseded,
                votes=self.ranks.commit_votes(),
                released=self.ranks.released,
            )
        parts = Components(
            plan=plan,
            health=health,
            store=store,
            meter=self.ranks.meter,
            threads=threads,
            scale=scale,
            pages=pages,
            edits=edits,
            prefetch_engine=engine,
            pager=pager,
            gradients=gradients,
            states=states,
            scheduler=scheduler,
            ranks=self.ranks,
            committer=committer,
            checkpoint=checkpoint,
        )
        runtime = Runtime(parts, self.model, self.ranks.serve(parts))
        pager.gradients = runtime.training_step
        return runtime

    def _converted(self, addresses: dict[int, ParameterPage]) -> list[ParameterPage]:
        """Make the parameter pages, and put placeholders in place of the Parameters' own memory.

        Returns the pages as a list, indexed by unit. Permanent pages (see `Plan.stays`) are resident
        afterwards. addresses: an empty dict that the pages keep up to date; it maps the address of each
        resident page's first byte to the page.
        """
        self.placeholders = placeholders = Placeholders(self.plan.device, self._largest())
        pages = [
            ParameterPage(
                unit,
                layout,
                self.initial.homes[unit],
                parameters=self.initial.parameters[unit],
                placeholders=[
                    placeholders.of(each.shape, each.stride, each.dtype) for each in layout.parameters
                ],
                shard=self.initial.shards[unit],
                addresses=addresses,
                permanent=self.plan.stays(unit),
            )
            for unit, layout in enumerate(self.plan.layout.units)
        ]
        for page in pages:
            page.convert()
            if page.permanent:
                page.arrive()
                memory = page.home.memory
                assert memory is not None
                page.land(self.store.mirror(page.home) if page.index in self.plan.mirrored else memory)
        return pages

    def _largest(self) -> int:
        """The most bytes of a placeholder: those of the largest page or tiled parameter."""
        units = [unit.nbytes for unit in self.plan.layout.units]
        return max(*units, *(8 * whole.numel() for whole, _ in self.initial.tiled), 0)

    def _adopt_tiled(self) -> None:
        nbytes = self.plan.tile_sum_bytes
        away = SumsInRam(self.store, nbytes, self.ranks.lock) if nbytes else None
        for whole, tiles in self.initial.tiled:
            shown = self.placeholders.of(whole.shape, whole.stride(), tiles[0].dtype)
            adopt_tiled(whole, tiles, shown, away)

    def _gradient_pages(self, copies: GradientCopies | None) -> dict[int, GradientPage]:
        return {
            unit: GradientPage(unit, layout, self.initial.home(unit, Kind.GRADIENT), self.plan, copies)
            for unit, layout in enumerate(self.plan.layout.units)
        }

    def _move_buffers(self) -> None:
        places = registered(self.model)
        for buffer in list(self.model.buffers()):
            if buffer.device != self.plan.device:
                places[id(buffer)].put(buffer.to(self.plan.device))


def bytes_on(model: nn.Module, device: torch.device) -> int:
    """Bytes of the parameters and buffers of `model` on a CUDA device; 0 for the CPU."""
    return sum(each.nbytes() for each in _storages_on(model, device).values())


def _storages_on(model: nn.Module, device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages on a CUDA device, by address, in which parameters and buffers of `model` lie."""
    if device.type != "cuda":
        return {}
    tensors = (each for each in (*model.parameters(), *model.buffers()) if each.device == device)
    return {each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in tensors)}


def _kept_by_others(model: nn.Module, device: torch.device) -> int:
    """Bytes of torch's segments on a CUDA device that hold tensors other than the model's, with the free
    bytes of partly used segments, which torch's limit counts, too.
    """
    if device.type != "cuda":
        return 0
    others = torch.cuda.memory_allocated(device) - bytes_on(model, device)
    return max(0, others) + partly_used_bytes(device)


def bytes_set_aside(plan: Plan, own: int) -> int:
    """Bytes of a model on a CUDA device that wait in RAM while the device tier is opened and filled, because
    the tier has no room beside them. own: bytes of the model there.
    """
    missing = plan.device_tier_bytes - available_bytes(plan.device) if own else 0
    return missing if 0 < missing <= own else 0  # else the tier itself has no room, and says so


def _set_aside(model: nn.Module, device: torch.device, nbytes: int) -> Callable[[], None]:
    """Move parameters of `model` from a CUDA device to RAM until their storages have at least `nbytes` bytes.
    Returns a function that moves them back.
    """
    moved: list[nn.Parameter] = []
    storages, freed = _storages_on(model, device), 0
    for parameter in model.parameters():
        if freed >= nbytes:
            break
        if parameter.device == device:
            found = storages.pop(parameter.untyped_storage().data_ptr(), None)
            freed += 0 if found is None else found.nbytes()
            moved.append(parameter)
            parameter.data = parameter.data.cpu()

    def give_back() -> None:
        for parameter in moved:
            parameter.data = parameter.data.to(device)

    return give_back


def _threads(plan: Plan, ranks: SingleRank) -> cpu_adam.ThreadPool:
    cpus = ranks.node_share(cpu_adam.default_cpus())
    return cpu_adam.ThreadPool(openmp=plan.device.type == "cpu", cpus=cpus)


def _guard(plan: Plan) -> HeapGuard:
    """Make a runtime's heap guard, which limits the process's resident memory by trimming the heap.

    If the model computes on the CPU and the plan knows the activations, the limit is the process's present
    resident memory plus the RAM budget, less a margin. Otherwise there is no limit. With unknown activations,
    the memory in use can exceed the budget. The guard would then trim the heap again and again without
    reaching the limit: an eager step of 309M parameters with 1540 MiB took 1.2 times as long.
    """
    if plan.device.type != "cpu" or plan.activations is None:
        return HeapGuard(None)
    return _limited(plan)


def _limited(plan: Plan) -> HeapGuard:
    """Make a heap guard that has the limit of `_guard` even if the plan does not know the activations.

    It guards the time while pages are filled, when there are no activations. The values of each parameter
    leave a hole in the heap that is often a little too small for the next parameter's values. Without a
    limit, all holes together were as large as the model in fp32.
    """
    budget = plan.ram_budget
    least, most = _GUARD_MARGINS
    margin = min(max(budget // 16, least), most, budget // 4)
    return HeapGuard(machine.process_memory().resident + budget - margin, margin)


def _take_over(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    rule = runtime.plan.rule
    assert rule is not None
    assert runtime.training_step is not None
    runtime.training_step.attach(optimizer.param_groups)
    runtime.take(PagedOptimizer(optimizer, rule, runtime.training_step))
    retire(optimizer)
    _watch_other_optimizers()
    runtime.resumed()


@functools.cache
def _watch_other_optimizers() -> None:
    """Have torch's optimizers raise ConfigError from now on in steps that would update bf16 or fp16 paged
    parameters without their fp32 masters.
    """
    register_optimizer_step_pre_hook(_refuse_rounded)


def _refuse_rounded(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(isinstance(each, PagedOptimizer) for each in (optimizer, *vars(optimizer).values())):
        return  # a wrapper has the runtime's as an attribute
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        rounded = is_paged(parameter) and parameter.dtype.itemsize < 4
        if rounded and parameter.grad is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}, which infinity.offload was not given, would update "
                f"{next(paged([parameter]))._place.name} in {parameter.dtype}, without its fp32 master.",
                'Give infinity.offload one optimizer with all parameters, or Precision(compute="fp32").',
            )
