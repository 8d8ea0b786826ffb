"""First commit: tells a run of ranks that ended before any commit of it counted from one with commits.

[Note: a run without a commit]
A death in the first commit can leave some ranks with a part and others with none. As no commit has counted,
the run can begin anew. But ranks whose disks were exchanged or lost look alike, and theirs may have counted.
So all ranks give a new run one name, which each writes into its list of slabs before the first step. The list
goes when a commit has counted. A rank that has the list and no part has never made a part in that run, and
without its part no commit counts: so parts of other ranks with the same name are no commit. A run that
continues a commit has no name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infinity.checkpoint import commit_files
from infinity.checkpoint.agreed_commit import reader_of
from infinity.checkpoint.rank_directories import rank_directories
from infinity.checkpoint.slab_list import SlabList
from infinity.errors import IncompatibleCheckpoint
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

if TYPE_CHECKING:
    from infinity.distributed.communicator import Communicator


class _Found(NamedTuple):
    """What a directory of a rank has, on any node."""

    rank: int
    committed: bool
    """Whether there are parts of commits."""
    run: str | None
    """The name of the run that has its list of slabs there."""


def commits_to_continue(communicator: Communicator, given: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether a directory has commits of these ranks, on any of their nodes. All ranks call this.

    given: the directory that the user gives. Parts of a run of which no commit has counted are removed; see
    [Note: a run without a commit]. Raises IncompatibleCheckpoint if some ranks have parts and others have
    not, and it is not certain that no commit has counted, and StorageError (EBUSY) for parts that are in use.
    """
    share = communicator.share
    there = rank_directories(given) if os.path.isdir(given) else {}
    here = {rank: directory for rank, directory in sorted(there.items()) if rank < share.ranks}
    heard = communicator.agree(
        "offload()",
        node=communicator.place.node,
        ranks=list(here),
        found=[_look(rank, directory, files) for rank, directory in here.items()],
    )
    found = {_Found(*each) for said in heard.values() for each in said["found"]}
    lacking = set(range(share.ranks)) - {each.rank for each in found if each.committed}
    if not lacking:
        return True
    if len(lacking) < share.ranks:
        if not _never_counted(found, lacking):
            numbers = ", ".join(map(str, sorted(lacking)))
            raise IncompatibleCheckpoint(
                f"There are commits of some ranks in {os.fspath(given)}, and none of {numbers}.",
                "Start ranks on all nodes where commits are, or give back the disks that had them.",
            )
        _remove_parts(here, heard, communicator, files)
        communicator.agree("offload()")  # no rank begins anew before all parts are gone
    return False


def _look(rank: int, directory: Path, files: DiskFiles) -> _Found:
    return _Found(rank, bool(commit_files.generations(directory)), SlabList(directory, files).read().run)


def _never_counted(found: set[_Found], lacking: set[int]) -> bool:
    """Whether all parts are of one run of which a rank has made none."""
    runs = {each.run for each in found if each.committed}
    without = {each.run for each in found if each.rank in lacking}
    return len(runs) == 1 and None not in runs and runs <= without


def _remove_parts(
    here: Mapping[int, Path],
    heard: Mapping[int, Mapping[str, object]],
    communicator: Communicator,
    files: DiskFiles,
) -> None:
    """Remove the parts in directories of this node, of which each is looked after by one rank."""
    for rank, directory in here.items():
        if reader_of(rank, communicator.place.node, heard) == communicator.share.rank:
            with PathLock(directory, rank=rank, files=files):
                for generation in commit_files.generations(directory):
                    commit_files.remove(directory, generation, files)
