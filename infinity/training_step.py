"""Training step: takes gradients from autograd, updates parameters, and reads and writes optimizer states.

The methods of `runtime.optimizer`, and the hooks that autograd calls with gradients, call this module.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from infinity.accumulation.vertical import Accumulator
from infinity.config import format_size
from infinity.errors import ConfigError, InfinityError, NonFiniteGradient
from infinity.formats.encodings import rounded
from infinity.formats.muon import Muon
from infinity.gradients.exact_sum import ExactSum
from infinity.layout.strides import in_memory_order
from infinity.model.paged_parameter import PagedParameter, Place, raw_gradient, take_gradient
from infinity.model.tiled_parameter import TiledParameter, by_tile, join_states
from infinity.optim.decision import EagerStep, Speculation, StepOptions
from infinity.pages.optimizer_page import state_digest
from infinity.prefetch.trace import AccessKind
from infinity.ranks import GRADIENT_CURE, SingleStep
from infinity.telemetry.stats import Phase
from infinity.tiers import Tier
from infinity.tiers.device import peak_bytes

if TYPE_CHECKING:
    from infinity.build import Components

_CHECKED = 1 << 20
"""The fewest bytes of a master whose copy is checked against free RAM. The check takes 0.2 ms."""


class TrainingStep:
    """A runtime's operations on gradients, updates and optimizer states, which only training needs.

    It implements the protocol OptimizerCore (infinity/optim/paged_optimizer.py), by which `runtime.optimizer`
    updates parameters and reads and writes their states.
    """

    def __init__(self, parts: Components, ranks: SingleStep, check_capacity: Callable[[int], None]) -> None:
        """parts: the runtime's components. ranks: the step's view of the ranks. check_capacity: called before
        optimizer states are copied for the user, with their number of bytes; raises BudgetError if the copies
        do not fit in RAM.
        """
        assert parts.gradients is not None and parts.states is not None and parts.scheduler is not None
        self.check_capacity = check_capacity
        self._components = parts
        self._ranks = ranks
        self._refuse = parts.health.check
        self._pager = parts.pager
        self._edits = parts.edits
        self._gradients = parts.gradients
        self._states = parts.states
        self._scheduler = parts.scheduler
        self._param_groups: Sequence[Mapping[str, Any]] = ()
        """The param groups of the user's optimizer. The list is not a copy, so later changes take effect."""
        self._groups: dict[tuple[int, int], int] = {}
        """(index of a unit, index of a parameter in it) -> index of its param group, for the groups in
        `_members`.
        """
        self._members: list[list[int]] = []
        """For each param group, id() of its parameters, when `_groups` was made."""
        self._backward = -1
        self._trained = [
            parameter
            for page in parts.pages
            for index, parameter in enumerate(page.parameters)
            if page.layout.parameters[index].trainable
        ]
        self._times_forgotten = 0
        """Number of times that all gradients were forgotten."""
        self._times_dropped: Counter[tuple[int, int]] = Counter()
        """(unit, index of a parameter) -> number of times that its own gradient was forgotten."""
        self.open = False
        """Whether gradients have come for a step that `step` has not ended yet."""
        self._last_step = time.perf_counter()
        self._knows_activations = parts.plan.activations is not None
        """False until the first step has compared its activations with the room that the plan has left for
        them. True from the start if the plan knew the activations.
        """
        self._eager: EagerStep | None = None
        if parts.plan.update == "eager":
            assert parts.plan.accumulation is not None
            self._eager = EagerStep(
                parts.pages,
                parts.gradients,
                parts.states.rule,
                accumulation=parts.plan.accumulation,
            )
        self._speculation: Speculation | None = None
        if parts.plan.speculative:
            assert parts.plan.accumulation is not None
            self._speculation = Speculation(parts.pages, parts.gradients, parts.plan.accumulation)

    def attach(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the param groups of the user's optimizer. Called once, by `infinity.offload`."""
        self._param_groups = param_groups

    def clip(self, max_norm: float) -> float:
        """Scale all gradients to a global 2-norm of at most `max_norm`; returns the norm before scaling.

        Raises ConfigError if updates are eager. Runtime.clip_grad_norm_ says more.
        """
        with self._pager.lock:
            self._refuse()
            if self._eager is not None:
                raise ConfigError(
                    "clip_grad_norm_ was called, but eager updates have used the gradients that it measures.",
                    'Offload with update="lazy" to clip.',
                )
            self._check_slots()
            norm = self._agreed_norm("clip_grad_norm_", self._having)
            self._gradients.clip(max_norm, norm)
        return norm

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Copy a parameter's gradient to RAM and return the copy; None if there is no gradient.

        The copy is divided by the loss scale, and clipped if `clip` was called.
        """
        if isinstance(parameter, TiledParameter):
            return parameter.read_gradient()
        place = self._place(parameter)
        return self.read_gradient(place.page.index, place.index)

    def read_gradient(self, unit: int, parameter: int) -> torch.Tensor | None:
        """Copy a gradient to RAM as `gradient` does. parameter: the parameter's index in its unit."""
        with self._pager.lock:
            self._refuse()
            self._check_slots()
            return self._ranks.gradient(unit, parameter)

    def gradient_norm(self, unit: int, parameter: int) -> float:
        """Compute the 2-norm of a parameter's gradient from the sums of squares in its page, without reading
        the gradient. With several ranks, at the first call after a backward all ranks agree on the sums of
        all gradients.
        """
        return self.norm_of_gradients([(unit, parameter)])

    def norm_of_gradients(self, keys: Sequence[tuple[int, int]]) -> float:
        """Compute the 2-norm of the gradients of `keys`, (unit, index), which have one factor, together, as
        `gradient_norm` does.
        """
        gradients, squares = self._gradients, ExactSum()
        with self._pager.lock:
            self._refuse()
            self._check_slots()
            for key in keys:
                squares.merge(self._ranks.squares_of(*key, self._settle))
            return gradients.norm_of(squares, gradients.unscale_of(*keys[0]))

    def scale_gradient(self, unit: int, parameter: int, factor: float) -> None:
        """Multiply a parameter's gradient by `factor`. The page does not change; `step` applies the factor.

        Raises ConfigError if updates are eager. `step` raises ConfigError if gradients have different
        factors.
        """
        with self._pager.lock:
            self._refuse()
            if self._eager is not None:
                raise ConfigError(
                    "A gradient was multiplied by a number, but eager updates have used gradients.",
                    'Offload with update="lazy" to clip or scale gradients, or scale the loss.',
                )
            self._gradients.scale(unit, parameter, factor)

    def set_gradient(self, unit: int, parameter: int, value: torch.Tensor) -> None:
        """Replace a parameter's gradient, as `p.grad = value` does. A gradient of zeros takes no memory.

        value: floats of the parameter's shape, as the optimizer is to see them. Raises ConfigError if updates
        are eager, if it is called inside of a backward, or if there are several ranks and `value` is not all
        zeros.
        """
        name = self._components.pages[unit].layout.parameters[parameter].names[0]
        if self._eager is not None:
            raise ConfigError(
                f"The gradient of {name} was set, but eager updates use gradients when they come.",
                f'Offload with update="lazy" to set gradients. {GRADIENT_CURE}',
            )
        if torch._C._current_graph_task_id() != -1:
            raise ConfigError(f"The gradient of {name} was set inside of a backward.", GRADIENT_CURE)
        zeros = not value.any()
        if not zeros:
            self._ranks.check_settable(unit, parameter)
        gradients = self._gradients
        self.drop_gradient(unit, parameter, zeros=zeros)
        if zeros:
            return
        with self._pager.lock:
            value = gradients.stored_form(unit, parameter, value)
        with self._pager.lock:
            self._check_masters("gradients")
            self.open = True
            self._scheduler.complete(unit)
            self._scheduler.accumulate(unit, parameter, value)
            gradients.staged.finish()
        gradients.await_limit()

    def step(self) -> bool:
        """Update every parameter that has a gradient. Returns False if the update was skipped.

        Raises ConfigError if no parameter has a gradient, or if gradients have different factors. If a
        gradient is infinite or NaN, the update is skipped where the loss scale is dynamic, and
        NonFiniteGradient is raised where it is not.
        """
        try:
            return self._step()
        finally:
            if self._eager is not None and self._gradients.lost:
                self._eager.ended = True  # `step` cannot succeed, and `zero_grad` may go on

    def _step(self) -> bool:
        parts, gradients = self._components, self._gradients
        with self._pager.lock:
            self._refuse()
            self._check_masters("step()")
            parts.meter.entered(Phase.STEP)
            self._check_slots()
            norm = self._agreed_norm("step()", self._to_be_updated)
            if not gradients.any:
                gradients.check()  # the only one may be lost
                raise ConfigError(
                    "step() was called and no parameter has a gradient.",
                    "Call loss.backward() before it, and zero_grad() after it.",
                )
            if self._eager is not None:
                self._eager.step(self._param_groups)
            finite = math.isfinite(norm)
            if not finite:
                self._uncount_stopped()
            if finite:
                self._update()
            elif not parts.scale.dynamic:
                done = "nothing was updated"
                if self._eager is not None:
                    done = self._eager.done
                    self._eager.ended = True
                    self._check_whole_updates(self._eager)
                raise NonFiniteGradient(
                    f"A gradient is infinite, NaN or lost; {done}.",
                    "Call zero_grad() and go on with another batch, or lower the learning rate or clip.",
                )
            else:
                self._scheduler.undo_all()  # a commit may follow before zero_grad()
                parts.meter.skipped()
            self.open = False
            if self._eager is not None:
                self._eager.ended = True
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
        return finite

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients of all parameters.

        set_to_none: if False, each parameter that had a gradient gets a gradient of zeros. Raises ConfigError
        if eager updates may have begun in a step that has not called `step`.
        """
        with self._pager.lock:
            self._refuse()
            self._check_stepped("zero_grad() was called")
            self._pager.forwards.prune()
            for parameter in self._trained:
                take_gradient(parameter)  # where a hook of the user has failed before the one that takes it
            zeros: dict[int, set[int]] = {}
            if not set_to_none:
                zeros = {
                    unit: {index for index in page.having if self.has_gradient(unit, index)}
                    for unit, page in self._gradients.pages.items()
                }
                self._ranks.times_zeroed += 1
            self._forget_stored()
            for unit, page in self._gradients.pages.items():
                page.zeros = zeros.get(unit, set())

    def has_gradient(self, unit: int, parameter: int) -> bool:
        """Whether this rank knows of a gradient of the parameter and has not dropped the gradient."""
        return self._ranks.has(unit, parameter)

    def gradient_age(self, unit: int, parameter: int) -> int:
        """A number that changes whenever a parameter's gradient is forgotten or replaced."""
        return self._times_forgotten + self._times_dropped[unit, parameter]

    def drop_gradient(self, unit: int, parameter: int, *, zeros: bool) -> None:
        """Forget a parameter's gradient, as `p.grad = None` does; with zeros=True, a gradient of zeros takes
        its place.

        If this was the last stored gradient, everything else that is known of the step is forgotten too, as
        by `zero_grad`: all factors, and the note that eager updates have used gradients. With several ranks
        this happens only while all ranks know which gradients exist. Raises the errors of `RankedStep.drop`,
        and ConfigError if eager updates may have begun and `step` has not been called since.
        """
        gradients, ranks = self._gradients, self._ranks
        with self._pager.lock:
            self._refuse()
            self._check_stepped("A gradient was dropped (p.grad = None)")
            had = self.has_gradient(unit, parameter)
            ended = self._eager is not None and self._eager.ended
            last = had and (parameter in gradients.pages[unit].content or bool(gradients.factors) or ended)
            ranks.drop(unit, parameter)
            if self._eager is not None:
                self._eager.dropped(unit, parameter)
            if not had and not zeros:
                return
            page = gradients.pages[unit]
            (page.zeros.add if zeros else page.zeros.discard)(parameter)
            gradients.factors.pop((unit, parameter), None)
            self._times_dropped[unit, parameter] += 1
            if last and ranks.settled and not ranks.any_stored:
                self._forget_stored()

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether `read_state` would return a state and not {}. Does no I/O to find out."""
        if isinstance(parameter, TiledParameter):
            return any(self.has_state(tile) for tile in parameter.tiles)
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
        """Copy the tensors of a parameter's optimizer state to RAM and return them by name.

        Returns {} if the parameter has no state, as before its first update. OptimizerCore says which names a
        state has.
        """
        if isinstance(parameter, TiledParameter):
            return join_states([self.read_state(tile) for tile in parameter.tiles])
        place, states = self._place(parameter), self._states
        with self._pager.lock:
            self._refuse()
            self._check_masters("optimizer states")
            self._scheduler.complete(place.page.index)
            found = states.read(place.page.index, place.index)
            layout = place.page.layout.parameters[place.index]
            stepped = states.pages[place.page.index].steps[place.index]
            if (found or stepped) and layout.trainable and parameter.dtype != torch.float32:
                found["master"] = self._master(place)
            return found

    def read_master(self, place: Place) -> torch.Tensor:
        """Copy a parameter's fp32 master to RAM and return it, in the parameter's shape and strides.

        If the parameter has no master, because it is frozen, its values are copied and converted to float32.
        Raises BudgetError if the copy does not fit in RAM.
        """
        with self._pager.lock:
            self._refuse()
            nbytes = 4 * place.page.layout.parameters[place.index].numel
            self._check_masters("masters")
            if nbytes >= _CHECKED:
                self.check_capacity(nbytes)
            self._scheduler.complete(place.page.index)
            return self._master(place)

    def average(self, parameter: torch.Tensor) -> torch.Tensor:
        """Copy the running average of a parameter's masters to RAM, as `Runtime.average` says."""
        if isinstance(parameter, TiledParameter):
            return torch.cat([self.average(tile) for tile in parameter.tiles])
        place, states = self._place(parameter), self._states
        layout = place.page.layout.parameters[place.index]
        with self._pager.lock:
            self._refuse()
            self.check_averages()
            self._scheduler.complete(place.page.index)
            found = self._values(place)
            if layout.trainable:
                found = states.average(place.page.index, place.index, found)
            return found.to(torch.float32).as_strided(layout.shape, layout.stride)

    def check_averages(self) -> None:
        """Raise ConfigError if the run keeps no averages, or if averages and masters have changed places."""
        self._check_masters("the averages")
        if self._states.rule.average is None:
            raise ConfigError(
                "The averages were asked for, and the run keeps none.",
                "Give infinity.offload average=, the decay of the averages.",
            )

    def _check_masters(self, what: str) -> None:
        if self._states.exchanged:
            raise ConfigError(
                f"Within averaged(), {what} cannot be used: masters and averages have changed places.",
                "Do it outside of averaged().",
            )

    def _master(self, place: Place) -> torch.Tensor:
        layout = place.page.layout.parameters[place.index]
        found = self._values(place)
        if layout.trainable:
            found = self._states.master(place.page.index, place.index, found)
        return found.to(torch.float32).as_strided(layout.shape, layout.stride)

    def before_loading(self, states: Sequence[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]) -> None:
        """Wait until all ranks are about to replace the same optimizer states, so that no rank still reads
        the present states. Raises RankDivergence if another rank is to get other states.
        """

        def digests() -> dict[tuple[int, int], int]:
            found = {}
            for parameter, state in states:
                for tile, part in by_tile(parameter, state):
                    place = self._place(tile)
                    found[place.key] = state_digest(place.page.layout.parameters[place.index], part)
            return found

        with self._pager.lock:
            self._refuse()
            cure = "Give all ranks the same states, such as those of one file."
            self._ranks.agree_on_states(digests, cure)

    def loaded(self) -> None:
        """Wait until all ranks have replaced optimizer states, so that none reads another's former states."""
        with self._pager.lock:
            self._refuse()
            self._ranks.agree("the end of a change of optimizer states")

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the parameter's optimizer state; with {} the next update is the parameter's first.

        state: tensors by name, as `read_state` returns them.
        """
        if isinstance(parameter, TiledParameter):
            for tile, part in by_tile(parameter, state):
                self.write_state(tile, part)
            return
        place, states = self._place(parameter), self._states
        with self._pager.lock:
            self._refuse()
            self._check_masters("optimizer states")
            self._scheduler.complete(place.page.index)
            self._scheduler.complete_awaited()
            states.write(place.page.index, place.index, state)
            states.given.pop((place.page.index, place.index), None)
            if "master" in state and parameter.dtype != torch.float32:
                states.restore(place.page.index, place.index, self._values(place), state["master"])

    # --- called by hooks -------------------------------------------------------------------------------

    def add(self, unit: int, parameter: int, gradient: torch.Tensor, later: int = 0) -> None:
        """Add a new gradient to the stored gradient of a parameter, which another rank may keep.

        unit: the unit's index. parameter: the parameter's index in the unit. later: for micro-batches that
        run together, the number of backwards that began before the gradient's own and have not ended. With
        eager updates, the unit's update begins here once the unit has all its gradients of the step.
        """
        self._gradients.check_unscaled()
        if not self._ranks.add(unit, parameter, gradient, later):
            self._scheduler.accumulate(unit, parameter, gradient)
        self._update_complete()
        if self._scheduler.crowded:
            self._update_complete(wait=True)
            self._scheduler.make_room()

    def gradient_arrived(self, parameter: torch.Tensor, accumulator: Accumulator | None) -> None:
        """Take from autograd the gradient that it has computed for a parameter, and store it.

        accumulator: gets the gradient during runtime.accumulate, and adds the gradients of all
        micro-batches to the stored gradient in the order of the micro-batches. None: the gradient is added
        at once.
        """
        gradient = take_gradient(parameter)
        place = self._place(parameter)
        together = accumulator is not None and accumulator.together
        if gradient is not None:
            self._ranks.await_room(place.page.index, place.index, gradient, together=together)
        with self._pager.lock:
            self._refuse()
            if gradient is not None:
                self._check_masters("gradients")
                self.open = True
                self._scheduler.complete(place.page.index)
                add = self.add if accumulator is None else accumulator.add
                add(place.page.index, place.index, gradient.detach())
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                self._components.meter.entered(Phase.BACKWARD)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_done if together else self._counted_backward_done)
        self._gradients.await_limit()

    def expect(self, number: int, parameters: Set[tuple[int, int]]) -> None:
        """Note the parameters, (unit, index), for which the backward of a micro-batch brings one gradient
        each.

        number: the micro-batch's number in the group of micro-batches that run together.
        """
        self._ranks.await_cleared()
        with self._pager.lock:
            self._ranks.expect(number, parameters)

    def backwards_done(self, count: int) -> None:
        """Note that the backwards of `count` micro-batches that ran together have ended."""
        with self._pager.lock:
            self._ranks.backward_ended(count)
            self._update_complete(wait=True)

    def _counted_backward_done(self) -> None:
        self._backward_done()
        self.backwards_done(1)

    def _backward_done(self) -> None:
        with self._pager.lock:
            self._backward = -1
            self._gradients.staged.finish()
            self._components.meter.entered(Phase.BETWEEN)

    # --- helpers ---------------------------------------------------------------------------------------

    def _check_slots(self) -> None:
        """Mark the gradients as lost if a `.grad` slot is not empty: a hook of the user failed before our
        hook could empty it.
        """
        if any(raw_gradient(each) is not None for each in self._trained):
            self._gradients.lose(RuntimeError())

    def _check_activations(self) -> None:
        """Warn if the activations of the first step take more memory than the plan has left in the budget; on
        CUDA, where a limit of torch's allocator enforces the budget, if they take much less.
        """
        plan, saved = self._components.plan, self._pager.saved_bytes.peak
        if plan.device.type == "cuda":
            if idle := plan.idle(peak_bytes(plan.device)):
                warnings.warn(
                    f"The first step left {format_size(idle)} of the device budget unused: the plan keeps "
                    "room for activations, of which it knows nothing. Give infinity.offload the largest "
                    "batch as example_inputs=, and more pages have their homes on the device.",
                    stacklevel=4,
                )
            return
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
        """Update all units that no eager update has updated in this step."""
        parts = self._components
        if not parts.store.device.shares_host:
            parts.prefetch_engine.land_all()  # a page that arrives now would miss the update
        self._edits.sync_edits()
        order = parts.prefetch_engine.next_step()
        exposed = parts.prefetch_engine.exposed()  # before an update begins, which has views of pages, too
        options = StepOptions(self._param_groups, self._group_of(), self._states.rule, self._states.averaged)
        if self._speculation is not None:
            self._speculation.stepped()
        try:
            if self._states.rule.matrix:
                self._update_matrices()
            else:
                self._scheduler.step(options, order, self._edits.exposed)
        except Exception as error:
            parts.health.lose(error)
            raise
        self._edits.updated()
        if not self._states.rule.matrix:
            self._ranks.stepped(functools.partial(self._updated_units, options))
            for unit in exposed:  # their parts of other ranks
                parts.prefetch_engine.demand([unit], AccessKind.UPDATE)
                parts.prefetch_engine.settle_for_user([unit])
                self._ranks.offer(unit)
        parts.prefetch_engine.look_ahead()

    def _update_matrices(self) -> None:
        """Update matrices by Muon's rule, each as an edit of its page."""
        started = time.perf_counter()
        rule, groups = self._states.rule, self._group_of()
        for unit, page in self._gradients.pages.items():
            for index in sorted(page.having):
                group = groups.get((unit, index))
                if group is not None:
                    self._update_matrix(unit, index, rule.whole(self._param_groups[group]))
        self._components.meter.updating(time.perf_counter() - started)

    def _update_matrix(self, unit: int, index: int, options: Muon) -> None:
        states, page = self._states, self._components.pages[unit]
        parameter, layout = page.parameters[index], page.layout.parameters[index]
        gradient = self.read_gradient(unit, index)
        momentum = states.read(unit, index).get("momentum_buffer")
        assert gradient is not None
        master, gradient = self._master(self._place(parameter)), gradient.to(torch.float32)
        if momentum is None:
            momentum = torch.zeros_like(gradient)
        with torch.no_grad():
            options.update(master, momentum, gradient, self._components.plan.device)
        # Then no rank reads former parts any more, and devices that round otherwise are found.
        self._ranks.agree_on_states(
            lambda: {(unit, index): state_digest(layout, {"momentum_buffer": momentum, "master": master})},
            "Train on equal devices, with equal versions of torch and numbers of threads.",
        )
        step = states.pages[unit].steps[index] + 1
        states.write(unit, index, {"momentum_buffer": momentum})
        states.pages[unit].steps[index] = step
        states.given[unit, index] = flat = in_memory_order(master, layout.stride)
        with self._edits.agreed([page]), torch.no_grad():
            parameter.copy_(rounded(flat, layout.dtype).as_strided(layout.shape, layout.stride))
            self._edits.write_back(page)
        del states.given[unit, index]

    def _check_stepped(self, call: str) -> None:
        """Raise ConfigError if eager updates may have begun in a step that has not called `step`."""
        eager = self._eager
        if eager is None or eager.ended or not (eager.begun or (self._ranks.updates_elsewhere and self.open)):
            return
        raise ConfigError(
            f"{call}, but step() was not, and eager updates in the backward cannot be undone.",
            "Call runtime.optimizer.step() after the last backward of each step, or offload with "
            'update="lazy".',
        )

    def _check_whole_updates(self, eager: EagerStep) -> None:
        """Raise NonFiniteGradient if an eager update has begun on any rank of several, in a step with a
        gradient that is not finite. Each rank updates its own chunks of a unit, and other ranks may not have
        updated theirs. The runtime cannot be used any more then.
        """
        if self._ranks.updated_in_part(eager.begun):
            error = NonFiniteGradient(
                "A gradient is infinite, NaN or lost, and eager updates have changed parts of parameters on "
                "some ranks alone.",
                'Start all ranks again, with a lower learning rate or update="lazy".',
            )
            self._components.health.lose(error)
            raise error.again()

    def _update_complete(self, *, wait: bool = False) -> None:
        """Begin the eager updates of units that have got the last gradients of all ranks.

        wait: whether to wait for gradients that are on their way from a device. If not, units that the CPU
        updates, from the first one with such gradients on, are left to a later call.
        """
        if self._eager is not None:
            eager, await_unit = self._eager, self._scheduler.await_gradients if wait else None
            for unit, parameters in self._ranks.take_complete():
                if eager.added(unit, parameters):
                    self._begin_early(eager, unit)
            while (admitted := eager.next(await_unit)) is not None:
                self._begin_early(eager, admitted)
        elif self._speculation is not None:
            for unit, _ in self._ranks.take_complete():
                if self._speculation.admits(unit):
                    self._update_tentatively(unit)

    def _forget_stored(self) -> None:
        """Forget all stored gradients, so that the next step can begin."""
        self._scheduler.undo_all()
        self._uncount_stopped()
        self._ranks.clear()
        self._times_forgotten += 1
        self.open = False
        if self._eager is not None:
            self._eager.clear()

    def _uncount_stopped(self) -> None:
        """Take back what was counted for updates that the device left out."""
        if self._eager is not None and (stopped := self._scheduler.uncount_stopped()):
            self._eager.stopped(len(stopped))

    def _updated_units(self, options: StepOptions) -> list[int]:
        """The units with a parameter that has both a gradient, on any rank, and a param group."""
        return [
            unit
            for unit, page in self._gradients.pages.items()
            if any(options.group(unit, index) is not None for index in page.having)
        ]

    def _agreed_norm(self, call: str, keys: Callable[[], Iterable[tuple[int, int]]]) -> float:
        """Return the norm of all ranks' gradients, after all ranks have agreed that gradients are complete.

        call: the caller's name, for errors. keys: function that returns the parameters, as (unit, index),
        whose gradients must all have the same factor.
        """
        gradients = self._gradients
        before = set(self._having()) if gradients.factors else set()
        # An eager step with a lost gradient ends as one that is not finite does; see `_check_whole_updates`.
        squares = self._settle(call, keys, forgiving=self._eager is not None)
        for key in gradients.having() if gradients.factors else ():
            if key not in before:  # another rank's, which this rank could not scale
                gradients.scale(*key, gradients.factor)
        return gradients.norm_of(squares, gradients.unscale)

    def _settle(
        self, call: str, keys: Callable[[], Iterable[tuple[int, int]]] = tuple, *, forgiving: bool = False
    ) -> ExactSum:
        """Agree with all ranks that gradients are complete; returns the sum of squares.

        keys: function that returns the parameters, (unit, index), whose gradients must have one factor; by
        default none. call, forgiving: as in `SingleStep.settle`.
        """
        failure: InfinityError | None = None
        try:
            self._group_of()
            self._gradients.agree_on_factor(call, keys())
            self._components.store.settle()  # raises if a gradient was not written home
            if not forgiving:
                self._gradients.check()
            if self._eager is not None:
                self._eager.check_options(self._param_groups)
        except InfinityError as error:
            failure = error.again()
        return self._ranks.settle(call, self._param_groups, failure, forgiving=forgiving)

    def _begin_early(self, eager: EagerStep, unit: int) -> None:
        """Begin the eager update of a unit that has all gradients of the step."""
        parts = self._components
        options = eager.options(self._param_groups, self._groups if eager.begun else self._group_of())
        if not parts.store.device.shares_host:
            parts.prefetch_engine.land(unit, for_host=True)
        self._edits.write_back(parts.pages[unit])
        try:
            self._scheduler.begin_early(unit, options, self._edits.exposed)
        except Exception as error:
            parts.health.lose(error)
            raise
        self._edits.updated(unit)

    def _update_tentatively(self, unit: int) -> None:
        """Begin the speculative update of a unit that has all gradients of the step."""
        parts = self._components
        options = StepOptions(self._param_groups, self._group_of(), self._states.rule)
        parts.prefetch_engine.land(unit, for_host=True)
        self._edits.write_back(parts.pages[unit])
        self._scheduler.begin_tentatively(unit, options, self._edits.exposed)

    def _group_of(self) -> Mapping[tuple[int, int], int]:
        """Bring `_groups` up to date with user code's changes of the param groups, and return it."""
        members = [[id(each) for each in group["params"]] for group in self._param_groups]
        if members != self._members:
            groups: dict[tuple[int, int], int] = {}
            for index, group in enumerate(self._param_groups):
                for place in self._places(group["params"]):
                    if (place.page.index, place.index) in groups:
                        raise ConfigError(
                            f"The parameter {place.name} is in the optimizer's param groups twice.",
                            "Let each parameter be in one group.",
                        )
                    groups[place.page.index, place.index] = index
            self._groups, self._members = groups, members
        return self._groups

    def _having(self) -> Iterator[tuple[int, int]]:
        """The parameters, (unit, index), for which `has_gradient` is True."""
        return (key for key in self._gradients.having() if self.has_gradient(*key))

    def _to_be_updated(self) -> Iterator[tuple[int, int]]:
        """The parameters, (unit, index), that have a gradient and are in a param group."""
        return (key for key in self._having() if key in self._groups)

    def _values(self, place: Place) -> torch.Tensor:
        """A copy in RAM of a parameter's values with the user's edits: (numel,) in memory order."""
        page = place.page
        self._edits.write_back(page)
        return self._pager.copied_values(place)

    def _places(self, parameters: Iterable[torch.Tensor]) -> Iterator[Place]:
        """The places of parameters, and of the tiles of tiled ones in their place."""
        for parameter in parameters:
            parts = parameter.tiles if isinstance(parameter, TiledParameter) else (parameter,)
            yield from map(self._place, parts)

    def _place(self, parameter: torch.Tensor) -> Place:
        if isinstance(parameter, PagedParameter) and parameter._place.pager is self._pager:
            return parameter._place
        raise ConfigError(
            "A tensor was given that is no parameter of the offloaded model.",
            "Give one of model.parameters().",
        )
