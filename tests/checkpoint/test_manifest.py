"""Tests of the files of a commit: writing, reading back, and the ways in which a file can be wrong.

Random changes of the files are in tests/checkpoint/test_manifest_fuzz.py.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import CHECKSUMS, changed, contents, original, put, put_tree, signed, small, tree
from typed_values import VALUES, same

from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import decode, encode
from infinity.checkpoint.commit_files import generations, newest, read, remove, write
from infinity.checkpoint.manifest import FORMAT, READABLE, Manifest
from infinity.checkpoint.tensor_files import packed
from infinity.checkpoint.typed_json import dumps, parse, typed
from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, StorageError, StorageFull
from infinity.system.disk_files import DiskFiles

FILES = DiskFiles()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_commit_comes_back(tmp_path: Path) -> None:
    commit = small()
    manifest, checksums, tensors = commit.manifest, commit.checksums, commit.tensors
    write(commit, tmp_path, FILES)
    assert names(tmp_path) == ["commit-7", "commit-7.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    found = newest(tmp_path, FILES)
    assert found is not None and found.skipped == ()
    assert found.manifest == manifest
    assert found.checksums.tolist() == checksums.tolist() and found.checksums.dtype == np.uint32
    assert same(
        found.tensors, dict(sorted(tensors.items(), key=lambda each: list(found.tensors).index(each[0])))
    )
    assert decode(found.manifest.run.state, found.tensors)["order"] == (2, 0, 1)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_manifest_comes_back(data: st.DataObject) -> None:
    """Manifests with free values and texts give equal manifests, and values with the same types."""
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    manifest, tensors = small().manifest, small().tensors
    value = data.draw(VALUES)
    run = dataclasses.replace(
        manifest.run,
        buffers={name: encode(value, tensors) for name in data.draw(st.sets(text, max_size=2))},
        loss_scale=None if data.draw(st.booleans()) else manifest.run.loss_scale,
        state=encode(value, tensors),
    )
    manifest = dataclasses.replace(
        manifest,
        generation=data.draw(st.integers(0, (1 << 59))),
        versions=data.draw(st.dictionaries(text, text, max_size=3)),
        isa=data.draw(text),
        codecs=data.draw(st.dictionaries(text, st.integers(0, 9), max_size=3)),
        run=run,
    )
    found = typed(parse(dumps(manifest), "manifest"), Manifest, "manifest")
    assert found == manifest
    assert same(decode(found.run.state, tensors), value)


class Recorder:
    """Lists the operations, and makes the one with the number `failing` fail with `code`."""

    def __init__(self, failing: int | None = None, code: int = errno.ENOSPC) -> None:
        self.operations: list[tuple[str, str, str]] = []
        self._failing = failing
        self._code = code

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        number = len(self.operations)
        self.operations.append((operation, Path(path).name, Path(target).name if target else ""))
        if number == self._failing:
            raise OSError(self._code, os.strerror(self._code))
        return number

    def ended(self, ticket: int) -> None:
        pass


ORDER = [
    ("remove", "commit-7.safetensors", ""),
    ("remove", ".commit-7.tmp", ""),
    ("create", "commit-7.safetensors", ""),
    ("write", "commit-7.safetensors", ""),
    ("sync", "commit-7.safetensors", ""),
    ("create", ".commit-7.tmp", ""),
    ("write", ".commit-7.tmp", ""),
    ("sync", ".commit-7.tmp", ""),
    ("rename", ".commit-7.tmp", "commit-7"),
]


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    recorder = Recorder()
    write(small(), tmp_path, DiskFiles(recorder))
    assert recorder.operations == [*ORDER, ("sync directory", tmp_path.name, "")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("failing", range(len(ORDER) + 1))
def test_a_failed_operation_leaves_the_commit_before(tmp_path: Path, failing: int, code: int) -> None:
    write(small(3), tmp_path, FILES)
    with pytest.raises(StorageFull if code == errno.ENOSPC else StorageError) as caught:
        write(small(), tmp_path, DiskFiles(Recorder(failing, code)))
    assert caught.value.errno == code
    before = ["commit-3", "commit-3.safetensors"]
    last = failing == len(ORDER)  # the sync of the directory
    assert names(tmp_path) == (
        ["commit-3", "commit-3.safetensors", "commit-7", "commit-7.safetensors"] if last else before
    )
    found = newest(tmp_path, FILES)
    assert found is not None and found.manifest == small(7 if last else 3).manifest


def test_files_of_a_crash_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "commit-7.safetensors").write_bytes(b"stale")
    (tmp_path / ".commit-7.tmp").write_bytes(b"stale")
    write(small(), tmp_path, FILES)
    assert names(tmp_path) == ["commit-7", "commit-7.safetensors"]
    assert read(tmp_path, 7, FILES).manifest == small().manifest


def test_a_commit_is_never_overwritten(tmp_path: Path) -> None:
    write(small(), tmp_path, FILES)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StorageError) as caught:
        write(small(), tmp_path, FILES)
    assert caught.value.errno == errno.EEXIST
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = small()
    manifest = commit.manifest
    buffers = {"\ud800": manifest.run.buffers["block.running"]}
    wrong = dataclasses.replace(manifest, run=dataclasses.replace(manifest.run, buffers=buffers))
    with pytest.raises(ConfigError, match=r"half a surrogate pair"):
        write(dataclasses.replace(commit, manifest=wrong), tmp_path, FILES)
    with pytest.raises(ConfigError, match=r"goes past the end of the table of checksums"):
        write(dataclasses.replace(commit, checksums=commit.checksums[:-1]), tmp_path, FILES)
    monkeypatch.setattr(commit_files, "MANIFEST_LIMIT", 1000)
    with pytest.raises(ConfigError, match=r"commit-7 would have \d+ bytes, more than 1000"):
        write(commit, tmp_path, FILES)
    assert names(tmp_path) == []


def test_no_commit_is_none(tmp_path: Path) -> None:
    for name in (
        "commit-",
        "commit-01",
        "commit-1x",
        "commit-7.safetensors",
        ".commit-7.tmp",
        "xcommit-1",
        "commit--1",
    ):
        (tmp_path / name).write_bytes(b"")
    assert generations(tmp_path) == []
    assert newest(tmp_path, FILES) is None
    with pytest.raises(StorageError):
        newest(tmp_path / "missing", FILES)


def test_the_newest_whole_commit_wins(tmp_path: Path) -> None:
    for generation in (9, 10, 11, 100):
        write(small(generation), tmp_path, FILES)
    assert generations(tmp_path) == [9, 10, 11, 100]
    (tmp_path / "commit-100").write_bytes((tmp_path / "commit-100").read_bytes()[:-1])
    (tmp_path / "commit-11.safetensors").unlink()
    found = newest(tmp_path, FILES)
    assert found is not None and found.manifest.generation == 10
    assert [each.split()[0] for each in found.skipped] == ["commit-100", "commit-11.safetensors"]
    (tmp_path / "commit-10.safetensors").write_bytes(b"")
    (tmp_path / "commit-9").write_bytes(b"")
    with pytest.raises(CorruptState, match=r"commit-100 .*commit-11\.\w+ .*commit-10\.\w+ .*commit-9 "):
        newest(tmp_path, FILES)


def test_a_manifest_of_another_generation_is_refused(tmp_path: Path) -> None:
    put(tmp_path, *contents(small(7)), generation=8)
    with pytest.raises(CorruptState, match="commit-8 is the manifest of generation 7"):
        newest(tmp_path, FILES)


@pytest.mark.parametrize("version", READABLE)
def test_every_readable_version_is_read(tmp_path: Path, version: int) -> None:
    manifest, data = contents(small(7))
    put(tmp_path, signed(manifest.split(b"\n", 1)[1], version=version), data)
    assert read(tmp_path, 7, FILES).manifest == small(7).manifest


@pytest.mark.parametrize("version", [READABLE[0] - 1, FORMAT + 1])
def test_another_format_is_not_passed_over(tmp_path: Path, version: int) -> None:
    write(small(3), tmp_path, FILES)
    put(tmp_path, signed(b"anything at all", version=version), b"", generation=8)
    with pytest.raises(IncompatibleCheckpoint, match=f"version {version}") as caught:
        newest(tmp_path, FILES)
    assert "Resume it with the version of infinity that wrote it" in caught.value.cure
    assert "infinity checkpoint export" in caught.value.cure


def test_a_version_with_a_flipped_bit_is_passed_over(tmp_path: Path) -> None:
    write(small(3), tmp_path, FILES)
    manifest, data = contents(small(8))
    put(
        tmp_path,
        manifest.replace(b"infinity-commit %d " % FORMAT, b"infinity-commit 2 ", 1),
        data,
        generation=8,
    )
    found = newest(tmp_path, FILES)
    assert found is not None and found.manifest.generation == 3 and len(found.skipped) == 1


@pytest.mark.parametrize("name", ["commit-7", "commit-7.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "missing"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(small(), tmp_path, FILES)
    os.rename(tmp_path / name, elsewhere / name)
    if kind == "link":
        (tmp_path / name).symlink_to(elsewhere / name)
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "directory":
        (tmp_path / name).mkdir()
    with pytest.raises(
        CorruptState, match=f"{name} is {'missing' if kind == 'missing' else 'not a regular'}"
    ):
        read(tmp_path, 7, FILES)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    write(small(), tmp_path, FILES)
    os.truncate(tmp_path / "commit-7.safetensors", 1 << 40)
    recorder = Recorder()
    with pytest.raises(CorruptState, match=r"commit-7\.safetensors has 1099511627776 bytes, not \d+\."):
        read(tmp_path, 7, DiskFiles(recorder))
    os.truncate(tmp_path / "commit-7", 1 << 40)
    with pytest.raises(CorruptState, match="not at most"):
        read(tmp_path, 7, DiskFiles(recorder))
    assert recorder.operations == [("read", "commit-7", "")]


def test_a_failing_disk_is_not_a_broken_commit(tmp_path: Path) -> None:
    write(small(3), tmp_path, FILES)
    write(small(), tmp_path, FILES)
    for failing in (0, 1):
        with pytest.raises(StorageError) as caught:
            newest(tmp_path, DiskFiles(Recorder(failing, errno.EIO)))
        assert caught.value.errno == errno.EIO


def test_a_commit_is_removed_manifest_first(tmp_path: Path) -> None:
    write(small(3), tmp_path, FILES)
    write(small(), tmp_path, FILES)
    recorder = Recorder()
    remove(tmp_path, 3, DiskFiles(recorder))
    assert recorder.operations == [
        ("remove", "commit-3", ""),
        ("sync directory", tmp_path.name, ""),
        ("remove", "commit-3.safetensors", ""),
    ]
    assert names(tmp_path) == ["commit-7", "commit-7.safetensors"]
    remove(tmp_path, 3, FILES)


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    write(small(), tmp_path, FILES)
    for name in (
        "commit-8.safetensors",
        ".commit-8.tmp",
        ".commit-7.tmp",
        "commit-08.safetensors",
        "notes.data",
    ):
        (tmp_path / name).write_bytes(b"")
    commit_files.remove_leftovers(tmp_path, FILES)
    assert names(tmp_path) == ["commit-08.safetensors", "commit-7", "commit-7.safetensors", "notes.data"]


WEIGHT = "parameters[0]"
CHANGES: list[tuple[str, Any, str]] = [
    ("generation", -1, "generation"),
    ("generation", 7.0, "generation"),
    ("generation", True, "generation"),
    ("generation", 1 << 63, "generation"),
    ("created", None, "created"),
    ("more", 1, "'more'"),
    ("volume.stripe_bytes", 1000, "volume.stripe_bytes"),
    ("volume.stripe_bytes", 0, "volume.stripe_bytes"),
    ("volume.stripe_bytes", 1 << 41, "volume.stripe_bytes"),
    ("volume.stripe_bytes", 1 << 24, "volume.slabs"),
    ("volume.slabs[0].uuid", "f" * 32, "twice"),
    ("volume.slabs[0].uuid", "../../etc/passwd", "volume.slabs[0].uuid"),
    ("volume.slabs[0].nbytes", 65536, "past the end of the volume"),
    ("volume.slabs[0].nbytes", 4096, "volume.slabs"),
    ("volume.slabs[0].nbytes", 0, "volume.slabs[0].nbytes"),
    ("volume.slabs[0].nbytes", 100, "volume.slabs[0].nbytes"),
    ("volume.slabs[0].uuid", "AB" * 16, "volume.slabs[0].uuid"),
    ("volume.slabs[0].weight", 1 << 21, "volume.slabs[0].weight"),
    ("volume.slabs[0].weight", 0, "volume.slabs[0].weight"),
    ("volume.slabs[0].weight", 65536, "volume.slabs"),
    ("volume.slabs", [], "volume.slabs"),
    ("chunk_elements", 100, "chunk_elements"),
    ("chunk_elements", 0, "chunk_elements"),
    ("rule.states", "int4", "rule.states"),
    ("rule.states", "fp32", "arrays"),
    ("rule.moments", [], "arrays"),
    ("precision.compute", "fp8", "precision.compute"),
    ("units[0].parameters", ["block.weight"], "units"),
    ("units[0].parameters", ["block.weight", "block.scale", "block.scale"], "units"),
    (f"{WEIGHT}.names", [], "names"),
    (f"{WEIGHT}.names", ["block.weight", "block.scale"], "twice"),
    (f"{WEIGHT}.names", ["other"], "units"),
    (f"{WEIGHT}.shape", [2, 4601], "ranges ends at element 9200 of 9202"),
    (f"{WEIGHT}.shape", [1 << 40, 1 << 40], "shape"),
    (f"{WEIGHT}.stride", [1, 1], "stride"),
    (f"{WEIGHT}.stride", [1], "stride"),
    (f"{WEIGHT}.dtype", "float16", "arrays"),
    (f"{WEIGHT}.dtype", "int8", "dtype"),
    (f"{WEIGHT}.dtype", "object", "dtype"),
    (f"{WEIGHT}.moments", False, "arrays"),
    (f"{WEIGHT}.ranges", [], "ranges"),
    (f"{WEIGHT}.ranges[1][0]", 4096, "ranges[1][0]"),
    (f"{WEIGHT}.ranges[1][1]", 1007, "ranges ends at element 9199"),
    (f"{WEIGHT}.ranges[1][1]", 1009, "ranges[1]"),
    (f"{WEIGHT}.ranges[0][1]", 8000, "ranges[1][0]"),
    (f"{WEIGHT}.ranges[1][1]", 0, "ranges[1][1]"),
    (f"{WEIGHT}.ranges[0][2].values[0]", 196608 - 16383, "volume"),
    (f"{WEIGHT}.ranges[0][2].values[1]", CHECKSUMS - 1, "checksums"),
    (f"{WEIGHT}.ranges[0][2].master", [0, 0], "arrays"),
    ("run.param_groups[0].params", ["head.weight"], "run.param_groups"),
    ("run.param_groups[1].params", ["block.weight"], "twice"),
    ("run.param_groups[0].options", 1, "run.param_groups[0].options"),
    ("world_size", 0, "world_size"),
    ("rank", 1, "rank"),
    ("run.buffers", {"a": {"$pickle": ""}}, "run.buffers['a']"),
    ("run.buffers", {"a": {"$tensor": ["uint8", [1], [1], "9"]}}, "run.buffers['a']"),
    ("run.loss_scale.value", -1.0, "run.loss_scale.value"),
    ("run.loss_scale.value", 1, "run.loss_scale.value"),
    ("run.state", {"$tuple": 1}, "run.state"),
    ("data", None, "data"),
]


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    content = original()[1]
    for path, value, named in CHANGES:
        put_tree(tmp_path, changed(tree(), path, value), content)
        with pytest.raises(CorruptState) as caught:
            read(tmp_path, 7, FILES)
        assert caught.value.cause.startswith("commit-7") and named in caught.value.cause, (path, caught.value)


def test_every_field_must_be_there(tmp_path: Path) -> None:
    for each in dataclasses.fields(Manifest):
        without = tree()
        del without[each.name]
        put_tree(tmp_path, without, original()[1])
        with pytest.raises(CorruptState, match=f"commit-7 lacks '{each.name}'"):
            read(tmp_path, 7, FILES)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"\\' * 200_000,
        b'{"a":1,"a":2}',
        b"[NaN]",
        b"[1e999]",
        b"[" + b"9" * 100_000 + b"]",
        b"[1] [2]",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_text_that_is_not_a_manifest(tmp_path: Path, text: bytes) -> None:
    put(tmp_path, signed(text), b"")
    with pytest.raises(CorruptState, match="commit-7"):
        read(tmp_path, 7, FILES)


def test_a_data_file_that_is_not_of_tensors(tmp_path: Path) -> None:
    tables = (
        {},
        {"checksums": torch.zeros(CHECKSUMS)},
        {"checksums": torch.zeros((1, 1), dtype=torch.uint32)},
    )
    for data in (b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]", *map(packed, tables)):
        put_tree(tmp_path, tree(), data)
        with pytest.raises(CorruptState, match=r"commit-7\.safetensors"):
            read(tmp_path, 7, FILES)


def test_every_bit_of_the_files_is_checked(tmp_path: Path) -> None:
    manifest, data = original()
    for place in range(0, len(manifest), 7):
        flipped = bytearray(manifest)
        flipped[place] ^= 1 << place % 8
        put(tmp_path, bytes(flipped), data)
        with pytest.raises(CorruptState):
            read(tmp_path, 7, FILES)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        put(tmp_path, manifest, bytes(flipped))
        with pytest.raises(CorruptState):
            read(tmp_path, 7, FILES)


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    manifest, data = original()
    for end in range(0, len(manifest), 3):
        put(tmp_path, manifest[:end], data)
        with pytest.raises(CorruptState):
            read(tmp_path, 7, FILES)
