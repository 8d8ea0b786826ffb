"""Dynamic loss scaling for fp16: gradients are made larger in backward, and smaller again in the update.

The scale is a power of two, so scaling is exact unless a value over- or underflows. If the gradients of a
step are not all finite, the step is skipped and the scale is halved. After 2,000 good steps the scale is
doubled (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; the constants are
those of torch.amp.GradScaler).

The runtime does not see the loss. So it scales gradients where they enter and leave the root module: the
gradients of the root module's outputs are multiplied by the scale, and the gradients of its inputs are
divided by the scale. A parameter that is used outside of the root module is treated like an output.

[Note: the scale of several ranks]
N ranks average their gradients, and one rank that runs the micro-batches of all divides its losses by N
instead. Its backward is that of a rank if its scale is N times larger: then the same values overflow, and
the same ones underflow. So the scale of ranks is N times smaller, N rounded down to a power of two.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_INITIAL = 2.0**16
_LARGEST = 2.0**24
_SMALLEST = 2.0**-14
_GROWTH_INTERVAL = 2000


class LossScale:
    """The loss scale of one runtime: a number that `step_was` adapts. It stays 1 unless `dynamic`."""

    def __init__(self, *, dynamic: bool, ranks: int = 1) -> None:
        """ranks: number of ranks that average their gradients; see [Note: the scale of several ranks]."""
        self.dynamic = dynamic
        self._smaller = 2.0 ** (ranks.bit_length() - 1)
        """By how much the scale of one rank is larger."""
        self.value = _INITIAL / self._smaller if dynamic else 1.0
        self.good_steps = 0
        """Number of steps in a row whose gradients were finite, since the scale last changed."""

    @property
    def of_one_rank(self) -> float:
        """The scale with which one rank has the backward of these; see [Note: the scale of several ranks].

        Commits and copies of runs hold this one, from which any number of ranks can go on.
        """
        return self.value * self._smaller

    @of_one_rank.setter
    def of_one_rank(self, value: float) -> None:
        self.value = value / self._smaller

    def step_was(self, *, finite: bool) -> None:
        """Adapt the scale after an optimizer step. finite: whether all gradients of the step were finite."""
        if not self.dynamic:
            return
        if not finite:
            self.value = max(_SMALLEST / self._smaller, self.value / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.value = min(_LARGEST / self._smaller, self.value * 2)
            self.good_steps = 0

    def incoming(self, inputs: Any) -> Any:
        """Return the root module's inputs, with views in place of differentiable tensors.

        Backward through the views divides the gradients of the inputs by the scale, on their way out of the
        module.
        """
        return _map_tensors(self._enter, inputs) if self.dynamic else inputs

    def outgoing(self, outputs: Any) -> Any:
        """Return the root module's outputs, with views in place of differentiable tensors.

        Backward through the views multiplies the gradients of the outputs by the scale, on their way into the
        module.
        """
        return _map_tensors(self._leave, outputs) if self.dynamic else outputs

    def borrowed(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a view of a parameter, to be used in its place outside of the root module.

        Backward through the view multiplies the parameter's gradients by the scale, so that they are scaled
        like those from inside the module.
        """
        return self._leave(parameter)

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        return _ScaleGradient.apply(tensor, self, -1) if _differentiable(tensor) else tensor  # type: ignore[no-untyped-call]

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        return _ScaleGradient.apply(tensor, self, 1) if _differentiable(tensor) else tensor  # type: ignore[no-untyped-call]


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return a copy of `values` in which every tensor is replaced by function(tensor).

    Tensors are found in the containers that torch.utils._pytree knows and in the fields of dataclasses.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        twin = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(twin, field.name, _map_tensors(function, getattr(leaf, field.name)))
        return twin

    return tree_map(replaced, values)


class _ScaleGradient(torch.autograd.Function):
    """The identity function in forward. In backward it multiplies the gradient by scale.value ** power.

    The value of the scale is read when backward runs, so it may have changed since the forward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: LossScale, power: int) -> torch.Tensor:
        ctx.scale, ctx.power = scale, power
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.scale.value**ctx.power, None, None


def _differentiable(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()
