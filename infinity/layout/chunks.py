"""Chunks and regions: the place of every parameter in the parameter page of its unit.

A unit is a group of parameters that are fetched together, and its parameter page holds their values. The page
consists of at most two regions for each dtype: the trainable parameters of the dtype, and the frozen ones.
The functions here read shapes and dtypes, and no tensor data.

[Note: shards and chunks]
N ranks divide each region into N contiguous ranges of equal length, its shards: rank r owns shard r. A rank
cuts the trainable regions that it keeps into chunks, and each chunk is updated by a job of its own. The last
chunk of a shard may be shorter. Shards and chunks begin at multiples of BLOCK = 4096 elements, and a
parameter is placed so that such a boundary cuts it only at multiples of BLOCK from its own first element: it
begins at a multiple of BLOCK, or crosses none. So the places of parameters depend neither on the number of
ranks nor on the length of chunks, and ranks may choose different lengths. Large parameters come first in a
region, and small ones, which share blocks, come behind them.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """The size of a range of a parameter page: the unit's trainable, or frozen, parameters of one dtype."""

    dtype: torch.dtype
    trainable: bool
    starts: tuple[int, ...]
    """The prefix table of the region's shards: shard r begins at element `starts[r]`, and the last item is
    the region's length in elements, with gaps between parameters and padding. The items are multiples of
    4096, except the last one with one rank. All shards have equal lengths.
    """

    @property
    def elements(self) -> int:
        """Length of the region in elements."""
        return self.starts[-1]

    @property
    def shard_elements(self) -> int:
        """Length of a shard in elements."""
        return self.starts[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the region takes in the page: a multiple of 4096 times the number of ranks."""
        return round_up(self.elements * self.dtype.itemsize, PAGE_ALIGNMENT)

    def counts(self, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """Yield (length in elements, number of chunks that have this length) for the chunks of one shard.

        A frozen region has no chunks; for it, the chunks are counted that it would have if it were trainable.
        """
        chunks, rest = divmod(self.shard_elements, chunk_elements)
        if chunks:
            yield chunk_elements, chunks
        if rest:
            yield rest, 1


@dataclass(frozen=True)
class Region(RegionSize):
    """A region of a parameter page."""

    byte_offset: int
    """Distance in bytes from the start of the parameter page to the region; a multiple of 4096."""


class OwnedRange(NamedTuple):
    """Elements of one parameter that lie in one rank's shard."""

    owner: int
    """The rank that owns the shard."""
    start: int
    """Index of the first element in the parameter; a multiple of 4096 in trainable parameters."""
    numel: int
    """Number of elements."""


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

    def within(self, first: int, count: int) -> Piece | None:
        """Return the part of the piece in elements [first, first + count) of the parameter; None if there is
        none.
        """
        low, high = max(self.start, first), min(self.start + self.count, first + count)
        return Piece(self.parameter, low, self.offset + low - self.start, high - low) if low < high else None


@dataclass(frozen=True)
class Chunk:
    """A range of a trainable region, which is updated as a whole, and the pieces of parameters in it."""

    owner: int
    """The rank in whose shard the chunk lies."""
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
    """The chunks of all trainable regions, in the order of the page: those of all ranks' shards, or of one
    rank's; see `build`.
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
        """The pieces of the parameter `parameters[index]` in memory order, each as (chunk index, piece), as
        far as they lie in `chunks`. A frozen parameter has no pieces.
        """
        return self._pieces.get(index, ())

    @functools.cached_property
    def _pieces(self) -> dict[int, tuple[tuple[int, Piece], ...]]:
        found: dict[int, list[tuple[int, Piece]]] = {}
        for chunk_index, chunk in enumerate(self.chunks):
            for piece in chunk.pieces:
                found.setdefault(piece.parameter, []).append((chunk_index, piece))
        return {index: tuple(pieces) for index, pieces in found.items()}

    def owned(self, index: int, most: int | None = None) -> Iterator[OwnedRange]:
        """Yield the ranges of the parameter `parameters[index]` in all ranks' shards, in memory order.

        most: the most elements of a range, a multiple of 4096; None: a range for each shard.
        """
        each = self.parameters[index]
        starts, end = self.regions[each.region].starts, each.offset + each.numel
        at = each.offset
        while at < end:
            owner = bisect.bisect_right(starts, at) - 1
            stop = min(end, starts[owner + 1])
            for first in range(at, stop, most or stop - at):
                yield OwnedRange(owner, first - each.offset, min(most or stop - at, stop - first))
            at = stop


@dataclass(frozen=True)
class ModelLayout:
    """The layouts of all units of a model, in the order in which `named_modules` visits the modules."""

    units: tuple[UnitLayout, ...]
    chunk_elements: int
    """Greatest length of a chunk in elements."""

    @functools.cached_property
    def module_units(self) -> dict[str, tuple[int, ...]]:
        """For each module's path, the indices of the units in which the module's direct parameters lie. Units
        of tiles, which the module uses one after the other, are left out.
        """
        found: dict[str, dict[int, None]] = {}
        for unit, layout in enumerate(self.units):
            for parameter in layout.parameters:
                for name in parameter.names if parameter.tile_of is None else ():
                    found.setdefault(name.rpartition(".")[0], {})[unit] = None
        return {path: tuple(units) for path, units in found.items()}


def page_bytes(regions: Sequence[RegionSize]) -> int:
    """Size in bytes of the parameter page that holds these regions; at least 4096."""
    return max(PAGE_ALIGNMENT, sum(region.nbytes for region in regions))


def build(
    surveyed: Survey,
    groups: Grouping,
    chunk_elements: int,
    ranks: int = 1,
    owners: Iterable[int] | None = None,
) -> ModelLayout:
    """Lay out the parameter pages of all units of a model.

    surveyed: the model's parameters. groups: the units, from `surveyed.group`. chunk_elements: greatest
    length of a chunk in elements; raises ConfigError if it is not a positive multiple of 4096. ranks: number
    of ranks, which is the number of shards. owners: the ranks whose shards are cut into chunks, in ascending
    order; None: all.
    """
    _check_chunk(chunk_elements)
    cut = tuple(range(ranks) if owners is None else owners)
    units = (
        _build_unit(name, [surveyed.parameters[index] for index in members], chunk_elements, ranks, cut)
        for name, members in groups
    )
    return ModelLayout(tuple(units), chunk_elements)


def region_sizes(parameters: Sequence[SurveyedParameter], ranks: int = 1) -> tuple[RegionSize, ...]:
    """The regions of the parameter page of a unit that consists of `parameters`.

    There is one region for each pair of dtype and `trainable` among the parameters, in the order in which the
    pairs first occur. ranks: as in `build`.
    """
    return _place(parameters, ranks)[0]


def _place(
    parameters: Sequence[SurveyedParameter], ranks: int
) -> tuple[tuple[RegionSize, ...], list[tuple[int, int]]]:
    """Return the regions of a unit that consists of `parameters`, and the place of each parameter.

    A place is (index of the region, offset of the parameter in the region in elements).
    """
    regions: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, parameter in enumerate(parameters):
        regions.setdefault((parameter.dtype, parameter.trainable), []).append(index)
    places = [(0, 0)] * len(parameters)
    found = []
    for region, ((dtype, trainable), members) in enumerate(regions.items()):
        end, alignment = 0, PARAMETER_ALIGNMENT // dtype.itemsize
        for index in sorted(members, key=lambda each: parameters[each].numel < BLOCK):
            numel = parameters[index].numel
            offset = round_up(end, alignment)
            if offset % BLOCK + numel > BLOCK:
                offset = round_up(offset, BLOCK)
            if numel:  # an empty parameter takes no room, and the region's end may be outside of the page
                places[index] = region, offset
                end = offset + numel
            else:
                places[index] = region, 0
        shard = end if ranks == 1 else round_up(-(-end // ranks), BLOCK)
        found.append(RegionSize(dtype, trainable, tuple(shard * rank for rank in range(ranks + 1))))
    return tuple(found), places


def _build_unit(
    name: str,
    members: Sequence[SurveyedParameter],
    chunk_elements: int,
    ranks: int,
    owners: Sequence[int],
) -> UnitLayout:
    found, places = _place(members, ranks)
    parameters = tuple(
        ParameterLayout(**vars(member), region=region, offset=offset)
        for member, (region, offset) in zip(members, places, strict=True)
    )
    regions, byte_offset = [], 0
    for size in found:
        regions.append(Region(**vars(size), byte_offset=byte_offset))
        byte_offset += size.nbytes
    chunks = (
        chunk
        for index, size in enumerate(found)
        if size.trainable
        for chunk in _chunks(parameters, index, size, chunk_elements, owners)
    )
    return UnitLayout(name, parameters, tuple(regions), tuple(chunks), page_bytes(found))


def _chunks(
    parameters: Sequence[ParameterLayout],
    region: int,
    size: RegionSize,
    chunk_elements: int,
    owners: Sequence[int],
) -> Iterator[Chunk]:
    """Yield the chunks of the shards of `owners` in one region. region: its index. size: its size."""
    inside = sorted(
        ((each.offset, each.numel, index) for index, each in enumerate(parameters) if each.region == region),
    )
    inside = [each for each in inside if each[1]]
    ends = [offset + numel for offset, numel, _ in inside]
    for owner in owners:
        for start in range(size.starts[owner], size.starts[owner + 1], chunk_elements):
            end = min(start + chunk_elements, size.starts[owner + 1])
            pieces = []
            for offset, numel, index in inside[bisect.bisect_right(ends, start) :]:
                if offset >= end:
                    break
                low, high = max(offset, start), min(offset + numel, end)
                pieces.append(Piece(index, low - offset, low - start, high - low))
            yield Chunk(owner, region, start, end - start, tuple(pieces))


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
    """As in `ModelLayout`: greatest length of a chunk in elements."""

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
