"""Strides: a parameter's elements in the order in which its memory, and so its page, has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_memory_order(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The elements of `values` in the memory order of a dense tensor with strides `stride` (in elements).

    Returns (numel,) on the same device: a view where `values` has these strides already, else a copy.
    """
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.resolve_neg()  # the caller reads bytes, in which a negation that is only noted is missing
    if values.stride() != tuple(stride):
        values = torch.empty_strided(
            values.shape, tuple(stride), dtype=values.dtype, device=values.device
        ).copy_(values)
    return values.as_strided((values.numel(),), (1,))
