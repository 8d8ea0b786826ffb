"""Commit source: the arrays of a commit's parameters, read from its slabs whatever their chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from infinity.aio import Faults
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import BLOCK, OptimizerRule, ParameterEntry, Range, array_bytes
from infinity.checksum import crc32c_blocks
from infinity.config import round_up
from infinity.errors import CorruptState, StorageError
from infinity.formats.optimizer_rules import StateArray
from infinity.system.disk_files import DiskFiles
from infinity.tiers import PAGE_ALIGNMENT, NvmeTier, aligned_ram
from infinity.tiers.path_lock import PathLock

Read = Callable[[torch.Tensor, int], object]
"""Function (memory, offset) that fills memory, uint8, with a commit's volume from byte `offset` on, both in
multiples of 4096 bytes. Raises StorageError, and CorruptState for a short file.
"""


def open_slabs(
    saved: SavedCommit,
    directories: Iterable[str | os.PathLike[str]],
    files: DiskFiles,
    shared: Mapping[Path, PathLock],
    faults: Faults | None = None,
) -> NvmeTier:
    """Open the slabs of a commit, or of a rank's part of one, to read arrays from them.

    directories: where the slabs are looked for. shared: the locks of directories that the caller holds.
    faults: of the I/O engines, for tests. Raises IncompatibleCheckpoint if a slab is missing.
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
    """What reads the volume of a tier that has adopted a commit's slabs, and leased nothing."""
    lease = tier.lease(tier.free_bytes)
    return lambda memory, offset: tier.read(lease, memory, offset=offset).wait()


@dataclass(frozen=True)
class Damage:
    """A range of a parameter's elements for which an array is not as it was committed."""

    parameter: str
    """Canonical name of the parameter."""
    array: str
    first: int
    end: int
    """The elements are those from `first` to `end` - 1, in memory order."""
    cause: str
    """A sentence: the bytes differ, or they could not be read."""


@dataclass(frozen=True)
class Checked:
    """The result of reading a part of an array."""

    nbytes: int
    damage: tuple[Damage, ...]


class CommitSource:
    """Reads arrays of a commit. Every block that is read is compared with its checksum."""

    def __init__(self, saved: SavedCommit, read: Read) -> None:
        """saved: the commit. read: reads its volume."""
        self.rule: OptimizerRule | None = saved.manifest.rule
        """The optimizer of the saved run."""
        self._saved = saved
        self._read_volume = read
        self._entries = {each.names[0]: each for each in saved.manifest.parameters}

    def parameters(self) -> Mapping[str, ParameterEntry]:
        """All parameters by their canonical names."""
        return self._entries

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read entries of an array, as `ArraySource.read` says, of elements that the commit, or the rank's
        part of it, has. Raises CorruptState for changed bytes.
        """
        entry = self._entries[name]
        at, end, parts = first, first + count, []
        for each in entry.ranges:
            if each.first <= at < min(end, each.first + each.count):
                high = min(end, each.first + each.count)
                parts.append(self._read(entry, array, each, (at, high)))
                at = high
        assert at == end, f"this part lacks element {at} of {name}"
        dtype = self._array(entry, array).dtype
        return torch.cat(parts).view(dtype) if parts else torch.empty(0, dtype=dtype, device="cpu")

    def check(self, entry: ParameterEntry, window: int) -> Iterator[Checked]:
        """Read all arrays of a parameter and compare them with their checksums; goes on after differences.

        Reads at most `window` elements at a time, a multiple of 4096, and yields a result after each read.
        """
        for each in entry.ranges:
            for array in each.arrays:
                for first in range(each.first, each.first + each.count, window):
                    end = min(first + window, each.first + each.count)
                    yield self._checked(entry, array, each, (first, end))

    def _checked(
        self, entry: ParameterEntry, array: str, within: Range, elements: tuple[int, int]
    ) -> Checked:
        try:
            found, wrong = self._compared(entry, array, within, elements)
        except StorageError as error:
            return Checked(0, (Damage(entry.names[0], array, *elements, error.cause),))
        damage = (
            Damage(entry.names[0], array, first, end, "The bytes are not those that were committed.")
            for first, end in wrong
        )
        return Checked(found.nbytes, tuple(damage))

    def _read(
        self, entry: ParameterEntry, array: str, within: Range, elements: tuple[int, int]
    ) -> torch.Tensor:
        """Do what `_compared` does for elements that need not begin or end with a block of the range, and
        raise CorruptState if bytes differ.
        """
        first, end = elements
        low = first - (first - within.first) % BLOCK
        high = min(within.first + within.count, low + round_up(end - low, BLOCK))
        found, wrong = self._compared(entry, array, within, (low, high))
        if wrong:
            first, end = wrong[0]
            raise CorruptState(
                f"The bytes of {array} of {entry.names[0]} for its elements {first} to {end} are not those "
                "that were committed.",
                "Look at the drive's SMART data and the kernel log, and load an earlier copy of the run.",
            )
        size, per = self._layout(entry, array)
        start = (first - low) // per * size
        return found[start : start + -(-(end - first) // per) * size]

    def _compared(
        self, entry: ParameterEntry, array: str, within: Range, elements: tuple[int, int]
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Read an array's bytes, uint8, for elements [first, end) of the parameter that lie in a range and
        are whole blocks of it.

        Returns them with the ranges of elements whose bytes differ from their checksums. Raises CorruptState
        if the commit does not have the array, and StorageError.
        """
        first, end = elements
        stored = within.arrays.get(array)
        if stored is None:
            raise CorruptState(
                f"The commit has no {array} of {entry.names[0]} for its elements {first} to {end}.",
                "Load another commit.",
            )
        form = self._array(entry, array)
        low, high = (stored.offset + array_bytes(form, at - within.first) for at in elements)
        start, stop = low // PAGE_ALIGNMENT * PAGE_ALIGNMENT, round_up(high, PAGE_ALIGNMENT)
        memory = aligned_ram(stop - start)
        self._read_volume(memory, start)
        found = memory[low - start : high - start]
        rows = np.array([(0, high - low, array_bytes(form, BLOCK))], dtype=np.int64)
        checksums = crc32c_blocks(found, rows)
        at = stored.checksum + (first - within.first) // BLOCK
        wrong = np.flatnonzero(checksums != self._saved.checksums[at : at + len(checksums)]).tolist()
        return found, _joined([(first + at * BLOCK, min(first + (at + 1) * BLOCK, end)) for at in wrong])

    def _layout(self, entry: ParameterEntry, array: str) -> tuple[int, int]:
        """Bytes of an entry of an array, and how many elements of the parameter share it."""
        found = self._array(entry, array)
        return found.dtype.itemsize, found.per

    def _array(self, entry: ParameterEntry, array: str) -> StateArray:
        return entry.arrays(self.rule)[array]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges, with those joined that touch."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined
