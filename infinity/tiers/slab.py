"""Slabs: preallocated files, one per directory and rank, in which NVMe pages lie. This module makes, names,
finds and removes the files, but does no I/O on pages.

[Note: the name of a slab says whose it is]
A new slab is `infinity-rank<rank>.slab`. No commit needs it, so it is removed when its run ends, or, if its
process was killed, by the next process that locks the directory for the rank. The first commit renames the
slab to `infinity-rank<rank>-<uuid>.slab`, and the manifest names the uuid. A slab of this name is only
removed by a run that has read the commits it belongs to.

A crash between this rename and that of the manifest leaves a slab that no commit has. The temporary manifest
then exists, and names the slab: see `commit_files.unfinished_slabs`. So the temporary manifest is written
before slabs are renamed, and is removed only after they have their old names back.

A scratch slab holds what no later process needs. It loses its name, `infinity-rank<rank>.scratch`, as soon as
it is open, so nothing of it is left after a kill.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid as uuids
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.config import round_up
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, storage_errors
from infinity.system.closing import Closing
from infinity.system.directory import is_at, preallocate
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:
    from typing_extensions import Self


def slab_name(rank: int, uuid: str | None = None) -> str:
    """The name of a slab's file. uuid: 32 hexadecimal digits; None for a slab that was never committed."""
    return f"infinity-rank{rank}.slab" if uuid is None else f"infinity-rank{rank}-{uuid}.slab"


def scratch_name(rank: int) -> str:
    """The name that a scratch slab's file has until it is open."""
    return f"infinity-rank{rank}.scratch"


@dataclass
class _Open:
    """All that is needed to close a slab. It is kept outside of the Slab object, which may be gone when
    the slab is closed.
    """

    descriptor: int
    path: Path
    files: DiskFiles
    lock: PathLock
    """Kept alive by this reference, because a lock ends when nothing refers to it."""
    keep: bool
    process: int


