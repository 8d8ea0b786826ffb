"""Decisions: what the update of each unit in a step computes, and when it is decided.

A lazy update is decided by `step()`, from the param groups of that moment (`StepOptions`). A decision counts
as a step before the update runs.

[Note: eager updates] An eager update is decided in the backward that brings the unit's last gradient.
Gradients then need not leave the memory in which they arrive. Also, the disk can move states during the
backward, not only during the next forward. Updates that are not done when the backward ends go on during
the next forward. A unit is updated if all gradients are finite that became complete up to its last one. Where
parameters get several gradients a step, a unit that the device updates is left to `step()`: it needs no
staging.

[Note: when to speculate] A speculative update is decided like an eager one, by the unit's last gradient, with
the factor that gradients have if they are not clipped. It leaves gradients and everything else as they are
until `step()` knows the factor ([Note: speculative updates] in infinity/optim/chunk_update.py). So nothing
is refused: not clipping, not the loss scaling of fp16, and not one more gradient. An update that was wrong
costs time. So after steps in a row whose gradients were clipped nothing is begun, until a norm is below its
limit again.

The runtime cannot tell which gradient is the last of a step, so the trainer declares how many backwards a
step has. Features that need all gradients before the first update are refused: clipping, and the loss
scaling of fp16. An update cannot be undone, so a step whose updates have begun must call step().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity import cpu_adam
from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import Group, Rule
from infinity.gradients.gradients import CompleteGradients, Gradients
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The update of one unit, as `step()`, an eager or a speculative update decided it.

    Changes that user code makes later, to gradients or options, do not affect the update. Equal decisions
    for the same gradients have results of equal bits.
    """

    hypers: Sequence[cpu_adam.Hyper]
    native: Sequence[cpu_adam.NativeHyper] = field(compare=False)
    """The hyper-parameters of `hypers`, in the same order, in the form that the native code takes."""
    parameters: Mapping[int, tuple[int, int]]
    """Index in the unit of each updated parameter -> (index into `hypers`, seed of its stochastic
    rounding).
    """
    scale: float
    """Factor by which stored gradients are multiplied to get the gradients that the optimizer sees."""
    fresh: frozenset[int]
    """Indices of the unit's chunks that have no moments yet. If the update changes such a chunk, it creates
    them.
    """
    zeros: frozenset[int]
    """Those of `parameters` whose gradient is zero and not stored."""
    edited: frozenset[int]
    """Indices in the unit of parameters that user code has edited since their last update. The update first
    sets their fp32 masters to the edited values.
    """
    average: cpu_adam.AverageStep | None = None
    """How the running averages of the unit's masters change; None if there are none."""
    averaged: frozenset[int] = frozenset()
    """Indices in the unit of parameters that are averaged and not updated."""

    @property
    def incomplete(self) -> bool:
        """Whether an input of some chunk has no value yet, or an outdated one; see `ChunkUpdate.prepare`."""
        return bool(self.fresh or self.edited or self.zeros)

    @property
    def chosen(self) -> list[tuple[int, int, int]]:
        """What is updated and averaged, in the form that `ThreadPool.submit_updates` takes."""
        found = [(index, hyper, seed) for index, (hyper, seed) in self.parameters.items()]
        return found + [(index, cpu_adam.AVERAGED, 0) for index in self.averaged]


class StepOptions:
    """The options of all param groups in one step.

    The hyper-parameters of an update are computed once for all parameters of a group that have had equally
    many updates, not once for each unit.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        group_of: Mapping[tuple[int, int], int],
        rule: Rule,
        averaged: int = 0,
    ) -> None:
        """groups: the options of each param group. They must not change while this object is in use.

        group_of: (index of a unit, index of a parameter in this unit) -> index of the parameter's group.
        averaged: `States.averaged` before the step.
        """
        self.groups = groups
        self._group_of = group_of
        self._rule = rule
        self.average = (
            None if rule.average is None else cpu_adam.AverageStep(averaged == 0, 1 - float(rule.average))
        )
        """How running averages of masters change in the step; None if there are none."""
        self._hypers: dict[tuple[int, int, bool], tuple[cpu_adam.Hyper, cpu_adam.NativeHyper]] = {}

    def group(self, unit: int, parameter: int) -> int | None:
        """The index of a parameter's param group; None: the parameter is in no group."""
        return self._group_of.get((unit, parameter))

    def hyper(self, group: int, step: int, first: bool) -> tuple[cpu_adam.Hyper, cpu_adam.NativeHyper]:
        """Return the hyper-parameters of an update of parameters in a group, in two forms.

        They are (object for Python code, object for the native code) with equal values. group: the index of
        the group. step, first: as in `Rule.hyper`, whose errors are raised.
        """
        key = group, step, first
        if key not in self._hypers:
            found = self._rule.hyper(self.groups[group], step, first)
            self._hypers[key] = found, found.native()
        return self._hypers[key]

    def writes_moments(self, group: int) -> bool:
        """Whether an update of parameters in a group writes any moment."""
        return bool(self._rule.written(self.groups[group]))


