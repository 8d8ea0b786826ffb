"""Rank parts: what the directories of several ranks, side by side in one directory, have of their commits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.agreed_commit import rank_directories
from infinity.checkpoint.manifest import CommitName, named_commits
from infinity.checkpoint.verification import ListedCommit, list_commits
from infinity.errors import CorruptState
from infinity.system.disk_files import DiskFiles


@dataclass(frozen=True)
class RankParts:
    """The parts of commits in one rank's directory."""

    directory: Path
    commits: tuple[ListedCommit, ...]
    """In ascending order."""

    @property
    def world_size(self) -> int:
        """The number of ranks that the newest readable part names; 0 if there is none."""
        sizes = [each.saved.manifest.world_size for each in self.commits if each.saved is not None]
        return sizes[-1] if sizes else 0

    def readable(self) -> set[CommitName]:
        """The commits whose manifest and data file are whole here."""
        return {each.saved.manifest.name for each in self.commits if each.saved is not None}

    def skipped(self, generation: int) -> tuple[str, ...]:
        """For each newer commit than `generation` whose part is not readable, what is wrong with it; newest
        first.
        """
        newer = (each for each in reversed(self.commits) if each.generation > generation)
        return tuple(each.fault for each in newer if each.fault is not None)

    def whole(self) -> set[CommitName]:
        """The commits whose part is whole here, as far as it was looked at."""
        return {each.saved.manifest.name for each in self.commits if each.saved is not None and each.whole}


def list_ranks(
    directory: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]], files: DiskFiles
) -> dict[int, RankParts]:
    """The parts of all ranks whose directories lie in a directory, by rank; none of one rank's directory.

    others: directories where slabs may lie, too. Nothing is locked. Raises StorageError.
    """
    return {
        rank: RankParts(path, tuple(list_commits(path, others, files)))
        for rank, path in sorted(rank_directories(directory).items())
    }


def absent(ranks: Mapping[int, RankParts]) -> list[int]:
    """The ranks of which the parts speak and that have no directory there, as on another node."""
    size = max((each.world_size for each in ranks.values()), default=0)
    return [rank for rank in range(size) if rank not in ranks]


def newest_whole(ranks: Mapping[int, RankParts]) -> CommitName | None:
    """The newest commit of which the parts of all these ranks are whole, with their slabs; None if there is
    none.
    """
    return max(set.intersection(*(each.whole() for each in ranks.values())), default=None)


def newest_readable(directory: str | os.PathLike[str], ranks: Mapping[int, RankParts]) -> CommitName:
    """The newest commit of which all these ranks have a manifest and a data file that are whole: the one that
    a restart continues. Raises CorruptState if there is none.
    """
    common = set.intersection(*(each.readable() for each in ranks.values()))
    if not common:
        told = "; ".join(f"rank {rank} has {named_commits(each.readable())}" for rank, each in ranks.items())
        raise CorruptState(
            f"There is no commit in {os.fspath(directory)} of which all ranks have whole parts: {told}.",
            "Give the directory of --checkpoint, or of checkpoint=, of one run.",
        )
    return max(common)
