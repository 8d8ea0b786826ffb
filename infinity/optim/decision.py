"""Decision: what one unit's update in a step will do, fixed before it runs and counted at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity import cpu_adam
from infinity.gradients.host import Gradients
from infinity.pages.optimizer_page import States
from infinity.pages.parameter_page import ParameterPage

GroupOf = Callable[[int, int], Mapping[str, Any] | None]
"""(unit, parameter) -> its live param group, or None if the optimizer does not have the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One unit's update, as `step()` or an eager update decided it. Later changes do not affect it."""

    hypers: Sequence[cpu_adam.Hyper]
    native: Sequence[cpu_adam.NativeHyper]
    """The native form of each of `hypers`."""
    parameters: Mapping[int, tuple[int, int]]
    """Updated parameter -> (index into `hypers`, seed of its stochastic roundings)."""
    scale: float
    """Factor from the stored gradient to the one that the rule sees."""
    fresh: frozenset[int]
    """Chunks whose moments this update creates."""
    edited: frozenset[int]
    """Edited parameters: their masters are set to their present values first."""


def decide(unit: int, group_of: GroupOf, gradients: Gradients, states: States) -> Decision | None:
    """The update of a unit's parameters that have a gradient and a group; None if none has both.

    Raises as `Rule.hyper`.
    """
    state, rule = states.pages[unit], states.rule
    known: dict[tuple[int, int, bool], int] = {}
    hypers: list[cpu_adam.Hyper] = []
    parameters = {}
    for index in gradients.pages[unit].content:
        group = group_of(unit, index)
        if group is None:
            continue
        step, first = state.steps[index] + 1, index not in state.has_moments
        key = (id(group), step, first)
        if key not in known:
            known[key] = len(hypers)
            hypers.append(rule.hyper(group, step, first))
        parameters[index] = (known[key], state.seed(index, step))
    if not parameters:
        return None
    return Decision(
        hypers=hypers,
        native=[each.native() for each in hypers],
        parameters=parameters,
        scale=gradients.unscale,
        fresh=frozenset(chunk_index for chunk_index, begun in enumerate(state.begun) if not begun),
        edited=frozenset(state.edited),
    )


def count_step(page: ParameterPage, states: States, decision: Decision, group_of: GroupOf) -> None:
    """Count a unit's update as done (steps, moments, versions), however late it runs."""
    state, touched = states.pages[page.index], decision.parameters.keys()
    if not all(state.begun):
        for chunk_index, chunk in enumerate(page.layout.chunks):
            if any(piece.parameter in touched for piece in chunk.pieces):
                state.begun[chunk_index] = True
    state.edited -= touched
    for index in touched:
        state.steps[index] += 1
        group = group_of(page.index, index)
        if group is not None and states.rule.written(group):
            state.has_moments.add(index)
        torch.autograd.graph.increment_version(page.parameters[index])
    page.acknowledge()
