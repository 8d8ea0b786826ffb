"""Commit source: reads the arrays of a commit from the slabs of its rank commits, whatever their chunks."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infinity.aio import Faults
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import BLOCK, OptimizerRule, ParameterEntry, Range, array_bytes
from infinity.checksum import crc32c_blocks
from infinity.config import round_up
from infinity.errors import CorruptState, IncompatibleCheckpoint, StorageError
from infinity.system.disk_files import DiskFiles
from infinity.tiers import PAGE_ALIGNMENT, NvmeTier, aligned_ram
from infinity.tiers.path_lock import PathLock

Read = Callable[[torch.Tensor, int], object]
"""Function (memory, offset) that fills `memory`, uint8, with the bytes of a rank commit's volume from byte
`offset` on. The offset and the size of `memory` are multiples of 4096. Raises StorageError, and CorruptState
if a file ends too early.
"""


class RankCommit(NamedTuple):
    """A rank commit, and the function that reads its volume, on this node or over the network."""

    saved: SavedCommit
    read: Read


def open_slabs(
    saved: SavedCommit,
    directories: Iterable[str | os.PathLike[str]],
    files: DiskFiles,
    shared: Mapping[Path, PathLock],
    faults: Faults | None = None,
) -> NvmeTier:
    """Open the slabs of a rank commit, to read arrays from them.

    directories: where the slabs are looked for. shared: the locks of directories that the caller holds.
    faults: what the I/O engines shall inject, for tests. Raises IncompatibleCheckpoint if a slab is missing.
    """
    record = saved.manifest.volume
    return NvmeTier(
        {os.fspath(each): 1 << 62 for each in directories},
        record.nbytes,
        rank=saved.manifest.rank,
        adopt=record,
        faults=faults,
        files=files,
        shared=shared,
    )


def reader_of(tier: NvmeTier) -> Read:
    """Return a function that reads bytes of a tier's volume into memory.

    tier: has adopted a commit's slabs, and has no leases. This call leases all its bytes.
    """
    lease = tier.lease(tier.free_bytes)
    return lambda memory, offset: tier.read(lease, memory, offset=offset).wait()


@dataclass(frozen=True)
class Damage:
    """A range of a parameter's elements for which an array does not have the committed bytes."""

    parameter: str
    """Canonical name of the parameter."""
    array: str
    first: int
    end: int
    """The elements are those from `first` to `end` - 1, in memory order."""
    cause: str
    """A sentence: the bytes differ, or they could not be read."""


class _Array(NamedTuple):
    """An array of a parameter, in one of the ranges that a rank commit has."""

    rank_commit: RankCommit
    entry: ParameterEntry
    name: str
    within: Range

    @property
    def parameter(self) -> str:
        return self.entry.names[0]


@dataclass(frozen=True)
class Checked:
    """What `CommitSource.check` has found in a range of an array."""

    nbytes: int
    damage: tuple[Damage, ...]


