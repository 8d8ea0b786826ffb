"""Runtime: the public interface of a paged model, which `offload` returns and which owns its components."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from infinity.accumulation.vertical import Accumulator
from infinity.checkpoint.export import Source, export
from infinity.components import Components
from infinity.config import Size, format_size
from infinity.errors import BudgetError, ConfigError
from infinity.model.hooks import ModuleHooks, weakly
from infinity.model.paged_parameter import PagedParameter
from infinity.optim.paged_optimizer import PagedOptimizer
from infinity.planning.cost_model import Prediction
from infinity.planning.plan import Plan
from infinity.system import machine
from infinity.system.closing import Closing
from infinity.telemetry.stats import Stats
from infinity.telemetry.timeline import Timeline
from infinity.training_step import TrainingStep


class Runtime(Closing):
    """A model whose states are pages. Made by `infinity.offload`; a context manager that closes itself."""

    def __init__(self, parts: Components) -> None:
        self._components = parts
        self._refuse = parts.health.check
        self._accumulator: Accumulator | None = None
        """The accumulator that gradients go through; None before the first `accumulate`."""
        self._optimizer: PagedOptimizer | None = None
        self.training_step: TrainingStep | None = None
        """The core of `runtime.optimizer`; None for inference."""
        self._hooks = ModuleHooks(
            parts.model,
            parts.pager,
            parts.plan.layout.module_units,
            parts.plan.precision.compute_dtype,
            parts.scale,
            check_copy=self._check_copy,
            forward_done=self._forward_done,
        )
        if parts.gradients is not None:
            self.training_step = TrainingStep(parts, self._check_capacity)
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
        """The plan: homes of states, and the predicted seconds of a step.

        After the first step the measured seconds of the last step replace the predicted ones, and measured
        activations those that no example inputs told.
        """
        plan, last = self._components.plan, self._components.meter.snapshot().last_step
        if last is None:
            return plan
        activations = (
            self._components.pager.saved_bytes.peak if plan.activations is None else plan.activations
        )
        return replace(plan, activations=activations, prediction=Prediction.of_step(last))

    @property
    def optimizer(self) -> PagedOptimizer:
        """The optimizer to step, save, load and give to schedulers. Raises ConfigError without one."""
        if self.training_step is None:
            raise ConfigError(
                "The model was offloaded without an optimizer.",
                "Give infinity.offload an optimizer to train.",
            )
        assert self._optimizer is not None
        return self._optimizer

    def take(self, optimizer: PagedOptimizer) -> None:
        """Set the optimizer that `optimizer` returns. Called once, by `offload`."""
        self._optimizer = optimizer

    @property
    def stats(self) -> Stats:
        """Bytes moved per tier edge, stalls, peaks, hit rate, and what limited the last step."""
        store = self._components.store
        for name, pool in store.pools.items():
            self._components.meter.peak(name, pool.counters.peak)
        return self._components.meter.snapshot()

    @contextmanager
    def timeline(self, to: str | os.PathLike[str] | Timeline) -> Iterator[Timeline]:
        """Context in which the runtime's work is recorded for Perfetto, in a file of that path or a Timeline.

        infinity/telemetry/timeline.py says what is shown; `Timeline.annotate(loss=...)` adds to the last
        step. Raises StorageError or StorageFull if the file cannot be written, ConfigError inside of another
        such context.
        """
        with ExitStack() as inside:
            timeline = to if isinstance(to, Timeline) else inside.enter_context(Timeline(to))
            inside.enter_context(self._components.store.link.timed())
            inside.enter_context(self._components.meter.recording(timeline))
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
        micro-batches. together: number of micro-batches under way at one time, with their activations; None:
        as many as the budget has room for. recompute: blocks keep only their inputs and run again in
        backward. Returns the detached losses. See infinity.accumulation.vertical.Accumulator.run for details
        and warnings.
        """
        training_step, parts = self._training(), self._components
        with parts.pager.lock:
            self._refuse()
            if self._accumulator is None:
                assert parts.gradients is not None
                self._accumulator = Accumulator(
                    parts.model, parts.plan, parts.pager, parts.gradients, training_step.add
                )
        return self._accumulator.run(batches, loss_fn, together=together, recompute=recompute)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before.

        The norm (float32 scalar) is summed in float64; the factor is max_norm / (norm + 1e-6), as
        in torch.nn.utils.clip_grad_norm_. A norm that is not finite scales nothing: `step` decides.
        Raises ConfigError with eager updates.
        """
        norm = self._training().clip(float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of a parameter's gradient, unscaled and clipped, in host RAM; None if there is none.

        Shape and strides are the parameter's, the dtype is the accumulation's (`Precision.accumulate`).
        """
        return self._training().gradient(parameter)

    @contextmanager
    def full_parameters(self, module: nn.Module) -> Iterator[None]:
        """Context in which all parameters of `module` are resident, to be read or edited in place.

        Edits reach the fp32 masters. Raises BudgetError if they do not fit together (`needed`).
        """
        units = {
            parameter._place.page.index
            for parameter in module.parameters()
            if isinstance(parameter, PagedParameter) and parameter._place.pager is self._components.pager
        }
        with self._components.pager.whole(sorted(units)):
            yield

    def save(self, path: str | None = None, *, state: Mapping[str, Any] | None = None) -> NoReturn:
        """Raises ConfigError always: checkpoints of a run cannot be written yet."""
        raise ConfigError(
            "Durable commits are not there yet.",
            "Save model.state_dict() and runtime.optimizer.state_dict() with torch.save, if they fit in RAM.",
        )

    def load(self, path: str | None = None) -> NoReturn:
        """Raises ConfigError: commits do not exist yet."""
        raise ConfigError(
            "Durable commits are not there yet.",
            "Load with model.load_state_dict() and runtime.optimizer.load_state_dict().",
        )

    def export(self, path: str | os.PathLike[str], *, dtype: str = "compute", shard: Size = "4GiB") -> None:
        """Write the model to the directory `path` in Hugging Face's layout.

        See infinity.checkpoint.export.export.
        """
        parts, compute = self._components, self._components.plan.precision.compute_dtype
        with parts.pager.lock:
            self._refuse()
            if parts.updater is not None:
                parts.updater.complete_all()
            parts.edits.sync_edits()
            source = Source(parts.model, parts.pager, parts.store, parts.states, compute)
            export(source, path, dtype=dtype, shard=shard)

    def close(self) -> None:
        """Wait for what is under way, and give all memory and files back. A second call does nothing.

        The model's parameters cannot be used afterwards: copy its state_dict() before, if it is needed.
        """
        parts = self._components
        with parts.pager.lock:
            if parts.health.closed:
                return
            parts.health.closed = True
            parts.pager.forwards.prune()
            with ExitStack() as ends:  # run from the last to the first, each even if another is interrupted
                ends.callback(parts.store.close)
                ends.callback(parts.threads.close)
                if parts.gradients is not None:
                    ends.callback(parts.gradients.close)
                ends.callback(parts.pager.forget)
                for page in parts.pages:
                    ends.callback(page.end)
                ends.callback(parts.prefetch_engine.abandon)
                if parts.updater is not None:
                    ends.callback(parts.updater.abandon)
                for handle in self._handles:
                    ends.callback(handle.remove)
                ends.callback(self._hooks.remove)

    # --- what hooks call -------------------------------------------------------------------------------

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        self._training().gradient_arrived(parameter, self._accumulator)

    def _forward_done(self) -> None:
        if self._components.gradients is None:
            with self._components.pager.lock:
                self._components.prefetch_engine.step_done()

    def _check_copy(self, module: nn.Module) -> None:
        self._check_capacity(sum(each.numel() * each.element_size() for each in module.parameters()))

    # --- inside ----------------------------------------------------------------------------------------

    def _check_capacity(self, nbytes: int) -> None:
        """See OptimizerCore."""
        self._refuse()
        usable = machine.memory().usable
        if nbytes > usable:
            raise BudgetError(
                f"A copy of {format_size(nbytes)} was asked for, and {format_size(usable)} of RAM are free.",
                "Read single ones instead (runtime.optimizer.state[p], runtime.full_parameters(module)).",
                needed=nbytes,
            )

    def _training(self) -> TrainingStep:
        if self.training_step is None:
            raise ConfigError(
                "The model was offloaded without an optimizer, so it has no gradients.",
                "Give infinity.offload an optimizer to train, or run the model under torch.no_grad().",
            )
        return self.training_step
