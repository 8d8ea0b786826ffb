"""Parts: the ranges of a page that are written to disk as a whole, and the slots that each of them has there.

[Note: slots A and B]
With commits on, a page consists of parts: a chunk's slice of the parameter page, a chunk's optimizer states,
or a region of frozen parameters. A part of trained parameters owns two slots in the slabs, A and B, whatever
the home of its page, and a number (`Part.newest`) that says which slot holds its newest bytes. The slot that
the last durable commit holds is never written, nor the slot that a pending commit holds. All other bytes go
to the slot that is left, and later bytes overwrite them there. A frozen part has slot A alone, which the
first commit holds for good. So there is nothing to allocate and nothing to collect, and the room on disk
follows from the layout alone (infinity/planning/slab_layout.py).

The results of a speculative update go to a slot that is neither held nor the newest (`Part.tentative`). Once
`step()` has confirmed them, this slot is the newest; else it is free again. So a run with speculative updates
has one slot more.

[Note: parts of others]
The home of one of several ranks may have whole pages, of which other ranks update their shards. Another
rank's shard is a part with slot A alone, and no commit of this rank holds it. Its owner commits it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import StateFormat
from infinity.layout.chunks import UnitLayout
from infinity.layout.shards import HomeRange, PageShard
from infinity.planning.slab_layout import PageImages
from infinity.tiers import PAGE_ALIGNMENT

if TYPE_CHECKING:
    from infinity.pages.home import Home

Segments = npt.NDArray[np.int64]
"""Ranges of a part that have checksums, int64 (n, 3). A row is (offset in the part, bytes, bytes of a block).

