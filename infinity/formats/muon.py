"""Muon: the update of a whole matrix, as torch.optim.Muon computes it (pure).

The direction of an update is the momentum with singular values near 1. A Newton-Schulz iteration finds it
from products of whole matrices (Jordan et al., https://kellerjordan.github.io/posts/muon/; for
`match_rms_adamw` Liu et al., arXiv:2502.16982).

[Note: Muon's bits] The iteration runs in bf16, where the last bit of an input can change the third digit of
the result. Parameters that were rounded once instead of twice were 4e-3 from torch's after 30 steps of a tiny
model. So each operation here is torch.optim.Muon's, in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from infinity.config import round_up
from infinity.tiers import PAGE_ALIGNMENT

_COPIES = 6
"""The most copies of a matrix in fp32 that an update takes in RAM: gradient, momentum, master, and the
matrices of the iteration or one of the first three while it is gathered from chunks.
"""
_COPIES_ON_DEVICE = 3
"""The same number for a device, which runs the iteration only: it takes at most five matrices in bf16."""


def bytes_in_ram(elements: int) -> int:
    """Bytes of RAM, beside pages, that the update of a matrix of `elements` elements takes."""
    return round_up(_COPIES * 4 * elements, PAGE_ALIGNMENT)


def bytes_on_device(elements: int) -> int:
    """Bytes that the Newton-Schulz iteration takes on a device with memory of its own, for a matrix of
    `elements` elements.
    """
    return _COPIES_ON_DEVICE * 4 * elements


@dataclass(frozen=True, kw_only=True)
class Muon:
    """The options of a param group, named as in torch.optim.Muon."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    def update(
        self, master: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, device: torch.device
    ) -> None:
        """Update a matrix and its momentum in place; `gradient` is overwritten. All three are float32 (rows,
        columns) in RAM. device: where the iteration runs.
        """
        momentum.lerp_(gradient, 1 - self.momentum)
        blend = gradient.lerp_(momentum, self.momentum) if self.nesterov else momentum
        direction = self._orthogonal(blend.to(torch.bfloat16).to(device)).to(master.device)
        master.mul_(1 - self.lr * self.weight_decay)
        master.add_(direction, alpha=-self._rate(master.shape))

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """Run the iteration on a bfloat16 matrix, which is overwritten. Returns a matrix of its shape and
        dtype.
        """
        a, b, c = self.ns_coefficients
        tall = matrix.size(0) > matrix.size(1)
        x = matrix.T if tall else matrix
        x.div_(x.norm().clamp(min=self.eps))
        for _ in range(self.ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    def _rate(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))