class CommitSource:
    """Reads arrays of a commit from its rank commits, and compares every block with its checksum.

    Elements of a parameter are counted in memory order: the order of their addresses in the tensor of the
    model that was saved. So an array does not depend on the pages, chunks and ranks of that run.
    """

    def __init__(self, rank_commits: Sequence[RankCommit]) -> None:
        """rank_commits: the rank commits to read from. An element that several of them have is read from the
        first. Their manifests describe each parameter equally, except for the ranges.
        """
        manifest = rank_commits[0].saved.manifest
        self.rule: OptimizerRule | None = manifest.rule
        """The optimizer of the saved run; None if the run had none."""
        self._generation = manifest.generation
        self._rank_commits = rank_commits
        self._entries = {each.names[0]: each for each in manifest.parameters}
        self._ranges = [
            {each.names[0]: each.ranges for each in one.saved.manifest.parameters} for one in rank_commits
        ]

    def parameters(self) -> Mapping[str, ParameterEntry]:
        """Return all parameters by their canonical names."""
        return self._entries

    def has(self, name: str, first: int, count: int) -> bool:
        """Whether the rank commits together have elements [first, first + count) of a parameter."""
        while count > 0:
            found = self._find(name, first)
            if found is None:
                return False
            _, within = found
            count -= within.first + within.count - first
            first = within.first + within.count
        return True

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read the entries of an array that belong to a parameter's elements [first, first + count).

        name: the parameter's canonical name. array: VALUES, or the name of a state array of the parameter.
        The range begins at a multiple of 4096, and ends at one or at the parameter's end; for values of a
        frozen parameter it may be any range. Returns a flat CPU tensor of the dtype in which the array is
        stored. Raises StorageError if the bytes cannot be read, CorruptState if they differ from what was
        committed, IncompatibleCheckpoint for elements that no rank commit has, and RankFailure.
        """
        entry = self._entries[name]
        at, end, pieces = first, first + count, []
        while at < end:
            found = self._find(name, at)
            if found is None:
                raise IncompatibleCheckpoint(
                    f"Element {at} of {name} is in no rank commit of commit-{self._generation} read here.",
                    "Load a copy of the run, which save(PATH) makes.",
                )
            rank_commit, within = found
            high = min(end, within.first + within.count)
            pieces.append(self._read(_Array(rank_commit, entry, array, within), (at, high)))
            at = high
        dtype = entry.arrays(self.rule)[array].dtype
        return torch.cat(pieces).view(dtype) if pieces else torch.empty(0, dtype=dtype, device="cpu")

    def check(self, window: int) -> Iterator[Checked]:
        """Compare all arrays of all rank commits with their checksums, and go on after differences.

        Reads at most `window` elements at a time, a multiple of 4096, and yields a result after each read.
        """
        for rank_commit, ranges in zip(self._rank_commits, self._ranges, strict=True):
            for name, entry in self._entries.items():
                for each in ranges[name]:
                    for array in each.arrays:
                        for first in range(each.first, each.first + each.count, window):
                            end = min(first + window, each.first + each.count)
                            yield self._checked(_Array(rank_commit, entry, array, each), (first, end))

    def _find(self, name: str, element: int) -> tuple[RankCommit, Range] | None:
        """Find the first rank commit that has an element of a parameter, and the range in which it lies."""
        for rank_commit, ranges in zip(self._rank_commits, self._ranges, strict=True):
            at = bisect.bisect_right(ranges[name], element, key=lambda each: each.first) - 1
            if at >= 0 and element < ranges[name][at].first + ranges[name][at].count:
                return rank_commit, ranges[name][at]
        return None

    def _checked(self, array: _Array, elements: tuple[int, int]) -> Checked:
        try:
            found, wrong = self._compared(array, elements)
        except StorageError as error:
            return Checked(0, (Damage(array.parameter, array.name, *elements, error.cause),))
        damage = (
            Damage(array.parameter, array.name, first, end, "The bytes are not those that were committed.")
            for first, end in wrong
        )
        return Checked(found.nbytes, tuple(damage))

    def _read(self, array: _Array, elements: tuple[int, int]) -> torch.Tensor:
        """Read the bytes, uint8, of an array for elements of a parameter. Raises CorruptState if they differ
        from their checksums, and the errors of `_compared`.
        """
        first, end = elements
        within = array.within
        low = first - (first - within.first) % BLOCK
        high = min(within.first + within.count, low + round_up(end - low, BLOCK))
        found, wrong = self._compared(array, (low, high))
        if wrong:
            first, end = wrong[0]
            raise CorruptState(
                f"The bytes of {array.name} of {array.parameter} for its elements {first} to {end} are not "
                "those that were committed.",
                "Look at the drive's SMART data and the kernel log, and load an earlier copy of the run.",
            )
        form = array.entry.arrays(self.rule)[array.name]
        start = array_bytes(form, first - low)
        return found[start : start + array_bytes(form, end - first)]

    def _compared(
        self, array: _Array, elements: tuple[int, int]
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Read the bytes of an array for some elements of a parameter, and compare them with their checksums.

        elements: (first, end) for elements [first, end) of the parameter. They must lie in `array.within`,
        and be whole blocks of it. Returns the bytes, uint8, and the ranges of elements whose bytes differ
        from their checksums. Raises CorruptState if the commit does not have the array, and StorageError if
        the bytes cannot be read.
        """
        first, end = elements
        within = array.within
        stored = within.arrays.get(array.name)
        if stored is None:
            raise CorruptState(
                f"The commit has no {array.name} of {array.parameter} for its elements {first} to {end}.",
                "Load another commit.",
            )
        form = array.entry.arrays(self.rule)[array.name]
        low, high = (stored.offset + array_bytes(form, at - within.first) for at in elements)
        start, stop = low // PAGE_ALIGNMENT * PAGE_ALIGNMENT, round_up(high, PAGE_ALIGNMENT)
        memory = aligned_ram(stop - start)
        array.rank_commit.read(memory, start)
        found = memory[low - start : high - start]
        rows = np.array([(0, high - low, array_bytes(form, BLOCK))], dtype=np.int64)
        checksums = crc32c_blocks(found, rows)
        at = stored.checksum + (first - within.first) // BLOCK
        committed = array.rank_commit.saved.checksums[at : at + len(checksums)]
        wrong = np.flatnonzero(checksums != committed).tolist()
        return found, _joined([(first + at * BLOCK, min(first + (at + 1) * BLOCK, end)) for at in wrong])


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges in a list of ascending ranges."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined
