"""Directories on disks: how they are made and checked, their free bytes, and preallocation of files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from infinity.config import format_size
from infinity.errors import ConfigError, StorageError, StorageFull, storage_error, storage_errors
from infinity.system import machine


def path_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a path. Raises ConfigError for a value that cannot be a path, whatever its type."""
    try:
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError(f"expected a text, not {type(text).__name__}")
        if not text or b"\0" in os.fsencode(text):
            raise ValueError("embedded null byte" if text else "it is empty")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path!r} is no path: {error}.", "Give a directory on a disk.") from error
    return text


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """Check that `directory` can hold pages, and return its path without symbolic links.

    Raises StorageError for a directory that is missing, cannot be reached, or is in RAM, and ConfigError for
    a value that cannot be a path.
    """
    directory = path_text(directory)
    with storage_errors("open", directory):
        path = os.path.realpath(directory)
        mode = os.stat(path).st_mode
        kind = machine.file_system(path)
    if not stat.S_ISDIR(mode):
        raise storage_error("open", path, None, errno.ENOTDIR)
    if kind in machine.RAM_FILE_SYSTEMS:
        raise StorageError(
            f"{path} is on {kind}, which is RAM: pages kept there would not leave memory.",
            "Give a directory on a disk, or a larger host budget.",
            path=path,
            errno=errno.EINVAL,
        )
    return Path(path)


def make_directory(directory: str | os.PathLike[str], made: list[str]) -> Path:
    """Make a directory that can hold pages, and its missing parents. Returns its path without symbolic links.

    The new directory has mode 0700. New parents have the modes that the umask leaves, and all rights of the
    owner. made: the new directories are appended to it, the outermost first, also before an error; see
    `unmake`. Raises the errors of `check_directory`, before anything is made, and StorageError.
    """
    nearest = os.path.join(os.curdir, Path(path_text(directory)))
    missing: list[str] = []
    while not os.path.lexists(nearest) and os.path.dirname(nearest):
        missing.append(nearest)
        nearest = os.path.dirname(nearest)
    check_directory(nearest)
    for path in reversed(missing):
        with storage_errors("make", path):
            try:
                os.mkdir(path, mode=0o700 if path is missing[0] else 0o777)
            except FileExistsError:  # another process has made it, or it ends in ".."
                continue
            made.append(path)
            # The umask may have taken the owner's bits away.
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & 0o700 != 0o700:
                os.chmod(path, mode | 0o700)
    return check_directory(directory)


def unmake(made: list[str]) -> None:
    """Remove directories that `make_directory` has made, unless something has been put there."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def free_bytes(path: str | os.PathLike[str] | int) -> int:
    """Bytes that this user may still take on a file system. path: any path on the file system, or the
    descriptor of an open file there.
    """
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def preallocate(descriptor: int, nbytes: int, path: str | os.PathLike[str]) -> None:
    """Allocate disk blocks for `nbytes` bytes of an open file, so that no later write meets a full disk.

    Existing bytes of the file do not change. path: the file's path or directory, for errors. Raises
    StorageFull if the file system lacks the bytes, StorageError for every other error.
    """
    available = free_bytes(descriptor)
    missing = nbytes - os.fstat(descriptor).st_blocks * 512
    if missing > available:
        raise StorageFull(
            f"The file system of {os.fspath(path)} has {format_size(available)} free of "
            f"{format_size(missing)} needed.",
            f"Give that path at most {available} bytes, free space there, or use another path.",
            path=os.fspath(path),
            errno=errno.ENOSPC,
        )
    with storage_errors("preallocate room at", path):
        os.posix_fallocate(descriptor, 0, nbytes)


def is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether `path` itself, and not a file that it links to, names the file that is open as `descriptor`."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def nameless_file(directory: str) -> int:
    """Make a file without a name in `directory` and return its descriptor. Raises StorageError. Where the
    file system has no O_TMPFILE, a file with a name is made, and the name is removed at once.
    """
    try:
        with storage_errors("create a file in", directory):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except StorageError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    with storage_errors("create a file in", directory):
        descriptor, path = tempfile.mkstemp(prefix=".infinity-test-", dir=directory)
    os.unlink(path)
    return descriptor
