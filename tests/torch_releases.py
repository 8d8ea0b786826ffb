"""What releases of torch cannot do, for tests to skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

fsdp2_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU"
)


def torch_loses_hooks() -> bool:
    """Whether torch loses the hooks of a leaf that a Function of Python saves where there are saved-tensor
    hooks, as torch 2.6 does.
    """

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scale: Tensor) -> Tensor:
            ctx.save_for_backward(scale)
            return scale * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    called: list[Tensor] = []
    scale = torch.ones((), requires_grad=True)
    scale.register_hook(called.append)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        doubled = Scaled.apply(scale)
    doubled.backward()
    return not called
