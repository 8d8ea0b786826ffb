"""Tests of the operations by which files other than pages reach a disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.system.disk_files import DiskFiles


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277, 0o777])
def test_the_owner_can_read_and_write_a_new_file_under_any_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        DiskFiles().create(tmp_path / "file", b"bytes")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_a_file_whose_mode_cannot_be_set_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "fchmod", refuse)
    before = os.umask(0o277)
    try:
        with pytest.raises(StorageError) as caught:
            DiskFiles().create(tmp_path / "file", b"bytes")
    finally:
        os.umask(before)
    assert caught.value.errno == errno.EPERM
    assert list(tmp_path.iterdir()) == []
