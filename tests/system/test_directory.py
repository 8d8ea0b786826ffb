"""Tests of directories that are made for commits, and of values that are no directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError, StorageError
from infinity.system.directory import check_directory, make_directory, unmake


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("what", ["a\0b", "", 3, None, b"bytes", "\ud800"], ids=repr)
def test_a_value_that_is_no_path(what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (check_directory, lambda path: make_directory(path, [])):
        with pytest.raises(ConfigError, match="is no path") as caught:
            call(what)
        assert caught.value.cure
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o277])
def test_directories_that_are_made_are_the_owners(mask: int, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o750)
    made: list[str] = []
    before = os.umask(mask)
    try:
        assert make_directory(there / "outer" / "inner", made) == there / "outer" / "inner"
    finally:
        os.umask(before)
    assert mode(there / "outer" / "inner") == 0o700
    assert mode(there / "outer") == (0o777 & ~mask) | 0o700
    assert mode(there) == 0o750
    assert make_directory(there, made) == there
    assert made == [str(there / "outer"), str(there / "outer" / "inner")]
    (there / "outer" / "file").touch()
    unmake(made)
    assert [each.name for each in there.rglob("*")] == ["outer", "file"]


@pytest.mark.parametrize("name", ["a", "a/", "./a/.", "a/b/../c"])
def test_relative_paths_are_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[str] = []
    path = make_directory(name, made)
    assert path == Path(os.path.realpath(tmp_path / name)) and mode(path) == 0o700
    unmake(made)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_below_what_can_hold_no_pages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    made: list[str] = []
    for path, reason in (
        (tmp_path / "file", errno.ENOTDIR),
        (tmp_path / "file" / "x", errno.ENOTDIR),
        (tmp_path / "link", errno.ENOENT),
        (Path("/dev/shm/infinity-test/x"), errno.EINVAL),
    ):
        with pytest.raises(StorageError) as caught:
            make_directory(path, made)
        assert caught.value.errno == reason
        assert "INFINITY_AIO" not in caught.value.cure
    assert made == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
    assert not os.path.lexists("/dev/shm/infinity-test")


def test_what_was_made_before_an_error_is_known(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(StorageError) as caught:
        make_directory(tmp_path / "a" / ("b" * 300), made)
    assert caught.value.errno == errno.ENAMETOOLONG
    assert made == [str(tmp_path / "a")]
