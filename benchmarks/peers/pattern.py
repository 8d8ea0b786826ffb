"""Initial values at the speed of memory: normals drawn once, laid over every matrix again and again.

A CPU draws normals one after another: those of 7B parameters for minutes. What a step costs, and what fits,
does not depend on them, so that benchmarks on a GPU start from these. Users' models never do.
"""

from __future__ import annotations

import math

import torch
from torch import nn

_STD = 0.02
_LENGTH = 1_048_573
"""Normals: a prime, so that the rows of no matrix are equal."""


def fill_by_pattern(model: nn.Module, layers: int) -> None:
    """Have `infinity.offload` fill this model, built on the meta device, with a pattern.

    The standard deviations are the decoder's own: matrices named `out`, which add to the residual stream, are
    scaled by its depth of `layers`. Vectors are ones. The same values each time.
    """
    normals = torch.randn(_LENGTH, generator=torch.Generator().manual_seed(0))
    usual, scaled = normals * _STD, normals * (_STD / math.sqrt(2 * layers))
    patterns = {
        module: scaled if name.rpartition(".")[2] == "out" else usual
        for name, module in model.named_modules()
    }

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2:
                parameter.data.fill_(1.0)
            else:
                _lay(patterns[module], parameter.data.view(-1))

    model._init_weights = fill  # type: ignore[assignment]  # what materialize asks a module for


def _lay(pattern: torch.Tensor, flat: torch.Tensor) -> None:
    for start in range(0, flat.numel(), _LENGTH):
        piece = flat[start : start + _LENGTH]
        piece.copy_(pattern[: piece.numel()])
