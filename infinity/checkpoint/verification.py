"""Verification: lists the commits in a checkpoint's directory, and checks that their bytes are undamaged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infinity.aio import Faults
from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import Checked, CommitSource, RankCommit, open_slabs, reader_of
from infinity.checkpoint.continued_commit import rank_directories, rank_of
from infinity.checkpoint.manifest import CommitName, array_bytes
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, StorageError
from infinity.system.closing import Closing
from infinity.system.directory import check_directory
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import slab_name, slab_paths

_WINDOW = 4 << 20
"""Number of elements that are read at a time: enough that all of a disk's requests are in flight."""

_OTHER = "Give the directory of --checkpoint, or of checkpoint=."
_IN_USE = (
    "Wait until the run or the other verification there has ended, or verify a copy, such as a snapshot of "
    "the file system."
)


@dataclass(frozen=True)
class FoundSlab:
    """A slab of a commit, and where it lies."""

    uuid: str
    nbytes: int
    """Bytes of its file, as the commit recorded them."""
    path: str | None
    """None if it lies in none of the directories, or in several."""
    fault: str | None
    """Why the commit cannot be read from the slab; None if the slab is long enough."""


@dataclass(frozen=True)
class ListedCommit:
    """A commit whose manifest and data file were read, but none of its pages."""

    generation: int
    saved: SavedCommit | None
    """None if the manifest or its data file is not whole, or has another version."""
    fault: str | None
    """Why `saved` is None."""
    slabs: tuple[FoundSlab, ...]

    @property
    def whole(self) -> bool:
        """Whether the commit's own files are whole, and all slabs were found."""
        return self.saved is not None and all(slab.fault is None for slab in self.slabs)


def list_commits(
    directory: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]], files: DiskFiles
) -> list[ListedCommit]:
    """List the commits of a directory in ascending order. others: more directories where slabs may lie.

    Nothing is locked, so a run may be in progress: a commit that it replaces meanwhile is left out. Raises
    StorageError for a directory that cannot be read.
    """
    paths = _directories(directory, others)
    found = []
    for generation in commit_files.generations(paths[0]):
        try:
            saved = commit_files.read(paths[0], generation, files)
        except (CorruptState, IncompatibleCheckpoint) as error:
            if generation in commit_files.generations(paths[0]):
                found.append(ListedCommit(generation, None, error.cause, ()))
            continue
        found.append(ListedCommit(generation, saved, None, tuple(find_slabs(saved, paths, files))))
    return found


class RankDirectory(NamedTuple):
    """A rank's directory, and the rank commits in it."""

    directory: Path
    commits: list[ListedCommit]
    """In ascending order."""

    def names(self, *, slabs: bool) -> set[CommitName]:
        """Return the names of the rank commits whose own files are whole. slabs: whether all their slabs must
        have been found, too.
        """
        saved = (each.saved for each in self.commits if each.whole or not slabs)
        return {each.manifest.name for each in saved if each is not None}


def list_ranks(
    directory: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]], files: DiskFiles
) -> dict[int, RankDirectory]:
    """List the commits of all ranks whose directories lie in `directory`, by rank.

    others: more directories where slabs may lie. Raises StorageError for a directory that cannot be read.
    """
    found = sorted(rank_directories(directory).items())
    return {rank: RankDirectory(path, list_commits(path, others, files)) for rank, path in found}


def absent(ranks: Mapping[int, RankDirectory]) -> list[int]:
    """List the ranks without a directory here, such as those of another node. How many ranks there must be is
    taken from the newest readable rank commits.
    """
    sizes = [
        each.saved.manifest.world_size
        for of_rank in ranks.values()
        for each in [one for one in of_rank.commits if one.saved is not None][-1:]
        if each.saved is not None
    ]
    return [rank for rank in range(max(sizes, default=0)) if rank not in ranks]


def newest_of_all(ranks: Mapping[int, RankDirectory], *, slabs: bool) -> CommitName | None:
    """Return the newest commit of which all these ranks have rank commits. slabs: as in
    `RankDirectory.names`.
    """
    return max(set.intersection(*(each.names(slabs=slabs) for each in ranks.values())), default=None)


