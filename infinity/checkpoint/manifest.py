"""Manifest: what a commit says about a model's durable state and where its bytes lie in the volume.

A manifest is independent of how pages were cut: it gives ranges of each parameter's elements, so that a
runtime with other units, chunks or homes can read it. Nothing in it names a path. Places are byte offsets in
the volume, the bytes of all slabs as one striped series (infinity/tiers/striping.py).

A manifest is read by `typed_json.typed`, which calls the methods `check`. They raise ValueError, with a text
that begins with the name of a field, for what types do not say. What passes needs no further checks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from infinity.checkpoint.tensor_files import TORCH_DTYPES
from infinity.checkpoint.typed_json import LARGEST, Json, Row, short
from infinity.checksum import crc32c
from infinity.formats.moments import DTYPES as MOMENT_DTYPES
from infinity.formats.optimizer_rules import StateArray, state_arrays
from infinity.layout.strides import is_dense
from infinity.tiers.volume_record import VolumeRecord

if TYPE_CHECKING:  # a manifest is read without pages
    from infinity.pages.optimizer_page import States

FORMAT = 4
"""The version of the format that is written, and the only one that is read."""
BLOCK = 4096
"""Number of elements of a parameter to which a checksum belongs, in every array."""
VALUES = "values"
"""The name of the array that holds a parameter's elements in the dtype of its page. The names of the other
arrays are those of `StateArray`.
"""

_PAGE = 4096

MASTER_DTYPES = {"whole": "float16", "split": "bfloat16", "itself": "float32", "none": ""}
"""The dtype of a trainable parameter's values, by `ParameterEntry.master`."""


@dataclass(frozen=True)
class DataFile:
    """The file of tensors beside a JSON text, to which its encoded values refer."""

    nbytes: int
    crc32c: int
    """The checksum of all its bytes."""

    @classmethod
    def of(cls, content: bytes) -> DataFile:
        """The entry for a file with this content."""
        return cls(len(content), crc32c(content))


@dataclass(frozen=True)
class OptimizerRule:
    """Which states the optimizer keeps."""

    name: str
    """The name of the optimizer's class in torch.optim."""
    moments: tuple[str, ...]
    """The keys of the moments in torch's state."""
    states: str
    """The format of moments: "fp32", "bf16" or "int8" (infinity/formats/moments.py)."""
    averaged: int | None = None
    """Number of steps of which running averages of masters have the values. With more than 0, all ranges of
    trainable parameters have the array "average". None if the run keeps no averages.
    """

    def check(self) -> None:
        """See the module."""
        _check_choice("states", self.states, MOMENT_DTYPES)
        _check_unique("moments", self.moments)

    @staticmethod
    def of(states: States) -> OptimizerRule:
        """The rule of a running model. states: the model's optimizer states."""
        rule = states.rule
        averaged = None if rule.average is None else states.averaged
        return OptimizerRule(rule.name, rule.moments, rule.states, averaged)


@dataclass(frozen=True)
class PrecisionEntry:
    """The fields of the `Precision` with which the model was offloaded."""

    compute: str
    states: str
    keep: tuple[str, ...]
    accumulate: str

    def check(self) -> None:
        """See the module."""
        _check_choice("compute", self.compute, ("bf16", "fp16", "fp32"))
        _check_choice("states", self.states, MOMENT_DTYPES)
        _check_choice("accumulate", self.accumulate, ("fp32", "compute"))


@dataclass(frozen=True)
class ChunkEntry(Row):
    """Which of a chunk's two places the commit holds."""

    parameter_slot: int
    """0 or 1: the place of `UnitEntry.parameter_places` that holds the chunk's slice of parameters."""
    state_slot: int
    """0 or 1: the place of `UnitEntry.state_places` that holds the chunk's states."""
    begun: bool
    """Whether the chunk has been updated, so that its place of states holds states."""


@dataclass(frozen=True)
class FrozenEntry(Row):
    """A region of frozen parameters, which has one place."""

    start: int
    """Distance in bytes from the start of the unit's parameter page to the region."""
    nbytes: int
    place: int
    """Offset of the region in the volume, in bytes."""


