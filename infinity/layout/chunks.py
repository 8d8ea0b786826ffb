"""Chunks and regions: every parameter's place in its unit's page. Pure: reads no tensor's data."""

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
"""Bytes that every parameter's start is a multiple of, so that no kernel's choice depends on the page."""


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter's place in its unit. Elements are counted in memory order."""

    names: tuple[str, ...]
    """All names that it is registered under; the first is the canonical one."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides in elements, as in the user's tensor; dense, in any order of dimensions."""
    dtype: torch.dtype
    """The dtype in the page."""
    numel: int
    region: int
    """Index into the unit's regions."""
    offset: int
    """Elements from the region's start."""
    trainable: bool
    """The value of `requires_grad` when the layout was made."""


@dataclass(frozen=True)
class Region:
    """The parameters of a unit that share a dtype and are all trained or all frozen."""

    dtype: torch.dtype
    trainable: bool
    elements: int
    """Elements of the region, gaps between parameters included."""
    byte_offset: int
    """Bytes from the start of the parameter page; a multiple of 4096."""


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in a chunk."""

    parameter: int
    """Index into the unit's parameters."""
    start: int
    """Elements from the parameter's first; a multiple of 4096."""
    offset: int
    """Elements from the chunk's first."""
    count: int
    """Elements of the piece."""


@dataclass(frozen=True)
class Chunk:
    """A range of a trainable region that one job updates, and the pieces of parameters in it."""

    region: int
    """Index into the unit's regions."""
    start: int
    """Elements from the region's start; a multiple of 4096."""
    count: int
    """Elements of the chunk, gaps included."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class UnitLayout:
    """The parameters that are fetched and released together."""

    name: str
    """Path of the module whose parameters these are, "" for the root."""
    parameters: tuple[ParameterLayout, ...]
    regions: tuple[Region, ...]
    chunks: tuple[Chunk, ...]
    """The chunks of trainable regions, in order. All but a region's last are `chunk_elements` long."""
    nbytes: int
    """Bytes of the parameter page; a multiple of 4096, at least 4096."""

    def start(self, index: int) -> int:
        """Bytes from the page's start to parameter `index`."""
        parameter = self.parameters[index]
        return self.regions[parameter.region].byte_offset + parameter.offset * parameter.dtype.itemsize

    def chunk_start(self, chunk_index: int) -> int:
        """Bytes from the page's start to chunk `chunk_index`; a multiple of 4096."""
        chunk = self.chunks[chunk_index]
        region = self.regions[chunk.region]
        return region.byte_offset + chunk.start * region.dtype.itemsize

    def pieces(self, index: int) -> tuple[tuple[int, Piece], ...]:
        """(chunk, piece) of parameter `index`, in memory order."""
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
    """All units, in the order in which `named_modules` first meets them."""

    units: tuple[UnitLayout, ...]
    chunk_elements: int

    @functools.cached_property
    def module_units(self) -> dict[str, tuple[int, ...]]:
        """The units in which each module's own parameters lie, by the module's path."""
        found: dict[str, dict[int, None]] = {}
        for unit, layout in enumerate(self.units):
            for parameter in layout.parameters:
                for name in parameter.names:
                    found.setdefault(name.rpartition(".")[0], {})[unit] = None
        return {path: tuple(units) for path, units in found.items()}


@dataclass(frozen=True)
class Extent:
    """A region before its place in the page is known."""

    dtype: torch.dtype
    trainable: bool
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes in the page; a multiple of 4096."""
        return round_up(self.elements * self.dtype.itemsize, PAGE_ALIGNMENT)

    def counts(self, chunk_elements: int) -> Iterator[tuple[int, int]]:
        """The lengths of the region's chunks in elements, each with how many chunks have it."""
        full, rest = divmod(self.elements, chunk_elements)
        if full:
            yield chunk_elements, full
        if rest:
            yield rest, 1


def page_bytes(extents: Sequence[Extent]) -> int:
    """Bytes of the parameter page that holds these regions."""
    return max(PAGE_ALIGNMENT, sum(extent.nbytes for extent in extents))


def build(surveyed: Survey, groups: Grouping, chunk_elements: int) -> ModelLayout:
    """The layout of these groups of surveyed parameters. chunk_elements: a multiple of 4096."""
    _check_chunk(chunk_elements)
    units = (
        _build_unit(name, [surveyed.parameters[index] for index in members], chunk_elements)
        for name, members in groups
    )
    return ModelLayout(tuple(units), chunk_elements)


def extents(parameters: Sequence[SurveyedParameter], chunk_elements: int) -> tuple[Extent, ...]:
    """The regions of a unit of these parameters, without laying out its chunks."""
    return _place(parameters, chunk_elements)[0]


def _place(
    parameters: Sequence[SurveyedParameter], chunk_elements: int
) -> tuple[tuple[Extent, ...], list[tuple[int, int]]]:
    """The regions, and every parameter's place: (index of its region, offset in elements)."""
    regions: dict[tuple[torch.dtype, bool], int] = {}
    ends: list[int] = []
    places = []
    for parameter in parameters:
        region = regions.setdefault((parameter.dtype, parameter.trainable), len(regions))
        if region == len(ends):
            ends.append(0)
        if not parameter.numel:  # it takes no room, and a place at the region's end may be outside the page
            places.append((region, 0))
            continue
        offset = round_up(ends[region], PARAMETER_ALIGNMENT // parameter.dtype.itemsize)
        if parameter.trainable:
            offset = _start(offset, parameter.numel, chunk_elements)
        ends[region] = offset + parameter.numel
        places.append((region, offset))
    found = (Extent(dtype, trainable, ends[region]) for (dtype, trainable), region in regions.items())
    return tuple(found), places


def _start(aligned: int, numel: int, chunk_elements: int) -> int:
    """The element at which a trainable parameter starts: chunks may cut it only at multiples of BLOCK
    elements from its own start."""
    chunk_end = aligned - aligned % chunk_elements + chunk_elements
    if aligned + numel <= chunk_end:
        return aligned
    on_block = round_up(aligned, BLOCK)
    # It is cut where chunks end: at multiples of BLOCK from the region's start, and so from its own.
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
    for extent in found:
        regions.append(Region(extent.dtype, extent.trainable, extent.elements, byte_offset))
        byte_offset += extent.nbytes
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
