"""Elements in the order in which a page has them: the parameter's own, whatever its strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_memory_order(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The elements of `values`, of any strides, as a dense tensor of `stride` (elements) lays them out.

    Returns (numel,) on the same device: a view where the strides are these already, else a copy.
    """
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.resolve_neg()  # its bytes are read
    if values.stride() != tuple(stride):
        values = torch.empty_strided(
            values.shape, tuple(stride), dtype=values.dtype, device=values.device
        ).copy_(values)
    return values.as_strided((values.numel(),), (1,))