def decide(
    unit: int,
    options: StepOptions,
    gradients: Gradients,
    states: States,
    among: Collection[int] | None = None,
) -> Decision | None:
    """Decide the update of those parameters of a unit that have both a gradient and a param group. If running
    averages are kept, those of the unit's other trainable parameters are updated, too.

    unit: index of the unit. options: the options of this step's param groups. gradients, states: the
    gradients and the optimizer states of all units. among: the parameters to decide for, all by default.
    Returns None if there is nothing to do. Raises the errors of `Rule.hyper`.
    """
    state = states.pages[unit]
    known: dict[tuple[int, int, bool], int] = {}
    parameters = {}
    page = gradients.pages[unit]
    for index in page.having:
        group = options.group(unit, index)
        if group is None or (among is not None and index not in among):
            continue
        step = state.steps[index] + 1
        key = group, step, index not in state.has_moments
        parameters[index] = (known.setdefault(key, len(known)), state.seed(index, step))
    averaged = frozenset() if options.average is None else state.trainable - parameters.keys()
    if not parameters and not averaged:
        return None
    hypers = [options.hyper(*key) for key in known]
    return Decision(
        hypers=[hyper for hyper, _ in hypers],
        native=[native for _, native in hypers],
        parameters=parameters,
        scale=gradients.unscale,
        fresh=frozenset(chunk_index for chunk_index, begun in enumerate(state.begun) if not begun),
        zeros=frozenset(parameters.keys() - page.content) if page.zeros else frozenset(),
        edited=frozenset(state.edited),
        average=options.average,
        averaged=averaged,
    )


def count_step(
    page: ParameterPage,
    states: States,
    touched: Collection[int],
    options: StepOptions,
    averaged: Collection[int] = (),
) -> None:
    """Count the update of a unit as done as soon as it is decided, even if it runs much later.

    Adds one to the step count of each updated parameter in the unit's optimizer page, and notes there which
    chunks and parameters have moments from now on. Also increments torch's version counter of each updated
    parameter, because its values are going to change in place. page: the unit's parameter page. touched: the
    indices of the updated parameters. states, options: as for `decide`. averaged: `Decision.averaged`.
    """
    state = states.pages[page.index]
    written = {*touched, *averaged} if averaged else touched
    if not all(state.begun):
        for chunk_index, chunk in enumerate(page.layout.chunks):
            if any(piece.parameter in written for piece in chunk.pieces):
                state.begun[chunk_index] = True
    state.edited.difference_update(written)
    for index in touched:
        state.steps[index] += 1
        group = options.group(page.index, index)
        if group is not None and options.writes_moments(group):
            state.has_moments.add(index)
        torch.autograd.graph.increment_version(page.parameters[index])
    page.acknowledge()


