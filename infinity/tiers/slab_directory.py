"""What lies in a directory of slabs: leftovers of dead processes, which go, and committed slabs, which stay.

All of it happens under the directory's lock for the rank, so that no other process has these files open.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from infinity.errors import IncompatibleCheckpoint, storage_errors
from infinity.system.directory import check_directory
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab_header import check_uuid, left_by_a_crash, parse_slab_name, slab_name


def lock_directory(
    directory: str | os.PathLike[str], rank: int, files: DiskFiles, *, spared: Collection[str] = ()
) -> PathLock:
    """Lock a directory for a rank, and remove what dead processes left there. Raises as PathLock does.

    spared: as for `reclaim`.
    """
    lock = PathLock(directory, rank=rank, files=files)
    try:
        reclaim(lock, files, spared=spared)
    except BaseException:
        lock.close()
        raise
    return lock


def lock_directories(
    directories: Sequence[Path],
    rank: int,
    files: DiskFiles,
    shared: Mapping[Path, PathLock],
    cleanup: contextlib.ExitStack,
    *,
    spared: Collection[str] = (),
) -> dict[Path, PathLock]:
    """Return a lock of each directory, by `lock_directory`, to be closed by `cleanup`.

    directories: without symbolic links. shared: locks that the caller holds already, to be shared; nothing
    is removed from their directories. spared: as for `reclaim`.
    """
    locks: dict[Path, PathLock] = {}
    for directory in directories:
        if directory in shared and directory not in locks:
            lock = shared[directory].share()
        else:
            lock = lock_directory(directory, rank, files, spared=spared)
        locks[directory] = cleanup.enter_context(lock)
    return locks


def reclaim(lock: PathLock, files: DiskFiles, *, spared: Collection[str] = ()) -> None:
    """Remove the slabs of a locked directory and rank that dead processes left uncommitted.

    Slabs that were committed stay, and so do files that are not certain to be leftovers: those with another
    name, no regular file, or a header that is damaged or of another version. Only names of this rank's slabs
    are ever opened. spared: uuids of slabs that stay whatever their headers say, because a commit names them.
    """
    for path in _leftovers(lock.directory, lock.rank, files, spared):
        files.remove(path)


def leftover_bytes(directory: Path, rank: int) -> int:
    """Bytes on disk of what `reclaim` would remove from a directory for a rank. Removes and locks nothing."""
    return sum(path.lstat().st_blocks * 512 for path in _leftovers(directory, rank, DiskFiles(), ()))


def _leftovers(directory: Path, rank: int, files: DiskFiles, spared: Collection[str]) -> Iterator[Path]:
    """Yield the files in a directory that `reclaim` removes for a rank."""
    with storage_errors("list", directory):
        names = sorted(os.listdir(directory))
    for name in names:
        path = directory / name
        if name == slab_name(rank):
            if _is_regular(path):
                yield path
        else:
            named = parse_slab_name(name)
            if not named or named[0] != rank or named[1] in spared:
                continue
            if _is_regular(path) and left_by_a_crash(path, files):
                yield path


def slab_paths(directories: Sequence[Path], rank: int, uuid: str) -> list[Path]:
    """The paths in the directories that have the name of the slab with this uuid."""
    paths = (directory / slab_name(rank, uuid) for directory in directories)
    return [path for path in paths if os.path.lexists(path)]


def find_slab(directories: Sequence[Path], rank: int, uuid: str) -> Path:
    """Return the path of the slab with this uuid, which must lie in exactly one of the directories.

    Raises IncompatibleCheckpoint if it lies in none of them or in several.
    """
    name = slab_name(rank, uuid)
    found = slab_paths(directories, rank, uuid)
    if not found:
        raise IncompatibleCheckpoint(
            f"The slab {name} (uuid {uuid}) of the commit is in none of the directories "
            f"{', '.join(map(str, directories))}.",
            "Give the directory where it lies in the nvme budget.",
        )
    if len(found) > 1:
        raise IncompatibleCheckpoint(
            f"The slab {name} (uuid {uuid}) of the commit was found {len(found)} times: "
            f"{', '.join(map(str, found))}.",
            "Keep the one that the last run used, and move the copies to where no nvme budget points.",
        )
    return found[0]


def remove_slab(
    directory: str | os.PathLike[str],
    uuid: str,
    rank: int = 0,
    files: DiskFiles | None = None,
    *,
    lock: PathLock | None = None,
) -> bool:
    """Remove a committed slab of which no commit needs anything any more. Returns whether it was there.

    It is removed under the directory's lock, and the directory is synced. lock: the lock of the directory
    and rank if the caller holds it (`NvmeTier.locks`); by default it is taken for the call. Raises
    StorageError with errno EBUSY if the lock is held otherwise, CorruptState for what is no uuid.
    """
    files = files or DiskFiles()
    path = check_directory(directory) / slab_name(rank, check_uuid(uuid))
    with lock.share() if lock else PathLock(directory, rank=rank, files=files) as held:
        assert (held.directory, held.rank) == (path.parent, rank)
        if not _is_regular(path):
            return False
        files.remove(path)
        files.sync_directory(path.parent)
        return True


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
