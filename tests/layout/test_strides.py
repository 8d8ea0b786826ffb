"""Tests of strides: which of them give equal memory orders."""

from __future__ import annotations

import itertools

import pytest
import torch

from infinity.layout.strides import in_memory_order, part_in_memory_order, same_order


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


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 3), (3, 4, 5), (1, 4, 5), (2, 1, 6), (1, 1, 1)])
def test_a_part_in_memory_order_is_that_part_of_the_whole(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel())
    for one, other in itertools.product(itertools.permutations(range(len(shape))), repeat=2):
        values = numbers.view([shape[each] for each in one]).permute(
            [one.index(each) for each in range(len(one))]
        )
        stride = torch.empty_permuted(shape, other).stride()
        whole = in_memory_order(values, stride)
        for first, last in itertools.combinations_with_replacement(range(len(numbers) + 1), 2):
            part = part_in_memory_order(values, stride, first, last - first)
            assert torch.equal(part, whole[first:last])


def test_a_part_is_copied_with_whole_rows_alone() -> None:
    images = torch.arange(8 * 3 * 5).view(8, 3, 5)
    channels_last = (15, 1, 3)
    part = part_in_memory_order(images, channels_last, 16, 20)
    assert part.untyped_storage().nbytes() == 2 * 15 * 8, "rows 1 and 2"
    alike = part_in_memory_order(images, images.stride(), 16, 20)
    assert alike.untyped_storage().data_ptr() == images.untyped_storage().data_ptr(), "a view"