class EagerStep:
    """The state that all eager updates of a step share: the step's gradients and the optimizer's options."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        rule: Rule,
        *,
        accumulation: int,
    ) -> None:
        """accumulation: number of gradients that each parameter gets in a step, as declared by the user."""
        self._pages = pages
        self._gradients = gradients
        self._rule = rule
        self._accumulation = accumulation
        self._options: StepOptions | None = None
        """Copies of the param groups' options, made when the step's first unit is updated; None before."""
        self._updated = 0
        """Number of units that eager updates have updated in this step."""
        self._broken: set[tuple[int, int]] = set()
        """(unit, index of a parameter) of each gradient of this step of which `next` has found that it is not
        finite. The CPU updates no further unit then.
        """
        self._complete: deque[CompleteGradients] = deque()
        """Gradients of units that the CPU updates that `next` has not checked, in the order in which they
        became complete.
        """
        self.ended = False
        """Whether `optimizer.step()` has ended the step. Its gradients stay in use until `clear`."""

    def added(self, unit: int, parameters: Sequence[int]) -> bool:
        """Note new gradients of a unit's parameters. Returns whether to update the unit now, without `next`:
        the device updates it in the backward, and it has all gradients of the step. If one that came before
        is not finite, the device itself stops the update; see [Note: updates in the backward] in
        infinity/gradients/device.py.
        """
        gradients = self._gradients
        page = gradients.pages[unit]
        complete = [each for each in parameters if page.arrivals[each] >= self._accumulation]
        if not complete or page.consumed:
            return False
        last = page.complete(self._pages[unit].parameters, self._accumulation)
        if gradients.on_device(unit):
            return last and gradients.on_device_in_backward
        self._complete.append(gradients.completed(unit, complete, last=last))
        return False

    def next(self, wait: Callable[[int], None] | None) -> int | None:
        """Return the next unit to be updated by the CPU: it has all gradients of the step, and all that
        became complete before are finite. None: there is none, or gradients are on their way from a device.

        wait: function that is called with a unit before the call waits for the unit's gradients; None: the
        call does not wait. Raises the errors of `GradientPage.squares`.
        """
        while self._complete:
            first = self._complete[0]
            if not self._gradients.come(first):
                if wait is None:
                    return None
                wait(first.unit)
                self._gradients.come(first, wait=True)
            self._complete.popleft()
            page = self._gradients.pages[first.unit]
            if page.consumed:  # one more gradient came than was declared
                continue
            for index in first.parameters:  # those that are not in `content` were dropped
                if index in page.content and not page.finite(index, arrived=True):
                    self._broken.add((first.unit, index))
            if self._broken or not first.last or self._gradients.stopped_before(first):
                continue
            if page.complete(self._pages[first.unit].parameters, self._accumulation):  # none was dropped
                return first.unit
        return None

    def dropped(self, unit: int, parameter: int) -> None:
        """Note that the gradient of a parameter was dropped."""
        self._broken.discard((unit, parameter))

    def options(self, groups: Sequence[Group], group_of: Mapping[tuple[int, int], int]) -> StepOptions:
        """Count one more unit as updated, and return the options of all param groups for its update.

        The first call in a step checks the groups and copies their options. Later calls in the step return
        the same copies. groups: the optimizer's param groups. group_of: as in `StepOptions`. Raises the
        errors of `Rule.check`.
        """
        if self._options is None:
            self._rule.check(groups)
            self._options = StepOptions(_frozen(groups), group_of, self._rule)
        self._updated += 1
        return self._options

    def stopped(self, units: int) -> None:
        """Note that the device has left out the updates of some of the units that count as updated."""
        self._updated -= units

    def step(self, groups: Sequence[Group]) -> None:
        """Check that user code may call `optimizer.step()` now, after the eager updates of this step.

        groups: the optimizer's param groups. Raises ConfigError if their options have changed since the
        first of these updates, or if `optimizer.step()` was called before with the same gradients.
        """
        if self.ended:
            raise ConfigError(
                "step() was called again for gradients that eager updates have used.",
                "Call runtime.optimizer.zero_grad() after step(), and a backward before the next one.",
            )
        self.check_options(groups)

    def check_options(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError if options of param groups have changed since the first update of this step."""
        if self._options is not None and not _same(self._options.groups, _frozen(groups)):
            raise ConfigError(
                f"The optimizer's options were changed after {self._updated} units were updated with others.",
                "Set the options back, and change them (or call a scheduler) after step(), or offload with "
                'update="lazy".',
            )

    @property
    def begun(self) -> bool:
        """Whether a unit has been updated in this step. The options of that update then hold for the step."""
        return self._options is not None

    def clear(self) -> None:
        """Forget this step, so that the next step can begin. Called when the step's gradients have been
        forgotten.
        """
        self._options = None
        self._updated = 0
        self.ended = False
        self._broken.clear()
        self._complete.clear()

    @property
    def done(self) -> str:
        """A clause for an error message: how many units this step had updated before the error came."""
        return f"{self._updated} of {len(self._pages)} units were updated before it came"


_MOST_WRONG = 3
"""Number of clipped steps in a row after which no update is begun before `step()`."""


class Speculation:
    """Says which units to update before all gradients of a step are known; see [Note: when to speculate]."""

    def __init__(self, pages: Sequence[ParameterPage], gradients: Gradients, accumulation: int) -> None:
        """accumulation: number of gradients that each parameter gets in a step, as declared by the user."""
        self._pages = pages
        self._gradients = gradients
        self._accumulation = accumulation
        self._wrong = 0
        """Number of steps in a row, up to the last one, whose gradients were clipped."""

    def admits(self, unit: int) -> bool:
        """Whether to begin the update of a unit now: it has all gradients of the step, and none of them is
        scaled. They may be on their way from a device. If they are not finite, `step()` undoes the update.
        """
        gradients = self._gradients.pages[unit]
        if self._wrong >= _MOST_WRONG or self._gradients.factors:
            return False
        return gradients.complete(self._pages[unit].parameters, self._accumulation)

    def stepped(self) -> None:
        """Note the factor of the gradients in the step that is decided now."""
        self._wrong = 0 if self._gradients.factor == 1.0 else self._wrong + 1


def _frozen(groups: Sequence[Group]) -> list[Group]:
    """Copy the options of all param groups. In the copies, "params" is a list of the parameters' ids."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in (*group.items(), ("params", [id(each) for each in group["params"]]))
        }
        for group in groups
    ]


def _same(one: Sequence[Group], other: Sequence[Group]) -> bool:
    return len(one) == len(other) and all(
        mine.keys() == theirs.keys() and all(_equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.as_tensor(one).equal(torch.as_tensor(other)))
    return bool(one == other)
