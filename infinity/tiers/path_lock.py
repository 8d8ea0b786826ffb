"""Locks of a directory for one rank: while a process holds one, no other touches that rank's slabs there.

[Note: who holds a lock]
The lock is a POSIX record lock on the file infinity-rank<rank>.lock. It ends with the process that took it. A
lock of flock() would not: a worker that was forked (by a DataLoader) inherits the descriptor, and would keep
the lock after its parent was killed. Three things follow from this choice:

- POSIX locks do not exclude other locks of the same process. So a table of the inodes that this process has
  locked is looked at first, before the file is opened.
- A lock ends as soon as the process closes any descriptor of the file. So this module never opens a file that
  is in the table, and other code must not open lock files at all.
- A forked child has its parent's objects, but not its parent's locks. So table entries and lock objects store
  the process that they belong to. In the child, closing an object closes descriptors only.

The owner removes the file while it still holds the lock. A process that opened the file before that locks an
inode without a name, sees that the path does not name the inode, and begins again. A lock file that nobody
has locked means nothing: the next owner takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import struct
import threading
import weakref
from pathlib import Path

from infinity.errors import StorageError
from infinity.system.closing import Closing
from infinity.system.directory import check_directory, is_at
from infinity.system.disk_files import DiskFiles

_CURE = "Give each run a directory of its own, or wait until that run has ended."
_OURS = (
    "Call runtime.close() on the runtime that uses it. If no name is left for it, delete what keeps it: its "
    "model or optimizer, a tensor with a graph such as a loss, or the traceback of an error (sys.last_value, "
    "sys.last_traceback)."
)
_THIS = "this process"
_FLOCK = "hhqqi0q"  # struct flock: type, whence, start, length, pid


class _Table:
    """The locks of this process."""

    def __init__(self) -> None:
        # Reentrant, because the garbage collector can end a lock at any point of the code that takes another.
        self.mutex = threading.RLock()
        self.held: set[tuple[int, int, int]] = set()
        """(process that took the lock, device and inode of the file)."""

    def begin_anew(self) -> None:
        """Empty the table in a forked child. A thread of the parent may have held the mutex, so make a new
        one.
        """
        self.mutex = threading.RLock()
        self.held.clear()


_table = _Table()
os.register_at_fork(after_in_child=_table.begin_anew)


class PathLock(Closing):
    """The exclusive right of this process to the slabs of one rank in one directory.

    It is held from construction until `close`, until this object is garbage-collected, or until the process
    ends in any way. `close` removes its file, infinity-rank<rank>.lock (mode 0600, empty). In a forked child,
    `close` changes nothing for the parent.

    directory: must exist, be writable, and not lie in RAM. files: makes, locks and removes the file.

    Raises StorageError with errno EBUSY, naming the process, if this or another process holds the lock.
    Raises StorageError for a directory that cannot be used.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, rank: int = 0, files: DiskFiles | None = None
    ) -> None:
        files = files or DiskFiles()
        self.directory = check_directory(directory)
        self.rank = rank
        self.path = self.directory / f"infinity-rank{rank}.lock"
        with _table.mutex:
            descriptor = self._acquire(files)
            _table.held.add(_key(os.fstat(descriptor)))
            self._finalizer = weakref.finalize(self, _release, descriptor, self.path, files, os.getpid())

    def close(self) -> None:
        """Remove the lock file and release the lock. A second call does nothing."""
        self._finalizer()

    def _acquire(self, files: DiskFiles) -> int:
        """Open and lock the file, which is made if it is missing. Returns the descriptor."""
        while True:
            self._check_not_ours()
            descriptor = self._open(files)
            try:
                files.lock(descriptor, self.path)
                if is_at(descriptor, self.path):
                    return descriptor
            except StorageError as error:
                holder = _holder(descriptor)
                os.close(descriptor)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise self._in_use(holder) from error
                raise
            except BaseException:  # a signal's handler raised it, before or after the lock was taken
                try:
                    files.lock(descriptor, self.path)
                except StorageError:
                    os.close(descriptor)
                else:
                    _release(descriptor, self.path, files, os.getpid())
                raise
            os.close(descriptor)

    def _check_not_ours(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if _key(os.lstat(self.path)) in _table.held:
                gc.collect()  # a runtime that nothing refers to ends itself
            if _key(os.lstat(self.path)) in _table.held:
                raise self._in_use(_THIS)

    def _open(self, files: DiskFiles) -> int:
        while True:
            try:
                return files.open(self.path)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
            try:
                return files.create_open(self.path)
            except StorageError as error:
                if error.errno != errno.EEXIST:  # another process has just made it
                    raise

    def _in_use(self, holder: str) -> StorageError:
        return StorageError(
            f"The slabs of rank {self.rank} in {self.directory} are in use by {holder}.",
            _OURS if holder == _THIS else _CURE,
            path=str(self.path),
            errno=errno.EBUSY,
        )


def _release(descriptor: int, path: Path, files: DiskFiles, process: int) -> None:
    """Remove a lock's file and close it, which ends the lock. In a forked child: only close it."""
    with _table.mutex:
        if process == os.getpid():
            _table.held.discard(_key(os.fstat(descriptor)))
            with contextlib.suppress(OSError):
                if is_at(descriptor, path):
                    files.remove(path)
        os.close(descriptor)


def _key(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _holder(descriptor: int) -> str:
    """A text for users that names the process with the lock on an open file."""
    with contextlib.suppress(OSError):
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
        if kind != fcntl.F_UNLCK and process > 0:  # 0: a process of another PID namespace
            return f"process {process}"
    return "another process"
