"""Directories of ranks: where each of several ranks has its commits.

It is `rank-<rank>` in the directory that the user gives. So ranks on one node may be given the same directory
and ranks on several nodes a directory that is another disk on each node.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from infinity.checkpoint import commit_files
from infinity.errors import storage_errors
from infinity.layout.shards import Share
from infinity.system.directory import path_text

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")


def directory_of(directory: str | os.PathLike[str], share: Share) -> str:
    """The directory where a rank's commits go.

    directory: the one that the user gives. Raises ConfigError for a value that cannot be a path.
    """
    text = path_text(directory)
    return text if share.ranks == 1 else os.path.join(text, name_of(share.rank, share.ranks))


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


def name_of(rank: int, ranks: int) -> str:
    """The name, as in `commit_directories`, of the directory where one of so many ranks commits."""
    return f"rank-{rank}" if ranks > 1 else "."
