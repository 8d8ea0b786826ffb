"""Records of volumes: the slabs of a durable NVMe tier as a commit stores them, and their adoption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError, CorruptState
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import Slab
from infinity.tiers.slab_directory import find_slab
from infinity.tiers.slab_header import SLAB_HEADER_BYTES, check_uuid
from infinity.tiers.striping import Striping
from infinity.tiers.tier import PAGE_ALIGNMENT

_MOST_STRIPES = 65536
_LONGEST_STRIPE = 1 << 40
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class SlabRecord:
    """A slab of a volume. Raises CorruptState for values that no volume has."""

    uuid: str
    """The slab's uuid as 32 hexadecimal digits. It is part of the file's name, so no directory is stored."""
    nbytes: int
    """Bytes of pages, without the header."""
    weight: int
    """Number of stripes of a period that lie in the slab."""

    def __post_init__(self) -> None:
        check_uuid(self.uuid)
        _check(_is_multiple(self.nbytes, _MOST_BYTES), f"a slab of {self.nbytes!r} bytes")
        _check(type(self.weight) is int and 0 < self.weight <= _MOST_STRIPES, f"a weight of {self.weight!r}")


@dataclass(frozen=True)
class VolumeRecord:
    """A volume over slabs: all that says where each byte lies. Raises CorruptState for impossible values."""

    stripe_bytes: int
    slabs: tuple[SlabRecord, ...]
    """The slabs in the volume's order, on which the places of bytes depend."""

    def __post_init__(self) -> None:
        _check(_is_multiple(self.stripe_bytes, _LONGEST_STRIPE), f"stripes of {self.stripe_bytes!r} bytes")
        _check(len({slab.uuid for slab in self.slabs}) == len(self.slabs), "a slab twice")
        weight = sum(slab.weight for slab in self.slabs)
        _check(0 < weight <= _MOST_STRIPES, f"{weight} stripes in a period")
        _check(self.nbytes > 0, "no bytes")

    @property
    def striping(self) -> Striping:
        """The pattern of the stripes over the slabs."""
        return Striping(tuple(slab.weight for slab in self.slabs), self.stripe_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the volume."""
        return self.striping.volume_bytes([slab.nbytes for slab in self.slabs])


def adopt_slabs(
    record: VolumeRecord,
    limits: Mapping[PathLock, int],
    wanted: int,
    *,
    files: DiskFiles,
    cleanup: ExitStack,
    undo: ExitStack,
) -> list[Slab]:
    """Open the slabs of a committed volume, in its order, and have them grow to `wanted` bytes together.

    limits: the locks of the directories in which the slabs are looked for, and the budget of each directory
    in bytes. cleanup: will close the slabs. undo: will give back the room by which they grew.

    Raises BudgetError where the slabs in a directory are larger than its budget, ConfigError where `wanted`
    is not positive, and otherwise as `find_slab`, `Slab.adopt` and `Slab.grow` do.
    """
    if wanted <= 0:
        raise ConfigError(f"An nvme tier of {wanted} bytes was asked for.", "Ask for at least one page.")
    locks = {lock.directory: lock for lock in limits}
    rank = next(iter(limits)).rank
    paths = [find_slab(list(locks), rank, slab.uuid) for slab in record.slabs]
    sizes = [
        max(slab.nbytes, size)
        for slab, size in zip(record.slabs, record.striping.path_bytes(wanted), strict=True)
    ]
    _check_budgets(paths, sizes, {lock.directory: limit for lock, limit in limits.items()})
    slabs = [
        cleanup.enter_context(Slab.adopt(path, slab.nbytes, lock=locks[path.parent], files=files))
        for path, slab in zip(paths, record.slabs, strict=True)
    ]
    for slab, size in zip(slabs, sizes, strict=True):
        if size > slab.nbytes:
            undo.callback(slab.shrink, slab.nbytes)
            slab.grow(size)
    return slabs


def _check_budgets(paths: list[Path], sizes: list[int], limits: Mapping[Path, int]) -> None:
    needed: Counter[Path] = Counter()
    for path, size in zip(paths, sizes, strict=True):
        needed[path.parent] += SLAB_HEADER_BYTES + size
    for directory, size in needed.items():
        if size > limits[directory]:
            raise BudgetError(
                f"The commit's slabs in {directory} need {format_size(size)}, and the nvme budget there is "
                f"{format_size(limits[directory])}.",
                f"Give {directory} {size} bytes.",
                needed=size,
                tier="nvme",
            )


def _is_multiple(nbytes: int, most: int) -> bool:
    return type(nbytes) is int and 0 < nbytes <= most and nbytes % PAGE_ALIGNMENT == 0


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise CorruptState(f"The record of a volume has {what}.", "Load another commit.")
