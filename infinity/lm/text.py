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
"""Bytes that separate the contents of two files."""

_SNIFFED = 8 << 10
"""Number of bytes at the beginning of a file that are examined to decide whether the file is text."""

_HELD_OUT = 20
"""The last 1 / _HELD_OUT of the text's bytes is never trained on."""

_LEAST_HELD_OUT = 2 << 10

_STRETCHES = 64
_STRETCH = 4 << 10
"""Number and bytes of the stretches of a text that its digest takes in."""

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Names of folders that are left out of the standard library: they hold third-party code, tests, or no
text."""

_OTHER_DATA = "Give files or folders of text with --data."


class Text:
    """The bytes of several files as one sequence, with SEPARATOR between two files.

    Only the names and sizes of the files are kept in memory.
    """

    def __init__(self, roots: Sequence[str], paths: Sequence[str], sizes: Sequence[int]) -> None:
        """Describe the files of the text.

        roots: files and folders in which the files were found. paths: regular files, none of them empty, in
        the order of the sequence. sizes: bytes of each file, in the same order.
        """
        self.roots = tuple(roots)
        self._paths = paths
        self._starts = array("q", [0])
        for size in sizes:
            self._starts.append(self._starts[-1] + size + len(SEPARATOR))
        self.nbytes = max(0, self._starts[-1] - len(SEPARATOR))
        """Number of bytes in the sequence, separators included."""

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._paths)

    def digest(self) -> str:
        """A hash by which two texts are told apart without reading all of them.

        It is made of the sizes of the files, in their order, and of 64 stretches of 4 KiB, spread evenly. So
        it does not depend on where the files lie. Raises StorageError as `read` does.
        """
        found = hashlib.blake2b(self._starts.tobytes(), digest_size=16)
        count = min(_STRETCH, self.nbytes)
        for number in range(_STRETCHES):
            found.update(self.read((self.nbytes - count) * number // (_STRETCHES - 1), count))
        return found.hexdigest()

    @property
    def train(self) -> range:
        """Byte positions of the part to train on: all but the last twentieth."""
        return range(self.nbytes - self.nbytes // _HELD_OUT)

    @property
    def held_out(self) -> range:
        """Byte positions of the part that is never trained on: the last twentieth."""
        return range(self.nbytes - self.nbytes // _HELD_OUT, self.nbytes)

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes of the sequence from position `start` on, across the ends of files.

        Raises ValueError if the range leaves the sequence, and StorageError if a file cannot be read any more
        or has become shorter.
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
    """Find the text in `paths`, or in the modules of this Python's standard library if `paths` is None.

    A path may be a file, which is always taken, or a folder, of which all text files are taken. A text file
    is a regular file without a NUL byte in its first 8 KiB. Empty files, hidden files and folders inside a
    folder, and files that were already found under another name are left out. Links are followed.

    The files are sorted by a hash of their names relative to the given path. This order is the same on every
    machine, and it mixes the folders, so that each folder has a share in the held-out part.

    Raises ConfigError if a path does not exist or is neither a file nor a folder, and if less than 40 KiB of
    text are found. Raises StorageError (with errno) if a file or folder cannot be read.
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
"""A file that was found: (path relative to the folder that was searched, path to open, size in bytes). The
first is the file's own name if the file itself was given.
"""


class _Walk:
    """A search for files. Each file is found only once, even if several links lead to the file.

    Otherwise a file could be both trained on and held out.
    """

    def __init__(self, takes: Callable[[str], bool], without: frozenset[str]) -> None:
        """Choose which files are found.

        takes: function that is given the path of a file in a folder and returns whether the file is wanted.
        without: names of folders to leave out.
        """
        self._takes = takes
        self._without = without
        self._seen: set[tuple[int, int]] = set()

    def files(self, root: str) -> Iterator[_File]:
        """Yield the file `root`, or the wanted files in the folder `root` and below it. Files that were
        found before, empty files, and hidden files and folders in `root` are left out.

        Raises ConfigError if `root` does not exist or is neither a file nor a folder, and StorageError if the
        system cannot read a file or folder.
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
                # Names are sorted, because a file with several names is known by the first of them.
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
    """The stat result of a path; None if the file was removed, or if a link leads nowhere or to itself."""
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
    """Read `count` bytes of a file from `offset` on.

    If the file ends earlier, the bytes up to its end are returned if `short` is true; otherwise StorageError
    is raised.
    """
    found = bytearray()
    # The file is opened for each read (some 10 us): there may be more files than a process can have open.
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
