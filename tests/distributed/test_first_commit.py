"""Tests of ranks that are started again: they begin anew if no commit can have counted, and else never."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_commits import Meeting

from infinity.checkpoint import commit_files
from infinity.checkpoint.continued_commit import commits_to_continue, write_run
from infinity.errors import IncompatibleCheckpoint, StorageError
from infinity.layout.shards import Share
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

FILES = DiskFiles()
RUN, OTHER = "5" * 32, "7" * 32


def rank_directory(node: Path, rank: int, run: str | None, *generations: int) -> Path:
    """Make a rank's directory. run: the name of its run that has made no commit; None if there is none."""
    directory = node / f"rank-{rank}"
    directory.mkdir(parents=True)
    for generation in generations:
        commit_files.manifest_path(directory, generation).touch()
        commit_files.data_path(directory, generation).touch()
    write_run(directory, run, FILES)
    return directory


def started(nodes: Sequence[Path]) -> list[bool]:
    """What each of two ranks finds. nodes: rank -> the directory that it is given."""
    meeting = Meeting(2)

    def start(rank: int) -> bool:
        def call(agree: Any) -> bool:
            place = SimpleNamespace(node=nodes.index(nodes[rank]))
            communicator: Any = SimpleNamespace(share=Share(rank, 2, 3), place=place, agree=agree)
            return commits_to_continue(communicator, nodes[rank], FILES)

        found: bool = meeting.attend(rank, call)
        return found

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(start, rank) for rank in range(2)]
    failed = [each.exception() for each in calls]
    for kind in (StorageError, IncompatibleCheckpoint):
        for each in failed:
            if isinstance(each, kind):
                raise each
    return [each.result() for each in calls]


def committed(*nodes: Path) -> list[str]:
    return sorted(path.name for node in set(nodes) for path in node.rglob("commit-*"))


def test_ranks_without_a_directory_begin_anew(tmp_path: Path) -> None:
    assert started([tmp_path / "new"] * 2) == [False, False]


def test_ranks_go_on_where_all_have_rank_commits(tmp_path: Path) -> None:
    for rank in range(2):
        rank_directory(tmp_path, rank, RUN, 1)
    assert started([tmp_path] * 2) == [True, True]
    assert len(committed(tmp_path)) == 4


def test_parts_of_exchanged_nodes_are_found(tmp_path: Path) -> None:
    nodes = tmp_path / "one", tmp_path / "two"
    for rank, node in enumerate(nodes):
        rank_directory(node, rank, None, 5)
    assert started(nodes[::-1]) == [True, True]


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_begin_anew_after_a_death_in_the_first_commit(order: int, tmp_path: Path) -> None:
    """Also if the nodes were exchanged, and after a first commit that was given up."""
    nodes = tmp_path / "one", tmp_path / "two"
    directory = rank_directory(nodes[0], 0, RUN, 2)
    rank_directory(nodes[1], 1, RUN)
    assert started(nodes[::order]) == [False, False]
    assert committed(*nodes) == ["commit-2.safetensors"]
    assert (directory / ".commit-2.tmp").exists(), "the next run removes the slabs that it names"


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (RUN, OTHER),  # rank 1 is back on a node where an earlier run ended before its first commit
        (None, None),  # the run continued a commit
        (None, RUN),  # a commit has counted
        (RUN, None),  # rank 1's directory was made anew
    ],
)
def test_parts_that_may_have_counted_stay(mine: str | None, other: str | None, tmp_path: Path) -> None:
    rank_directory(tmp_path, 0, mine, 1)
    rank_directory(tmp_path, 1, other)
    with pytest.raises(IncompatibleCheckpoint, match=r"commits of some ranks in .*, and none of rank-1"):
        started([tmp_path] * 2)
    assert len(committed(tmp_path)) == 2


def test_parts_of_a_run_that_goes_on_stay(tmp_path: Path) -> None:
    directory = rank_directory(tmp_path, 0, RUN, 1)
    rank_directory(tmp_path, 1, RUN)
    with PathLock(directory, rank=0, files=FILES), pytest.raises(StorageError) as caught:
        started([tmp_path] * 2)
    assert caught.value.errno == errno.EBUSY
    assert len(committed(tmp_path)) == 2
