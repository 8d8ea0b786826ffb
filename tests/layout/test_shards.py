"""Tests of shards: the ranks' parts of a page cover it once, and every range is found in the home."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from infinity.config import Precision
from infinity.cpu_adam import BLOCK
from infinity.layout.chunks import UnitLayout, build
from infinity.layout.shards import PageShard, Share, Span, part_bytes, spans
from infinity.layout.units import survey

SIZES: dict[str, list[tuple[int, bool]]] = {
    "one small parameter": [(7, True)],
    "several chunks": [(13 * BLOCK + 5, True), (100, True)],
    "only frozen": [(5 * BLOCK, False)],
    "frozen before trained": [(3 * BLOCK + 1, False), (9 * BLOCK, True), (10, False)],
    "two dtypes": [(6 * BLOCK, True), (3 * BLOCK, True), (100, False)],
    "no elements": [(0, True), (0, False)],
}
"""Units by name: for each parameter, its number of elements and whether it is trained."""


def unit_of(name: str, ranks: int) -> UnitLayout:
    """Lay out a unit of SIZES in chunks of at most 6 blocks. The second parameter is kept in fp32."""
    model = nn.Module()
    for index, (size, trained) in enumerate(SIZES[name]):
        parameter = nn.Parameter(torch.empty(size, device="meta"), requires_grad=trained)
        model.register_parameter(f"p{index}", parameter)
    surveyed = survey(model, Precision(keep=("p1",)))
    everything = tuple(range(len(surveyed.parameters)))
    return build(surveyed, (("", everything),), 6 * BLOCK, ranks).units[0]


every_unit = pytest.mark.parametrize("name", SIZES)
every_rank_count = pytest.mark.parametrize("ranks", [1, 2, 3, 5])


@pytest.mark.parametrize(("stage", "whole"), [(0, (1, 1, 1)), (1, (1, 1, 0)), (2, (1, 0, 0)), (3, (0, 0, 0))])
def test_stages_divide_one_kind_after_the_other(stage, whole) -> None:
    for share, expected in [(Share(2, 4, stage), whole), (Share(0, 1, stage), (1, 1, 1))]:
        assert (share.whole_parameters, share.whole_gradients, share.whole_states) == expected


def test_shards_are_cut_where_their_gradients_are_kept() -> None:
    assert [list(Share(1, 3, stage).cut_shards) for stage in range(4)] == [[0, 1, 2], [0, 1, 2], [1], [1]]
    assert list(Share().cut_shards) == [0]


@pytest.mark.parametrize("arguments", [(1, 1, 0), (-1, 2, 0), (0, 0, 0), (0, 2, 4), (0, 2, -1)])
def test_impossible_shares_are_refused(arguments) -> None:
    with pytest.raises(AssertionError):
        Share(*arguments)


@every_unit
@every_rank_count
def test_spans_cover_a_page_once(name, ranks) -> None:
    unit = unit_of(name, ranks)
    found = spans(unit, ranks)
    end, parts = 0, [0] * ranks
    for span in found:
        assert (span.start, span.at) == (end, parts[span.owner])
        assert span.nbytes > 0
        assert span.nbytes % 4096 == 0
        end += span.nbytes
        parts[span.owner] += span.nbytes
    assert end == (unit.nbytes if ranks == 1 or name != "no elements" else 0)
    part = part_bytes(unit, ranks)
    assert {max(4096, each) for each in parts} == {part}
    assert part % 4096 == 0
    for index, chunk in enumerate(unit.chunks if ranks > 1 else ()):
        start, size = unit.chunk_start(index), unit.regions[chunk.region].dtype.itemsize
        (span,) = [each for each in found if each.start <= start < each.start + each.nbytes]
        assert span.owner == chunk.owner
        assert start + chunk.count * size <= span.start + span.nbytes


def test_spans_of_one_rank_are_the_page() -> None:
    unit = unit_of("two dtypes", 1)
    assert spans(unit, 1) == (Span(owner=0, start=0, nbytes=unit.nbytes, at=0),)
    assert part_bytes(unit, 1) == unit.nbytes


def test_spans_of_frozen_regions() -> None:
    unit = unit_of("frozen before trained", 3)
    frozen = [span for span in spans(unit, 3) if span.start < unit.regions[1].byte_offset]
    assert frozen == [Span(rank, rank * 16384, 16384, 0) for rank in range(3)]


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(AssertionError, match="another number of ranks"):
        spans(unit_of("several chunks", 2), 3)
    with pytest.raises(AssertionError, match="another number of ranks"):
        spans(unit_of("only frozen", 2), 3)


@every_unit
@every_rank_count
@pytest.mark.parametrize("stage", [2, 3])
def test_homes_of_all_ranks_rebuild_the_page(name, ranks, stage) -> None:
    unit = unit_of(name, ranks)
    page = [None] * (unit.nbytes // 4096)
    for rank in range(ranks):
        shard = PageShard(unit, Share(rank, ranks, stage))
        assert shard.nbytes == (part_bytes(unit, ranks) if stage == 3 else unit.nbytes)
        home = [False] * (shard.nbytes // 4096)
        for page_start, home_start, nbytes in shard.own:
            for offset in range(0, nbytes, 4096):
                assert page[(page_start + offset) // 4096] is None
                page[(page_start + offset) // 4096] = rank
                home[(home_start + offset) // 4096] = True
        if stage == 3 and shard.own:
            assert all(home)
        assert sum(each.nbytes for each in shard.held) == (
            sum(each.nbytes for each in shard.own) if stage == 3 else unit.nbytes
        )
        expected = {other: [] for other in range(ranks) if other != rank}
        for span in spans(unit, ranks):
            if span.owner != rank:
                expected[span.owner].append(span)
        assert shard.others == {other: tuple(found) for other, found in expected.items()}
    assert (None in page) == (name == "no elements" and ranks > 1)


@every_unit
@every_rank_count
@pytest.mark.parametrize("stage", [2, 3])
def test_every_range_is_found_in_the_home(name, ranks, stage) -> None:
    unit = unit_of(name, ranks)
    half = 2048  # all ends that are tried are multiples of half a page
    inside = (span.start + step for span in spans(unit, ranks) for step in (0, half))
    bounds = sorted({0, half, unit.nbytes, *inside})
    for rank in range(ranks):
        shard = PageShard(unit, Share(rank, ranks, stage))
        where = {
            page_start + each: home_start + each
            for page_start, home_start, nbytes in shard.held
            for each in range(0, nbytes, half)
        }
        for start, end in itertools.combinations_with_replacement(bounds, 2):
            pieces = shard.pieces(start, end - start)
            found = {
                page_start + each: home_start + each
                for page_start, home_start, nbytes in pieces
                for each in range(0, nbytes, half)
            }
            assert found == {at: where[at] for at in range(start, end, half) if at in where}
            assert pieces == sorted(pieces)


@every_unit
@every_rank_count
def test_chunks_are_found_in_the_home(name, ranks) -> None:
    unit = unit_of(name, ranks)
    for rank in range(ranks):
        part, page = (PageShard(unit, Share(rank, ranks, stage)) for stage in (3, 2))
        for index in range(len(unit.chunks)):
            start = unit.chunk_start(index)
            assert page.home_start(index) == start
            if unit.chunks[index].owner != rank:
                with pytest.raises(AssertionError, match="does not hold"):
                    part.home_start(index)
            elif ranks > 1:
                (held,) = [
                    each for each in part.own if each.page_start <= start < each.page_start + each.nbytes
                ]
                assert part.home_start(index) == held.home_start + start - held.page_start


def test_ranges_outside_of_the_page_are_refused() -> None:
    shard = PageShard(unit_of("one small parameter", 2), Share(0, 2, 3))
    with pytest.raises(AssertionError):
        shard.pieces(4096, 1 << 20)
