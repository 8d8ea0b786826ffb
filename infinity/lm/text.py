"""Text to train on: the bytes of many files as one sequence, read on demand."""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import os
import stat
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infinity.config import format_size
from infinity.errors import ConfigError, StorageError, storage_errors

SEPARATOR = b"\n"
"""The bytes between two files."""

_SNIFFED = 8 << 10
"""Bytes at a file's beginning that decide whether it is text."""

_HELD_OUT = 20
"""A twentieth of the bytes is never trained on."""

_LEAST_HELD_OUT = 2 << 10

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders inside the standard library's folder that hold third-party code, tests, or no text."""

_OTHER_DATA = "Give files or folders of text with --data."


class Text:
    """A sequence of files with SEPARATOR between them. Only names and sizes are in memory."""

    def __init__(self, roots: Sequence[str], paths: Sequence[str], sizes: Sequence[int]) -> None:
        """paths: regular files of `sizes` bytes, in order, none empty. roots: where they were found."""
        self.roots = tuple(roots)
        self._paths = paths
        self._starts = array("q", [0])
        for size in sizes:
            self._starts.append(self._starts[-1] + size + len(SEPARATOR))
        self.nbytes = max(0, self._starts[-1] - len(SEPARATOR))
        """Bytes of the sequence, separators included."""

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._paths)

    @property
    def train(self) -> range:
        """Byte positions to train on."""
        return range(self.nbytes - self.nbytes // _HELD_OUT)

    @property
    def held_out(self) -> range:
        """Byte positions that are never trained on: the last twentieth."""
        return range(self.nbytes - self.nbytes // _HELD_OUT, self.nbytes)

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from position `start` on, across files.

        Raises ValueError outside the sequence, and StorageError for a file that cannot be read any more, or
        has become shorter.
        """
        if start < 0 or count < 0 or start + count > self.nbytes:
            raise ValueError(f"{count} bytes at {start} are not within 0 .. {self.nbytes}")
        found = bytearray()
        index = bisect.bisect_right(self._starts, start) - 1
        while len(found) < count:
            at = start + len(found)
            size = self._starts[index + 1] - self._starts[index] - len(SEPARATOR)
            offset = at - self._starts[index]
            wanted = min(size - offset, count - len(found))
            if wanted > 0:
                found += _read(self._paths[index], offset, wanted)
            if len(found) < count:
                found += SEPARATOR
            index += 1
        return bytes(found)


def find_text(paths: Sequence[str] | None) -> Text:
    """The text in `paths`: files, which are always taken, and folders, with all text files in them.

    A text file is a regular file without a NUL byte in its first 8 KiB. Hidden files and folders, empty
    files, and files that were already found by another name are left out; links are followed. None: the
    modules of this Python's standard library.

    Files are in the order of a hash of their names relative to their roots: it is the same on every machine,
    and every folder has its share in the held-out part.

    Raises ConfigError for a path that does not exist or is neither file nor folder, and if less than 40 KiB
    are found; StorageError (errno) for a file or folder that cannot be read.
    """
    if paths is None:
        roots = [_standard_library()]
        found = list(_Walk(_is_module, _NOT_THE_LIBRARY).files(roots[0]))
    else:
        walk = _Walk(_is_text, frozenset())
        roots = [os.fspath(path) for path in paths]
        found = [each for root in roots for each in walk.files(root)]
    order = sorted(found, key=lambda each: _order(each[0]))
    text = Text(roots, [path for _, path, _ in order], [size for _, _, size in order])
    if len(text.held_out) < _LEAST_HELD_OUT:
        raise ConfigError(
            f"{', '.join(roots) or 'Nothing'} holds {format_size(text.nbytes)} of text in {text.files} "
            f"files; {format_size(_LEAST_HELD_OUT * _HELD_OUT)} are the least that can be trained on.",
            _OTHER_DATA,
        )
    return text


def _standard_library() -> str:
    folder = sysconfig.get_path("stdlib")
    if not folder or not os.path.isdir(folder):
        raise ConfigError(f"This Python's standard library is not in a folder ({folder}).", _OTHER_DATA)
    return folder


def _order(name: str) -> tuple[bytes, str]:
    return hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), name


_File = tuple[str, str, int]
"""(name relative to the root, path, size in bytes)."""


class _Walk:
    """Finds each file once, however many links lead to it, so that none is in both parts."""

    def __init__(self, takes: Callable[[str], bool], without: frozenset[str]) -> None:
        """takes: path -> whether a file in a folder is wanted. without: names of folders to leave out."""
        self._takes = takes
        self._without = without
        self._seen: set[tuple[int, int]] = set()

    def files(self, root: str) -> Iterator[_File]:
        """The files of `root`, a file or a folder, that were not found before.

        Raises ConfigError if `root` does not exist or is neither; StorageError.
        """
        try:
            with _reading(root):
                found = os.stat(root)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise ConfigError(f"There is no {root}.", "Give a file or folder that exists.") from error
            raise
        if stat.S_ISDIR(found.st_mode):
            yield from self._folder(root)
        elif not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{root} is neither a file nor a folder.", _OTHER_DATA)
        elif found.st_size > 0 and self._is_new(found):
            yield os.path.basename(root), root, found.st_size

    def _folder(self, root: str) -> Iterator[_File]:
        folders = [root]
        while folders:
            folder = folders.pop()
            with _reading(folder):
                if not self._is_new(os.stat(folder)):
                    continue
                # In the order of names, because a file with several names is known by the first.
                inside = sorted(name for name in os.listdir(folder) if not name.startswith("."))
            below = []
            for name in inside:
                path = os.path.join(folder, name)
                found = _stat(path)
                if found is not None and stat.S_ISDIR(found.st_mode):
                    below += [path] if name not in self._without else []
                elif found is not None and self._wants(path, found):
                    yield Path(os.path.relpath(path, root)).as_posix(), path, found.st_size
            folders += reversed(below)

    def _wants(self, path: str, found: os.stat_result) -> bool:
        filled = stat.S_ISREG(found.st_mode) and found.st_size > 0
        return filled and self._takes(path) and self._is_new(found)

    def _is_new(self, found: os.stat_result) -> bool:
        key = found.st_dev, found.st_ino
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _stat(path: str) -> os.stat_result | None:
    """The status of a path; None for a link that leads nowhere or to itself, and for a removed file."""
    try:
        with _reading(path):
            return os.stat(path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            return None
        raise


def _is_module(path: str) -> bool:
    return path.endswith(".py")


def _is_text(path: str) -> bool:
    return b"\0" not in _read(path, 0, _SNIFFED, short=True)


def _read(path: str, offset: int, count: int, *, short: bool = False) -> bytes:
    """`count` bytes at `offset`. If the file ends before: fewer with `short`, else raises StorageError."""
    found = bytearray()
    # Opened each time (some 10 us), because there may be more files than a process can have open.
    with _reading(path, offset), open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while len(found) < count and (piece := file.read(count - len(found))):
            found += piece
    if len(found) < count and not short:
        raise StorageError(
            f"{path} ends at byte {offset + len(found)}: it has become shorter since it was found.",
            "Leave the files as they are while they are trained on, and start again.",
            path=path,
            offset=offset + len(found),
        )
    return bytes(found)


def _reading(path: str, offset: int | None = None) -> contextlib.AbstractContextManager[None]:
    cure = "Put it back or make it readable, or leave it out of --data."
    return storage_errors("read", path, offset=offset, cure=cure)
