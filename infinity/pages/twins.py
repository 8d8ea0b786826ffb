"""Twins: the two places on disk that each durable part of a page has, and what each of the places holds.

[Note: two places and a bit]
With commits on, a page consists of parts: a chunk's slice of the parameter page, a chunk's optimizer states,
or a region of frozen parameters. A part of trained parameters owns two places in the slabs, whatever the home
of its page, and a bit (`Part.side`) that says which place holds its newest bytes. The place that the last
durable commit holds is never written, nor the place that a pending commit holds. All other bytes go to the
place that is left, and later bytes overwrite them there. A frozen part has one place, which the first commit
holds for good. So there is nothing to allocate and nothing to collect, and the room on disk follows from the
layout alone (infinity/planning/slab_layout.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.formats.optimizer_rules import StateFormat
from infinity.layout.chunks import UnitLayout
from infinity.planning.slab_layout import PageImages, region_bytes
from infinity.tiers import PAGE_ALIGNMENT

if TYPE_CHECKING:
    from infinity.pages.home import Home

Segments = npt.NDArray[np.int64]
"""Ranges of a part that have checksums, int64 (n, 3). A row is (offset in the part, bytes, bytes of a block).

A range holds the entries of one array that belong to a piece of one parameter. A block holds those of 4096
elements of the parameter, counted from its first element, so that checksums do not depend on chunks.
"""


class Label(NamedTuple):
    """What a row of segments is: the entries of an array for a parameter's elements from `first` on."""

    parameter: str
    array: str
    first: int


Row = tuple[tuple[int, int, int], Label]
"""A row of segments, and what it is."""

UNKNOWN = -1
"""The entry of `Part.checksums` for a block whose checksum is not known."""


