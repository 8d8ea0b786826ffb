"""Tests that read randomly changed commits: typed errors or an equal manifest, and memory in proportion."""

from __future__ import annotations

import dataclasses
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import (
    CHECKSUMS,
    changed,
    contents,
    mutated_bytes,
    mutated_tree,
    original,
    put,
    put_tree,
    signed,
    small,
    tree,
)

from infinity.checkpoint.codec import decode
from infinity.checkpoint.commit_files import SavedCommit, read
from infinity.checkpoint.manifest import Range, StoredArray
from infinity.checkpoint.typed_json import dumps
from infinity.errors import CorruptState, IncompatibleCheckpoint
from infinity.system.disk_files import DiskFiles

FILES = DiskFiles()
Mutate = Callable[[random.Random, Path], None]


def change_text(chance: random.Random, directory: Path) -> None:
    """Write a commit with a changed text whose checksum is right."""
    manifest, data = original()
    put(directory, signed(mutated_bytes(manifest.split(b"\n", 1)[1], chance)), data)


def change_tree(chance: random.Random, directory: Path) -> None:
    """Write a commit with a changed tree whose checksum is right."""
    put_tree(directory, mutated_tree(tree(), chance), original()[1])


def change_data(chance: random.Random, directory: Path) -> None:
    """Write a commit with a changed data file whose checksum in the manifest is right."""
    put_tree(directory, tree(), mutated_bytes(original()[1], chance))


def bytes_allowed(directory: Path) -> int:
    """The most bytes that reading a commit may take: a multiple of its files' sizes, and something."""
    return 80 * sum(path.stat().st_size for path in directory.iterdir()) + (1 << 19)


def fuzz(directory: Path, mutate: Mutate, seeds: range) -> int:
    """Read changed commits; returns how many of them were found whole, all of which say what was written."""
    whole = 0
    for seed in seeds:
        mutate(random.Random(seed), directory)
        found, taken = measured(directory)
        if taken >= bytes_allowed(directory):
            # Once in many reads a table of the interpreter grows, which is no memory of this read.
            found, taken = measured(directory)
        assert taken < bytes_allowed(directory), f"seed {seed} took {taken} bytes"
        if found is not None:
            check_equal(directory, found)
            whole += 1
    return whole


def measured(directory: Path) -> tuple[SavedCommit | None, int]:
    """Read a commit; returns it, or None if it was refused, and the most bytes that Python took meanwhile."""
    tracemalloc.start()
    try:
        return read(directory, 7, FILES), tracemalloc.get_traced_memory()[1]
    except (CorruptState, IncompatibleCheckpoint) as error:
        assert len(error.cause) < 2000
        return None, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_equal(directory: Path, found: SavedCommit) -> None:
    """Assert that a commit that was read says exactly what its file says."""
    written = json.loads((directory / "commit-7").read_bytes().split(b"\n", 1)[1])
    del written["data"]
    assert json.loads(dumps(found.manifest)) == written
    assert found.manifest.generation == 7


MUTATIONS = {"text": change_text, "tree": change_tree, "data": change_data}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_changed_commits_are_refused_or_equal(tmp_path: Path, kind: str) -> None:
    whole = fuzz(tmp_path, MUTATIONS[kind], range(500))
    if kind == "tree":
        assert 0 < whole < 250, "some changes are of free fields, most are not"


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATIONS)
def test_many_changed_commits_are_refused_or_equal(tmp_path: Path, kind: str) -> None:
    fuzz(tmp_path, MUTATIONS[kind], range(1000, 26_000))


@pytest.mark.parametrize("node", [[], {"$tuple": []}, "", 1, {"$dict": []}, [[[[[[[[1]]]]]]]]])
def test_small_nodes_take_memory_in_proportion(tmp_path: Path, node: Any) -> None:
    """A state of very many nodes, each a few bytes of text, takes at most the allowed bytes."""
    put_tree(tmp_path, changed(tree(), "run.state", [node] * 20_000), original()[1])
    tracemalloc.start()
    try:
        found = read(tmp_path, 7, FILES)
        assert tracemalloc.get_traced_memory()[1] < bytes_allowed(tmp_path)
    finally:
        tracemalloc.stop()
    assert len(decode(found.manifest.run.state, found.tensors)) == 20_000


def test_reading_takes_memory_in_proportion(tmp_path: Path) -> None:
    """Reading a commit of two thousand ranges takes at most the allowed bytes, and is read whole."""

    def stored(checksum: int) -> StoredArray:
        return StoredArray(0, CHECKSUMS + checksum)

    commit = small()
    manifest = commit.manifest
    weight = manifest.parameters[0]
    count = 2000
    ranges = tuple(
        Range(4096 * each, 4096, {"values": stored(2 * each), "remainder": stored(2 * each + 1)})
        for each in range(count)
    )
    many = dataclasses.replace(weight, shape=(4096 * count,), stride=(1,), moments=False, ranges=ranges)
    manifest = dataclasses.replace(manifest, parameters=(many, manifest.parameters[1]))
    checksums = np.zeros(2 * count + CHECKSUMS, np.uint32)
    put(tmp_path, *contents(dataclasses.replace(commit, manifest=manifest, checksums=checksums)))
    tracemalloc.start()
    try:
        found = read(tmp_path, 7, FILES)
        assert tracemalloc.get_traced_memory()[1] < 40 * sum(p.stat().st_size for p in tmp_path.iterdir())
    finally:
        tracemalloc.stop()
    assert found.manifest == manifest
