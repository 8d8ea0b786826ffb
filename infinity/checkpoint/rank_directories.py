"""Directories of ranks: where each of several ranks has its commits.

It is `rank-<rank>` in the directory that the user gives. So ranks on one node may be given the same directory
and ranks on several nodes a directory that is another disk on each node.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from infinity.checkpoint import commit_files
from infinity.checkpoint.resume import no_commit
from infinity.errors import IncompatibleCheckpoint, storage_errors
from infinity.layout.shards import Share
from infinity.system.directory import path_text

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")


def directory_of(directory: str | os.PathLike[str], share: Share) -> str:
    """The directory where a rank's commits go.

    directory: the one that the user gives. Raises ConfigError for a value that cannot be a path.
    """
    text = path_text(directory)
    return text if share.ranks == 1 else os.path.join(text, f"rank-{share.rank}")


def rank_of(directory: Path) -> int:
    """The rank whose commits go to a directory, by its name; 0 for a directory of no rank."""
    match = _RANK.fullmatch(directory.name)
    return int(match[1]) if match else 0


def rank_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """The directories of ranks in a directory: rank -> path. Raises StorageError."""
    with storage_errors("list", directory):
        found = ((_RANK.fullmatch(name), name) for name in os.listdir(directory))
        return {int(match[1]): Path(directory) / name for match, name in found if match}


def check_ranks(directory: Path, share: Share) -> None:
    """Check that what is in a directory can be continued by so many ranks, as far as its names say.

    Raises ConfigError if one rank finds no commit at all, and IncompatibleCheckpoint if a single rank finds
    commits of several, or the other way round.
    """
    several = any(commit_files.generations(each) for each in rank_directories(directory).values())
    alone = bool(commit_files.generations(directory))
    if share.ranks == 1 and not alone and not several:
        raise no_commit(directory)
    if several and share.ranks == 1 and not alone:
        there, here = "several ranks", "one rank"
    elif alone and share.ranks > 1 and not several:
        there, here = "one rank", f"{share.ranks} ranks"
    else:
        return
    raise IncompatibleCheckpoint(
        f"{directory} has the commits of {there}, and this run has {here}.",
        "Start as many ranks as there were.",
    )
