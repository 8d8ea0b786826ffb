"""Slabs: preallocated files, one per directory and rank, in which NVMe pages live. This module makes, locks
and removes the files, but does no I/O on pages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path

from infinity.config import round_up
from infinity.errors import ConfigError, StorageError, storage_errors
from infinity.system.closing import Closing
from infinity.system.directory import check_directory, preallocate


class Slab(Closing):
    """A file of `nbytes` bytes on disk, which is preallocated, locked, and removed on close.

    The file is `directory`/infinity-rank<rank>.slab, with mode 0600. Its room on the file system is taken
    at once, so that a full disk shows before training and not hours into it. The file is locked (flock) for
    as long as this process has it open. A file that a dead process left behind is not locked, and is
    reclaimed. A context manager.

    directory: must exist, be writable, and not lie in RAM (as on tmpfs). nbytes: rounded up to whole 4 KiB
    blocks.

    Raises StorageFull where the file system does not have that much room; no file is left behind then.
    Raises StorageError (with path and errno) for a directory that is missing, read-only or in RAM, and for
    a slab in use (EBUSY, naming the process that has it). Raises ConfigError where `nbytes` is not
    positive.
    """

    def __init__(self, directory: str | os.PathLike[str], nbytes: int, *, rank: int = 0) -> None:
        if nbytes <= 0:
            raise ConfigError(f"A slab of {nbytes} bytes was asked for.", "Give at least one page.")
        self.nbytes = round_up(nbytes, 4096)
        self.directory = check_directory(directory)
        self.path = self.directory / f"infinity-rank{rank}.slab"
        descriptor = self._open_locked()
        self._finalizer = weakref.finalize(self, _remove, descriptor, self.path, os.getpid())
        try:
            self._preallocate(descriptor)
        except BaseException:
            self.close()
            raise
        self._descriptor = descriptor

    def close(self, *, keep: bool = False) -> None:
        """Remove the file and release its lock. A second call does nothing.

        keep: if True, the file stays in place and only its lock is released. The file is also removed if
        this object is garbage-collected, or is still open when the process ends. In a forked child this
        method only closes the child's descriptor, because the file belongs to the parent.
        """
        if keep and self._finalizer.detach() is not None:
            os.close(self._descriptor)
        self._finalizer()

    def _open_locked(self) -> int:
        """Open the file at `path`, which is created if it is missing, and lock it. Returns the descriptor."""
        while True:
            with storage_errors("create", self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                with storage_errors("lock", self.path):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The last owner may have removed the file between our open and our lock. The file that
                    # we have locked then has no name any more, and another process can own the name.
                    if _is_at(descriptor, self.path):
                        return descriptor
                    os.close(descriptor)
            except StorageError as error:
                holder = _lock_holder(descriptor)
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise StorageError(
                    f"The slab {self.path} is in use by {holder}.",
                    "Give each run a directory of its own, or wait until that run has ended.",
                    path=str(self.path),
                    errno=errno.EBUSY,
                ) from error

    def _preallocate(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)  # drops what a dead process left behind
        preallocate(descriptor, self.nbytes, self.path)


def _remove(descriptor: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            # The name goes before the lock, so that a process which gets the lock does not find this file.
            if _is_at(descriptor, path):
                os.unlink(path)
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` names the file that is open as `descriptor`."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _lock_holder(descriptor: int) -> str:
    """A text for users that names the process with the lock (flock) on an open file."""
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                return "this process" if int(fields[4]) == os.getpid() else f"process {fields[4]}"
    return "another process"
