"""First commit: tells a run of ranks that ended before any commit of it counted from one with commits.

[Note: a run without a commit]
A death in the first commit can leave some ranks with a part and others with none. As no commit has counted,
the run can begin anew. But ranks whose disks were exchanged or lost look alike, and theirs may have counted.
So all ranks give a new run one name, which each writes into the file `run` before the first step. The file
goes when a commit has counted. A rank that has the file and no part has never made a part in that run, and
without its part no commit counts: so parts of other ranks with the same name are no commit. A run that
continues a commit has no name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import reader_of
from infinity.checkpoint.manifest import CommitName
from infinity.checkpoint.rank_directories import commit_directories, name_of, rank_of
from infinity.errors import CorruptState, IncompatibleCheckpoint
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator


_NAME = "run"


def write_run(directory: Path, run: str | None, files: DiskFiles) -> None:
    """Write the name of a run durably; None: remove the file. Raises StorageError."""
    path = directory / _NAME
    files.remove(path)
    if run is not None:
        files.create(path, run.encode())
        files.sync_directory(directory)


def read_run(directory: Path, files: DiskFiles) -> str | None:
    """The name that `write_run` has written; None if there is none."""
    path = directory / _NAME
    if path.is_symlink() or not path.is_file():
        return None
    found = files.read(path, limit=64).decode("ascii", errors="replace")
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


class _Found(NamedTuple):
    """What a directory of commits has, on any node."""

    name: str
    """As in `commit_directories`."""
    committed: bool
    """Whether there are parts of commits."""
    run: str | None
    """The name of the run that has made no commit there yet."""
    parts: frozenset[tuple[CommitName, int]]
    """The commits of which there is a part that can be read, each with the number of its parts."""


def commits_to_continue(communicator: Communicator, given: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether a directory has commits, on any node of these ranks. All ranks call this.

    given: the directory that the user gives. Parts of a run of which no commit has counted are removed; see
    [Note: a run without a commit]. Raises IncompatibleCheckpoint if some parts of all commits are missing,
    and it is not certain that no commit has counted, and StorageError (EBUSY) for parts that are in use.
    """
    there, node = commit_directories(given), communicator.place.node
    holding = communicator.agree("offload()", node=node, holds=sorted(there))
    mine = {
        name: directory
        for name, directory in sorted(there.items())
        if reader_of(name, node, holding) == communicator.share.rank
    }
    told = [_look(name, directory, files) for name, directory in mine.items()]
    found = {
        _Found(name, committed, run, frozenset((CommitName(*commit), size) for commit, size in parts))
        for said in communicator.agree("offload()", found=told).values()
        for name, committed, run, parts in said["found"]
    }
    commits = {each for one in found for each in one.parts}
    if any(_names(each[1]) <= {one.name for one in found if each in one.parts} for each in commits):
        return True
    having = {each.name for each in found if each.committed}
    if not having:
        return False
    lacking = _names(max((size for _, size in commits), default=communicator.share.ranks)) - having
    if not lacking:
        return True  # offload says what is wrong with them
    if not _never_counted(found, lacking):
        raise IncompatibleCheckpoint(
            f"There are commits of some ranks in {os.fspath(given)}, and none of "
            f"{', '.join(sorted(lacking))}.",
            "Start ranks on all nodes where commits are, or give back the disks that had them.",
        )
    _remove_parts(mine.values(), files)
    communicator.agree("offload()")  # no rank begins anew before all parts are gone
    return False


def _names(size: int) -> set[str]:
    """The directories of all parts of a commit."""
    return {name_of(part, size) for part in range(size)}


def _look(name: str, directory: Path, files: DiskFiles) -> tuple[str, bool, str | None, list[Any]]:
    """A directory's `_Found`, as JSON can hold it."""
    parts = []
    for generation in (generations := commit_files.generations(directory)):
        with suppress(CorruptState):
            manifest = commit_files.read(directory, generation, files).manifest
            parts.append((manifest.name, manifest.world_size))
    return name, bool(generations), read_run(directory, files), parts


def _never_counted(found: Collection[_Found], lacking: Collection[str]) -> bool:
    """Whether all parts are of one run of which a rank has made none."""
    runs = {each.run for each in found if each.committed}
    without = {each.run for each in found if each.name in lacking}
    return len(runs) == 1 and None not in runs and runs <= without


def _remove_parts(directories: Iterable[Path], files: DiskFiles) -> None:
    """Take the parts of commits in directories back. The next run there removes their slabs."""
    for directory in directories:
        with PathLock(directory, rank=rank_of(directory), files=files):
            for generation in commit_files.generations(directory):
                commit_files.take_back(directory, generation, files, leave=True)
