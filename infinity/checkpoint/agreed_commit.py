"""Agreed commit: the newest commit of which every part is whole, from which all ranks of a run go on.

Each rank commits to `rank-<rank>` in the directory that the user gives, and a single rank to that directory.
So ranks on one node may be given the same directory, and ranks on several nodes a directory that is another
disk on each node.

[Note: parts that have moved]
A rank's part lies on the node where the rank ran. A restart may put ranks on other nodes, and there may be
more ranks, or fewer. So each rank looks at all parts on its node. A part that is not of a rank which runs
there is read by another rank of the node, and sent over the network (continued_commit.py).

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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import CommitName, named_commits
from infinity.checkpoint.typed_json import CURE
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, InfinityError, storage_errors
from infinity.layout.shards import Share
from infinity.system.directory import path_text
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator

Agree = Callable[..., dict[int, dict[str, Any]]]
"""`Communicator.agree`: function (call, **facts) that returns the facts of all ranks, by rank."""

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")
_RUN = "run"


# --- directories of commits -------------------------------------------------------------------------------


def directory_of(directory: str | os.PathLike[str], share: Share) -> str:
    """The directory where a rank's commits go.

    directory: the one that the user gives. Raises ConfigError for a value that cannot be a path.
    """
    text = path_text(directory)
    return text if share.ranks == 1 else os.path.join(text, name_of(share.rank, share.ranks))


def name_of(rank: int, ranks: int) -> str:
    """The name, as in `commit_directories`, of the directory where one of so many ranks commits."""
    return f"rank-{rank}" if ranks > 1 else "."


def rank_of(directory: Path) -> int:
    """The rank whose commits go to a directory, by its name; 0 for a directory of no rank."""
    match = _RANK.fullmatch(directory.name)
    return int(match[1]) if match else 0


def rank_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """The directories of ranks in a directory: rank -> path. Raises StorageError."""
    with storage_errors("list", directory):
        found = ((_RANK.fullmatch(name), name) for name in os.listdir(directory))
        return {int(match[1]): Path(directory) / name for match, name in found if match}


def commit_directories(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """The directories of commits in a directory, by the name of each there: those of ranks, and "." for the
    directory itself if one rank has committed to it. None if it does not exist. Raises StorageError.
    """
    if not os.path.isdir(directory):
        return {}
    found = {path.name: path for path in rank_directories(directory).values()}
    return found | ({".": Path(directory)} if commit_files.generations(directory) else {})


def no_commit(directory: str | os.PathLike[str]) -> ConfigError:
    """The error for a directory without commits."""
    return ConfigError(
        f"There is no commit in {os.fspath(directory)}.",
        "Leave resume= out to begin anew, or give another directory.",
    )


# --- the name of a run without a commit -------------------------------------------------------------------


def write_run(directory: Path, run: str | None, files: DiskFiles) -> None:
    """Write the name of a run durably; None: remove the file. Raises StorageError."""
    path = directory / _RUN
    files.remove(path)
    if run is not None:
        files.create(path, run.encode())
        files.sync_directory(directory)


def _read_run(directory: Path, files: DiskFiles) -> str | None:
    """The name that `write_run` has written; None if there is none."""
    path = directory / _RUN
    if path.is_symlink() or not path.is_file():
        return None
    found = files.read(path, limit=64).decode("ascii", errors="replace")
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


# --- what all ranks have ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What a directory of commits has, on any node."""

    name: str
    """As in `commit_directories`."""
    committed: bool
    """Whether there are manifests, whole or not."""
    run: str | None
    """The name of the run that has made no commit there yet."""
    faults: tuple[str, ...]
    """What is wrong with commits that are not whole."""


_Commit = tuple[CommitName, int]
"""A commit, and the number of its parts."""


@dataclass
class _Survey:
    """What all ranks have of commits."""

    found: list[_Found] = field(default_factory=list)
    readers: dict[_Commit, dict[int, list[int]]] = field(default_factory=dict)
    """Commit -> part -> the ranks that read it."""
    directories: list[Path] = field(default_factory=list)
    """Those that this rank reads."""
    mine: dict[tuple[_Commit, int], tuple[Path, SavedCommit]] = field(default_factory=dict)
    """Each whole part that this rank reads, with its directory."""

    @property
    def complete(self) -> list[_Commit]:
        """The commits of which every part was found."""
        return [each for each, parts in self.readers.items() if len(parts) == each[1]]


def _survey(
    directories: Mapping[str, Path], files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> _Survey:
    """Look at all commits of a directory, on all nodes. directories: `commit_directories` on this `node`."""
    survey = _Survey()
    heard = agree("offload()", node=node, holds=sorted(directories))
    said = []
    for name, directory in sorted(directories.items()):
        here = [
            each for each, they in sorted(heard.items()) if they["node"] == node and name in they["holds"]
        ]
        if rank != next((each for each in here if name_of(each, len(heard)) == name), here[0]):
            continue
        survey.directories.append(directory)
        whole, faults = _read_all(directory, name, files)
        for saved in whole:
            manifest = saved.manifest
            skipped = tuple(fault for number, fault in faults.items() if number > manifest.generation)
            commit = manifest.name, manifest.world_size
            survey.mine[commit, manifest.rank] = directory, replace(saved, skipped=skipped)
        parts = [[*each.manifest.name, each.manifest.world_size, each.manifest.rank] for each in whole]
        said.append([name, bool(whole or faults), _read_run(directory, files), [*faults.values()], parts])
    for reader, they in agree("offload()", found=said).items():
        for name, committed, run, of_commits, parts in they["found"]:
            survey.found.append(_Found(name, committed, run, tuple(of_commits)))
            for generation, created, size, part in parts:
                of_parts = survey.readers.setdefault((CommitName(generation, created), size), {})
                of_parts.setdefault(part, []).append(reader)
    return survey


def _read_all(directory: Path, name: str, files: DiskFiles) -> tuple[list[SavedCommit], dict[int, str]]:
    """The whole commits of a directory, newest first, and what is wrong with others, by number."""
    found, faults = [], {}
    for generation in reversed(commit_files.generations(directory)):
        try:
            saved = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
            continue
        if name_of(saved.manifest.rank, saved.manifest.world_size) != name:
            raise IncompatibleCheckpoint(
                f"Commit {generation} in {directory} is the part of rank {saved.manifest.rank}.",
                "Give each rank the directory that it had.",
            )
        found.append(saved)
    return found, faults


@dataclass(frozen=True)
class Parts:
    """Where the parts of the commit lie that all ranks continue."""

    name: CommitName
    holders: tuple[int, ...]
    """For each part, the rank that reads it: the rank with the part's number, if the part is on its node."""
    read: Mapping[int, tuple[Path, SavedCommit]]
    """The parts that this rank reads, each with its directory, by their numbers."""


def find_parts(
    directories: Mapping[str, Path], given: Path, files: DiskFiles, rank: int, agree: Agree, *, node: int
) -> Parts:
    """Find the newest commit of which all parts are whole, whatever their number. All ranks call this.

    directories: `commit_directories` on this rank's node, which is `node`. given: the directory that the
    user gives, for errors. Raises ConfigError if there is no commit, IncompatibleCheckpoint if no rank finds
    a part, and CorruptState if no commit is whole.
    """
    survey = _survey(directories, files, rank, agree, node=node)
    if not survey.complete:
        raise _no_common(given, survey)
    commit = max(survey.complete)
    found = survey.readers[commit]
    holders = tuple(part if part in found[part] else min(found[part]) for part in range(commit[1]))
    read = {part: survey.mine[commit, part] for part, holder in enumerate(holders) if holder == rank}
    return Parts(commit[0], holders, read)


def _no_common(given: Path, survey: _Survey) -> InfinityError:
    """The error if there is no commit of which all parts are whole."""
    faults = [fault for each in survey.found for fault in each.faults]
    if not survey.readers and not faults:
        return no_commit(given)
    if {each.name for each in survey.found} == {"."}:
        return CorruptState(f"No commit in {given} is whole: {' '.join(faults)}", CURE)
    size = max((size for _, size in survey.readers), default=1)
    of_parts = [
        {name for (name, _), found in survey.readers.items() if part in found} for part in range(size)
    ]
    told = "; ".join(f"of rank {part} {named_commits(names)}" for part, names in enumerate(of_parts))
    cause = " ".join([f"There is no commit in {given} of which all parts are whole: {told}.", *faults])
    if all(of_parts):
        return CorruptState(cause, "Give back what the ranks had in one run.")
    return IncompatibleCheckpoint(
        cause, "Start a rank on each node that has parts of ranks, or give back the disk that had them."
    )


def commits_to_continue(communicator: Communicator, given: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether a directory has commits, on any node of these ranks. All ranks call this.

    given: the directory that the user gives. Parts of a run of which no commit has counted are removed; see
    [Note: a run without a commit]. Raises IncompatibleCheckpoint if some parts of all commits are missing,
    and it is not certain that no commit has counted, and StorageError (EBUSY) for parts that are in use.
    """
    share, node = communicator.share, communicator.place.node
    survey = _survey(commit_directories(given), files, share.rank, communicator.agree, node=node)
    having = {each.name for each in survey.found if each.committed}
    if survey.complete or not having:
        return bool(having)
    size = max((size for _, size in survey.readers), default=share.ranks)
    lacking = {name_of(part, size) for part in range(size)} - having
    if not lacking:
        return True  # offload says what is wrong with them
    if not _never_counted(survey.found, lacking):
        raise IncompatibleCheckpoint(
            f"There are commits of some ranks in {os.fspath(given)}, and none of "
            f"{', '.join(sorted(lacking))}.",
            "Start ranks on all nodes where commits are, or give back the disks that had them.",
        )
    _remove_parts(survey.directories, files)
    communicator.agree("offload()")  # no rank begins anew before all parts are gone
    return False


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
