"""Decision: what the update of one unit in a step will do. A decision is fixed, and counts as a step,
before the update runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity import cpu_adam
from infinity.gradients.host import Gradients
from infinity.optim.step_options import StepOptions
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The update of one unit, as `step()` or an eager update decided it.

    Changes that user code makes later, to gradients or options, do not affect the update.
    """

    hypers: Sequence[cpu_adam.Hyper]
    native: Sequence[cpu_adam.NativeHyper]
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


def decide(unit: int, options: StepOptions, gradients: Gradients, states: States) -> Decision | None:
    """Decide the update of a unit's parameters that have both a gradient and a param group. Where there are
    running averages, the other trainable parameters are averaged.

    unit: index of the unit. options: the options of this step's param groups. gradients, states: the
    gradients and the optimizer states of all units. Returns None if there is nothing to do. Raises the
    errors of `Rule.hyper`.
    """
    state = states.pages[unit]
    known: dict[tuple[int, int, bool], int] = {}
    parameters = {}
    page = gradients.pages[unit]
    for index in page.having:
        group = options.group(unit, index)
        if group is None:
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
