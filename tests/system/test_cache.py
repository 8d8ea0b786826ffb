"""Tests of the user's cache: whatever lies in place of a file, it is read or counts as empty, at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.system.cache import JsonFile, cache_file, read_bytes


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_file("file")
    found.parent.mkdir()
    return found


def opened() -> JsonFile[Any]:
    return JsonFile[Any]("file", lambda content: content["figures"], "nothing")


def nested(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (os.mkfifo, "no regular file"),
        (Path.mkdir, "irectory"),
        (nested, "too many levels"),
        (lambda path: path.write_text("{"), "Expecting"),
        (lambda path: path.write_text("[]"), "another form"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
    ids=["FIFO", "directory", "deep", "torn", "list", "circle of links"],
)
def test_what_is_no_file_of_ours_counts_as_empty(put: Callable[[Path], Any], reason: str, path: Path) -> None:
    put(path)
    found = opened()
    assert found.content == "nothing"
    assert found.ignored is not None
    assert reason in found.ignored


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir], ids=["FIFO", "directory"])
def test_bytes_that_cannot_be_read_are_none(put: Callable[[Path], Any], path: Path) -> None:
    put(path)
    assert read_bytes(path) is None


def test_a_fifo_is_replaced_by_the_next_file(path: Path) -> None:
    os.mkfifo(path)
    assert opened().save({"figures": [1, 2]})
    assert json.loads(path.read_text()) == {"figures": [1, 2]}
    assert opened().content == [1, 2]
    assert read_bytes(path) == path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == ["file"]
