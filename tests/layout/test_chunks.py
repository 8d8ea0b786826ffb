"""Tests of the cuts of regions: shards of ranks, and chunks in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_models import on_meta
from torch import nn

from infinity.config import Precision
from infinity.cpu_adam import BLOCK
from infinity.layout.chunks import ModelLayout, UnitLayout, build, page_bytes, region_sizes
from infinity.layout.units import Survey, survey
from infinity.lm.decoder import PRESETS, Decoder

MEBI = 1 << 20


class Bag(nn.Module):
    """A module with parameters of the given sizes. frozen: indices of parameters that are not trained."""

    def __init__(self, sizes, frozen=()) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            tensor = torch.empty(size, device="meta")
            self.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=index not in frozen))


def whole(surveyed: Survey, chunk_elements: int, ranks: int = 1) -> UnitLayout:
    """Lay out a model as a single unit."""
    everything = (("", tuple(range(len(surveyed.parameters)))),)
    return build(surveyed, everything, chunk_elements, ranks).units[0]


SIZES = st.lists(
    st.integers(0, 3 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK, 5 * BLOCK, 40 * BLOCK, 40 * BLOCK + 1]),
    min_size=1,
    max_size=12,
)


def layout(sizes: list[int], compute: str, blocks: int, ranks: int) -> UnitLayout:
    return whole(survey(Bag(sizes), Precision(compute=compute)), blocks * BLOCK, ranks)


@settings(max_examples=150, deadline=None)
@given(
    sizes=SIZES,
    compute=st.sampled_from(["bf16", "fp32"]),
    blocks=st.integers(1, 9),
    ranks=st.integers(1, 9),
)
def test_places_depend_neither_on_ranks_nor_on_chunks(sizes, compute, blocks, ranks) -> None:
    places = [each.offset for each in layout(sizes, compute, blocks, ranks).parameters]
    assert places == [each.offset for each in layout(sizes, compute, 1, 1).parameters]


@settings(max_examples=300, deadline=None)
@given(
    sizes=SIZES,
    frozen=st.sets(st.integers(0, 11)),
    compute=st.sampled_from(["bf16", "fp32"]),
    keep=st.sampled_from([(), ("p*1",)]),
    cut=st.tuples(st.integers(1, 40), st.integers(2, 9)),
)
def test_every_rank_has_a_shard_of_each_region(sizes, frozen, compute, keep, cut) -> None:
    surveyed = survey(Bag(sizes, frozen), Precision(compute=compute, keep=keep))
    chunk_elements, ranks = cut[0] * BLOCK, cut[1]
    unit = whole(surveyed, chunk_elements, ranks)
    regions = region_sizes(surveyed.parameters, ranks)
    assert page_bytes(regions) == unit.nbytes
    assert [each.starts for each in regions] == [each.starts for each in unit.regions]
    end = 0
    for number, region in enumerate(unit.regions):
        assert region.byte_offset == end
        end += region.nbytes
        assert region.nbytes == region.elements * region.dtype.itemsize
        shard = region.elements // ranks
        assert region.starts == tuple(shard * rank for rank in range(ranks + 1))
        assert shard % BLOCK == 0
        content = max(each.offset + each.numel for each in unit.parameters if each.region == number)
        assert 0 <= region.elements - content < ranks * BLOCK
        chunks = [chunk for chunk in unit.chunks if chunk.region == number]
        if not region.trainable:
            assert chunks == []
            continue
        for owner in range(ranks):
            start = region.starts[owner]
            own = [chunk for chunk in chunks if chunk.owner == owner]
            assert [chunk.count for chunk in own] == [
                count for count, times in region.counts(chunk_elements) for _ in range(times)
            ]
            for chunk in own:
                assert chunk.start == start
                start += chunk.count
            assert start == region.starts[owner + 1]
        assert chunks == sorted(chunks, key=lambda each: each.start)
    assert unit.nbytes == max(end, 4096)
    check_pieces(unit, sizes)
    check_owned(unit, sizes, ranks)
    for rank in range(ranks):
        alone = build(surveyed, (("", tuple(range(len(sizes)))),), chunk_elements, ranks, [rank]).units[0]
        assert alone.chunks == tuple(chunk for chunk in unit.chunks if chunk.owner == rank)
        assert (alone.regions, alone.parameters) == (unit.regions, unit.parameters)


def check_owned(unit: UnitLayout, sizes: list[int], ranks: int) -> None:
    """Assert that the ranges that ranks own of a parameter are those in their shards, and cover it once."""
    for index, size in enumerate(sizes):
        starts, offset = unit.regions[unit.parameters[index].region].starts, unit.parameters[index].offset
        for most in (None, BLOCK, 3 * BLOCK):
            end = 0
            for owner, start, numel in unit.owned(index, most):
                assert start == end
                assert start % BLOCK == 0
                assert 0 < numel <= (most or size)
                assert starts[owner] <= offset + start
                assert offset + start + numel <= starts[owner + 1]
                end += numel
            assert end == size
        assert len(list(unit.owned(index))) <= ranks


def check_pieces(unit: UnitLayout, sizes: list[int]) -> None:
    """Assert that pieces lie in their chunks and do not overlap, and cover each trained parameter once."""
    covered = [0] * len(sizes)
    for chunk in unit.chunks:
        end = 0
        for piece in chunk.pieces:
            parameter = unit.parameters[piece.parameter]
            assert piece.start == covered[piece.parameter]
            assert piece.start % BLOCK == 0
            assert piece.count > 0
            assert end <= piece.offset
            end = piece.offset + piece.count
            assert end <= chunk.count
            assert chunk.start + piece.offset == parameter.offset + piece.start
            assert parameter.offset * parameter.dtype.itemsize % 256 == 0
            covered[piece.parameter] += piece.count
    assert covered == [
        size * parameter.trainable for size, parameter in zip(sizes, unit.parameters, strict=True)
    ]


@pytest.mark.parametrize(
    ("sizes", "blocks", "ranks", "counts"),
    [
        ([1], 8, 4, [1, 1, 1, 1]),
        ([4 * BLOCK], 8, 4, [1, 1, 1, 1]),
        ([4 * BLOCK + 1], 8, 4, [2, 2, 2, 2]),
        ([8 * BLOCK + 1], 2, 4, [2, 1] * 4),
        ([17 * BLOCK], 4, 2, [4, 4, 1] * 2),
        ([9 * BLOCK], 2, 3, [2, 1] * 3),
        ([BLOCK - 128, 7 * BLOCK, 64], 100, 2, [4, 4]),  # small parameters share a block behind the large one
    ],
)
def test_chunks_by_the_rule(sizes, blocks, ranks, counts) -> None:
    unit = whole(survey(Bag(sizes), Precision()), blocks * BLOCK, ranks)
    assert [chunk.count for chunk in unit.chunks] == [count * BLOCK for count in counts]


def test_shards_of_frozen_regions_are_whole_blocks() -> None:
    unit = whole(survey(Bag([3, 5000], frozen={0, 1}), Precision()), BLOCK, 3)
    assert [region.elements for region in unit.regions] == [3 * BLOCK]
    assert unit.chunks == ()


def padding(laid: ModelLayout, elements: int) -> float:
    """The fraction of all pages that holds no parameter, relative to `elements` elements of parameters."""
    return sum(region.elements for unit in laid.units for region in unit.regions) / elements - 1


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("chunk_elements", [MEBI, 2 * MEBI, 4 * MEBI])
@pytest.mark.parametrize("unit_bytes", [1, 32 * MEBI, 128 * MEBI])
def test_padding_is_little(compute, chunk_elements, unit_bytes) -> None:
    surveyed = survey(on_meta(lambda: Decoder(PRESETS["309m"].decoder)), Precision(compute=compute))
    elements = sum(parameter.numel for parameter in surveyed.parameters)
    groups = surveyed.group(unit_bytes)
    assert padding(build(surveyed, groups, chunk_elements, 4), elements) < 0.005
