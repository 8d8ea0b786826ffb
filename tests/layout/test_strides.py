"""Tests of strides: which of them give equal memory orders, and those of contiguous tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from infinity.layout.strides import row_major, same_order


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 4, 1), (3, 1, 2, 5)])
def test_row_major(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (2, 1, 1), (1, 1, 1), (2, 0, 4)])
def test_same_order(shape: tuple[int, int, int]) -> None:
    """Two orders are the same if numbering the elements in memory gives both tensors the same values."""

    def numbered(order: tuple[int, ...]) -> torch.Tensor:
        turned = torch.arange(shape[0] * shape[1] * shape[2]).view([shape[each] for each in order])
        return turned.permute([order.index(each) for each in range(3)])

    orders = [numbered(order) for order in itertools.permutations(range(3))]
    found = set()
    for one, other in itertools.product(orders, repeat=2):
        assert one.shape == other.shape == shape
        same = same_order(shape, one.stride(), other.stride())
        assert same == torch.equal(one, other)
        found.add(same)
    assert found == ({True, False} if shape in ((2, 3, 4), (1, 3, 4)) else {True})
