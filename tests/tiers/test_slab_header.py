"""Tests of slab headers: their bytes are a format, and every wrong byte is told."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import CorruptState, IncompatibleCheckpoint, StorageError
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab_header import (
    SLAB_HEADER_BYTES,
    SlabHeader,
    check_uuid,
    left_by_a_crash,
    parse_slab_name,
    read_header,
    slab_name,
)

UUID = "00112233445566778899aabbccddeeff"
FILES = DiskFiles()
HEADER = SlabHeader(UUID, 3, 0x1_2345_6000, committed=True)
GOLDEN = bytes.fromhex(
    "494e46534c414231"  # magic
    "01000000"  # version
    "01000000"  # flags
    "00112233445566778899aabbccddeeff"
    "03000000"  # rank
    "0060452301000000"  # page bytes
) + bytes(4096 - 44)


def put(directory: Path, content: bytes, name: str = slab_name(3, UUID)) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def changed(offset: int, field: bytes) -> bytes:
    return GOLDEN[:offset] + field + GOLDEN[offset + len(field) :]


def test_the_bytes_are_a_format(tmp_path: Path) -> None:
    assert SLAB_HEADER_BYTES == 4096
    assert HEADER.pack() == GOLDEN
    assert read_header(put(tmp_path, GOLDEN + b"pages"), FILES) == HEADER
    assert read_header(put(tmp_path, changed(12, bytes(4))), FILES) == SlabHeader(
        UUID, 3, HEADER.nbytes, False
    )


def test_names(tmp_path: Path) -> None:
    assert slab_name(12) == "infinity-rank12.slab"
    assert slab_name(12, UUID) == f"infinity-rank12-{UUID}.slab"
    assert parse_slab_name(slab_name(12, UUID)) == (12, UUID)
    good = slab_name(0, UUID)
    for name in (
        slab_name(0),
        good + "x",
        "x" + good,
        good + "\n",
        good.replace("rank0", "rank00"),
        good.replace("rank0", "rank-1"),
        good.replace("ff.", "FF."),
        good.replace("ff.", "f."),
        good.replace("rank0", "rank\u0660"),
    ):
        assert parse_slab_name(name) is None, name


@pytest.mark.parametrize("uuid", ["", UUID.upper(), UUID[:-1], UUID + "0", "../" + UUID[3:], UUID + "\n"])
def test_what_is_no_uuid_never_becomes_a_path(uuid: str) -> None:
    assert check_uuid(UUID) == UUID
    with pytest.raises(CorruptState, match="no uuid"):
        check_uuid(uuid)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "ends after 0 of 4096"),
        (GOLDEN[:4095], "ends after 4095 of 4096"),
        (bytes(4096), "begins with"),
        (changed(0, b"INFSLAB2"), "begins with b'INFSLAB2'"),
        (changed(12, b"\2"), "unknown flags 0x2"),
        (changed(15, b"\x80"), "unknown flags 0x80000001"),
        (changed(16, b"\1"), "is that of infinity-rank3-0111"),
        (changed(32, b"\4"), "is that of infinity-rank4-0011"),
        (changed(36, bytes(8)), "says 0 bytes"),
        (changed(36, b"\1"), "no positive multiple"),
        (changed(36, struct.pack("<Q", 1 << 63)), "no positive multiple"),
        (changed(44, b"\1"), "not zero"),
        (changed(4095, b"\1"), "not zero"),
    ],
)
def test_every_wrong_field_is_told(tmp_path: Path, content: bytes, match: str) -> None:
    path = put(tmp_path, content)
    with pytest.raises(CorruptState, match=match) as error:
        read_header(path, FILES)
    assert str(path) in error.value.cause


@given(place=st.integers(0, 4095), bit=st.integers(0, 7))
def test_no_flipped_bit_is_overlooked(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    """A header with one bit flipped is refused, except where the other value is as good.

    These are the committed flag and the size of the pages, which a commit's record also has.
    """
    content = changed(place, bytes([GOLDEN[place] ^ 1 << bit]))
    path = put(tmp_path_factory.mktemp("slabs"), content)
    try:
        read = read_header(path, FILES)
    except (CorruptState, IncompatibleCheckpoint):
        return
    assert read.pack() == content
    assert (read.uuid, read.rank) == (HEADER.uuid, HEADER.rank)
    assert (place, bit) == (12, 0) or 36 <= place < 44


def test_an_unknown_version_is_not_corrupt(tmp_path: Path) -> None:
    path = put(tmp_path, changed(8, b"\2"))
    with pytest.raises(IncompatibleCheckpoint, match="version 2, and this version of infinity reads 1"):
        read_header(path, FILES)
    assert not left_by_a_crash(path, FILES)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "missing"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / slab_name(3, UUID)
    if kind == "symlink":
        path.symlink_to(put(tmp_path, GOLDEN, "elsewhere"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(StorageError):
        read_header(path, FILES)


@given(
    end=st.integers(0, 5000), torn=st.lists(st.integers(0, 60), max_size=8), nbytes=st.integers(1, 1 << 50)
)
def test_what_a_crash_can_leave_of_a_new_header_is_reclaimed(
    tmp_path_factory: pytest.TempPathFactory, end: int, torn: list[int], nbytes: int
) -> None:
    content = bytearray(SlabHeader(UUID, 3, nbytes * 4096, committed=False).pack() + bytes(904))
    for place in torn:
        content[place] = 0
    path = put(tmp_path_factory.mktemp("slabs"), bytes(content[:end]))
    assert left_by_a_crash(path, FILES)


@pytest.mark.parametrize("wrote", [*range(50), 512, 4095])
def test_any_part_of_a_mark_leaves_a_header(tmp_path: Path, wrote: int) -> None:
    """A write that ends half way, as on a full disk, leaves the header of before or the committed one."""
    before = SlabHeader(UUID, 3, HEADER.nbytes, committed=False)
    path = put(tmp_path, GOLDEN[:wrote] + before.pack()[wrote:])
    assert read_header(path, FILES) == (HEADER if wrote > 12 else before)
    assert left_by_a_crash(path, FILES) == (wrote <= 12)


def test_a_committed_header_is_never_taken_for_a_leftover(tmp_path: Path) -> None:
    """Not even a damaged one, as long as anything in it cannot come from the creation of this slab."""
    assert not left_by_a_crash(put(tmp_path, GOLDEN), FILES)
    for place in (*range(12), *range(13, 4096)):  # byte 12 has the flag itself
        assert not left_by_a_crash(put(tmp_path, changed(place, bytes([GOLDEN[place] ^ 0xFF]))), FILES)
    for content in (b"text of somebody else", bytes(4000) + b"x", GOLDEN[:13]):
        assert not left_by_a_crash(put(tmp_path, content), FILES)
    other = SlabHeader(UUID[::-1], 3, 4096, committed=False).pack()
    assert not left_by_a_crash(put(tmp_path, other), FILES), "the header of another slab"
    assert not left_by_a_crash(put(tmp_path, bytes(4096), "infinity-rank3-other.slab"), FILES)
