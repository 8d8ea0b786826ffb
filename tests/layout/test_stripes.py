"""Tests of stripes: how regions are cut into chunks for several ranks, and that one rank changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_models import on_meta
from torch import nn

from infinity.config import Precision, round_up
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


def old_places(sizes: list[int], itemsize: int, chunk: int) -> tuple[list[int], list[int]]:
    """The rule for one rank, told by blocks: the start of each trained parameter, and the chunks' lengths."""
    starts, end = [], 0
    for size in sizes:
        if size == 0:
            starts.append(0)
            continue
        start = -(-end * itemsize // 256) * 256 // itemsize
        room = chunk - start % chunk
        if size > room:
            into_block = -start % BLOCK
            if size >= BLOCK and room - into_block >= BLOCK:
                start += into_block
            elif room < chunk:
                start += room
        starts.append(start)
        end = start + size
    return starts, [min(chunk, end - first) for first in range(0, end, chunk)]


SIZES = st.lists(
    st.integers(0, 3 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK, 5 * BLOCK, 40 * BLOCK, 40 * BLOCK + 1]),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, compute=st.sampled_from(["bf16", "fp32"]), blocks=st.integers(1, 9))
def test_one_rank_keeps_the_rule_of_before(sizes, compute, blocks) -> None:
    unit = whole(survey(Bag(sizes), Precision(compute=compute)), blocks * BLOCK)
    itemsize = 2 if compute == "bf16" else 4
    starts, lengths = old_places(sizes, itemsize, blocks * BLOCK)
    assert [parameter.offset for parameter in unit.parameters] == starts
    assert [chunk.count for chunk in unit.chunks] == lengths
    assert [chunk.start for chunk in unit.chunks] == [blocks * BLOCK * index for index in range(len(lengths))]
    assert [region.elements for region in unit.regions] == [sum(lengths)]
    assert unit.nbytes == max(4096, round_up(sum(lengths) * itemsize, 4096))


@settings(max_examples=300, deadline=None)
@given(
    sizes=SIZES,
    frozen=st.sets(st.integers(0, 11)),
    compute=st.sampled_from(["bf16", "fp32"]),
    keep=st.sampled_from([(), ("p*1",)]),
    cut=st.tuples(st.integers(1, 40), st.integers(2, 9)),
)
def test_stripes_give_every_rank_as_much(sizes, frozen, compute, keep, cut) -> None:
    surveyed = survey(Bag(sizes, frozen), Precision(compute=compute, keep=keep))
    chunk_elements, ranks = cut[0] * BLOCK, cut[1]
    unit = whole(surveyed, chunk_elements, ranks)
    regions = region_sizes(surveyed.parameters, chunk_elements, ranks)
    assert page_bytes(regions) == unit.nbytes
    assert [(each.elements, each.chunk_elements) for each in regions] == [
        (each.elements, each.chunk_elements) for each in unit.regions
    ]
    longest = max(BLOCK, chunk_elements // ranks // BLOCK * BLOCK)
    end = 0
    for number, (region, size) in enumerate(zip(unit.regions, regions, strict=True)):
        assert region.byte_offset == end
        end += size.nbytes
        assert size.nbytes == region.elements * region.dtype.itemsize
        assert size.nbytes % (ranks * 4096) == 0
        chunks = [chunk for chunk in unit.chunks if chunk.region == number]
        if not region.trainable:
            assert chunks == []
            continue
        assert region.chunk_elements == longest
        assert len(chunks) % ranks == 0
        assert [chunk.count for chunk in chunks] == [
            count for count, times in size.counts() for _ in range(times)
        ]
        start = 0
        for index, chunk in enumerate(chunks):
            assert (chunk.start, chunk.count % BLOCK) == (start, 0)
            start += chunk.count
            assert chunk.count == chunks[index // ranks * ranks].count
            if index < len(chunks) - ranks:
                assert chunk.count == longest
        assert start == region.elements
        if chunks:
            assert chunks[-1].count <= longest
            assert any(chunk.pieces for chunk in chunks[-ranks:])  # no stripe is padding alone
    assert unit.nbytes == max(end, 4096)
    check_pieces(unit, sizes)


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
        ([8 * BLOCK], 8, 4, [2] * 4),
        ([8 * BLOCK + 1], 8, 4, [2] * 4 + [1] * 4),
        ([17 * BLOCK], 8, 2, [4, 4, 4, 4, 1, 1]),
        ([9 * BLOCK], 2, 3, [1] * 9),  # a block for each rank, although a stripe should be shorter
        ([7 * BLOCK, BLOCK - 64, 100], 100, 2, [5, 5]),  # with chunks of 4 blocks, a gap is in the way
    ],
)
def test_stripes_by_the_rule(sizes, blocks, ranks, counts) -> None:
    unit = whole(survey(Bag(sizes), Precision()), blocks * BLOCK, ranks)
    assert [chunk.count for chunk in unit.chunks] == [count * BLOCK for count in counts]


def test_parts_of_frozen_regions_are_whole_pages() -> None:
    unit = whole(survey(Bag([3, 5000], frozen={0, 1}), Precision()), BLOCK, 3)
    assert [region.elements * 2 for region in unit.regions] == [3 * 4096]
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
