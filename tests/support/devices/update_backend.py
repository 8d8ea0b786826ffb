"""A backend for PagedOptimizer in tests: it updates plain tensors with the CPU kernels, instead of pages.

It stands in for the runtime behind the protocol OptimizerCore (infinity/optim/paged_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.cpu_adam import Segment, ThreadPool, Update
from infinity.errors import BudgetError
from infinity.formats.optimizer_rules import Rule


class MemoryBackend:
    """An OptimizerCore whose step() updates contiguous fp32 or bf16 parameters from their `.grad`.

    `reads` counts calls of `read_state`. `capacity` is the most bytes that `check_capacity` allows; None: no
    limit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pool: ThreadPool) -> None:
        self.rule = Rule.of(optimizer)
        self.groups = optimizer.param_groups
        self.pool = pool
        self.capacity: int | None = None
        self.reads = 0
        self._states: dict[int, dict[str, Tensor]] = {}

    def step(self) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def zero_grad(self, *, set_to_none: bool) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter)

    def has_state(self, parameter: Tensor) -> bool:
        return id(parameter) in self._states

    def read_state(self, parameter: Tensor) -> dict[str, Tensor]:
        self.reads += 1
        return {name: each.clone() for name, each in self._states.get(id(parameter), {}).items()}

    def write_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        self._states.pop(id(parameter), None)
        if state:
            self._states[id(parameter)] = {name: each.float().clone() for name, each in state.items()}

    def before_loading(self, states: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Called before states are replaced."""

    def loaded(self) -> None:
        """Called after states were replaced."""

    def check_capacity(self, nbytes: int) -> None:
        if self.capacity is not None and nbytes > self.capacity:
            raise BudgetError(f"{nbytes} bytes do not fit.", "Free some.", needed=nbytes)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self._states.get(id(parameter), {})
        moments = {
            name: state.get(name, torch.full(parameter.shape, self.rule.initial(name)))
            for name in self.rule.moments
        }
        step = int(state.get("step", 0)) + 1
        split = parameter.dtype != torch.float32
        master = state.get("master", parameter.detach().float()) if split else parameter.detach()
        first, second = self.rule.first_moment, self.rule.second_moment
        hyper = self.rule.hyper(group, step, first not in state)
        self.pool.run(
            Update(
                grad=parameter.grad.view(-1),
                parameter=master.view(-1),
                copy=parameter.detach().view(-1) if split else None,
                first_moment=moments[first].view(-1) if first else None,
                second_moment=moments[second].view(-1) if second else None,
                segments=[Segment(0, parameter.numel())],
                hypers=[hyper],
            )
        )
        after = {"step": torch.tensor(float(step))} if self.rule.counts_steps else {}
        after |= {name: moments[name] for name in self.rule.written(group)}
        after |= {"master": master} if split else {}
        if after:
            self._states[id(parameter)] = after
