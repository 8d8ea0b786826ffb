"""Training step: the core of `runtime.optimizer`, which takes gradients, makes steps, and reads and writes
states of single parameters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.accumulation.vertical import Accumulator
from infinity.components import Components
from infinity.config import format_size
from infinity.errors import ConfigError, InfinityError, NonFiniteGradient
from infinity.model.paged_parameter import PagedParameter, Place, take_gradient
from infinity.optim.decision import GroupOf
from infinity.optim.eager import EagerStep
from infinity.telemetry.stats import Phase
from infinity.tiers import Tier


class TrainingStep:
    """The training half of a runtime; it implements OptimizerCore."""

    def __init__(self, parts: Components, check_capacity: Callable[[int], None]) -> None:
        """check_capacity: see OptimizerCore."""
        assert parts.gradients is not None and parts.states is not None and parts.updater is not None
        self.check_capacity = check_capacity
        self._components = parts
        self._refuse = parts.health.check
        self._pager = parts.pager
        self._edits = parts.edits
        self._gradients = parts.gradients
        self._states = parts.states
        self._updater = parts.updater
        self._param_groups: Sequence[Mapping[str, Any]] = ()
        """The optimizer's own list, so that changes to it are seen."""
        self._groups: dict[tuple[int, int], int] = {}
        self._backward = -1
        self._last_step = time.perf_counter()
        self._knows_activations = parts.plan.activations is not None or parts.plan.device.type != "cpu"
        """Whether the plan knew activations, or a cap keeps them within the budget, as on CUDA."""
        self._eager: EagerStep | None = None
        if parts.plan.update == "eager":
            assert parts.plan.accumulation is not None
            self._eager = EagerStep(
                parts.pages,
                parts.gradients,
                parts.states.rule,
                accumulation=parts.plan.accumulation,
            )

    def attach(self, param_groups: Sequence[Mapping[str, Any]], groups: dict[tuple[int, int], int]) -> None:
        """Set the param groups. Called once, by `offload`.

        groups: (unit, parameter) -> index of its param group.
        """
        self._param_groups = param_groups
        self._groups = groups

    def clip(self, max_norm: float) -> float:
        """See Runtime.clip_grad_norm_. Raises ConfigError with eager updates."""
        with self._pager.lock:
            self._refuse()
            if self._eager is not None:
                raise ConfigError(
                    "clip_grad_norm_ was called, but eager updates have used the gradients to measure.",
                    'Offload with update="lazy" to clip.',
                )
            norm = self._gradients.norm()
            self._gradients.clip(max_norm, norm)
        return norm

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See Runtime.grad."""
        place = self._place(parameter)
        with self._pager.lock:
            self._refuse()
            return self._gradients.read(place.page.index, place.index)

    def step(self) -> None:
        """See PagedOptimizer.step. Raises ConfigError without a gradient, NonFiniteGradient."""
        parts, gradients = self._components, self._gradients
        with self._pager.lock:
            self._refuse()
            parts.meter.entered(Phase.STEP)
            parts.store.settle()  # raises here if a gradient was not written home: only this step is lost
            if not gradients.any:
                raise ConfigError(
                    "step() was called and no parameter has a gradient.",
                    "Call loss.backward() before it, and zero_grad() after it.",
                )
            if self._eager is not None:
                self._eager.step(self._param_groups)
            finite = gradients.finite()
            if finite:
                self._update()
            elif not parts.scale.dynamic:
                done = "nothing was updated" if self._eager is None else self._eager.done
                raise NonFiniteGradient(
                    f"A gradient is infinite or NaN; {done}.",
                    "Call zero_grad() and go on with another batch, or lower the learning rate or clip.",
                )
            else:
                parts.meter.skipped()
            if self._eager is not None:
                self._eager.stepped()
            parts.scale.step_was(finite=finite)
            if parts.scale.dynamic:
                parts.meter.scaled(parts.scale.value)
            now = time.perf_counter()
            parts.meter.stepped(now - self._last_step)
            parts.meter.entered(Phase.BETWEEN)
            self._last_step = now
        if not self._knows_activations:
            self._knows_activations = True
            self._check_activations()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        with self._pager.lock:
            self._refuse()
            self._pager.forwards.prune()
            self._gradients.clear()
            if self._eager is not None:
                self._eager.clear()

    def has_state(self, parameter: torch.Tensor) -> bool:
        """See OptimizerCore."""
        place = self._place(parameter)
        states = self._states
        page = states.pages.get(place.page.index)
        if page is None:
            return False
        kept = states.rule.counts_steps or parameter.dtype != torch.float32
        return (
            states.rule.from_the_start
            or place.index in page.has_moments
            or bool(page.steps[place.index] and kept)
        )

    def read_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """See OptimizerCore."""
        place, states = self._place(parameter), self._states
        with self._pager.lock:
            self._refuse()
            self._updater.complete(place.page.index)
            found = states.read(place.page.index, place.index)
            layout = place.page.layout.parameters[place.index]
            stepped = states.pages[place.page.index].steps[place.index]
            if (found or stepped) and layout.trainable and parameter.dtype != torch.float32:
                master = states.master(place.page.index, place.index, self._values(place))
                found["master"] = master.as_strided(layout.shape, layout.stride)
            return found

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """See OptimizerCore."""
        place, states = self._place(parameter), self._states
        with self._pager.lock:
            self._refuse()
            self._updater.complete(place.page.index)
            states.write(place.page.index, place.index, state)
            if "master" in state and parameter.dtype != torch.float32:
                states.restore(place.page.index, place.index, self._values(place), state["master"])

    # --- what hooks call -------------------------------------------------------------------------------

    def add(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Add a new gradient to a parameter's; an eager step's last one for a unit updates the unit."""
        self._updater.accumulate(unit, parameter, gradient)
        if self._eager is not None:
            self._update_early(unit)

    def gradient_arrived(self, parameter: torch.Tensor, accumulator: Accumulator | None) -> None:
        """Take a parameter's complete gradient from autograd.

        accumulator: the one through which it goes, which orders gradients of micro-batches; None: none.
        """
        gradient = take_gradient(parameter)
        place = self._place(parameter)
        if gradient is not None:
            self._gradients.await_room(place.page.index, place.index, gradient)
        with self._pager.lock:
            self._refuse()
            if gradient is not None:
                self._updater.complete(place.page.index)
                add = self.add if accumulator is None else accumulator.add
                add(place.page.index, place.index, gradient.detach())
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                self._components.meter.entered(Phase.BACKWARD)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        with self._pager.lock:
            self._backward = -1
            self._gradients.staged.finish()
            self._components.meter.entered(Phase.BETWEEN)

    # --- inside ----------------------------------------------------------------------------------------

    def _check_activations(self) -> None:
        """Warn if the activations of the first step exceed the budget, which the plan filled with pages."""
        plan, saved = self._components.plan, self._pager.saved_bytes.peak
        beyond = plan.shortfall(saved)
        if beyond:
            tier = Tier.HOST if plan.unified else Tier.DEVICE
            budget = f"the {tier.value} budget of {format_size(plan.budgets[tier])}"
            warnings.warn(
                f"Saved activations take {format_size(saved)}, and the plan knew nothing of them: memory "
                f"exceeds {budget} by {format_size(beyond)}. Give infinity.offload example_inputs=, and the "
                "plan leaves room for them.",
                stacklevel=4,
            )

    def _update(self) -> None:
        """Update all units that are not updated eagerly."""
        parts = self._components
        if not parts.store.device.shares_host:
            parts.prefetch_engine.land_all()  # a page that arrives now would miss the update
        self._edits.sync_edits()
        order = parts.prefetch_engine.next_step()
        with self._all_or_poisoned():
            self._updater.step(self._group_of(self._param_groups), order, self._edits.exposed)
        self._edits.updated()
        parts.prefetch_engine.look_ahead()

    def _update_early(self, unit: int) -> None:
        """Update a unit if it has all gradients of the step."""
        eager, parts = self._eager, self._components
        assert eager is not None
        if not eager.admits(unit):
            return
        groups = eager.options(self._param_groups)
        if not parts.store.device.shares_host:
            parts.prefetch_engine.land(unit, for_host=True)
        self._edits.write_back(parts.pages[unit])
        with self._all_or_poisoned():
            self._updater.begin_early(unit, self._group_of(groups), self._edits.exposed)
        self._edits.updated(unit)

    @contextmanager
    def _all_or_poisoned(self) -> Iterator[None]:
        """Context of an update, which loses the runtime if it fails: it cannot be undone or repeated."""
        try:
            yield
        except BaseException as error:
            self._components.health.lose(
                error
                if isinstance(error, InfinityError)
                else ConfigError(
                    "An update was interrupted half way.", "Load the last checkpoint into a new runtime."
                )
            )
            raise

    def _group_of(self, groups: Sequence[Mapping[str, Any]]) -> GroupOf:
        """The function from (unit, parameter) to its group. groups: the optimizer's, or copies of them."""

        def group_of(unit: int, parameter: int) -> Mapping[str, Any] | None:
            index = self._groups.get((unit, parameter))
            return None if index is None else groups[index]

        return group_of

    def _values(self, place: Place) -> torch.Tensor:
        """A parameter's values in RAM, (numel,) in memory order."""
        page = place.page
        self._edits.write_back(page)
        layout = page.layout.parameters[place.index]
        nbytes = layout.numel * layout.dtype.itemsize
        return self._components.store.fetch(page.home, page.start(place.index), nbytes).view(layout.dtype)

    def _place(self, parameter: torch.Tensor) -> Place:
        if isinstance(parameter, PagedParameter) and parameter._place.pager is self._pager:
            return parameter._place
        raise ConfigError(
            "A tensor was given that is no parameter of the offloaded model.",
            "Give one of model.parameters().",
        )
