"""Shards: which ranks own which ranges of a unit's pages, and where a rank's home holds them. Pure.

The ranks are the processes that train one model together. ZeRO (Rajbhandari et al., 2020) has each of N ranks
keep 1/N of the optimizer states (stage 1), also of the gradients (stage 2), or also of the parameters
(stage 3). How a unit is divided is told in [Note: shards and chunks] in infinity/layout/chunks.py.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.layout.chunks import Piece, UnitLayout
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(frozen=True)
class Share:
    """One rank's place among the ranks, and what the ranks divide among them."""

    rank: int = 0
    ranks: int = 1
    """Number of ranks. A single rank keeps everything, at every stage."""
    stage: int = 0
    """The stage of ZeRO, from 0 to 3. At stage 0 every rank keeps everything."""
    on_node: int = 0
    """Number of ranks on each node, if all nodes have equally many and ranks are numbered node by node; 0
    otherwise, and if all ranks run on one node.
    """

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, (self.rank, self.ranks)
        assert 0 <= self.stage <= 3, self.stage
        assert not self.on_node or self.ranks % self.on_node == 0, (self.ranks, self.on_node)

    @property
    def whole_parameters(self) -> bool:
        """Whether this rank's homes hold whole parameter pages."""
        return self.ranks == 1 or self.stage < 3

    @property
    def whole_gradients(self) -> bool:
        """Whether this rank's homes hold the gradients of all chunks."""
        return self.ranks == 1 or self.stage < 2

    @property
    def whole_states(self) -> bool:
        """Whether this rank's homes hold the optimizer states of all chunks, so that it updates all."""
        return self.ranks == 1 or self.stage < 1

    @property
    def caches_for_node(self) -> int:
        """Number of ranks on other nodes whose parameters this rank pulls for all ranks of its node."""
        return self.ranks // self.on_node - 1 if self.on_node else 0

    def relay(self, owner: int) -> int:
        """The rank from which this rank pulls parameters of `owner`.

        This is `owner` itself if it runs on this node or if `on_node` is 0. Otherwise it is the rank of this
        node whose place on the node is the same as that of `owner` on its node.
        """
        if not self.on_node or owner // self.on_node == self.rank // self.on_node:
            return owner
        return self.rank // self.on_node * self.on_node + owner % self.on_node

    def kept(self, number: int, *, whole: bool) -> int:
        """How many of `number` chunks or bytes, which are divided equally among the ranks, this rank keeps:
        all if `whole`, else its own.
        """
        return number if whole else number // self.ranks

    @property
    def cut_shards(self) -> range:
        """The ranks whose shards this rank cuts into chunks: all if it keeps their gradients, else itself."""
        return range(self.ranks) if self.whole_gradients else range(self.rank, self.rank + 1)


ALONE = Share()
"""The share of a process that trains by itself."""


@dataclass(frozen=True)
class Span:
    """A range of a unit's parameter page that one rank owns. All numbers but `owner` are bytes, multiples of
    4096.
    """

    owner: int
    """The rank that owns the range."""
    start: int
    """Distance from the page's start to the range."""
    nbytes: int
    at: int
    """Distance from the start of the owner's share of the page to the range. A rank's share of a page is the
    concatenation of the rank's spans in page order.
    """


def spans(layout: UnitLayout, ranks: int) -> tuple[Span, ...]:
    """Divide a unit's parameter page into spans, in page order and without gaps.

    layout: laid out for this number of ranks. Each shard of a region is a span. With one rank, the whole page
    is a span. Otherwise a page without elements has no spans.
    """
    if ranks == 1:
        return (Span(0, 0, layout.nbytes, 0),)
    found = []
    at = 0
    for region in layout.regions:
        assert len(region.starts) == ranks + 1, "the unit is laid out for another number of ranks"
        nbytes = region.shard_elements * region.dtype.itemsize
        for owner in range(ranks) if nbytes else ():
            found.append(Span(owner, region.byte_offset + owner * nbytes, nbytes, at))
        at += nbytes
    return tuple(found)


def part_bytes(layout: UnitLayout, ranks: int) -> int:
    """Bytes of a rank's share of a unit's parameter page, equal for all ranks: a multiple of 4096, at least
    4096. layout: laid out for this number of ranks.
    """
    if ranks == 1:
        return layout.nbytes
    return max(
        PAGE_ALIGNMENT, sum(region.shard_elements * region.dtype.itemsize for region in layout.regions)
    )


