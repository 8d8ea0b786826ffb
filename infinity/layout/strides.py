"""Strides: flattening tensors in the order in which the elements of another tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_memory_order(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Flatten `values` in the order in which a dense tensor with strides `stride` has its elements in memory.

    stride: one stride for each dimension of `values`, in elements. Returns a tensor of shape (numel,) on
    the same device: a view of `values` if `values` has these strides, else a copy.
    """
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.resolve_neg()  # the caller reads bytes, which do not show a lazy negation
    if values.stride() != tuple(stride):
        values = torch.empty_strided(
            values.shape, tuple(stride), dtype=values.dtype, device=values.device
        ).copy_(values)
    return values.as_strided((values.numel(),), (1,))


def part_in_memory_order(values: torch.Tensor, stride: Sequence[int], first: int, count: int) -> torch.Tensor:
    """Return elements [first, first + count) of `in_memory_order(values, stride)`, of shape (count,).

    Only rows that contain such elements are read, and copied where the result is not a view. A row is the
    elements at one index of the dimension that is outermost in memory.
    """
    if values.layout is not torch.strided or values.is_neg():
        return in_memory_order(values, stride)[first : first + count]
    outermost_first = sorted(
        (each for each in range(values.dim()) if values.shape[each] != 1), key=lambda each: -stride[each]
    )
    ones = [each for each in range(values.dim()) if values.shape[each] == 1]
    turned = values.permute(outermost_first + ones)
    if not count or not outermost_first:
        return turned.reshape(-1)[first : first + count]
    row = values.numel() // turned.shape[0]
    start = first // row
    rows = turned[start : -(-(first + count) // row)]
    return rows.reshape(-1)[first - start * row :][:count]


def same_order(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether dense tensors of one shape, with strides `first` and `second`, have their elements in the same
    order in memory.

    Strides of dimensions of size 1 are ignored, and so are all strides of a tensor without elements.
    """
    if 0 in shape:
        return True
    triples = zip(shape, first, second, strict=True)
    return all(size == 1 or one == other for size, one, other in triples)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor fill one range of memory without gaps or overlap, in any order."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
