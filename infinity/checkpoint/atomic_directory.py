"""Atomic directory: a directory of files that appears whole or not at all, written by a separate thread.

[Note: two threads]
The caller's thread makes the content of the files, because the runtime's lock, CUDA's current stream and
inference mode belong to that thread. An event loop in a second thread writes the files, so that the caller
may itself run inside an event loop. A file's content comes in pieces. One piece is written while the caller
makes the next, and no other piece is in memory.

[Note: all or nothing]
All files are written into a temporary directory beside the target and synced, and the directory is renamed to
the target. After an error or an interrupt, the writes under way are waited for, and the temporary directory
is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiofiles  # type: ignore[import-untyped]

from infinity.config import format_size
from infinity.errors import ConfigError, StorageFull, storage_errors

_FULL = "Free space on that file system, or give a directory on another one."


class Writer:
    """Writes files in a thread of its own, inside a `with` statement; see [Note: two threads]."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="infinity-export")

    def __enter__(self) -> Writer:
        try:
            self._thread.start()
        except BaseException:  # after Ctrl-C the thread starts nevertheless
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def write(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        """Write a new file, and sync it to the disk. Raises OSError, and any error that `content` raises.

        content: the bytes of the file, piece by piece.
        """
        file = self._do(_open(path))
        last: Future[Any] | None = None
        try:
            for data in content:
                if last is not None:
                    last.result()
                last = self._begin(_write(file, data))
            if last is not None:
                last.result()
            self._do(_flush(file))
        except BaseException:
            with contextlib.suppress(OSError):
                self._do(file.close())  # the file's lock orders it after the write under way
            raise
        self._do(file.close())

    def _begin(self, action: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Submit a coroutine to the writing thread; returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(action, self._loop)

    def _do(self, action: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the writing thread, and return its result when it has ended."""
        return self._begin(action).result()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
        finally:
            self._loop.close()

    async def _finish(self) -> None:
        """Wait for all tasks of the event loop, even tasks whose caller was interrupted while waiting."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_default_executor()


async def _open(path: Path) -> Any:
    return await aiofiles.open(path, "xb")


async def _write(file: Any, data: bytes | memoryview) -> None:
    # The pool's thread keeps its argument for a while after the result is there, but not the view's bytes.
    with memoryview(data) as view:
        await file.write(view)


async def _flush(file: Any) -> None:
    await file.flush()
    await asyncio.to_thread(os.fsync, file.fileno())


def check_destination(path: str | os.PathLike[str], purpose: str = "export to") -> Path:
    """Check that a new directory can be put at `path`, and return the path of the directory.

    purpose: what the path is for, for the error message. Raises ConfigError if `path` is not a valid path, if
    it is a file, or if it is a directory that is not empty or at which a file system is mounted. Raises
    StorageError if the system cannot look at `path`, or cannot make a directory there.
    """
    cure = "Give a directory that does not exist yet, or an empty one."
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in str(path):
        raise ConfigError(f"The path to {purpose}, {path!r}, is not valid.", cure)
    target = Path(os.path.realpath(path))
    with storing("look at", target):
        if target.is_dir():
            if any(target.iterdir()):
                raise ConfigError(f"{target} is not empty.", cure)
            if target.is_mount():  # a directory cannot be renamed to it
                raise ConfigError(f"{target} is where a file system is mounted.", "Give a directory in it.")
        elif target.exists():
            raise ConfigError(f"{target} is no directory.", cure)
    with storing("write to", target):
        trial = _temporary(_nearest(target.parent))
        trial.mkdir()
        trial.rmdir()
    return target


def check_room(target: Path, nbytes: int) -> None:
    """Raise StorageFull if the file system of a new directory `target` has fewer than `nbytes` bytes free for
    this user.
    """
    with storing("look at", target):
        found = os.statvfs(_nearest(target))
    free = found.f_bavail * found.f_frsize
    if free < nbytes:
        raise StorageFull(
            f"{target} takes {format_size(nbytes)}, and its file system has {format_size(free)} free.",
            _FULL,
            path=str(target),
            errno=errno.ENOSPC,
        )


def _nearest(path: Path) -> Path:
    """The path itself if it exists, else its nearest existing parent."""
    return next(each for each in (path, *path.parents) if each.exists())


def _temporary(parent: Path) -> Path:
    return parent / f".infinity-export-{secrets.token_hex(8)}"


@contextlib.contextmanager
def published(target: Path, *, private: bool = False) -> Iterator[Path]:
    """Context that yields a new temporary directory beside `target`, and renames it to `target` at the end.

    private: whether only this user may enter the directory, and read the files in it (modes 0700 and 0600).
    After an error in the context, the temporary directory is removed; see [Note: all or nothing].
    """
    made = [each for each in target.parents if not each.exists()]
    directory = _temporary(target.parent)
    identity: os.stat_result | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700 if private else 0o777)
        identity = directory.stat()
        yield directory
        for each in directory.rglob("*") if private else ():
            each.chmod(0o700 if each.is_dir() else 0o600)
        sync(directory)
        directory.rename(target)
        for each in (target, *made):
            sync(each.parent)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            if identity is not None and os.path.samestat(identity, target.stat()):
                shutil.rmtree(target)
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
        raise


def sync(path: Path) -> None:
    """Sync a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storing(operation: str, path: Path) -> contextlib.AbstractContextManager[None]:
    """Context that turns OSError into StorageError.

    If the file system is full, the error's advice is to free space or to take another file system. operation:
    what was tried, as a verb for the error message, such as "write". path: the file or directory that the
    message names.
    """
    return storage_errors(operation, path, cure={errno.ENOSPC: _FULL, errno.EDQUOT: _FULL})