def find_slabs(saved: SavedCommit, directories: Sequence[Path], files: DiskFiles) -> Iterator[FoundSlab]:
    """Look for each slab of a commit in directories."""
    for slab in saved.manifest.volume.slabs:
        there = slab_paths(directories, saved.manifest.rank, slab.uuid)
        if len(there) != 1:
            yield FoundSlab(
                slab.uuid, slab.nbytes, None, "missing" if not there else f"found {len(there)} times"
            )
            continue
        found, fault = os.lstat(there[0]), None
        if not stat.S_ISREG(found.st_mode):
            fault = "it is not a regular file"
        elif found.st_size < slab.nbytes:
            fault = f"it has {found.st_size} bytes"
        yield FoundSlab(slab.uuid, slab.nbytes, str(there[0]), fault)


class Verification(Closing):
    """Checks all arrays of a commit. The directories are locked as long as this object is open."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        others: Sequence[str | os.PathLike[str]],
        files: DiskFiles,
        *,
        generation: int | None = None,
        faults: Faults | None = None,
    ) -> None:
        """others: more directories where slabs may lie. generation: the commit's; None: the newest whole
        commit's. faults: what the I/O engines shall inject, for tests.

        Raises StorageError with errno EBUSY, naming the process, if a run is in progress there. Raises
        ConfigError if there is no such commit, CorruptState if it is not whole, and IncompatibleCheckpoint
        for another version or a slab that is missing.
        """
        paths = _directories(directory, others)
        with ExitStack() as cleanup:
            # A run that is in progress would replace the commit.
            held = cleanup.enter_context(_locked(paths[0], rank_of(paths[0]), files))
            self.saved = _read(paths[0], generation, files)
            """The commit."""
            rank = self.saved.manifest.rank
            if rank != held.rank:  # the directory was renamed
                held = cleanup.enter_context(_locked(paths[0], rank, files))
                self.saved = _read(paths[0], generation, files)
            others_held = {path: cleanup.enter_context(_locked(path, rank, files)) for path in paths[1:]}
            locks = {paths[0]: held, **others_held}
            slabs = tuple(find_slabs(self.saved, paths, files))
            missing = [slab.uuid for slab in slabs if slab.path is None]
            if missing:
                raise IncompatibleCheckpoint(
                    f"The slab {slab_name(rank, missing[0])} of the commit is not in "
                    f"{', '.join(map(str, paths))}, or in several of them.",
                    "Give the directory where it lies with --slabs.",
                )
            tier = open_slabs(self.saved, paths, files, locks, faults)
            self._source = CommitSource([RankCommit(self.saved, reader_of(cleanup.enter_context(tier)))])
            self._cleanup = cleanup.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes that `check` reads."""
        manifest = self.saved.manifest
        return sum(
            array_bytes(array, each.count)
            for entry in manifest.parameters
            for array in entry.arrays(manifest.rule).values()
            for each in entry.ranges
        )

    def check(self) -> Iterator[Checked]:
        """Read all arrays of the commit, and compare them with their checksums; yields what each read has
        found.

        Raises no error for damage or for a place that cannot be read, but goes on.
        """
        return self._source.check(_WINDOW)

    def close(self) -> None:
        """Release slabs and locks. A second call does nothing."""
        self._cleanup.close()


def _directories(directory: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]]) -> list[Path]:
    return list(dict.fromkeys(check_directory(each) for each in (directory, *others)))


def _locked(path: Path, rank: int, files: DiskFiles) -> PathLock:
    """Lock a directory for a rank. If the directory is in use, the StorageError's cure suggests what a caller
    can do that only reads.
    """
    try:
        return PathLock(path, rank=rank, files=files)
    except StorageError as error:
        if error.errno != errno.EBUSY:
            raise
        raise StorageError(error.cause, _IN_USE, path=error.path, errno=error.errno) from error


def _read(directory: Path, generation: int | None, files: DiskFiles) -> SavedCommit:
    if generation is None:
        saved = commit_files.newest(directory, files)
        if saved is None:
            raise ConfigError(f"There is no commit in {directory}.", _OTHER)
        return saved
    if generation not in commit_files.generations(directory):
        raise ConfigError(f"There is no commit-{generation} in {directory}.", _OTHER)
    return commit_files.read(directory, generation, files)
