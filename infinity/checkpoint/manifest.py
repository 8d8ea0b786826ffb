"""Manifest: the description of a model's committed state, and of where its bytes lie in the volume.

A manifest is independent of how pages were cut: it gives ranges of each parameter's elements, so that a
runtime with other units, chunks or homes can read it. Nothing in it names a path. Places are byte offsets in
the volume, the bytes of all slabs as one striped series (infinity/tiers/striping.py).

`typed_json.typed` reads a manifest, and calls the methods `check` of its dataclasses. They check what type
hints cannot say, and raise ValueError with a text that begins with the name of a field. A manifest that was
read needs no further checks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from infinity.checkpoint.tensor_files import TORCH_DTYPES
from infinity.checkpoint.typed_json import LARGEST, Json, Row, short
from infinity.checksum import crc32c
from infinity.formats.encodings import DTYPES as MOMENT_DTYPES
from infinity.formats.optimizer_rules import StateArray, state_arrays
from infinity.layout.strides import is_dense
from infinity.tiers.striping import VolumeRecord

if TYPE_CHECKING:  # a manifest is read without pages
    from infinity.pages.optimizer_page import States

FORMAT = 6
"""The version of the format that is written."""
READABLE = (5, FORMAT)
"""The versions that are read. In version 5 parameters lie at other places of their pages; ranges of elements
say where, in both.
"""
CODECS = {"moments": 1, "rounding": 1}
"""Versions of what bytes of pages mean: the codes of int8 moments, and the tables of stochastic rounding."""
BLOCK = 4096
"""Number of elements of a parameter that one checksum covers, in every array."""
VALUES = "values"
"""The name of the array that holds a parameter's elements in the dtype of its page. The names of the other
arrays are those of `StateArray`.
"""

_TRAINABLE = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class DataFile:
    """A manifest's entry for its data file, the file of tensors to which encoded values refer."""

    nbytes: int
    crc32c: int
    """The checksum of all bytes of the file."""

    @classmethod
    def of(cls, content: bytes) -> DataFile:
        """Make the entry for a file with this content."""
        return cls(len(content), crc32c(content))


@dataclass(frozen=True)
class OptimizerRule:
    """Which states the optimizer keeps."""

    name: str
    """The name of the optimizer's class in torch.optim."""
    moments: tuple[str, ...]
    """The keys of the moments in torch's state."""
    states: str
    """The format of moments: "fp32", "bf16" or "int8" (infinity/formats/encodings.py)."""
    averaged: int | None = None
    """Number of steps that the running averages of masters include. If it is above 0, all ranges of trainable
    parameters have the array "average". None if the run keeps no averages.
    """

    def check(self) -> None:
        _check_choice("states", self.states, MOMENT_DTYPES)
        _check_unique("moments", self.moments)

    @staticmethod
    def of(states: States) -> OptimizerRule:
        """Return the rule of a running model. states: the model's optimizer states."""
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
        _check_choice("compute", self.compute, ("bf16", "fp16", "fp32"))
        _check_choice("states", self.states, MOMENT_DTYPES)
        _check_choice("accumulate", self.accumulate, ("fp32", "compute"))


@dataclass(frozen=True)
class UnitEntry:
    """A unit of the saved model."""

    name: str
    parameters: tuple[str, ...]
    """Canonical names of the unit's parameters, in the order of the page."""


@dataclass(frozen=True)
class StoredArray(Row):
    """Where an array lies for one range of a parameter's elements."""

    offset: int
    """Offset in the volume in bytes."""
    checksum: int
    """Index of the first block's checksum in the data file's table. Those of later blocks follow it."""


