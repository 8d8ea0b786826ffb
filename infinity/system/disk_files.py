"""Disk files: operations on manifests and other small files, and on the names of all files.

Every operation goes through a `DiskFiles`, so that tests can record it or make it fail. For pages, which the
I/O engine writes, tests use the engine's `Faults` instead (infinity/aio.py).

[Note: what a crash keeps] A crash keeps the bytes of a file that were written before the last `sync` of the
file began, and any part of the bytes that were written later. It keeps the names of a directory (creations,
renames, removals) from before the last `sync_directory`, and any number of the later changes. So a file is
first written and synced, then renamed, and then its directory is synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from infinity.aio import Faults
from infinity.errors import storage_errors

_FULL = "Free space on that file system, or use a directory on another one."
_CURES: Mapping[int, str] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EEXIST: "Remove what has this name, or give another directory.",
    errno.ELOOP: "Put the file itself there, not a symbolic link.",
    errno.EINVAL: "Put a regular file there.",
}


class Observer(Protocol):
    """Receives each operation of a `DiskFiles`, for tests."""

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        """Called before an operation, which fails if this call raises OSError. Returns a ticket for `ended`.

        operation: "create", "open", "lock", "write", "sync", "rename", "sync directory", "remove" or "read".
        path: the file or directory. target: the new path for a rename, else "". offset, data: for a write,
        the place in the file, in bytes, and the bytes to write; else 0 and b"".
        """
        ...

    def ended(self, ticket: int) -> None:
        """Called after the operation has succeeded. ticket: the result of `begins`."""


class DiskFiles:
    """Operations on files and directories. All raise StorageError, and StorageFull for a full disk.

    Operations on a descriptor have an argument `path`, which only errors use.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer

    def create(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Make a new file with mode 0600, write `data` and sync the file. If an operation fails, no file is
        left. Raises StorageError (EEXIST) if the path exists.
        """
        where = os.fspath(path)
        descriptor = self.create_open(where)
        try:
            self.write(descriptor, where, 0, data)
            self.sync(descriptor, where)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(where)
            raise
        finally:
            os.close(descriptor)

    def create_open(self, path: str | os.PathLike[str]) -> int:
        """Make a new, empty file, and open it to read and write. Returns the descriptor. Its mode is 0600,
        whatever the umask is. Raises StorageError (EEXIST) if the path exists.
        """
        with self._operation("create", os.fspath(path)):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            try:
                # File systems that keep no modes give more rights, and refuse to change them.
                if os.fstat(descriptor).st_mode & 0o600 != 0o600:
                    os.fchmod(descriptor, 0o600)
            except OSError:
                os.close(descriptor)
                os.unlink(path)
                raise
            return descriptor

    def open(self, path: str | os.PathLike[str]) -> int:
        """Open a regular file that exists to read and write. Returns the descriptor. Raises StorageError for
        anything else: ELOOP for a symbolic link, EINVAL for a FIFO or a device.
        """
        with self._operation("open", os.fspath(path)):
            # O_NONBLOCK: a FIFO must not make this call wait.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "not a regular file")
            return descriptor

    def lock(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        """Take the POSIX record lock of an open file for this process, without waiting. Raises StorageError
        (EAGAIN or EACCES) if another process has the lock.
        """
        with self._operation("lock", os.fspath(path)):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, descriptor: int, path: str | os.PathLike[str], offset: int, data: bytes) -> None:
        with self._operation("write", os.fspath(path), offset=offset, data=data):
            left = memoryview(data)
            while left:
                done = os.pwrite(descriptor, left, offset)
                left, offset = left[done:], offset + done

    def sync(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        """Make the content of an open file durable (fsync)."""
        with self._operation("sync", os.fspath(path)):
            os.fsync(descriptor)

    def rename(self, path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Rename a file within its file system. A file that has the new name is replaced."""
        with self._operation("rename", os.fspath(path), target=os.fspath(target)):
            os.rename(path, target)

    def sync_directory(self, path: str | os.PathLike[str]) -> None:
        with self._operation("sync directory", os.fspath(path)):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove the name of a file. Does nothing if there is no such file."""
        with self._operation("remove", os.fspath(path)), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def read(self, path: str | os.PathLike[str], *, limit: int, offset: int = 0) -> bytes:
        """Read at most `limit` bytes of a regular file from byte `offset` on. Symbolic links are refused."""
        with self._operation("read", os.fspath(path)):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb", buffering=0) as file:
                file.seek(offset)
                parts = []
                while limit > 0 and (part := file.read(min(limit, 1 << 24))):
                    parts.append(part)
                    limit -= len(part)
                return b"".join(parts)

    @contextlib.contextmanager
    def _operation(
        self, operation: str, path: str, *, target: str = "", offset: int = 0, data: bytes = b""
    ) -> Iterator[None]:
        with storage_errors(operation, path, cure=_CURES):
            if self._observer is None:
                yield
                return
            ticket = self._observer.begins(operation, path, target=target, offset=offset, data=data)
            yield
            self._observer.ended(ticket)


_injection = threading.local()


@contextlib.contextmanager
def injected(faults: Faults, observer: Observer | None = None) -> Iterator[Faults]:
    """Inject errors and delays, for tests, into the NVMe I/O of runtimes that this thread makes inside the
    `with` statement, as long as the runtimes live.

    faults: the errors and delays; also yielded. observer: receives the operations on all other files.
    """
    before = getattr(_injection, "faults", None), getattr(_injection, "observer", None)
    _injection.faults, _injection.observer = faults, observer
    try:
        yield faults
    finally:
        _injection.faults, _injection.observer = before


def injected_files() -> DiskFiles:
    """The operations on files for a runtime that this thread makes now; see `injected`."""
    return DiskFiles(getattr(_injection, "observer", None))


def injected_faults() -> Faults | None:
    """The faults to inject into the NVMe I/O of a runtime that this thread makes now; None: no faults."""
    return getattr(_injection, "faults", None)