class HomeRange(NamedTuple):
    """A range of a parameter page and its place in the page's home on one rank, in bytes."""

    page_start: int
    home_start: int
    nbytes: int


class PageShard:
    """Maps ranges of a unit's parameter page to ranges of the page's home on one rank.

    The home holds the whole page if `share.whole_parameters`, and otherwise only the ranges that the rank
    owns.
    """

    def __init__(self, layout: UnitLayout, share: Share) -> None:
        """layout: the unit, laid out for `share.ranks` ranks."""
        self.layout = layout
        self.share = share
        self._spans = spans(layout, share.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the home."""
        if self.share.whole_parameters:
            return self.layout.nbytes
        return part_bytes(self.layout, self.share.ranks)

    @functools.cached_property
    def own(self) -> tuple[HomeRange, ...]:
        """The ranges that this rank owns, in page order."""
        whole, rank = self.share.whole_parameters, self.share.rank
        return tuple(
            HomeRange(span.start, span.start if whole else span.at, span.nbytes)
            for span in self._spans
            if span.owner == rank
        )

    @functools.cached_property
    def held(self) -> tuple[HomeRange, ...]:
        """The ranges that the home holds, in page order: the whole page as one range, or else `own`."""
        return (HomeRange(0, 0, self.layout.nbytes),) if self.share.whole_parameters else self.own

    @functools.cached_property
    def others(self) -> dict[int, tuple[Span, ...]]:
        """The spans that other ranks own, by their owner and in page order; none with one rank.

        The home lacks them, unless it holds the whole page.
        """
        found = {}
        for rank in range(self.share.ranks):
            if rank != self.share.rank:
                found[rank] = tuple(span for span in self._spans if span.owner == rank)
        return found

    @functools.cached_property
    def others_trained(self) -> tuple[Span, ...]:
        """The spans that other ranks update, without frozen parameters."""
        trained = [
            (each.byte_offset, each.byte_offset + each.elements * each.dtype.itemsize)
            for each in self.layout.regions
            if each.trainable
        ]
        return tuple(
            span
            for spans_of_one in self.others.values()
            for span in spans_of_one
            if any(start <= span.start < end for start, end in trained)
        )

    def home_start(self, chunk_index: int) -> int:
        """Distance in bytes from the home's start to a chunk that the home holds; a multiple of 4096.

        chunk_index: index of the chunk in the unit.
        """
        start = self.layout.chunk_start(chunk_index)
        found = self.pieces(start, PAGE_ALIGNMENT)
        assert found, f"the home does not hold chunk {chunk_index}"
        return found[0].home_start

    def pieces(self, start: int, nbytes: int) -> list[HomeRange]:
        """Return what the home holds of a range of the page, as subranges in page order; there may be none.

        start: distance in bytes from the page's start to the range. nbytes: length of the range, which must
        lie inside the page.
        """
        end = start + nbytes
        assert 0 <= start <= end <= self.layout.nbytes, (start, nbytes)
        found = []
        first = bisect.bisect_right(self.held, start, key=lambda each: each.page_start + each.nbytes)
        for each in self.held[first:]:
            low, high = max(start, each.page_start), min(end, each.page_start + each.nbytes)
            if each.page_start >= end:
                break
            if low < high:
                found.append(HomeRange(low, each.home_start + low - each.page_start, high - low))
        return found


def kept_pieces(
    layout: UnitLayout, share: Share, *, whole: bool
) -> Callable[[int], Sequence[tuple[int, Piece]]]:
    """Return a function from a parameter's index to its pieces that this rank keeps, as (chunk index, piece).

    whole: whether this rank keeps all pieces.
    """
    if whole or len(share.cut_shards) == 1:
        return layout.pieces
    found = {
        index: tuple([each for each in layout.pieces(index) if layout.chunks[each[0]].owner == share.rank])
        for index in range(len(layout.parameters))
    }
    return found.__getitem__


def longest_own_chunk(trained: int, chunk_elements: int, ranks: int) -> int:
    """Return a number of elements that no chunk of a rank exceeds. trained: number of trainable elements.
    chunk_elements: length of a chunk in elements.
    """
    return min(chunk_elements, -(-trained // ranks) + PAGE_ALIGNMENT)


def kept_chunks(layout: UnitLayout, share: Share, *, whole: bool) -> Iterator[int]:
    """Yield the indices of a unit's chunks that this rank keeps. whole: whether it keeps all."""
    return (index for index, chunk in enumerate(layout.chunks) if whole or chunk.owner == share.rank)