A range holds the entries of one array that belong to a piece of one parameter. A block holds the entries of
4096 elements of the parameter, counted from its first element, so that checksums do not depend on chunks.
"""


class Label(NamedTuple):
    """What one row of `Segments` covers: entries of the array `array`, for elements of the parameter
    `parameter` from element `first` on.
    """

    parameter: str
    array: str
    first: int


Row = tuple[tuple[int, int, int], Label]
"""A row of segments, and its meaning."""

UNKNOWN = -1
"""The entry of `Part.checksums` for a block whose checksum is not known."""


class Part:
    """A range of a page that is written to disk as a whole, and its slots there."""

    __slots__ = (
        "_begun",
        "_masters",
        "checksums",
        "chunk_index",
        "committed",
        "durable",
        "end",
        "home",
        "labels",
        "newest",
        "pending",
        "segments",
        "slots",
        "start",
        "tentative",
        "verified",
    )

    def __init__(
        self,
        start: int,
        end: int,
        slots: tuple[int, ...],
        rows: Sequence[Row],
        home: Home,
        *,
        chunk_index: int | None = None,
        committed: bool = True,
        begun: Sequence[bool] | None = None,
        masters: int = 0,
    ) -> None:
        """start, end: the part's range of bytes in the home. slots: offsets of its slots in the volume, of A
        alone for a frozen part and for a part of another rank. rows: the rows of `segments` with
        their meaning. home: the page's home. chunk_index: index of the chunk that this rank updates; None
        for a frozen part and for a part of another rank. committed: whether this rank's commits hold the
        part; see [Note: parts of others].

        begun: for the optimizer states of a chunk, `StatePage.begun`. While begun[chunk_index] is False, only
        the first `masters` rows of `segments` have values.
        """
        self.start = start
        self.end = end
        self.slots = slots
        self.segments: Segments = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), 3)
        self.labels = tuple(row[1] for row in rows)
        """The meaning of each row of `segments`."""
        self.chunk_index = chunk_index
        self.committed = committed
        self.home = home
        """The home of the part's page."""
        self.newest = 0
        """Index in `slots` of the slot with the newest bytes on disk: 0 for A, 1 for B."""
        self.tentative: tuple[int, npt.NDArray[np.int64]] | None = None
        """(index of the slot with the results of a speculative update, checksums of its blocks); None if
        there is none that `step()` has yet to confirm.
        """
        self.durable: int | None = None
        """Index of the slot that the last durable commit holds; None if no commit holds the part."""
        self.pending: int | None = None
        """Index of the slot that the pending commit holds; None if none does yet."""
        self.checksums: npt.NDArray[np.int64] = np.full(block_count(self.segments), UNKNOWN)
        """CRC32C of each block in the slot `newest`, or UNKNOWN."""
        self.verified = True
        """Whether the bytes in the slot `newest` are known to have these checksums. False for bytes of an
        earlier process that nobody has read yet.
        """
        self._begun = begun
        self._masters = masters

    @property
    def trained(self) -> bool:
        """Whether the part has several slots."""
        return len(self.slots) > 1

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def begun(self) -> bool:
        """Whether all bytes of the part have values; see `__init__`."""
        return self._begun is None or self.chunk_index is None or self._begun[self.chunk_index]

    @property
    def filled(self) -> Segments:
        """The rows of `segments` whose bytes have values."""
        return self.segments if self.begun else self.segments[: self._masters]

    @property
    def offset(self) -> int:
        """Offset in the volume of the part's newest bytes on disk."""
        return self.slots[self.newest]

    def named(self, block: int) -> tuple[str, int]:
        """Name a block, an index in `checksums`, for an error: its array, parameter and elements, and where
        it begins in the part.
        """
        for (start, nbytes, size), label in zip(self.segments.tolist(), self.labels, strict=True):
            blocks = -(-nbytes // size)
            if block < blocks:
                elements = label.first + nbytes * BLOCK // size
                first = label.first + block * BLOCK
                end = min(first + BLOCK, elements)
                name = f"{label.array} of {label.parameter} for its elements {first} to {end}"
                return name, start + block * size
            block -= blocks
        raise IndexError(block)

    def free_slot(self) -> int | None:
        """Index of the slot to which new bytes go; None if commits hold all slots."""
        others = (slot for slot in range(len(self.slots)) if slot != self.newest)
        return self._not_held((self.newest, *others))

    def slot_beside(self) -> int | None:
        """Index of a slot that neither commits hold nor has the newest bytes; None if there is none."""
        return self._not_held(slot for slot in range(len(self.slots)) if slot != self.newest)

    def _not_held(self, slots: Iterable[int]) -> int | None:
        held = (self.durable, self.pending)
        return next((slot for slot in slots if slot not in held), None)

    def confirm(self) -> None:
        """Make the results of a speculative update, if there are any, the newest bytes."""
        if self.tentative is not None:
            (self.newest, self.checksums), self.verified = self.tentative, True
            self.tentative = None


class _Range(Protocol):
    """A range [start, end) of a home."""

    start: int
    end: int


_T = TypeVar("_T", bound=_Range)


class Ranges(tuple[_T, ...]):
    """Ranges of one home that do not overlap, in the order of its bytes."""

    def __init__(self, ranges: Iterable[_T] = ()) -> None:
        self._starts = [each.start for each in self]

    def over(self, start: int, end: int) -> Iterator[_T]:
        """Yield the ranges that have bytes in the range [start, end) of the home."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self) and self[index].start < end:
            if self[index].end > start:
                yield self[index]
            index += 1


class PageParts(Ranges[Part]):
    """The parts of one page, in the order of its home's bytes. Together they cover the home."""

    def extents(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield where the newest bytes [start, end) of the home lie on disk, in order.

        Each item is (offset in the volume, start in the home, end in the home). Neighbours are joined.
        """
        position = first = last = 0
        for part in self.over(start, end):
            low, high = max(start, part.start), min(end, part.end)
            there = part.offset + low - part.start
            if first < last and there == position + last - first:
                last = high
                continue
            if first < last:
                yield position, first, last
            position, first, last = there, low, high
        if first < last:
            yield position, first, last


def block_count(segments: Segments) -> int:
    """The number of blocks in `segments`."""
    return int((-(-segments[:, 1] // segments[:, 2])).sum()) if len(segments) else 0


def parameter_parts(shard: PageShard, images: PageImages, home: Home) -> PageParts:
    """Make the parts of a unit's parameter page that a rank has at home.

    shard: the ranges of the page that the rank has. images: the offsets of the page's images in the volume.
    home: the page's home.
    """
    layout = shard.layout
    parts: list[Part] = []
    offset = 0
    for number in range(len(layout.regions)):
        for start, nbytes, chunk_index, committed in _cuts(shard, number):
            for held in shard.pieces(start, nbytes):
                slots: tuple[int, ...] = (images.first + held.home_start,)
                if chunk_index is not None:
                    slots = (*slots, *(each + offset for each in images.others))
                    offset += nbytes
                rows = _value_rows(layout, number, held)
                stop = held.home_start + held.nbytes
                parts.append(
                    Part(
                        held.home_start,
                        stop,
                        slots,
                        rows,
                        home,
                        chunk_index=chunk_index,
                        committed=committed,
                    )
                )
    end = parts[-1].end if parts else 0
    if end < shard.nbytes:
        parts.append(Part(end, shard.nbytes, (images.first + end,), [], home))
    return PageParts(parts)


def _cuts(shard: PageShard, number: int) -> Iterator[tuple[int, int, int | None, bool]]:
    """Cut a region into the ranges of its parts, in page order. number: index of the region in the unit.

    Yields (bytes from the page's start, bytes, index of the chunk that the rank updates there or None,
    whether the rank's commits hold the range).
    """
    layout, share = shard.layout, shard.share
    region = layout.regions[number]
    if not region.trainable:
        yield region.byte_offset, region.nbytes, None, True
        return
    size = region.dtype.itemsize
    chunks = [(index, each) for index, each in enumerate(layout.chunks) if each.region == number]
    for owner in range(share.ranks) if region.elements else ():
        if share.whole_states or owner == share.rank:
            for index, each in chunks:
                if each.owner == owner:
                    nbytes = round_up(each.count * size, PAGE_ALIGNMENT)
                    yield region.byte_offset + each.start * size, nbytes, index, True
        else:
            start = region.byte_offset + region.starts[owner] * size
            yield start, region.shard_elements * size, None, False


def _value_rows(layout: UnitLayout, number: int, held: HomeRange) -> list[Row]:
    """The rows of a range of a region, in memory order. number: index of the region in the unit. held: the
    range.
    """
    size = layout.regions[number].dtype.itemsize
    begin, end = held.page_start, held.page_start + held.nbytes
    rows: list[Row] = []
    for index, each in enumerate(layout.parameters):
        if each.region == number and each.numel:
            start = layout.start(index)
            low, high = max(start, begin), min(start + each.numel * size, end)
            if low < high:
                label = Label(each.names[0], "values", (low - start) // size)
                rows.append(((low - begin, high - low, BLOCK * size), label))
    return sorted(rows)


def state_parts(
    layout: UnitLayout,
    formats: Sequence[StateFormat],
    images: PageImages,
    home: Home,
    *,
    begun: Sequence[bool],
    kept: Sequence[int],
) -> PageParts:
    """Make the parts of a unit's optimizer page.

    formats, begun, kept: `StatePage.formats`, `StatePage.begun`, `StatePage.kept`. images: the offsets of the
    page's images in the volume. home: the page's home.
    """
    parts: list[Part] = []
    start = 0
    for chunk_index in kept:
        chunk, form = layout.chunks[chunk_index], formats[chunk_index]
        rows: list[Row] = []
        masters = 0
        for array in form.arrays:
            block = BLOCK // array.per * array.dtype.itemsize
            rows += [
                (
                    (*form.place(array.name, each.offset, each.count), block),
                    Label(layout.parameters[each.parameter].names[0], array.name, each.start),
                )
                for each in chunk.pieces
            ]
            if array.name in ("remainder", "master"):
                masters = len(rows)
        end = start + form.nbytes
        if form.nbytes:
            slots = (images.first + start, *(each + start for each in images.others))
            parts.append(
                Part(
                    start,
                    end,
                    slots,
                    rows,
                    home,
                    chunk_index=chunk_index,
                    begun=begun,
                    masters=masters,
                )
            )
        start = end
    return PageParts(parts)
