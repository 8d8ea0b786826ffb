"""Manifest: what a commit says about a model's durable state and where its bytes lie in the volume.

A manifest is independent of how pages were cut: it gives ranges of each parameter's elements, so that a
runtime with other units, chunks or homes can read it. Nothing in it names a path. Places are byte offsets in
the volume, the bytes of all slabs as one striped series (infinity/tiers/striping.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from infinity.checkpoint.array_values import Json

FORMAT = 2
"""The version of the format that is written, and the only one that is read."""
BLOCK = 4096
"""Number of elements of a parameter to which a checksum belongs, in every array."""
SCALE_BLOCK = 64
"""Number of elements of a parameter that share one entry of a ".scale" array."""
HEADER_BYTES = 4096
"""Bytes at the start of a slab's file that are not part of the volume."""

MASTERS: Mapping[str, tuple[str, ...]] = {
    "whole": ("master",),
    "split": ("remainder",),
    "itself": (),
    "none": (),
}
"""The arrays, beside "values", from which the fp32 master of a parameter is made, by `Parameter.master`."""
MASTER_DTYPES = {"whole": "float16", "split": "bfloat16", "itself": "float32"}
"""The dtype of a trainable parameter's values, by `Parameter.master`."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of an element of a moment, by the format of states."""


@dataclass(frozen=True)
class SlabEntry:
    """A slab of the volume."""

    uuid: str
    """The UUID in the slab's header, as 32 lower-case hexadecimal digits."""
    nbytes: int
    """Bytes of the volume that lie in the slab, behind the header."""
    weight: int
    """Number of stripes that lie in the slab in each period; 0 for none."""


@dataclass(frozen=True)
class Volume:
    """The slabs that hold the pages, in the order of the volume."""

    stripe_bytes: int
    slabs: tuple[SlabEntry, ...]
    header_bytes: int = HEADER_BYTES

    @property
    def nbytes(self) -> int:
        """The length of the volume in bytes, in whole periods; 0 if a slab lacks the room for its stripes."""
        used = [slab for slab in self.slabs if slab.weight]
        if len(used) == 1:
            return used[0].nbytes
        periods = min((slab.nbytes // (slab.weight * self.stripe_bytes) for slab in used), default=0)
        return periods * self.stripe_bytes * sum(slab.weight for slab in used)


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
    trainable parameters have the array "average". None if the run keeps no averages: then the file has no
    such entry.
    """


@dataclass(frozen=True)
class PrecisionEntry:
    """The fields of the `Precision` with which the model was offloaded."""

    compute: str
    states: str
    keep: tuple[str, ...]
    accumulate: str


@dataclass(frozen=True)
class ChunkEntry:
    """Which of a chunk's two places the commit holds."""

    parameter_side: int
    """0 or 1: the place of `UnitEntry.parameter_places` that holds the chunk's slice of parameters."""
    state_side: int
    """0 or 1: the place of `UnitEntry.state_places` that holds the chunk's states."""
    begun: bool
    """Whether the chunk has been updated, so that its place of states holds states."""


@dataclass(frozen=True)
class FrozenEntry:
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
    nbytes: int
    """Size of the parameter page in bytes."""
    state_bytes: int
    """Size of the optimizer page in bytes; 0 if the unit has none."""
    parameter_places: tuple[int | None, int | None]
    """Offsets in the volume of the two places of the parameter page, in bytes; None for an absent place."""
    state_places: tuple[int | None, int | None]
    """Offsets in the volume of the two places of the optimizer page, in bytes; None for an absent place."""
    chunks: tuple[ChunkEntry, ...]
    frozen: tuple[FrozenEntry, ...]


@dataclass(frozen=True)
class Place:
    """Where an array has its entries for a range of a parameter's elements."""

    offset: int
    """Offset in the volume in bytes."""
    nbytes: int
    block_bytes: int
    """Bytes that belong to BLOCK elements of the parameter. The last block of a range may be shorter."""
    checksum: int
    """Index of the first block's checksum in the data file's table. The other blocks' follow it."""


@dataclass(frozen=True)
class Range:
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
    """Name of the dtype of the parameter's values in its page, as in `array_values.DTYPES`."""
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


class CommitName(NamedTuple):
    """What tells a commit from all others. It is equal for all parts of a commit of ranks. Names of one run
    are in the order of its commits.
    """

    generation: int
    created: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a commit says. Fields of the type Json hold values as `values.encode` returns them."""

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
    volume: Volume
    codecs: Mapping[str, int]
    """Versions of the codecs by name ("moments", "rounding")."""
    chunk_elements: int
    rule: OptimizerRule
    precision: PrecisionEntry
    units: tuple[UnitEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    param_groups: tuple[ParamGroup, ...]
    rank: int = 0
    world_size: int = 1
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

    @property
    def name(self) -> CommitName:
        """The name of the commit of which this is a part."""
        return CommitName(self.generation, self.created)


def named_commits(names: Collection[CommitName]) -> str:
    """Words for commits, such as "commit-3 of 2026-01-01T00:00:00+00:00"; "none" for none."""
    return " and ".join(f"commit-{number} of {created}" for number, created in sorted(names)) or "none"


def array_layout(name: str, dtype_bytes: int, rule: OptimizerRule) -> tuple[int, int] | None:
    """How an array of a range is laid out: (bytes of an entry, number of elements that share an entry).

    name: the array's name. dtype_bytes: bytes of an element of the parameter's values. Returns None for a
    name that no array has.
    """
    if name in rule.moments:
        return MOMENT_BYTES[rule.states], 1
    if rule.states == "int8" and name.removesuffix(".scale") in rule.moments:
        return 1, SCALE_BLOCK
    others = {"values": (dtype_bytes, 1), "master": (4, 1), "remainder": (2, 1), "average": (4, 1)}
    return others.get(name)


def blocks(count: int) -> int:
    """Number of checksums of a range of `count` elements in each array."""
    return -(-count // BLOCK)