@dataclass(frozen=True)
class UnitEntry:
    """The pages of a unit."""

    name: str
    parameters: tuple[str, ...]
    """Canonical names of the unit's parameters, in the order of the page."""
    nbytes: int = 0
    """Size of the parameter page in bytes; 0 in a copy, which has arrays and no pages."""
    state_bytes: int = 0
    """Size of the optimizer page in bytes; 0 if the unit has none."""
    parameter_places: tuple[int | None, int | None] = (None, None)
    """Offsets in the volume of the two places of the parameter page, in bytes; None for an absent place."""
    state_places: tuple[int | None, int | None] = (None, None)
    """Offsets in the volume of the two places of the optimizer page, in bytes; None for an absent place."""
    chunks: tuple[ChunkEntry, ...] = ()
    frozen: tuple[FrozenEntry, ...] = ()

    def check(self) -> None:
        """See the module."""
        _check_unique("parameters", self.parameters)
        _check_multiple("nbytes", self.nbytes)
        _check_multiple("state_bytes", self.state_bytes)
        for each in (*self.parameter_places, *self.state_places):
            _check_multiple("parameter_places or state_places", each or 0)
        for index, chunk in enumerate(self.chunks):
            if chunk.parameter_slot > 1 or self.parameter_places[chunk.parameter_slot] is None:
                raise ValueError(f"chunks[{index}][0] names a place that the unit lacks")
            held = chunk.begun and self.state_bytes
            if chunk.state_slot > 1 or (held and self.state_places[chunk.state_slot] is None):
                raise ValueError(f"chunks[{index}][1] names a place that the unit lacks")
        for index, region in enumerate(self.frozen):
            for number in (region.start, region.nbytes, region.place):
                _check_multiple(f"frozen[{index}]", number)
            if region.start + region.nbytes > self.nbytes:
                raise ValueError(f"frozen[{index}] goes past the end of the unit's page")

    def check_volume(self, nbytes: int) -> None:
        """Raise ValueError, as `check` does, if a place goes past the end of a volume of `nbytes` bytes."""
        sizes = (self.nbytes, 0), (self.state_bytes, self.state_bytes)  # the second has trained chunks alone
        for name, places, least in zip(
            ("parameter_places", "state_places"),
            (self.parameter_places, self.state_places),
            sizes,
            strict=True,
        ):
            for index, place in enumerate(places):
                if place is not None and place + least[index] > nbytes:
                    raise ValueError(f"{name}[{index}] goes past the end of the volume")
        for index, region in enumerate(self.frozen):
            if region.place + region.nbytes > nbytes:
                raise ValueError(f"frozen[{index}] goes past the end of the volume")


@dataclass(frozen=True)
class Place(Row):
    """Where an array has its entries for a range of a parameter's elements."""

    offset: int
    """Offset in the volume in bytes."""
    nbytes: int
    block_bytes: int
    """Bytes that belong to BLOCK elements of the parameter. The last block of a range may be shorter."""
    checksum: int
    """Index of the first block's checksum in the data file's table. The other blocks' follow it."""