@dataclass(frozen=True)
class Range(Row):
    """A range of a parameter's elements in memory order, and where its arrays lie."""

    first: int
    """Index of the first element in the parameter: a multiple of BLOCK."""
    count: int
    arrays: Mapping[str, StoredArray]
    """Name of an array -> where it lies. The names are "values", "master" or "remainder", those of moments,
    those of moments with ".scale" for exponents, and "average".
    """


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter: its names and form, and the ranges of its elements."""

    names: tuple[str, ...]
    """All names under which the parameter is registered. The first is the canonical name."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Name of the dtype of the parameter's values in its page, as in `TORCH_DTYPES`."""
    trainable: bool
    step: int
    """Number of updates that the parameter has had."""
    moments: bool
    """Whether the optimizer has moments for the parameter, so that each range has their arrays."""
    edited: bool
    """Whether user code has edited the values since the last update: "remainder" or "master" is out of date
    then.
    """
    ranges: tuple[Range, ...]
    """Ascending ranges. With one rank, each begins where the last one ended, from element 0 to `numel`."""

    def check(self) -> None:
        if not self.names:
            raise ValueError("names is empty")
        _check_choice("dtype", self.dtype, TORCH_DTYPES)
        if self.trainable and self.dtype not in _TRAINABLE:
            raise ValueError(f"dtype is {self.dtype}, which no optimizer updates")
        if math.prod(max(1, size) for size in self.shape) * self.torch_dtype.itemsize > LARGEST:
            raise ValueError("shape is too large")
        if len(self.stride) != len(self.shape) or not is_dense(self.shape, self.stride):
            raise ValueError("stride is not that of a dense tensor of this shape")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        found: torch.dtype = TORCH_DTYPES[self.dtype]
        return found

    def state_arrays(self, rule: OptimizerRule | None) -> tuple[StateArray, ...]:
        """Describe the arrays of optimizer states that each range in `ranges` has. Returns () for a frozen
        parameter or without a rule. rule: the optimizer rule of the manifest.
        """
        if rule is None or not self.trainable:
            return ()
        moments = rule.moments if self.moments else ()
        return state_arrays(self.torch_dtype, moments, rule.states, average=bool(rule.averaged))

    def arrays(self, rule: OptimizerRule | None) -> Mapping[str, StateArray]:
        """Return all arrays that each range has, by name. rule: the optimizer's rule in the manifest."""
        found = StateArray(VALUES, self.torch_dtype), *self.state_arrays(rule)
        return {each.name: each for each in found}

    def check_ranges(self, rule: OptimizerRule | None, volume_bytes: int, *, whole: bool) -> None:
        """Raise ValueError, as `check` does, for ranges that overlap, do not fit the parameter, lack an
        array, or go past the end of a volume of `volume_bytes` bytes.

        whole: whether the ranges must cover the whole parameter, as they do with one rank. Ranges begin at
        multiples of BLOCK elements. Only if `whole` is false may the ranges of a frozen parameter begin at
        any element, because ranks divide frozen parameters by their bytes.
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
            if each.arrays.keys() != arrays.keys():
                raise ValueError(f"{where}[2] has not exactly the arrays {', '.join(sorted(arrays))}")
            for name, stored in each.arrays.items():
                if stored.offset + array_bytes(arrays[name], each.count) > volume_bytes:
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
class LossScaleEntry:
    """The loss scale of fp16 compute."""

    value: float
    good_steps: int

    def check(self) -> None:
        if self.value <= 0:
            raise ValueError(f"value is {self.value}")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The state of a run outside of pages. Values of the type Json are results of `codec.encode`."""

    param_groups: tuple[ParamGroup, ...] = ()
    buffers: Mapping[str, Json] = field(default_factory=dict)
    """Encoded tensors by name, those of non-persistent buffers too."""
    extra_state: Mapping[str, Json] = field(default_factory=dict)
    """Encoded results of `get_extra_state` by the path of the module."""
    loss_scale: LossScaleEntry | None = None
    rng: Mapping[str, Json] = field(default_factory=dict)
    """Encoded states of generators by name ("torch", "cuda", "numpy", "python")."""
    state: Json = None
    """The encoded state that the user gave."""
    identity: Json = None
    """An encoded value that says which job this is, such as a digest of its data."""

    def check(self) -> None:
        _check_unique("param_groups", self.grouped)

    @property
    def grouped(self) -> tuple[str, ...]:
        """The canonical names of the parameters in all groups."""
        return tuple(itertools.chain.from_iterable(group.params for group in self.param_groups))


class CommitName(NamedTuple):
    """Identifies a commit, and is equal in all its rank commits. Names of one run sort in the order of its
    commits.
    """

    generation: int
    created: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest's file, without the entry for the data file."""

    generation: int
    created: str
    """When the commit was made, in UTC and ISO 8601. Informative with one rank. With several, the rank
    commits of a commit have the same generation and the same time; those of other runs have other times.
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
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}, and world_size {self.world_size}")
        if not self.chunk_elements or self.chunk_elements % BLOCK:
            raise ValueError(f"chunk_elements is {self.chunk_elements}, not a multiple of {BLOCK}")
        nbytes = self.volume.nbytes
        for index, parameter in enumerate(self.parameters):
            try:
                parameter.check_ranges(self.rule, nbytes, whole=self.world_size == 1)
            except ValueError as error:
                raise ValueError(f"parameters[{index}].{error}") from None
        _check_unique("parameters", [name for each in self.parameters for name in each.names])
        members = [name for unit in self.units for name in unit.parameters]
        if sorted(members) != sorted(each.names[0] for each in self.parameters):
            raise ValueError("units does not name each of the parameters once")
        if not {each.names[0] for each in self.parameters}.issuperset(self.run.grouped):
            raise ValueError("run.param_groups names a parameter that the checkpoint lacks")

    @property
    def name(self) -> CommitName:
        """The name of the commit, which all its rank commits have."""
        return CommitName(self.generation, self.created)


def named_commits(names: Collection[CommitName]) -> str:
    """Return words for commits, such as "commit-3 of 2026-01-01T00:00:00+00:00"; "none" if there is none."""
    return " and ".join(f"commit-{number} of {created}" for number, created in sorted(names)) or "none"


def array_bytes(array: StateArray, count: int) -> int:
    """Return the bytes of an array for `count` elements of a parameter."""
    return array.entries(0, count)[1] * array.dtype.itemsize


def blocks(count: int) -> int:
    """Return the number of blocks, each with a checksum, of an array for `count` elements of a parameter."""
    return -(-count // BLOCK)


def _check_choice(name: str, found: str, choices: Iterable[str]) -> None:
    if found not in choices:
        raise ValueError(f"{name} is {short(found)}, not one of {', '.join(choices)}")


def _check_unique(name: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"{name} names something twice")
