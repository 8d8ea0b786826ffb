"""What `offload` returns: the public face of a paged model. Holds the floors below and owns their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from infinity import cpu_adam, machine
from infinity.accumulate import Accumulator
from infinity.config import Size, format_size
from infinity.errors import BudgetError, ConfigError, InfinityError, NonFiniteGradient
from infinity.export import Source, export
from infinity.gradients import Gradients
from infinity.hooks import ModuleHooks, weakly
from infinity.optimizer import PagedOptimizer
from infinity.page import ParameterPage
from infinity.paging import Paging
from infinity.parameter import PagedParameter, Place, take_gradient
from infinity.plan import Plan
from infinity.predict import Prediction
from infinity.prefetch.engine import Engine
from infinity.scaling import LossScale
from infinity.states import States
from infinity.store import Store
from infinity.telemetry import Meter, Phase, Stats
from infinity.timeline import Timeline
from infinity.update import Updater


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The floors of one runtime, wired together. `gradients`, `states` and `updater` only for training."""

    model: nn.Module
    plan: Plan
    store: Store
    meter: Meter
    threads: cpu_adam.ThreadPool
    scale: LossScale
    pages: list[ParameterPage]
    engine: Engine
    paging: Paging
    gradients: Gradients | None
    states: States | None
    updater: Updater | None


