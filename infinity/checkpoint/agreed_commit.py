"""Agreed commit: the newest commit of which every part is whole, from which all ranks of a run go on.

[Note: parts that have moved]
A rank's part lies on the node where the rank ran. A restart may put ranks on other nodes, and there may be
more ranks, or fewer. So each rank looks at all parts on its node. A part that is not of a rank which runs
there is read by another rank of the node, and sent over the network (infinity/checkpoint/moved_parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import CommitName, named_commits
from infinity.checkpoint.rank_directories import name_of
from infinity.checkpoint.resume import check_loadable, no_commit
from infinity.errors import CorruptState, IncompatibleCheckpoint, InfinityError
from infinity.layout.shards import Share
from infinity.system.disk_files import DiskFiles

Agree = Callable[..., dict[int, dict[str, Any]]]
"""`Communicator.agree`: function (call, **facts) that returns the facts of all ranks, by rank."""


@dataclass(frozen=True)
class Parts:
    """Where the parts of the commit lie that all ranks continue."""

    name: CommitName
    holders: tuple[int, ...]
    """For each part, the rank that reads it: the rank with the part's number, if the part is on its node."""
    read: Mapping[int, tuple[Path, SavedCommit]]
    """The parts that this rank reads, each with its directory, by their numbers."""


def find_parts(
    directories: Mapping[str, Path], given: Path, files: DiskFiles, share: Share, agree: Agree, *, node: int
) -> Parts:
    """Find the newest commit of which all parts are whole, whatever their number. All ranks call this.

    directories: `commit_directories` on this rank's node, which is `node`. given: the directory that the
    user gives, for errors. Raises ConfigError if there is no commit, IncompatibleCheckpoint if no rank finds
    a part, and CorruptState if no commit is whole.
    """
    heard = agree("offload()", node=node, holds=sorted(directories))
    mine: dict[tuple[CommitName, int, int], tuple[Path, SavedCommit]] = {}
    faults: list[str] = []
    for place, directory in sorted(directories.items()):
        if reader_of(place, node, heard) == share.rank:
            whole, wrong = _read_all(directory, place, files)
            faults += wrong.values()
            for saved in whole:
                newer = [fault for number, fault in wrong.items() if number > saved.manifest.generation]
                skipped = replace(saved, skipped=tuple(newer))
                mine[saved.manifest.name, saved.manifest.world_size, saved.manifest.rank] = directory, skipped
    told = [[*commit, size, part] for commit, size, part in mine]
    readers: dict[tuple[CommitName, int], dict[int, list[int]]] = {}
    for reader, said in agree("offload()", parts=told).items():
        for generation, created, size, part in said["parts"]:
            of_commit = readers.setdefault((CommitName(generation, created), size), {})
            of_commit.setdefault(part, []).append(reader)
    complete = [commit for commit, of_parts in readers.items() if len(of_parts) == commit[1]]
    if not complete:
        raise _no_common(given, readers, faults)
    name, size = max(complete)
    found = readers[name, size]
    holders = tuple(part if part in found[part] else min(found[part]) for part in range(size))
    read = {part: mine[name, size, part] for part in range(size) if holders[part] == share.rank}
    return Parts(name, holders, read)


def _no_common(
    given: Path, readers: Mapping[tuple[CommitName, int], Mapping[int, object]], faults: Sequence[str]
) -> InfinityError:
    """The error if there is no commit of which all parts are whole. readers: commit -> its parts."""
    if not readers and not faults:
        return no_commit(given)
    size = max((size for _, size in readers), default=1)
    of_parts = [{name for (name, _), found in readers.items() if part in found} for part in range(size)]
    told = "; ".join(f"of rank {part} {named_commits(names)}" for part, names in enumerate(of_parts))
    cause = " ".join([f"There is no commit in {given} of which all parts are whole: {told}.", *faults])
    if all(of_parts):
        return CorruptState(cause, "Give back what the ranks had in one run.")
    return IncompatibleCheckpoint(
        cause, "Start a rank on each node that has parts of ranks, or give back the disk that had them."
    )


def reader_of(name: str, node: int, heard: Mapping[int, Mapping[str, Any]]) -> int:
    """The rank that reads a directory of commits on a node: that whose own it is, or the first one there.

    name: of `commit_directories`. heard: rank -> "node", where it runs, and "holds", the names there.
    """
    here = [each for each, said in sorted(heard.items()) if said["node"] == node and name in said["holds"]]
    return next((each for each in here if name_of(each, len(heard)) == name), here[0])


def _read_all(directory: Path, name: str, files: DiskFiles) -> tuple[list[SavedCommit], dict[int, str]]:
    """Read all commits of a directory. Returns those that are whole, and by number what is wrong with others.

    name: of the directory, as in `commit_directories`.
    """
    found, faults = [], {}
    for generation in commit_files.generations(directory):
        try:
            saved = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
            continue
        check_loadable(saved)
        if name_of(saved.manifest.rank, saved.manifest.world_size) != name:
            raise IncompatibleCheckpoint(
                f"Commit {generation} in {directory} is the part of rank {saved.manifest.rank}.",
                "Give each rank the directory that it had.",
            )
        found.append(saved)
    return found, faults
