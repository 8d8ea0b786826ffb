"""Agreed commit: the newest commit of which every rank's part is whole, from which a run of ranks goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.resume import check_loadable, no_commit
from infinity.errors import CorruptState, IncompatibleCheckpoint
from infinity.layout.shards import Share
from infinity.system.disk_files import DiskFiles

Agree = Callable[..., dict[int, dict[str, Any]]]
"""`Communicator.agree`: function (call, **facts) that returns the facts of all ranks, by rank."""


def newest_of_all(directory: Path, files: DiskFiles, share: Share, agree: Agree) -> SavedCommit:
    """This rank's part of the newest commit of which all ranks have whole parts. All ranks call this.

    directory: this rank's. Raises ConfigError if this rank has no commit, CorruptState if there is no such
    commit, and the errors of `check_loadable`.
    """
    whole: dict[int, SavedCommit] = {}
    faults: dict[int, str] = {}
    for generation in reversed(commit_files.generations(directory)):
        try:
            whole[generation] = commit_files.read(directory, generation, files)
        except CorruptState as error:
            faults[generation] = error.cause
    if not whole and not faults:
        raise no_commit(directory)
    for saved in whole.values():
        _check_part(saved, share)
    mine: list[list[Any]] = [[number, saved.manifest.created] for number, saved in sorted(whole.items())]
    heard = agree("offload()", commits=mine)
    common = [each for each in mine if all(each in said["commits"] for said in heard.values())]
    if not common:
        told = "; ".join(f"rank {rank} has {_named(said['commits'])}" for rank, said in sorted(heard.items()))
        raise CorruptState(
            " ".join([f"There is no commit of which all ranks have whole parts: {told}.", *faults.values()]),
            "Give each rank the directory that it had in one run.",
        )
    chosen: int = common[-1][0]
    return replace(whole[chosen], skipped=tuple(faults[each] for each in faults if each > chosen))


def _check_part(saved: SavedCommit, share: Share) -> None:
    check_loadable(saved, share.ranks)
    if saved.manifest.rank != share.rank:
        raise IncompatibleCheckpoint(
            f"Commit {saved.manifest.generation} in the directory of rank {share.rank} is the part of rank "
            f"{saved.manifest.rank}.",
            "Give each rank the directory that it had.",
        )


def _named(commits: list[list[Any]]) -> str:
    """Such as "commit 3 of 2026-01-01T00:00:00+00:00"."""
    return " and ".join(f"commit {number} of {created}" for number, created in commits) or "none"