@dataclass(frozen=True)
class Range(Row):
    """A range of a parameter's elements in memory order, and the places of its arrays."""

    first: int
    """Index of the first element in the parameter: a multiple of BLOCK."""
    count: int
    places: Mapping[str, Place]
    """By array: "values", "master" or "remainder", the moments' names, with ".scale" for exponents, and
    "average".
    """


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter: its meaning, and the ranges that hold it."""

    names: tuple[str, ...]
    """All names under which the parameter is registered. The first is the canonical name."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Name of the dtype of the parameter's values in its page, as in `TORCH_DTYPES`."""
    trainable: bool
    numel: int
    master: str
    """How the fp32 master is stored: "whole" (array "master"), "split" (values and array "remainder"),
    "itself" (the values are fp32), or "none" (there is no master).
    """
    step: int
    """Number of updates that the parameter has had."""
    moments: bool
    """Whether the ranges have the moments."""
    edited: bool
    """Whether the values were edited since the last update, so that a master that was split is void."""
    unit: int
    """Index of the parameter's unit in `Manifest.units`."""
    ranges: tuple[Range, ...]
    """Ranges that follow one another from element 0 to `numel`."""

    def check(self) -> None:
        """See the module."""
        if not self.names:
            raise ValueError("names is empty")
        _check_choice("dtype", self.dtype, TORCH_DTYPES)
        _check_choice("master", self.master, MASTER_DTYPES)
        if math.prod(max(1, size) for size in self.shape) * self.itemsize > LARGEST:
            raise ValueError("shape is too large")
        if self.numel != math.prod(self.shape):
            raise ValueError(f"numel is {self.numel}, not {math.prod(self.shape)}")
        if len(self.stride) != len(self.shape) or not is_dense(self.shape, self.stride):
            raise ValueError("stride is not that of a dense tensor of this shape")
        if (MASTER_DTYPES[self.master] or self.dtype) != self.dtype or (
            self.trainable == (self.master == "none")
        ):
            kind = "trainable" if self.trainable else "frozen"
            raise ValueError(f"master does not fit a {kind} parameter of {self.dtype}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the values."""
        return self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        found: torch.dtype = TORCH_DTYPES[self.dtype]
        return found

    def state_arrays(self, rule: OptimizerRule | None) -> tuple[StateArray, ...]:
        """The state arrays that each of the ranges has. rule: of the manifest."""
        if rule is None or not self.trainable:
            return ()
        moments = rule.moments if self.moments else ()
        return state_arrays(self.torch_dtype, moments, rule.states, average=bool(rule.averaged))

    def arrays(self, rule: OptimizerRule | None) -> Mapping[str, StateArray]:
        """All arrays that each of the ranges has, by name. rule: of the manifest."""
        found = StateArray(VALUES, self.torch_dtype), *self.state_arrays(rule)
        return {each.name: each for each in found}

    def check_ranges(self, rule: OptimizerRule | None, volume_bytes: int, *, whole: bool) -> None:
        """Raise ValueError, as `check` does, for ranges that are not those of the parameter, or whose places
        go past the end of a volume of `volume_bytes` bytes.

        whole: whether the ranges cover the parameter, as they do with one rank. If they do not, those of a
        frozen parameter may begin anywhere: ranks divide frozen parameters by their bytes.
        """
        arrays, end = self.arrays(rule), 0
        for index, each in enumerate(self.ranges):
            where = f"ranges[{index}]"
            anywhere = not whole and not self.trainable
            if each.first < end or (whole and each.first > end) or (each.first % BLOCK and not anywhere):
                raise ValueError(f"{where}[0] is not {end}, or not a multiple of {BLOCK}")
            end = each.first + each.count
            if not each.count or end > self.numel:
                raise ValueError(f"{where}[1] is 0, or goes past the last element")
            if each.places.keys() != arrays.keys():
                raise ValueError(f"{where}[2] has not exactly the arrays {', '.join(sorted(arrays))}")
            for name, place in each.places.items():
                size, per = arrays[name].dtype.itemsize, arrays[name].per
                form = -(-each.count // per) * size, BLOCK // per * size
                if (place.nbytes, place.block_bytes) != form:
                    raise ValueError(f"{where}[2]['{name}'] has not {form[0]} bytes, {form[1]} a block")
                if place.offset + place.nbytes > volume_bytes:
                    raise ValueError(f"{where}[2]['{name}'] goes past the end of the volume")
        if whole and end != self.numel:
            raise ValueError(f"ranges ends at element {end} of {self.numel}")


@dataclass(frozen=True)
class ParamGroup:
    """A param group of the optimizer."""

    options: Json
    """The encoded dict of the group's options without "params"."""
    params: tuple[str, ...]
    """Canonical names of the group's parameters."""


@dataclass(frozen=True)
class LossScale:
    """The loss scale of fp16 compute."""

    value: float
    good_steps: int

    def check(self) -> None:
        """See the module."""
        if self.value <= 0:
            raise ValueError(f"value is {self.value}")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What belongs to a run and is in no page. Values of the type Json are as `codec.encode` returns them."""

    param_groups: tuple[ParamGroup, ...] = ()
    buffers: Mapping[str, Json] = field(default_factory=dict)
    """Encoded tensors by name, those of non-persistent buffers too."""
    extra_state: Mapping[str, Json] = field(default_factory=dict)
    """Encoded results of `get_extra_state` by the path of the module."""
    loss_scale: LossScale | None = None
    rng: Mapping[str, Json] = field(default_factory=dict)
    """Encoded states of generators by name ("torch", "cuda", "numpy", "python")."""
    state: Json = None
    """The encoded state that the user gave."""
    identity: Json = None
    """An encoded value that says which job this is, such as a digest of its data."""

    def check(self) -> None:
        """See the module."""
        _check_unique("param_groups", self.grouped)

    @property
    def grouped(self) -> tuple[str, ...]:
        """The canonical names of the parameters in all groups."""
        return tuple(itertools.chain.from_iterable(group.params for group in self.param_groups))


class CommitName(NamedTuple):
    """What tells a commit from all others. It is equal for all parts of a commit of ranks. Names of one run
    are in the order of its commits.
    """

    generation: int
    created: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a commit says."""

    generation: int
    created: str
    """When the commit was made, in UTC and ISO 8601. Informative with one rank. With several, the parts of a
    commit have the same generation and the same time, by which they are told from parts of other runs.
    """
    versions: Mapping[str, str]
    """Versions by name ("infinity", "torch", "python"). Informative."""
    isa: str
    """The instruction set of the update kernels. Informative."""
    threads: int
    """Number of threads that computed. Informative."""
    volume: VolumeRecord
    codecs: Mapping[str, int]
    """Versions of the codecs by name ("moments", "rounding")."""
    chunk_elements: int
    rule: OptimizerRule | None
    """None in a copy of a model without an optimizer."""
    precision: PrecisionEntry
    units: tuple[UnitEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    run: RunRecord
    rank: int = 0
    world_size: int = 1

    def check(self) -> None:
        """See the module."""
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}, and world_size {self.world_size}")
        if not self.chunk_elements or self.chunk_elements % BLOCK:
            raise ValueError(f"chunk_elements is {self.chunk_elements}, not a multiple of {BLOCK}")
        nbytes = self.volume.nbytes
        for index, unit in enumerate(self.units):
            with _in(f"units[{index}]"):
                unit.check_volume(nbytes)
        members = {(index, name) for index, unit in enumerate(self.units) for name in unit.parameters}
        for index, parameter in enumerate(self.parameters):
            with _in(f"parameters[{index}]"):
                if (parameter.unit, parameter.names[0]) not in members:
                    raise ValueError("unit is a unit without this parameter")
                parameter.check_ranges(self.rule, nbytes, whole=self.world_size == 1)
        _check_unique("parameters", [name for each in self.parameters for name in each.names])
        if len(self.parameters) != len(members):
            raise ValueError("parameters is not what the units name")
        if not {each.names[0] for each in self.parameters}.issuperset(self.run.grouped):
            raise ValueError("run.param_groups names a parameter that the checkpoint lacks")

    @property
    def name(self) -> CommitName:
        """The name of the commit of which this is a part."""
        return CommitName(self.generation, self.created)


def named_commits(names: Collection[CommitName]) -> str:
    """Words for commits, such as "commit-3 of 2026-01-01T00:00:00+00:00"; "none" for none."""
    return " and ".join(f"commit-{number} of {created}" for number, created in sorted(names)) or "none"


def blocks(count: int) -> int:
    """Number of checksums of a range of `count` elements in each array."""
    return -(-count // BLOCK)


@contextlib.contextmanager
def _in(place: str) -> Iterator[None]:
    """Context that puts the text of a place before that of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from None


def _check_multiple(name: str, number: int) -> None:
    if number % _PAGE:
        raise ValueError(f"{name} is {number}, not a multiple of {_PAGE}")


def _check_choice(name: str, found: str, choices: Iterable[str]) -> None:
    if found not in choices:
        raise ValueError(f"{name} is {short(found)}, not one of {', '.join(choices)}")


def _check_unique(name: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"{name} names something twice")
