"""Agreed commit: the newest commit of which every rank's part is whole, from which a run of ranks goes on.

[Note: parts that have moved]
A rank's part lies on the node where the rank ran. A restart may put ranks on other nodes. So each rank looks
at all parts on its node. A part whose rank runs elsewhere is read by another rank of its node, and sent over
the network (infinity/checkpoint/moved_parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.manifest import CommitName, named_commits
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
    """For each rank, the rank that reads its part: itself, if the part is on its node."""
    read: Mapping[int, SavedCommit]
    """The parts that this rank reads, by the rank whose parts they are."""


def find_parts(
    directories: Mapping[int, Path], given: Path, files: DiskFiles, share: Share, agree: Agree, *, node: int
) -> Parts:
    """Find the newest commit of which all parts are whole. All ranks call this.

    directories: the directories of ranks on this rank's node, which is `node`. given: the directory that the
    user gives, for errors. Raises ConfigError if there is no commit, IncompatibleCheckpoint if no rank finds
    a rank's part or if there were another number of ranks, and CorruptState if no commit is whole.
    """
    heard = agree("offload()", node=node, ranks=sorted(directories))
    whole: dict[int, dict[CommitName, SavedCommit]] = {}
    faults: dict[int, dict[int, str]] = {}
    for rank, directory in sorted(directories.items()):
        if rank < share.ranks and reader_of(rank, node, heard) == share.rank:
            whole[rank], faults[rank] = _read_all(directory, files, share, rank)
    told = [[rank, sorted(commits)] for rank, commits in whole.items()]
    found: list[dict[int, set[CommitName]]] = [{} for _ in range(share.ranks)]
    for reader, said in agree("offload()", parts=told).items():
        for rank, names in said["parts"]:
            found[rank][reader] = {CommitName(*name) for name in names}
    everywhere = [set().union(*readers.values()) for readers in found]
    common = set.intersection(*everywhere)
    if not common:
        raise _no_common(
            given, everywhere, [each for of_rank in faults.values() for each in of_rank.values()]
        )
    name = max(common)
    holders = tuple(
        rank if name in readers.get(rank, ()) else min(each for each in readers if name in readers[each])
        for rank, readers in enumerate(found)
    )
    mine = {rank: commits[name] for rank, commits in whole.items() if holders[rank] == share.rank}
    if share.rank in mine:
        newer = [fault for number, fault in faults[share.rank].items() if number > name.generation]
        mine[share.rank] = replace(mine[share.rank], skipped=tuple(newer))
    return Parts(name, holders, mine)


def _no_common(given: Path, everywhere: Sequence[set[CommitName]], faults: Sequence[str]) -> InfinityError:
    """The error if there is no commit of which all parts are whole."""
    if not any(everywhere) and not faults:
        return no_commit(given)
    told = "; ".join(f"of rank {rank} {named_commits(names)}" for rank, names in enumerate(everywhere))
    cause = " ".join([f"There is no commit in {given} of which all parts are whole: {told}.", *faults])
    if all(everywhere):
        return CorruptState(cause, "Give back what the ranks had in one run.")
    return IncompatibleCheckpoint(
        cause, "Start a rank on each node that has parts of ranks, or give back the disk that had them."
    )


def reader_of(rank: int, node: int, heard: Mapping[int, Mapping[str, Any]]) -> int:
    """The rank that reads a rank's part on a node: that rank itself, or the first one there.

    heard: rank -> "node", where it runs, and "ranks", of which there are parts there.
    """
    here = [each for each, said in sorted(heard.items()) if said["node"] == node and rank in said["ranks"]]
    return rank if rank in here else here[0]


def _read_all(
    directory: Path, files: DiskFiles, share: Share, rank: int
) -> tuple[dict[CommitName, SavedCommit], dict[int, str]]:
    """Read all commits of a rank. Returns those that are whole, and by number what is wrong with others."""
    found, faults = {}, {}
    for generation in commit_files.generations(directory):
        try:
            saved = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
            continue
        check_loadable(saved, share.ranks)
        if saved.manifest.rank != rank:
            raise IncompatibleCheckpoint(
                f"Commit {generation} in {directory} is the part of rank {saved.manifest.rank}.",
                "Give each rank the directory that it had.",
            )
        found[saved.manifest.name] = saved
    return found, faults
