"""Chunks and regions: the place of every parameter in the parameter page of its unit.

A unit is a group of parameters that are fetched together, and its parameter page holds their values. The page
consists of at most two regions for each dtype: the trainable parameters of the dtype, laid one behind the
other, and the frozen ones. A region of trainable parameters is divided into chunks, and every chunk is
updated by a job of its own. The functions here read shapes and dtypes, and no tensor data.

[Note: stripes]
N ranks divide the chunks of a region among them: rank r owns every N-th chunk, beginning with chunk r. N
chunks of equal length, one for each rank, are a stripe. A region consists of whole stripes, so that all
ranks own equally many bytes of it. All stripes have the longest chunks that the plan allows, except the last
stripe. Its chunks are as short as the rest of the region permits, because padding is a cost on every rank.
The region's end is padded until the last stripe is whole, and a chunk may consist of padding alone. With one
rank a stripe is a chunk, and the last chunk ends with the last parameter, without padding.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError
from infinity.layout.units import Grouping, Survey, SurveyedParameter
from infinity.tiers import PAGE_ALIGNMENT

PARAMETER_ALIGNMENT = 256
"""Alignment in bytes of every parameter's start in its page.

With a fixed alignment, an operator that chooses its kernel by the alignment of a pointer makes the same
choice in every page.
"""


@dataclass(frozen=True)
class ParameterLayout(SurveyedParameter):
    """The place of one parameter in the parameter page of its unit.

    Elements are counted in memory order: the order of their addresses in the user's tensor.
    """

    region: int
    """Index of the parameter's region in `UnitLayout.regions`."""
    offset: int
    """Distance in elements from the region's start to the parameter's first element."""


@dataclass(frozen=True)
class RegionSize:
    """The size of a range of a parameter page: the unit's trainable, or frozen, parameters of one dtype.

    The parameters are laid one behind the other.
    """

    dtype: torch.dtype
    trainable: bool
    elements: int
    """Length of the region in elements, including gaps between parameters and, with several ranks, the
    padding behind the last of them.
    """
    chunk_elements: int
    """Length in elements of the region's chunks, except those of its last stripe; see [Note: stripes]. In a
    frozen region, which has no chunks: the length that chunks would have.
    """
    ranks: int
    """Number of chunks in a stripe; see [Note: stripes]."""

    @property
    def nbytes(self) -> int:
        """Bytes that the region takes in the page: a multiple of 4096 times the number of ranks."""
        return round_up(self.elements * self.dtype.itemsize, PAGE_ALIGNMENT * self.ranks)

    def counts(self) -> Iterator[tuple[int, int]]:
        """Yield (length in elements, number of chunks that have this length) for the region's chunks.

        A frozen region has no chunks; for it, the chunks are counted that it would have if it were trainable.
        """
        stripes, rest = divmod(self.elements, self.chunk_elements * self.ranks)
        if stripes:
            yield self.chunk_elements, stripes * self.ranks
        if rest:
            yield rest // self.ranks, self.ranks


@dataclass(frozen=True)
class Region(RegionSize):
    """A region of a parameter page."""

    byte_offset: int
    """Distance in bytes from the start of the parameter page to the region; a multiple of 4096."""


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that lie in one chunk."""

    parameter: int
    """Index of the parameter in `UnitLayout.parameters`."""
    start: int
    """Index of the piece's first element in the parameter; a multiple of 4096."""
    offset: int
    """Index of the piece's first element in the chunk."""
    count: int
    """Length of the piece in elements."""

    def parts(self, most: int) -> Iterator[Piece]:
        """Yield the piece as pieces of `most` elements, a multiple of 4096; the last may be shorter."""
        for done in range(0, self.count, most):
            yield Piece(self.parameter, self.start + done, self.offset + done, min(most, self.count - done))


