"""Slabs: preallocated files, one per directory and rank, in which NVMe pages live. This module makes, removes
and adopts the files, but does no I/O on pages.

A plain slab lasts as long as its run. A durable slab has a header (infinity/tiers/slab_header.py), and stays
for the next run once it was committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid as uuids
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.config import round_up
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, StorageError, storage_errors
from infinity.system.closing import Closing
from infinity.system.directory import check_directory, is_at, preallocate
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab_directory import lock_directory
from infinity.tiers.slab_header import SLAB_HEADER_BYTES, SlabHeader, read_header, slab_name

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class _Open:
    """What the end of a slab needs to know, apart from the slab, which may be garbage by then."""

    descriptor: int
    path: Path
    files: DiskFiles
    lock: PathLock
    keep: bool
    process: int


class Slab(Closing):
    """A file of `nbytes` bytes for pages on disk, which is preallocated, and removed on close.

    A plain slab is the file `directory`/infinity-rank<rank>.slab, with mode 0600. Its room on the file
    system is taken at once, so that a full disk shows before training and not hours into it. The directory
    is locked for the rank (PathLock) as long as the slab is open, and leftovers of dead processes there are
    removed first. A context manager.

    directory: must exist, be writable, and not lie in RAM (as on tmpfs). nbytes: bytes of pages, rounded up
    to whole 4 KiB blocks. durable: makes the file infinity-rank<rank>-<uuid>.slab instead, with a header
    before the pages; the header and the file's name are durable when the constructor returns. lock: a lock
    of the directory and rank that the caller holds, after `lock_directory`; by default the slab takes its
    own. files: reaches the disk for headers, locks and removals.

    Raises StorageFull where the file system does not have that much room; no file is left behind then.
    Raises StorageError (with path and errno) for a directory that is missing, read-only or in RAM, and for
    a directory in use (EBUSY, naming the process that has it). Raises ConfigError where `nbytes` is not
    positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nbytes: int,
        *,
        rank: int = 0,
        durable: bool = False,
        lock: PathLock | None = None,
        files: DiskFiles | None = None,
    ) -> None:
        if nbytes <= 0:
            raise ConfigError(f"A slab of {nbytes} bytes was asked for.", "Give at least one page.")
        files = files or DiskFiles()
        uuid = uuids.uuid4().hex if durable else None
        path = check_directory(directory) / slab_name(rank, uuid)
        with lock.share() if lock else lock_directory(path.parent, rank, files) as held:
            self._own(files.create_open(path), path, held.share(), files, keep=False)
        self.nbytes = round_up(nbytes, 4096)
        self.rank = rank
        self.uuid = uuid
        self._committed = False
        self._broken: StorageError | None = None
        try:
            preallocate(self._open.descriptor, self.base + self.nbytes, path)
            if durable:
                self._write_header()
                files.sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @classmethod
    def adopt(
        cls, path: str | os.PathLike[str], nbytes: int, *, lock: PathLock, files: DiskFiles | None = None
    ) -> Self:
        """Open a committed slab, which stays on close. No byte of its pages is read or changed.

        path: the slab's path in the directory of `lock`, under its own name. nbytes: bytes of pages that the
        commit recorded. Room that the file lacks, as a copy with holes does, is taken.

        Raises CorruptState for a damaged header or a file that is too short, IncompatibleCheckpoint for a
        slab that was never committed or has an unknown format version, StorageError for what cannot be
        opened or is no regular file.
        """
        files = files or DiskFiles()
        path = Path(path)
        descriptor = files.open(path)
        slab = cls.__new__(cls)
        slab._own(descriptor, path, lock.share(), files, keep=True)
        try:
            header = read_header(path, files)
            _check_adoptable(path, header, nbytes, os.fstat(descriptor).st_size)
            slab.nbytes = nbytes
            slab.rank = header.rank
            slab.uuid = header.uuid
            slab._committed = True
            slab._broken = None
            whole = SLAB_HEADER_BYTES + nbytes
            if os.fstat(descriptor).st_blocks * 512 < whole:  # else slow, where fallocate is emulated
                preallocate(descriptor, whole, path)
            files.sync_directory(path.parent)  # the file may have been moved here just now
        except BaseException:
            slab.close()
            raise
        return slab

    @property
    def base(self) -> int:
        """Offset in the file at which the pages begin, in bytes: 0 for a plain slab."""
        return 0 if self.uuid is None else SLAB_HEADER_BYTES

    @property
    def committed(self) -> bool:
        """Whether the header on disk says that a commit holds pages of the slab."""
        return self._committed

    @property
    def sync_failed(self) -> bool:
        """Whether a sync of the header has failed, so that nobody knows what the disk holds of the file."""
        return self._broken is not None

    @property
    def keep(self) -> bool:
        """Whether the file stays when the slab is closed, garbage-collected, or still open at exit."""
        return self._open.keep

    @keep.setter
    def keep(self, stays: bool) -> None:
        self._open.keep = stays

    def mark_committed(self) -> None:
        """Say durably in the header that a commit holds pages of the slab. Does nothing once this succeeded.

        Raises StorageError if this fails. After a failed write a later call writes the header again. After a
        failed sync it raises the same error, since a sync that succeeds after one that failed proves nothing.
        """
        if self.uuid is None:
            raise ConfigError("A plain slab cannot be committed.", "Make the slab with durable=True.")
        if not self._committed:
            self._write_header(committed=True)
            self._committed = True

    def check_name(self) -> None:
        """Raise StorageError (ENOENT) if the slab's path does not name its file any more.

        A file that was removed cannot be put back; one that was renamed can.
        """
        cure = "Put the file back under its name while the run goes on, or begin a new run."
        with storage_errors("find", self.path, cure=cure):
            if not is_at(self._open.descriptor, self.path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def grow(self, nbytes: int) -> None:
        """Take room for `nbytes` bytes of pages in all, and say so durably in the header.

        Raises StorageFull or StorageError if this fails; the slab then has the size of before.
        """
        if nbytes <= self.nbytes:
            return
        before, self.nbytes = self.nbytes, nbytes
        try:
            preallocate(self._open.descriptor, self.base + nbytes, self.path)
            if self.uuid is not None:
                self._write_header(committed=self._committed)
        except BaseException:
            self.shrink(before)
            raise

    def shrink(self, nbytes: int) -> None:
        """Give back the room behind the first `nbytes` bytes of pages; undoes `grow`. Raises no StorageError.

        The header may go on to say more bytes. That does no harm: a commit's own record counts, see `adopt`.
        """
        self.nbytes = nbytes
        with contextlib.suppress(OSError):
            os.ftruncate(self._open.descriptor, self.base + nbytes)

    def close(self) -> None:
        """Remove the file, unless `keep` is set, and release the lock. A second call does nothing.

        This also happens if the object is garbage-collected, or is still open when the process ends. In a
        forked child this method only closes the child's descriptor, because the file belongs to the parent.
        """
        self._finalizer()

    def _own(self, descriptor: int, path: Path, lock: PathLock, files: DiskFiles, *, keep: bool) -> None:
        self.path = path
        self.directory = path.parent
        self._open = _Open(descriptor, path, files, lock, keep, os.getpid())
        self._finalizer = weakref.finalize(self, _end, self._open)

    def _write_header(self, *, committed: bool = False) -> None:
        """Write and sync the header.

        A write that fails leaves the header of before or the new one, which differ in one byte or in the
        bytes of pages. Whichever it is, the next call writes all of it.
        """
        assert self.uuid is not None
        if self._broken is not None:
            raise self._broken.again()
        content = SlabHeader(self.uuid, self.rank, self.nbytes, committed).pack()
        self._open.files.write(self._open.descriptor, self.path, 0, content)
        try:
            self._open.files.sync(self._open.descriptor, self.path)
        except StorageError as error:
            self._broken = error.again()
            raise


def _check_adoptable(path: Path, header: SlabHeader, nbytes: int, file_bytes: int) -> None:
    """Check that a slab has the `nbytes` bytes of pages that a commit recorded. Raises as `Slab.adopt`.

    file_bytes: bytes of the whole file.
    """
    cure = "Load another commit, or restore this file from a copy."
    if path.name != slab_name(header.rank, header.uuid):
        raise CorruptState(f"The slab {path} is that of {slab_name(header.rank, header.uuid)}.", cure)
    if not header.committed:
        raise IncompatibleCheckpoint(f"No commit was ever made in the slab {path}.", cure)
    if min(header.nbytes, file_bytes - SLAB_HEADER_BYTES) < nbytes:
        raise CorruptState(
            f"The slab {path} has {file_bytes} bytes, {header.nbytes} of them pages by its header, where the "
            f"commit recorded {nbytes} bytes of pages.",
            cure,
        )


def _end(slab: _Open) -> None:
    """Close a slab's file, remove it if it is not to be kept, and then release the lock."""
    if os.getpid() == slab.process and not slab.keep:
        with contextlib.suppress(OSError):
            if is_at(slab.descriptor, slab.path):
                slab.files.remove(slab.path)
    os.close(slab.descriptor)
    slab.lock.close()
