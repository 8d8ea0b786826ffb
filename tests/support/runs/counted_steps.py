"""The bytes of real steps, counted as the planner counts those of steps without data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from infinity.planning import fake_step


def counted(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Run a forward and a backward of a model, and return the peak bytes of what their operations allocate.

    Gradients of parameters are dropped as soon as they are complete, in this and all later steps.
    """
    for each in model.parameters():
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(_drop)
    watch = fake_step._Watch()
    with watch:
        fake_step._step(model, args, kwargs, watch, train=True)
    return watch.peak


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