@dataclass(frozen=True)
class Chunk:
    """A range of a trainable region, which is updated as a whole, and the pieces of parameters in it."""

    region: int
    """Index of the chunk's region in `UnitLayout.regions`."""
    start: int
    """Distance in elements from the region's start to the chunk; a multiple of 4096."""
    count: int
    """Length of the chunk in elements, including gaps between parameters and padding."""
    pieces: tuple[Piece, ...]
    """In memory order. With several ranks a chunk may have no piece: it then consists of padding."""


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit: the parameters that are fetched and released together, in one page."""

    name: str
    """Path of the module whose parameters are in the unit; "" for the root module."""
    parameters: tuple[ParameterLayout, ...]
    regions: tuple[Region, ...]
    chunks: tuple[Chunk, ...]
    """The chunks of all trainable regions, in the order of the page.

    A chunk has `Region.chunk_elements` elements. Only the chunks of a region's last stripe may be shorter:
    with one rank, the last chunk; see [Note: stripes].
    """
    nbytes: int
    """Size of the parameter page in bytes: a multiple of 4096, and at least 4096."""

    def start(self, index: int) -> int:
        """Distance in bytes from the page's start to the parameter `parameters[index]`."""
        parameter = self.parameters[index]
        return self.regions[parameter.region].byte_offset + parameter.offset * parameter.dtype.itemsize

    def chunk_start(self, chunk_index: int) -> int:
        """Distance in bytes from the page's start to the chunk `chunks[chunk_index]`; a multiple of 4096."""
        chunk = self.chunks[chunk_index]
        region = self.regions[chunk.region]
        return region.byte_offset + chunk.start * region.dtype.itemsize

    def pieces(self, index: int) -> tuple[tuple[int, Piece], ...]:
        """The pieces of the parameter `parameters[index]` in memory order, each as (chunk index, piece).

        A frozen parameter has no pieces.
        """
        return self._pieces.get(index, ())

    @functools.cached_property
    def _pieces(self) -> dict[int, tuple[tuple[int, Piece], ...]]:
        found: dict[int, list[tuple[int, Piece]]] = {}
        for chunk_index, chunk in enumerate(self.chunks):
            for piece in chunk.pieces:
                found.setdefault(piece.parameter, []).append((chunk_index, piece))
        return {index: tuple(pieces) for index, pieces in found.items()}


@dataclass(frozen=True)
class ModelLayout:
    """The layouts of all units of a model, in the order in which `named_modules` visits the modules."""

    units: tuple[UnitLayout, ...]
    chunk_elements: int
    """Greatest length of a stripe in elements; with one rank a stripe is one chunk. A stripe of one block of
    4096 elements for each rank may be longer.
    """

    @functools.cached_property
    def module_units(self) -> dict[str, tuple[int, ...]]:
        """For each module's path, the indices of the units in which the module's direct parameters lie."""
        found: dict[str, dict[int, None]] = {}
        for unit, layout in enumerate(self.units):
            for parameter in layout.parameters:
                for name in parameter.names:
                    found.setdefault(name.rpartition(".")[0], {})[unit] = None
        return {path: tuple(units) for path, units in found.items()}


def page_bytes(regions: Sequence[RegionSize]) -> int:
    """Size in bytes of the parameter page that holds these regions; at least 4096."""
    return max(PAGE_ALIGNMENT, sum(region.nbytes for region in regions))


def build(surveyed: Survey, groups: Grouping, chunk_elements: int, ranks: int = 1) -> ModelLayout:
    """Lay out the parameter pages of all units of a model.

    surveyed: the model's parameters. groups: the units, from `surveyed.group`. chunk_elements: greatest
    length of a stripe in elements; raises ConfigError if it is not a positive multiple of 4096. ranks: number
    of ranks, which is the number of chunks in a stripe.
    """
    _check_chunk(chunk_elements)
    units = (
        _build_unit(name, [surveyed.parameters[index] for index in members], chunk_elements, ranks)
        for name, members in groups
    )
    return ModelLayout(tuple(units), chunk_elements)


def region_sizes(
    parameters: Sequence[SurveyedParameter], chunk_elements: int, ranks: int = 1
) -> tuple[RegionSize, ...]:
    """The regions of the parameter page of a unit that consists of `parameters`.

    There is one region for each pair of dtype and `trainable` among the parameters, in the order in which the
    pairs first occur. A region holds the parameters with its pair, laid one behind the other. The gaps
    between them and the padding depend on `chunk_elements` and `ranks`, which are as in `build`.
    """
    return _place(parameters, chunk_elements, ranks)[0]


