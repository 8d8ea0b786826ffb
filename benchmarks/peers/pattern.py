"""Pattern: fast initial values, a fixed row of random normals that is copied repeatedly into every matrix.

A CPU needs minutes to draw normals for 7B parameters. Neither the time nor the memory of a step depends on
the values, so benchmarks on a GPU start from the pattern. Models of users are never initialised in this way.
"""

from __future__ import annotations

import math

import torch
from torch import nn

_STD = 0.02
_LENGTH = 1_048_573
"""Number of normals in the pattern. It is prime, so that no matrix has equal rows."""


def fill_by_pattern(model: nn.Module, layers: int) -> None:
    """Set `model._init_weights`, so that `infinity.offload` later fills the model with the pattern.

    model: a decoder on the meta device, with `layers` layers. Matrices get the standard deviations of the
    decoder's own initialisation: 0.02, divided by sqrt(2 * layers) in modules named `out`, whose results add
    to the residual stream. Vectors are filled with ones. The values are the same in every process.
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
