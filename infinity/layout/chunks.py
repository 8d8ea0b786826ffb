"""Chunks and regions: the place of every parameter in the parameter page of its unit.

A unit is a group of parameters that are fetched together, and its parameter page holds their values. The page
consists of at most two regions for each dtype: the trainable parameters of the dtype, laid one behind the
other, and the frozen ones. A region of trainable parameters is divided into chunks, and every chunk is
updated by a job of its own. The functions here read shapes and dtypes, and no tensor data.
"""

from __future__ import annotations

import functools
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
class ParameterLayout:
    """The place of one parameter in the parameter page of its unit.

    Elements are counted in memory order: the order of their addresses in the user's tensor.
    """

    names: tuple[str, ...]
    """All names under which the parameter is registered. The first name is the canonical name."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides of the user's tensor in elements. The tensor is dense, with its dimensions in any order."""
    dtype: torch.dtype
    """The dtype of the parameter's elements in the page."""
    numel: int
    region: int
    """Index of the parameter's region in `UnitLayout.regions`."""
    offset: int
    """Distance in elements from the region's start to the parameter's first element."""
    trainable: bool
    """The value of the parameter's `requires_grad` when `survey` read the model."""


@dataclass(frozen=True)
class Region:
    """The part of a parameter page that holds the unit's trainable, or frozen, parameters of one dtype.

    The parameters are laid one behind the other.
    """

    dtype: torch.dtype
    trainable: bool
    elements: int
    """Length of the region in elements, including gaps between parameters."""
    byte_offset: int
    """Distance in bytes from the start of the parameter page to the region; a multiple of 4096."""


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one chunk."""

    parameter: int
    """Index of the parameter in `UnitLayout.parameters`."""
    start: int
    """Index of the piece's first element in the parameter; a multiple of 4096."""
    offset: int
    """Index of the piece's first element in the chunk."""
    count: int
    """Length of the piece in elements."""

    def parts(self, most: int) -> Iterator[Piece]:
        """Divide the piece into pieces of `most` elements, of which the last may be shorter.

        most: a multiple of 4096.
        """
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
    """Length of the chunk in elements, including gaps between parameters."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit: the parameters that are fetched and released together, in one page."""

    name: str
    """Path of the module whose parameters are in the unit; "" for the root module."""
    parameters: tuple[ParameterLayout, ...]
    regions: tuple[Region, ...]
    chunks: tuple[Chunk, ...]
    """The chunks of all trainable regions, in the order of the page.

    A chunk has `ModelLayout.chunk_elements` elements. Only the last chunk of a region may be shorter.
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

    @functools.cached_property
    def module_units(self) -> dict[str, tuple[int, ...]]:
        """For each module's path, the indices of the units in which the module's direct parameters lie."""
        found: dict[str, dict[int, None]] = {}
        for unit, layout in enumerate(self.units):
            for parameter in layout.parameters:
                for name in parameter.names:
                    found.setdefault(name.rpartition(".")[0], {})[unit] = None
        return {path: tuple(units) for path, units in found.items()}


@dataclass(frozen=True)
class RegionSize:
    """A region of a parameter page, as in `Region`, but without the region's offset in the page."""

    dtype: torch.dtype
    trainable: bool
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes that the region takes in the page; a multiple of 4096."""
        return round_up(self.elements * self.dtype.itemsize, PAGE_ALIGNMENT)

    def counts(self, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """Yield (length in elements, number of chunks that have this length) for the region's chunks.

        chunk_elements: length in elements of all chunks but the last.
        """
        full, rest = divmod(self.elements, chunk_elements)
        if full:
            yield chunk_elements, full
        if rest:
            yield rest, 1


def page_bytes(regions: Sequence[RegionSize]) -> int:
    """Size in bytes of the parameter page that holds these regions; at least 4096."""
    return max(PAGE_ALIGNMENT, sum(region.nbytes for region in regions))


def build(surveyed: Survey, groups: Grouping, chunk_elements: int) -> ModelLayout:
    """Lay out the parameter pages of all units of a model.

    surveyed: the model's parameters. groups: the units, from `surveyed.group`. chunk_elements: length of a
    chunk in elements, a positive multiple of 4096. Raises ConfigError for any other length.
    """
    _check_chunk(chunk_elements)
    units = (
        _build_unit(name, [surveyed.parameters[index] for index in members], chunk_elements)
        for name, members in groups
    )
    return ModelLayout(tuple(units), chunk_elements)


def region_sizes(parameters: Sequence[SurveyedParameter], chunk_elements: int) -> tuple[RegionSize, ...]:
    """The regions of the parameter page of a unit that consists of `parameters`.

    There is one region for each pair of dtype and `trainable` among the parameters, in the order in which the
    pairs first occur. A region holds the parameters with its pair, laid one behind the other. chunk_elements:
    length of a chunk in elements, on which the gaps between the parameters depend.
    """
    return _place(parameters, chunk_elements)[0]


def _place(
    parameters: Sequence[SurveyedParameter], chunk_elements: int
) -> tuple[tuple[RegionSize, ...], list[tuple[int, int]]]:
    """Return the regions of a unit that consists of `parameters`, and the place of each parameter.

    A place is (index of the region, offset of the parameter in the region in elements).
    """
    regions: dict[tuple[torch.dtype, bool], int] = {}
    ends: list[int] = []
    places = []
    for parameter in parameters:
        region = regions.setdefault((parameter.dtype, parameter.trainable), len(regions))
        if region == len(ends):
            ends.append(0)
        if not parameter.numel:  # takes no room, and the region's end may be outside of the page
            places.append((region, 0))
            continue
        offset = round_up(ends[region], PARAMETER_ALIGNMENT // parameter.dtype.itemsize)
        if parameter.trainable:
            offset = _start(offset, parameter.numel, chunk_elements)
        ends[region] = offset + parameter.numel
        places.append((region, offset))
    found = (RegionSize(dtype, trainable, ends[region]) for (dtype, trainable), region in regions.items())
    return tuple(found), places


def _start(aligned: int, numel: int, chunk_elements: int) -> int:
    """Return where in a trainable region the next parameter starts, in elements from the region's start.

    aligned: the first place behind the earlier parameters that has PARAMETER_ALIGNMENT. numel: the
    parameter's number of elements. If a chunk's end cuts the parameter, each of its pieces must begin at a
    multiple of BLOCK elements from the parameter's start. A gap is left before the parameter where only a
    place later than `aligned` achieves this.
    """
    chunk_end = aligned - aligned % chunk_elements + chunk_elements
    if aligned + numel <= chunk_end:
        return aligned
    on_block = round_up(aligned, BLOCK)
    # Chunks end at multiples of BLOCK from the region's start. A parameter that starts at a multiple of BLOCK
    # is therefore cut at multiples of BLOCK from its own start, too.
    if numel >= BLOCK and chunk_end - on_block >= BLOCK:
        return on_block
    return aligned if aligned % chunk_elements == 0 else chunk_end


def _build_unit(name: str, members: Sequence[SurveyedParameter], chunk_elements: int) -> UnitLayout:
    found, places = _place(members, chunk_elements)
    parameters = tuple(
        ParameterLayout(
            names=member.names,
            shape=member.shape,
            stride=member.stride,
            dtype=member.dtype,
            numel=member.numel,
            region=region,
            offset=offset,
            trainable=member.trainable,
        )
        for member, (region, offset) in zip(members, places, strict=True)
    )
    regions, byte_offset = [], 0
    for size in found:
        regions.append(Region(size.dtype, size.trainable, size.elements, byte_offset))
        byte_offset += size.nbytes
    return UnitLayout(
        name,
        parameters,
        tuple(regions),
        tuple(_chunks(parameters, regions, chunk_elements)),
        page_bytes(found),
    )


def _chunks(
    parameters: Sequence[ParameterLayout], regions: Sequence[Region], chunk_elements: int
) -> Iterator[Chunk]:
    for region_index, region in enumerate(regions):
        if not region.trainable:
            continue
        count = -(-region.elements // chunk_elements)
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        for index, parameter in enumerate(parameters):
            if parameter.region != region_index:
                continue
            done = 0
            while done < parameter.numel:
                chunk, offset = divmod(parameter.offset + done, chunk_elements)
                part = min(chunk_elements - offset, parameter.numel - done)
                pieces[chunk].append(Piece(index, done, offset, part))
                done += part
        for chunk, inside in enumerate(pieces):
            start = chunk * chunk_elements
            length = min(chunk_elements, region.elements - start)
            yield Chunk(region_index, start, length, tuple(inside))


def _check_chunk(chunk_elements: int) -> None:
    if chunk_elements <= 0 or chunk_elements % BLOCK:
        raise ConfigError(
            f"Chunks of {chunk_elements} elements were asked for.", f"Give a positive multiple of {BLOCK}."
        )