class Slab(Closing):
    """A preallocated file of `nbytes` bytes for pages on disk. A context manager. Closing the slab removes
    the file, unless the slab was committed.

    Its room on the file system is taken at once, so that a full disk is noticed before training. The file has
    mode 0600.

    lock: the lock of the slab's directory and rank, which `lock_directory` made; the slab does not close it.
    nbytes: bytes of pages, rounded up to whole 4 KiB blocks. files: makes, renames and removes the file.
    scratch: whether the file has a scratch slab's name; the caller then calls `drop_name`.

    Raises StorageFull if the file system does not have that much room; no file is left behind then. Raises
    StorageError (EEXIST) if a file of another type has the slab's name, and ConfigError if `nbytes` is not
    positive.
    """

    def __init__(
        self, lock: PathLock, nbytes: int, *, files: DiskFiles | None = None, scratch: bool = False
    ) -> None:
        if nbytes <= 0:
            raise ConfigError(f"A slab of {nbytes} bytes was asked for.", "Give at least one page.")
        files = files or DiskFiles()
        path = lock.directory / (scratch_name(lock.rank) if scratch else slab_name(lock.rank))
        self._own(files.create_open(path), path, lock, files, keep=False)
        self.uuid = uuids.uuid4().hex
        """32 hexadecimal digits, which are part of the file's name once it is committed."""
        self.nbytes = round_up(nbytes, 4096)
        try:
            preallocate(self._open.descriptor, self.nbytes, path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def adopt(cls, lock: PathLock, uuid: str, nbytes: int, *, files: DiskFiles | None = None) -> Self:
        """Open a committed slab, whose file stays on close. No byte of its pages is read or changed.

        lock: the lock for the slab's directory and rank. nbytes: the number of bytes of pages that the commit
        recorded. If the file has holes, as a copy may have, disk blocks are allocated for them.

        Raises CorruptState for a file that is too short, StorageError for one that cannot be opened.
        """
        files = files or DiskFiles()
        path = lock.directory / slab_name(lock.rank, uuid)
        descriptor = files.open(path)
        slab = cls.__new__(cls)
        slab._own(descriptor, path, lock, files, keep=True)
        slab.uuid, slab.nbytes = uuid, nbytes
        try:
            status = os.fstat(descriptor)
            if status.st_size < nbytes:
                raise CorruptState(
                    f"The slab {path} has {status.st_size} bytes, where the commit recorded {nbytes}.",
                    "Load another commit, or restore this file from a copy.",
                )
            if status.st_blocks * 512 < nbytes:  # else slow, where fallocate is emulated
                preallocate(descriptor, nbytes, path)
            files.sync_directory(path.parent)  # the file may have been moved here just now
        except BaseException:
            slab.close()
            raise
        return slab

    @property
    def path(self) -> Path:
        """The file's path, which changes at the first commit."""
        return self._open.path

    @property
    def keep(self) -> bool:
        """Whether the file stays when the slab is closed, garbage-collected, or still open at exit."""
        return self._open.keep

    @keep.setter
    def keep(self, stays: bool) -> None:
        self._open.keep = stays

    def rename(self, *, committed: bool) -> None:
        """Give the file the name of a committed slab, or of a new one, unless it has that name already. The
        caller syncs the directory. Raises StorageError.
        """
        opened = self._open
        target = opened.path.with_name(slab_name(opened.lock.rank, self.uuid if committed else None))
        if target != opened.path:
            opened.files.rename(opened.path, target)
            opened.path = target

    def drop_name(self) -> None:
        """Remove the file's name. The file itself goes once nobody has it open. Raises StorageError."""
        self._open.files.remove(self._open.path)

    def check_name(self) -> None:
        """Raise StorageError (ENOENT) if the slab's path does not name its file any more.

        A file that was removed cannot be put back; one that was renamed can.
        """
        cure = "Put the file back under its name while the run goes on, or begin a new run."
        with storage_errors("find", self.path, cure=cure):
            if not is_at(self._open.descriptor, self.path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def grow(self, nbytes: int) -> None:
        """Take room for `nbytes` bytes of pages in all, a multiple of 4096.

        Raises StorageFull or StorageError if this fails; the slab then keeps its size.
        """
        if nbytes <= self.nbytes:
            return
        try:
            preallocate(self._open.descriptor, nbytes, self.path)
        except BaseException:
            self.shrink(self.nbytes)
            raise
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Give back the room after the first `nbytes` bytes of pages; undoes `grow`. Raises no error."""
        self.nbytes = nbytes
        with contextlib.suppress(OSError):
            os.ftruncate(self._open.descriptor, nbytes)

    def close(self) -> None:
        """Remove the file, unless `keep` is set. A second call does nothing.

        This also happens if the object is garbage-collected, or is still open when the process ends. In a
        forked child this method only closes the child's descriptor, because the file belongs to the parent.
        """
        self._finalizer()

    def _own(self, descriptor: int, path: Path, lock: PathLock, files: DiskFiles, *, keep: bool) -> None:
        self.directory = path.parent
        self._open = _Open(descriptor, path, files, lock, keep, os.getpid())
        self._finalizer = weakref.finalize(self, _end, self._open)


def _end(slab: _Open) -> None:
    """Close a slab's file, and remove it if it is not to be kept."""
    if os.getpid() == slab.process and not slab.keep:
        with contextlib.suppress(OSError):
            if is_at(slab.descriptor, slab.path):
                slab.files.remove(slab.path)
    os.close(slab.descriptor)


def lock_directory(directory: str | os.PathLike[str], rank: int, files: DiskFiles) -> PathLock:
    """Lock a directory for a rank, and remove the uncommitted slabs that a dead process left there.

    Raises as PathLock does.
    """
    lock = PathLock(directory, rank=rank, files=files)
    try:
        for path in _leftovers(lock.directory, rank):
            files.remove(path)
    except BaseException:
        lock.close()
        raise
    return lock


def leftover_bytes(directory: Path, rank: int) -> int:
    """Bytes on disk that `lock_directory` would free in a directory."""
    return sum(path.lstat().st_blocks * 512 for path in _leftovers(directory, rank))


def _leftovers(directory: Path, rank: int) -> list[Path]:
    """The slabs in a directory that no commit and no living process needs, if the rank's lock is free."""
    return [path for name in (slab_name(rank), scratch_name(rank)) if _is_regular(path := directory / name)]


def slab_paths(directories: Sequence[Path], rank: int, uuid: str) -> list[Path]:
    """The paths in the directories that have the name of the committed slab with this uuid."""
    paths = (directory / slab_name(rank, uuid) for directory in directories)
    return [path for path in paths if os.path.lexists(path)]


def find_slab(directories: Sequence[Path], rank: int, uuid: str) -> Path:
    """Return the path of the slab with this uuid, which must lie in exactly one of the directories.

    Raises IncompatibleCheckpoint if it lies in none of them or in several.
    """
    name = slab_name(rank, uuid)
    found = slab_paths(directories, rank, uuid)
    if not found:
        searched = ", ".join(map(str, directories))
        raise IncompatibleCheckpoint(
            f"The slab {name} of the commit is in none of the directories {searched}.",
            "Give the directory where it lies in the nvme budget.",
        )
    if len(found) > 1:
        raise IncompatibleCheckpoint(
            f"The slab {name} of the commit was found {len(found)} times: {', '.join(map(str, found))}.",
            "Keep the one that the last run used, and move the copies to where no nvme budget points.",
        )
    return found[0]


def remove_slab(lock: PathLock, uuid: str, files: DiskFiles) -> None:
    """Remove a committed slab that no commit needs any more, if it is a regular file in the lock's directory,
    and sync the directory. Raises StorageError.
    """
    path = lock.directory / slab_name(lock.rank, uuid)
    if _is_regular(path):
        files.remove(path)
        files.sync_directory(path.parent)


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
