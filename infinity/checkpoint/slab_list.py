"""Slab list: the file `slabs` in a checkpoint's directory, which a run has there until its first commit.

See [Note: slabs of no commit] in infinity/checkpoint/run_slabs.py, and [Note: a run without a commit] in
infinity/checkpoint/first_commit.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from infinity.system.disk_files import DiskFiles

_NAME = "slabs"
_MOST = 1 << 20
"""Greatest number of bytes that are read."""
_SLAB = re.compile(r"[0-9a-f]{32}")
_RUN = re.compile(r"run ([0-9a-f]{32})")


class Listed(NamedTuple):
    """What the file lists. What is none of it is ignored."""

    slabs: frozenset[str]
    """UUIDs, each 32 hexadecimal digits."""
    run: str | None
    """What tells the run of several ranks from others, 32 hexadecimal digits; None for one that continues a
    commit, and for a run of one rank.
    """


class SlabList:
    """The file of one directory, which nobody else changes meanwhile."""

    def __init__(self, directory: Path, files: DiskFiles) -> None:
        self._path = directory / _NAME
        self._temporary = directory / f".{_NAME}.tmp"
        self._files = files

    def read(self) -> Listed:
        """What the file lists; nothing if there is none, or if it is no regular file."""
        if not self._path.is_file() or self._path.is_symlink():
            return Listed(frozenset(), None)
        lines = self._files.read(self._path, limit=_MOST).decode("ascii", errors="replace").splitlines()
        runs = [match[1] for match in map(_RUN.fullmatch, lines) if match]
        return Listed(frozenset(filter(_SLAB.fullmatch, lines)), runs[0] if runs else None)

    def write(self, slabs: Iterable[str], run: str | None) -> None:
        """Write the file durably, in place of one that is there. Raises StorageError."""
        lines = [*sorted(slabs), *([] if run is None else [f"run {run}"])]
        self._files.remove(self._temporary)
        self._files.create(self._temporary, "".join(f"{each}\n" for each in lines).encode())
        self._files.rename(self._temporary, self._path)
        self._files.sync_directory(self._path.parent)

    def remove(self) -> None:
        """Remove the file, if it is there. Raises StorageError."""
        self._files.remove(self._path)