class Part:
    """A range of a page that is written to disk as a whole, and its places there."""

    __slots__ = (
        "_begun",
        "_masters",
        "checksums",
        "chunk_index",
        "durable",
        "end",
        "home",
        "labels",
        "pending",
        "places",
        "segments",
        "side",
        "start",
        "verified",
    )

    def __init__(
        self,
        start: int,
        end: int,
        places: tuple[int, ...],
        rows: Sequence[Row],
        home: Home,
        *,
        chunk_index: int | None = None,
        begun: Sequence[bool] | None = None,
        masters: int = 0,
    ) -> None:
        """start, end: the part's range of bytes in the page. places: offsets of its places in the volume:
        two, or one for a frozen part. rows: what lies in the part. home: of the page. chunk_index: index of
        the chunk, None for a frozen part.

        begun: for the optimizer states of a chunk, `StatePage.begun`. While begun[chunk_index] is False, only
        the first `masters` rows of `segments` have values.
        """
        self.start = start
        self.end = end
        self.places = places
        self.segments: Segments = np.array([row[0] for row in rows], dtype=np.int64).reshape(len(rows), 3)
        self.labels = tuple(row[1] for row in rows)
        """What each row of `segments` is."""
        self.chunk_index = chunk_index
        self.home = home
        """The home of the part's page."""
        self.side = 0
        """Index in `places` of the place with the newest bytes on disk."""
        self.durable: int | None = None
        """Index of the place that the last durable commit holds; None if no commit holds the part."""
        self.pending: int | None = None
        """Index of the place that the pending commit holds; None if none does yet."""
        self.checksums: npt.NDArray[np.int64] = np.full(block_count(self.segments), UNKNOWN)
        """CRC32C of each block at the place `side`, or UNKNOWN."""
        self.verified = True
        """Whether the bytes at the place `side` are known to have these checksums. False for bytes of an
        earlier process that nobody has read yet.
        """
        self._begun = begun
        self._masters = masters

    @property
    def trained(self) -> bool:
        """Whether the part has two places."""
        return len(self.places) > 1

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
    def place(self) -> int:
        """Offset in the volume of the part's newest bytes on disk."""
        return self.places[self.side]

    def named(self, block: int) -> str:
        """Name a block, an index in `checksums`, for an error: its array, parameter and elements."""
        for (_, nbytes, size), label in zip(self.segments.tolist(), self.labels, strict=True):
            blocks = -(-nbytes // size)
            if block < blocks:
                elements = label.first + nbytes * BLOCK // size
                first = label.first + block * BLOCK
                end = min(first + BLOCK, elements)
                return f"{label.array} of {label.parameter} for its elements {first} to {end}"
            block -= blocks
        raise IndexError(block)

    def target(self) -> int | None:
        """Index of the place to which new bytes go; None if commits hold all places."""
        held = (self.durable, self.pending)
        for side in (self.side, 1 - self.side):
            if side not in held and side < len(self.places):
                return side
        return None


class Twins:
    """The parts of one page, in the order of its bytes. Together they cover the page."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._starts = [part.start for part in self.parts]

    def over(self, start: int, end: int) -> Iterator[Part]:
        """Yield the parts that have bytes in the range [start, end) of the page."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self.parts) and self.parts[index].start < end:
            yield self.parts[index]
            index += 1

    def extents(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield where the newest bytes [start, end) of the page lie on disk, in order.

        Each item is (offset in the volume, start in the page, end in the page). Neighbours are joined.
        """
        place = first = last = 0
        for part in self.over(start, end):
            low, high = max(start, part.start), min(end, part.end)
            there = part.place + low - part.start
            if first < last and there == place + last - first:
                last = high
                continue
            if first < last:
                yield place, first, last
            place, first, last = there, low, high
        if first < last:
            yield place, first, last


def block_count(segments: Segments) -> int:
    """The number of blocks in `segments`."""
    return int((-(-segments[:, 1] // segments[:, 2])).sum()) if len(segments) else 0


def parameter_twins(layout: UnitLayout, images: PageImages, home: Home) -> Twins:
    """Make the parts of a unit's parameter page.

    images: the offsets of the page's images in the volume. home: of the page.
    """
    parts: list[Part] = []
    chunks = iter(enumerate(layout.chunks))
    second = images.second
    for number, region in enumerate(layout.regions):
        size = region.dtype.itemsize
        start = region.byte_offset
        end = start + region_bytes(region)
        if not region.trainable and start < end:
            inside = [each for each in layout.parameters if each.region == number and each.numel]
            frozen: list[Row] = [
                ((each.offset * size, each.numel * size, BLOCK * size), Label(each.names[0], "values", 0))
                for each in inside
            ]
            parts.append(Part(start, end, (images.first + start,), frozen, home))
        while region.trainable and start < end:
            chunk_index, chunk = next(chunks)
            nbytes = round_up(chunk.count * size, PAGE_ALIGNMENT)
            rows: list[Row] = [
                (
                    (each.offset * size, each.count * size, BLOCK * size),
                    Label(layout.parameters[each.parameter].names[0], "values", each.start),
                )
                for each in chunk.pieces
            ]
            places = (images.first + start, second)
            parts.append(Part(start, start + nbytes, places, rows, home, chunk_index=chunk_index))
            start, second = start + nbytes, second + nbytes
    end = parts[-1].end if parts else 0
    if end < layout.nbytes:
        parts.append(Part(end, layout.nbytes, (images.first + end,), [], home))
    return Twins(parts)


def state_twins(
    layout: UnitLayout,
    formats: Sequence[StateFormat],
    begun: Sequence[bool],
    images: PageImages,
    home: Home,
) -> Twins:
    """Make the parts of a unit's optimizer page. formats, begun: `StatePage.formats`, `StatePage.begun`.

    images: the offsets of the page's images in the volume. home: of the page.
    """
    parts: list[Part] = []
    start = 0
    for chunk_index, (chunk, form) in enumerate(zip(layout.chunks, formats, strict=True)):
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
            places = (images.first + start, images.second + start)
            parts.append(
                Part(
                    start,
                    end,
                    places,
                    rows,
                    home,
                    chunk_index=chunk_index,
                    begun=begun,
                    masters=masters,
                )
            )
        start = end
    return Twins(parts)