@dataclass(frozen=True)
class _Cut:
    """The chunks' ends in a region of trainable parameters. All lengths are elements, multiples of BLOCK."""

    length: int
    """Length of the chunks before `last_stripe`."""
    last_stripe: int
    """Distance from the region's start to the last stripe; see [Note: stripes]."""
    last_length: int
    """Length of the chunks of the last stripe."""

    def around(self, place: int) -> tuple[int, int]:
        """Return the start and the end of the chunk in which `place` lies. All three are distances in
        elements from the region's start.
        """
        length, base = self.length, 0
        if place >= self.last_stripe:
            length, base = self.last_length, self.last_stripe
        start = place - (place - base) % length
        return start, start + length


def _place(
    parameters: Sequence[SurveyedParameter], chunk_elements: int, ranks: int
) -> tuple[tuple[RegionSize, ...], list[tuple[int, int]]]:
    """Return the regions of a unit that consists of `parameters`, and the place of each parameter.

    A place is (index of the region, offset of the parameter in the region in elements).
    """
    length = max(BLOCK, chunk_elements // ranks // BLOCK * BLOCK)
    regions: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, parameter in enumerate(parameters):
        regions.setdefault((parameter.dtype, parameter.trainable), []).append(index)
    places = [(0, 0)] * len(parameters)
    found = []
    for region, ((dtype, trainable), members) in enumerate(regions.items()):
        numels = [parameters[index].numel for index in members]
        alignment = PARAMETER_ALIGNMENT // dtype.itemsize
        if trainable:
            elements, offsets = _in_stripes(numels, alignment, length, ranks)
        else:
            elements, offsets = _in_line(numels, alignment, None)
            if ranks > 1:  # the ranks' parts of a frozen region are whole pages of equal bytes
                elements = round_up(elements * dtype.itemsize, ranks * PAGE_ALIGNMENT) // dtype.itemsize
        found.append(RegionSize(dtype, trainable, elements, length, ranks))
        for index, offset in zip(members, offsets, strict=True):
            places[index] = (region, offset)
    return tuple(found), places


def _in_stripes(numels: Sequence[int], alignment: int, length: int, ranks: int) -> tuple[int, list[int]]:
    """Lay the parameters of a trainable region one behind the other; see [Note: stripes].

    numels: the parameters' numbers of elements. alignment: alignment of a parameter's start, in elements.
    length: length of the chunks in elements, except those of the last stripe. Returns the region's length
    with padding, and the offsets of the parameters, in elements.
    """
    end, offsets = _in_line(numels, alignment, _Cut(length, 0, length))
    if ranks == 1 or not end:
        return end, offsets
    last_stripe = (end - 1) // (length * ranks) * length * ranks
    # The parameters before the last stripe keep their places, whatever the length of its chunks is.
    content = 0
    for numel, offset in zip(numels, offsets, strict=True):
        taken = round_up(numel, alignment)
        content += min(taken, max(0, offset + taken - last_stripe))
    # Gaps take less than two blocks of each chunk, so that the loop ends after at most three steps.
    for last_length in range(round_up(-(-content // ranks), BLOCK), length, BLOCK):
        tried, shorter = _in_line(numels, alignment, _Cut(length, last_stripe, last_length))
        if tried <= last_stripe + last_length * ranks:
            return last_stripe + last_length * ranks, shorter
    return last_stripe + length * ranks, offsets


def _in_line(numels: Sequence[int], alignment: int, cut: _Cut | None) -> tuple[int, list[int]]:
    """Lay the parameters of a region one behind the other. Returns the end of the last parameter and the
    offsets of all, in elements.

    numels, alignment: as in `_in_stripes`. cut: the chunks' ends; None in a frozen region.
    """
    end, offsets = 0, []
    for numel in numels:
        if not numel:  # takes no room, and the region's end may be outside of the page
            offsets.append(0)
            continue
        offset = round_up(end, alignment)
        if cut is not None:
            offset = _start(offset, numel, *cut.around(offset))
        end = offset + numel
        offsets.append(offset)
    return end, offsets


def _start(aligned: int, numel: int, chunk_start: int, chunk_end: int) -> int:
    """Return where in a trainable region the next parameter starts, in elements from the region's start.

    aligned: the first place behind the earlier parameters that has PARAMETER_ALIGNMENT. numel: the
    parameter's number of elements. chunk_start, chunk_end: the ends of the chunk in which `aligned` lies. If
    a chunk's end cuts the parameter, each of its pieces must begin at a multiple of BLOCK elements from the
    parameter's start. A gap is left before the parameter where only a place later than `aligned` achieves
    this.
    """
    if aligned + numel <= chunk_end:
        return aligned
    on_block = round_up(aligned, BLOCK)
    # Chunks end at multiples of BLOCK from the region's start. A parameter that starts at a multiple of BLOCK
    # is therefore cut at multiples of BLOCK from its own start, too.
    if numel >= BLOCK and chunk_end - on_block >= BLOCK:
        return on_block
    return aligned if aligned == chunk_start else chunk_end


def _build_unit(
    name: str, members: Sequence[SurveyedParameter], chunk_elements: int, ranks: int
) -> UnitLayout:
    found, places = _place(members, chunk_elements, ranks)
    parameters = tuple(
        ParameterLayout(**vars(member), region=region, offset=offset)
        for member, (region, offset) in zip(members, places, strict=True)
    )
    regions, byte_offset = [], 0
    for size in found:
        regions.append(Region(**vars(size), byte_offset=byte_offset))
        byte_offset += size.nbytes
    chunks = (chunk for index in range(len(found)) for chunk in _chunks(parameters, index, found[index]))
    return UnitLayout(name, parameters, tuple(regions), tuple(chunks), page_bytes(found))


def _chunks(parameters: Sequence[ParameterLayout], region: int, size: RegionSize) -> Iterator[Chunk]:
    """Yield the chunks of one region, none if it is frozen. region: the region's index. size: its size."""
    if not size.trainable:
        return
    ends = list(itertools.accumulate(count for count, times in size.counts() for _ in range(times)))
    pieces: list[list[Piece]] = [[] for _ in ends]
    for index, parameter in enumerate(parameters):
        if parameter.region != region or not parameter.numel:
            continue
        done = 0
        chunk = bisect.bisect_right(ends, parameter.offset)
        while done < parameter.numel:
            offset = parameter.offset + done - (ends[chunk - 1] if chunk else 0)
            part = min(ends[chunk] - parameter.offset, parameter.numel) - done
            pieces[chunk].append(Piece(index, done, offset, part))
            done += part
            chunk += 1
    for start, end, inside in zip([0, *ends], ends, pieces, strict=False):
        yield Chunk(region, start, end - start, tuple(inside))


def _check_chunk(chunk_elements: int) -> None:
    if chunk_elements <= 0 or chunk_elements % BLOCK:
        raise ConfigError(
            f"Chunks of {chunk_elements} elements were asked for.", f"Give a positive multiple of {BLOCK}."
        )


@dataclass(frozen=True)
class Division:
    """The way in which a model is divided into units and chunks, told by names, so that a checkpoint can keep
    it. Two runs with the same division have their pages at the same places on disk
    (infinity/planning/slab_layout.py).
    """

    units: tuple[tuple[str, tuple[str, ...]], ...]
    """The units: pairs (path of the module, canonical names of the parameters in the order of the page). The
    canonical name of a parameter is the first of its names in `named_parameters`.
    """
    chunk_elements: int
    """As in `ModelLayout`: greatest length of a stripe in elements."""

    @staticmethod
    def of(layout: ModelLayout) -> Division:
        """Return the division of a model that is laid out as `layout`."""
        units = ((unit.name, tuple(each.names[0] for each in unit.parameters)) for unit in layout.units)
        return Division(tuple(units), layout.chunk_elements)

    def grouping(self, surveyed: Survey) -> Grouping | None:
        """Return the grouping of a surveyed model's parameters into this division's units, or None if the
        division does not fit the model.

        A division fits if it has each parameter's canonical name exactly once and no other names, if no unit
        is empty, and if `chunk_elements` is a positive multiple of BLOCK.
        """
        indices = {parameter.names[0]: index for index, parameter in enumerate(surveyed.parameters)}
        names = [name for _, members in self.units for name in members]
        if len(names) != len(indices) or set(names) != indices.keys():
            return None
        if not all(members for _, members in self.units):
            return None
        if self.chunk_elements <= 0 or self.chunk_elements % BLOCK:
            return None
        return tuple((path, tuple(indices[name] for name in members)) for path, members in self.units)
