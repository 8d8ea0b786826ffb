"""Commit bugs of ranks: mistakes in how ranks commit together, each of which a crash must show.

A bug is a function that patches the code in the process of each rank. No race has to be won: the disk of each
node may be seen at any moment that is possible with what the ranks have heard of each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinity.checkpoint import commit_files, directory
from infinity.checkpoint.committer import Committer
from infinity.distributed.barrier import CommitVotes
from infinity.system.disk_files import DiskFiles


class Patch:
    """Attributes that are set until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._before:
            setattr(*self._before.pop())


Bug = Callable[[Patch], None]


def counts_at_once(patch: Patch) -> None:
    """A commit counts, and the places of the one before are free, before other ranks have voted."""
    patch.set(CommitVotes, "decide", lambda self, *_: self._vote(None))


def _vote_early(votes: CommitVotes) -> None:
    """Say that this rank is ready, and once more when it is."""
    agreement = votes._open
    votes._vote(None)
    votes._open = agreement


def voted_before_the_part_was_written(patch: Patch) -> None:
    make = Committer._make_durable

    def early(self: Committer, commit: Any, draft: Any) -> None:
        _vote_early(self._votes)  # type: ignore[arg-type]
        make(self, commit, draft)

    patch.set(Committer, "_make_durable", early)


def voted_before_the_name_was_synced(patch: Patch) -> None:
    rename, begin = DiskFiles.rename, CommitVotes.begin
    votes: list[CommitVotes] = []

    def beginning(self: CommitVotes, *arguments: Any) -> Any:
        votes[:] = [self]
        return begin(self, *arguments)

    def early(self: DiskFiles, path: Any, target: Any) -> None:
        rename(self, path, target)
        if os.path.basename(target).startswith("commit-"):
            _vote_early(votes[0])

    patch.set(CommitVotes, "begin", beginning)
    patch.set(DiskFiles, "rename", early)


def old_parts_removed_before_others_voted(patch: Patch) -> None:
    outcome, decide, remove_old = Committer._outcome, CommitVotes.decide, Committer._remove_old
    committers: dict[Any, Committer] = {}

    def remembering(self: Committer, *arguments: Any) -> Any:
        committers[self._votes] = self
        return outcome(self, *arguments)

    def late(self: CommitVotes, number: int, wanted: Any) -> Any:
        remove_old(committers[self], number)
        return decide(self, number, wanted)

    patch.set(Committer, "_outcome", remembering)
    patch.set(CommitVotes, "decide", late)


def refused_part_left(patch: Patch) -> None:
    """The part of a commit that another rank has refused keeps its name, and its places are free."""
    patch.set(commit_files, "take_back", lambda *_: None)


def refused_part_taken_back_without_a_sync(patch: Patch) -> None:
    def careless(where: Path, generation: int, files: DiskFiles, *_: Any) -> None:
        files.remove(commit_files.manifest_path(where, generation))
        files.remove(commit_files.data_path(where, generation))

    patch.set(commit_files, "take_back", careless)


def resumed_name_not_synced(patch: Patch) -> None:
    found, sync = directory.ContinuedCommit, DiskFiles.sync_directory
    skip: list[bool] = []

    def finding(*arguments: Any) -> Any:
        skip.append(True)
        return found(*arguments)

    def careless(self: DiskFiles, path: Any) -> None:
        if not skip:
            sync(self, path)
        skip.clear()

    patch.set(directory, "ContinuedCommit", finding)
    patch.set(DiskFiles, "sync_directory", careless)


BUGS: Mapping[str, Bug] = {
    "a commit counts at once": counts_at_once,
    "voted before the rank commit was written": voted_before_the_part_was_written,
    "voted before the name was synced": voted_before_the_name_was_synced,
    "old rank commits removed before others voted": old_parts_removed_before_others_voted,
    "refused rank commit left": refused_part_left,
    "refused rank commit taken back without a sync": refused_part_taken_back_without_a_sync,
    "resumed name not synced": resumed_name_not_synced,
}