class Runtime:
    """A model whose states are pages. Made by `infinity.offload`; a context manager that closes itself."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._closed = False
        self._failure: InfinityError | None = None
        self._optimizer: PagedOptimizer | None = None
        self._accumulator: Accumulator | None = None
        self._groups: dict[tuple[int, int], int] = {}
        self._backward = -1
        self._last_step = time.perf_counter()
        paging = parts.paging
        paging.refuse = self._refuse
        paging.scale = parts.scale
        if parts.states is not None:
            paging.edited = parts.states.edited
        if parts.gradients is not None:
            gradients = parts.gradients
            paging.gradient_of = lambda unit, index: index in gradients.pages[unit].content
            paging.drop_gradient_of = gradients.drop
        self._hooks = ModuleHooks(
            parts.model,
            paging,
            parts.plan.layout.module_units,
            parts.plan.precision.compute_dtype,
            parts.scale,
            check_copy=self._check_copy,
            forward_done=self._forward_done,
        )
        arrived = weakly(self._gradient_arrived)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(arrived)
            for page in parts.pages
            for index, parameter in enumerate(page.parameters)
            if page.layout.parameters[index].trainable
        ]

    # --- the public surface ----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What lies where, and what a step should take; after a first step, what it took."""
        plan, last = self._parts.plan, self._parts.meter.snapshot().last_step
        if plan.activations is None and last is not None:
            return replace(
                plan, activations=self._parts.paging.saved_bytes.peak, prediction=Prediction.of_step(last)
            )
        return plan

    @property
    def optimizer(self) -> PagedOptimizer:
        """The optimizer to step, save, load and give to schedulers. Raises ConfigError without one."""
        if self._optimizer is None:
            raise ConfigError(
                "The model was offloaded without an optimizer.",
                "Give infinity.offload an optimizer to train.",
            )
        return self._optimizer

    @property
    def stats(self) -> Stats:
        """Bytes moved per tier edge, stalls, peaks, hit rate, and what limited the last step."""
        store = self._parts.store
        for name, pool in store.pools.items():
            self._parts.meter.peak(name, pool.counters.peak)
        return self._parts.meter.snapshot()

    @contextmanager
    def timeline(self, to: str | os.PathLike[str] | Timeline) -> Iterator[Timeline]:
        """Inside, what the runtime does is recorded, for Perfetto: in a file of that path, or a Timeline.

        infinity/timeline.py says what is shown; `Timeline.annotate(loss=...)` adds to the last step.
        Raises StorageError, StorageFull where the file cannot be written, ConfigError inside of another.
        """
        with ExitStack() as inside:
            timeline = to if isinstance(to, Timeline) else inside.enter_context(Timeline(to))
            inside.enter_context(self._parts.store.link.timed())
            inside.enter_context(self._parts.meter.recording(timeline))
            yield timeline

    def accumulate(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[[Any], torch.Tensor],
        *,
        together: int | None = None,
        recompute: bool = False,
    ) -> list[torch.Tensor]:
        """`for batch in batches: loss_fn(batch).backward()`, page by page instead of batch by batch.

        Parameters cross the link once for all micro-batches, and gradients have the bits of the plain loop's.
        loss_fn(batch): calls the model and returns the scalar loss, already divided by the number of
        micro-batches. together: how many are under way at one time, with their activations; None: as many as
        the budget has room for. recompute: blocks keep their inputs alone and run again in backward. Returns
        the detached losses. infinity.accumulate.Accumulator.run says what happens where, and when it warns.
        """
        gradients, parts = self._training(), self._parts
        with parts.paging.lock:
            self._refuse()
            if self._accumulator is None:
                self._accumulator = Accumulator(parts.model, parts.plan, parts.paging, gradients)
        return self._accumulator.run(batches, loss_fn, together=together, recompute=recompute)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before.

        The norm (float32 scalar) is summed in float64; the factor is max_norm / (norm + 1e-6), as
        torch.nn.utils.clip_grad_norm_ has it. A norm that is not finite scales nothing: `step` decides.
        """
        gradients = self._training()
        with self._parts.paging.lock:
            self._refuse()
            norm = gradients.norm()
            gradients.clip(float(max_norm), norm)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in host RAM; None if there is none.

        Shape and strides are the parameter's, the dtype is the accumulation's (`Precision.accumulate`).
        """
        gradients = self._training()
        place = self._place(parameter)
        with self._parts.paging.lock:
            self._refuse()
            return gradients.read(place.page.index, place.index)

    @contextmanager
    def full_parameters(self, module: nn.Module) -> Iterator[None]:
        """Inside, all parameters of `module` are resident, to be read or edited in place.

        Edits reach the fp32 masters. Raises BudgetError where they do not fit together (`needed`).
        """
        units = {
            parameter._place.page.index
            for parameter in module.parameters()
            if isinstance(parameter, PagedParameter) and parameter._place.pager is self._parts.paging
        }
        with self._parts.paging.whole(sorted(units)):
            yield

    def save(self, path: str | None = None, *, state: Mapping[str, Any] | None = None) -> NoReturn:
        """Commits are not there yet: raises ConfigError."""
        raise ConfigError(
            "Durable commits are not there yet.",
            "Save model.state_dict() and runtime.optimizer.state_dict() with torch.save, if they fit in RAM.",
        )

    def load(self, path: str | None = None) -> NoReturn:
        """Commits are not there yet: raises ConfigError."""
        raise ConfigError(
            "Durable commits are not there yet.",
            "Load with model.load_state_dict() and runtime.optimizer.load_state_dict().",
        )

    def export(self, path: str | os.PathLike[str], *, dtype: str = "compute", shard: Size = "4GiB") -> None:
        """Write the model to the directory `path` in Hugging Face's layout; see infinity.export.export."""
        parts, compute = self._parts, self._parts.plan.precision.compute_dtype
        with parts.paging.lock:
            self._refuse()
            if parts.updater is not None:
                parts.updater.complete_all()
            parts.paging.sync_edits()
            source = Source(parts.model, parts.paging, parts.store, parts.states, compute)
            export(source, path, dtype=dtype, shard=shard)

    def close(self) -> None:
        """Wait for what is under way, give all memory and files back. Again: does nothing.

        The model's parameters cannot be used afterwards: copy its state_dict() before, if it is wanted.
        """
        parts = self._parts
        with parts.paging.lock:
            if self._closed:
                return
            self._closed = True
            parts.paging.forwards.prune()
            with ExitStack() as ends:  # from the last to the first, each also if one before it is interrupted
                ends.callback(parts.store.close)
                ends.callback(parts.threads.close)
                if parts.gradients is not None:
                    ends.callback(parts.gradients.clear)
                ends.callback(parts.paging.forget)
                for page in parts.pages:
                    ends.callback(page.end)
                ends.callback(parts.engine.abandon)
                if parts.updater is not None:
                    ends.callback(parts.updater.abandon)
                for handle in self._handles:
                    ends.callback(handle.remove)
                ends.callback(self._hooks.remove)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the optimizer's backend -----------------------------------------------------------------------

    def attach(self, optimizer: PagedOptimizer, groups: dict[tuple[int, int], int]) -> None:
        """Called once by `offload`. groups: (unit, parameter) -> index of its param group."""
        self._optimizer = optimizer
        self._groups = groups

    def step(self) -> None:
        """See PagedOptimizer.step. Raises ConfigError without a gradient, NonFiniteGradient."""
        parts, gradients = self._parts, self._training()
        with parts.paging.lock:
            self._refuse()
            parts.meter.entered(Phase.STEP)
            parts.store.settle()  # here a gradient that did not reach its home costs this step only
            if not gradients.any:
                raise ConfigError(
                    "step() was called and no parameter has a gradient.",
                    "Call loss.backward() before it, and zero_grad() after it.",
                )
            finite = gradients.finite()
            if finite:
                self._update()
            elif not parts.scale.dynamic:
                raise NonFiniteGradient(
                    "A gradient is infinite or NaN; nothing was updated.",
                    "Call zero_grad() and go on with another batch, or lower the learning rate or clip.",
                )
            else:
                parts.meter.skipped()
            parts.scale.step_was(finite=finite)
            if parts.scale.dynamic:
                parts.meter.scaled(parts.scale.value)
            now = time.perf_counter()
            parts.meter.stepped(now - self._last_step)
            parts.meter.entered(Phase.BETWEEN)
            self._last_step = now

    def zero_grad(self) -> None:
        """Forget all gradients."""
        with self._parts.paging.lock:
            self._refuse()
            self._parts.paging.forwards.prune()
            self._training().clear()

    def has_state(self, parameter: torch.Tensor) -> bool:
        """See optimizer.UpdateBackend."""
        place = self._place(parameter)
        states = self._parts.states
        page = states.pages.get(place.page.index) if states is not None else None
        if states is None or page is None:
            return False
        kept = states.rule.counts_steps or parameter.dtype != torch.float32
        return (
            states.rule.from_the_start
            or place.index in page.has_moments
            or bool(page.steps[place.index] and kept)
        )

    def read_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """See optimizer.UpdateBackend."""
        place, states = self._place(parameter), self._states()
        with self._parts.paging.lock:
            self._refuse()
            self._complete(place.page.index)
            found = states.read(place.page.index, place.index)
            layout = place.page.layout.parameters[place.index]
            stepped = states.pages[place.page.index].steps[place.index]
            if (found or stepped) and layout.trainable and parameter.dtype != torch.float32:
                master = states.master(place.page.index, place.index, self._values(place))
                found["master"] = master.as_strided(layout.shape, layout.stride)
            return found

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """See optimizer.UpdateBackend."""
        place, states = self._place(parameter), self._states()
        with self._parts.paging.lock:
            self._refuse()
            self._complete(place.page.index)
            states.write(place.page.index, place.index, state)
            if "master" in state and parameter.dtype != torch.float32:
                states.restore(place.page.index, place.index, self._values(place), state["master"])

    def check_capacity(self, nbytes: int) -> None:
        """See optimizer.UpdateBackend."""
        self._refuse()
        usable = machine.memory().usable
        if nbytes > usable:
            raise BudgetError(
                f"A copy of {format_size(nbytes)} was asked for, and {format_size(usable)} of RAM are free.",
                "Read single ones instead (runtime.optimizer.state[p], runtime.full_parameters(module)).",
                needed=nbytes,
            )

    # --- what hooks call -------------------------------------------------------------------------------

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        gradient = take_gradient(parameter)
        place = self._place(parameter)
        with self._parts.paging.lock:
            self._refuse()
            gradients = self._training()
            if gradient is not None:
                self._complete(place.page.index)
                self._parts.paging.heap.allocated(gradient.nbytes)
                add = gradients.add if self._accumulator is None else self._accumulator.add
                add(place.page.index, place.index, gradient.detach())
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                self._parts.meter.entered(Phase.BACKWARD)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        with self._parts.paging.lock:
            self._backward = -1
            if not self._closed:
                self._training().finish()
            self._parts.meter.entered(Phase.BETWEEN)

    def _forward_done(self) -> None:
        if self._parts.gradients is None:
            with self._parts.paging.lock:
                self._parts.engine.step_done()

    def _check_copy(self, module: nn.Module) -> None:
        self.check_capacity(sum(each.numel() * each.element_size() for each in module.parameters()))

    # --- inside ----------------------------------------------------------------------------------------

    def _update(self) -> None:
        """All or poisoned: an update that failed half way cannot be taken back or repeated."""
        parts = self._parts
        assert parts.updater is not None
        if not parts.store.device.shares_host:
            parts.engine.land_all()  # what arrives now would miss the update
        parts.paging.sync_edits()
        order = parts.engine.next_step()
        try:
            parts.updater.step(self._group_of, order, parts.paging.exposed)
        except BaseException as error:
            self._failure = (
                error.again()
                if isinstance(error, InfinityError)
                else ConfigError(
                    "An update was interrupted half way.", "Load the last checkpoint into a new runtime."
                )
            )
            raise
        parts.paging.updated()
        parts.engine.look_ahead()

    def _complete(self, unit: int) -> None:
        assert self._parts.updater is not None
        self._parts.updater.complete(unit)

    def _group_of(self, unit: int, parameter: int) -> Mapping[str, Any] | None:
        index = self._groups.get((unit, parameter))
        return None if index is None else self.optimizer.param_groups[index]

    def _values(self, place: Place) -> torch.Tensor:
        """A parameter's values in RAM, flat, in memory order."""
        page = place.page
        self._parts.paging.write_back(page)
        layout = page.layout.parameters[place.index]
        nbytes = layout.numel * layout.dtype.itemsize
        return self._parts.store.fetch(page.home, page.start(place.index), nbytes).view(layout.dtype)

    def _place(self, parameter: torch.Tensor) -> Place:
        if isinstance(parameter, PagedParameter) and parameter._place.pager is self._parts.paging:
            return parameter._place
        raise ConfigError(
            "A tensor was given that is no parameter of the offloaded model.",
            "Give one of model.parameters().",
        )

    def _training(self) -> Gradients:
        if self._parts.gradients is None:
            raise ConfigError(
                "The model was offloaded without an optimizer, so it has no gradients.",
                "Give infinity.offload an optimizer to train, or run the model under torch.no_grad().",
            )
        return self._parts.gradients

    def _states(self) -> States:
        self._training()
        assert self._parts.states is not None
        return self._parts.states

    def _refuse(self) -> None:
        if self._closed:
            raise ConfigError(
                "The runtime of this model is closed, and its parameters are gone with it.",
                "Use the model before runtime.close(); copy its state_dict() if it is wanted afterwards.",
            )
        updater = self._parts.updater
        failure = self._failure or (updater.failure if updater is not None else None)
        if failure is not None:
            raise failure.again()
