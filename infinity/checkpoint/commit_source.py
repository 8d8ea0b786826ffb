"""Commit source: the arrays of a commit's parameters, read from its slabs whatever their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from infinity.checkpoint.array_source import VALUES, SavedOptimizer, SavedParameter
from infinity.checkpoint.array_values import DTYPES
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import BLOCK, ParameterEntry, Range, array_layout
from infinity.checksum import crc32c_blocks
from infinity.config import round_up
from infinity.errors import CorruptState
from infinity.formats.optimizer_rules import StateArray, state_arrays
from infinity.tiers import PAGE_ALIGNMENT, NvmeTier
from infinity.tiers.nvme import NvmeLease
from infinity.tiers.volume_record import SlabRecord, VolumeRecord


def volume_record(saved: SavedCommit) -> VolumeRecord:
    """The slabs of a commit, as `NvmeTier` adopts them."""
    volume = saved.manifest.volume
    slabs = (SlabRecord(each.uuid, each.nbytes, each.weight) for each in volume.slabs)
    return VolumeRecord(volume.stripe_bytes, tuple(slabs))


class CommitSource:
    """Reads arrays of a commit (an `ArraySource`). Every block that is read is compared with its checksum."""

    def __init__(self, saved: SavedCommit, tier: NvmeTier) -> None:
        """saved: the commit. tier: has adopted the commit's slabs, and leased nothing."""
        self._saved = saved
        self._tier = tier
        self._lease: NvmeLease = tier.lease(tier.free_bytes)
        self._entries = {each.names[0]: each for each in saved.manifest.parameters}

    @property
    def optimizer(self) -> SavedOptimizer | None:
        rule = self._saved.manifest.rule
        return SavedOptimizer(rule.name, rule.states, rule.moments)

    def parameters(self) -> Mapping[str, SavedParameter]:
        return {name: saved_parameter(each) for name, each in self._entries.items()}

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read entries of an array; `ArraySource.read` says which. Raises CorruptState for changed bytes."""
        entry = self._entries[name]
        end = first + count
        parts = [
            self._read(entry, array, each, (max(first, each.first), min(end, each.first + each.count)))
            for each in entry.ranges
            if each.first < end and first < each.first + each.count
        ]
        dtype = self._dtype(entry, array)
        return torch.cat(parts).view(dtype) if parts else torch.empty(0, dtype=dtype, device="cpu")

    def check(self, entry: ParameterEntry, window: int) -> Iterator[int]:
        """Read all arrays of a parameter, at most `window` elements at a time, a multiple of 4096.

        Yields the number of bytes after each read. Raises CorruptState at the first that differ.
        """
        for each in entry.ranges:
            for array in each.places:
                for first in range(each.first, each.first + each.count, window):
                    end = min(first + window, each.first + each.count)
                    yield self._read(entry, array, each, (first, end)).nbytes

    def _read(
        self, entry: ParameterEntry, array: str, within: Range, elements: tuple[int, int]
    ) -> torch.Tensor:
        """Read an array's bytes, uint8, for elements [first, end) of the parameter that lie in a range."""
        first, end = elements
        place = within.places.get(array)
        if place is None:
            raise CorruptState(
                f"The commit has no {array} of {entry.names[0]} for its elements {first} to {end}.",
                "Load another commit.",
            )
        layout = array_layout(array, DTYPES_BY_NAME[entry.dtype].itemsize, self._saved.manifest.rule)
        assert layout is not None  # the manifest was checked when it was read
        size, per = layout
        block = (first - within.first) // BLOCK
        low = (first - within.first) // per * size
        high = min(place.nbytes, -(-(end - within.first) // per) * size)
        start = (place.offset + low) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        stop = round_up(place.offset + high, PAGE_ALIGNMENT)
        memory = torch.empty(stop - start + PAGE_ALIGNMENT, dtype=torch.uint8, device="cpu")
        shift = -memory.data_ptr() % PAGE_ALIGNMENT  # direct I/O takes aligned addresses only
        memory = memory[shift : shift + stop - start]
        self._tier.read(self._lease, memory, offset=start).wait()
        found = memory[place.offset + low - start : place.offset + high - start]
        checksums = crc32c_blocks(found, np.array([(0, high - low, place.block_bytes)], dtype=np.int64))
        wanted = self._saved.checksums[place.checksum + block : place.checksum + block + len(checksums)]
        wrong = np.flatnonzero(checksums != wanted)
        if len(wrong):
            at = first + int(wrong[0]) * BLOCK
            raise CorruptState(
                f"The bytes of {array} of {entry.names[0]} for its elements {at} to {min(at + BLOCK, end)} "
                "are not those that were committed.",
                "Look at the drive's SMART data and the kernel log, and load an earlier copy of the run.",
            )
        return found

    def _dtype(self, entry: ParameterEntry, array: str) -> torch.dtype:
        return next(each.dtype for each in _arrays(self._saved, entry) if each.name == array)


def saved_parameter(entry: ParameterEntry) -> SavedParameter:
    """What a manifest says of a parameter, without its ranges."""
    return SavedParameter(
        names=entry.names,
        shape=entry.shape,
        stride=entry.stride,
        dtype=DTYPES_BY_NAME[entry.dtype],
        trainable=entry.trainable,
        step=entry.step,
        has_moments=entry.moments,
        edited=entry.edited,
    )


DTYPES_BY_NAME: Mapping[str, torch.dtype] = DTYPES


def _arrays(saved: SavedCommit, entry: ParameterEntry) -> tuple[StateArray, ...]:
    dtype = DTYPES_BY_NAME[entry.dtype]
    values = (StateArray(VALUES, dtype),)
    if not entry.trainable:
        return values
    rule = saved.manifest.rule
    return (*values, *state_arrays(dtype, rule.moments, rule.states))
