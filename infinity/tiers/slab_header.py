"""Slab headers: the first 4096 bytes of a slab that can be committed. They say whose pages lie behind them.

The layout, little endian, without padding between fields:

| bytes | field |
|---|---|
| 0-8 | magic, `b"INFSLAB1"` |
| 8-12 | format version, u32, 1 |
| 12-16 | flags, u32: bit 0 is set once a commit holds pages of the slab, the others are zero |
| 16-32 | uuid of the slab, also part of the file's name |
| 32-36 | rank, u32, also part of the file's name |
| 36-44 | page bytes, u64, a positive multiple of 4096: the file is at least this long behind the header |
| 44-4096 | zero |

There is no checksum: every field is checked. All fields lie in the first 512 bytes, which a disk writes whole
or not at all, so a crash leaves the header of before or of after a write.
"""

from __future__ import annotations

import os
import re
import struct
import uuid as uuids
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import CorruptState, IncompatibleCheckpoint
from infinity.system.disk_files import DiskFiles

SLAB_HEADER_BYTES = 4096
"""Bytes of the header, behind which the pages begin."""

_MAGIC = b"INFSLAB1"
_VERSION = 1
_COMMITTED = 1
_FIELDS = struct.Struct("<8sII16sIQ")
_NAME = re.compile(r"infinity-rank(0|[1-9][0-9]{0,9})-([0-9a-f]{32})\.slab")
_CURE = "Load another commit, or restore this file from a copy."


def slab_name(rank: int, uuid: str | None = None) -> str:
    """The name of a slab's file. uuid: 32 hexadecimal digits if it has a header, None for a plain slab."""
    return f"infinity-rank{rank}.slab" if uuid is None else f"infinity-rank{rank}-{uuid}.slab"


def parse_slab_name(name: str) -> tuple[int, str] | None:
    """(rank, uuid) of a slab with a header by the name of its file, or None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def check_uuid(uuid: str) -> str:
    """Return `uuid` if it is 32 lower-case hexadecimal digits, so that it can be part of a file's name.

    Raises CorruptState for every other text.
    """
    if not re.fullmatch("[0-9a-f]{32}", uuid):
        raise CorruptState(f"{uuid!r} is no uuid of a slab.", "Load another commit.")
    return uuid


@dataclass(frozen=True)
class SlabHeader:
    """What the header of a slab says."""

    uuid: str
    """The slab's uuid as 32 hexadecimal digits."""
    rank: int
    nbytes: int
    """Bytes of pages behind the header."""
    committed: bool
    """Whether a commit holds pages of the slab, or did."""

    def pack(self) -> bytes:
        """Return the header's SLAB_HEADER_BYTES bytes."""
        flags = _COMMITTED if self.committed else 0
        identity = uuids.UUID(hex=self.uuid).bytes
        packed = _FIELDS.pack(_MAGIC, _VERSION, flags, identity, self.rank, self.nbytes)
        return packed.ljust(SLAB_HEADER_BYTES, b"\0")


def read_header(path: str | os.PathLike[str], files: DiskFiles) -> SlabHeader:
    """Read and check the header of the slab at `path`.

    Raises CorruptState for bytes that no header has, or that contradict the file's name,
    IncompatibleCheckpoint for an unknown format version, StorageError for a file that cannot be read.
    """
    return _unpack(Path(path), files.read(path, limit=SLAB_HEADER_BYTES))


def left_by_a_crash(path: str | os.PathLike[str], files: DiskFiles) -> bool:
    """Whether the slab at `path` was left by a process that ended before the slab was first committed.

    True if the header says so, and for what a crash during the slab's creation can leave: any part of such a
    header, zeros elsewhere, and an end of the file anywhere. False for a committed slab and for every other
    content, even if it is no header at all. Raises StorageError for a file that cannot be read.
    """
    content = files.read(path, limit=SLAB_HEADER_BYTES)
    named = parse_slab_name(Path(path).name)
    if named is None:
        return False
    rank, uuid = named
    expected = SlabHeader(uuid, rank, 0, committed=False).pack()
    size = slice(_FIELDS.size - 8, _FIELDS.size)  # of the pages, which can be any
    return all(
        found in (0, byte) or size.start <= place < size.stop
        for place, (found, byte) in enumerate(zip(content, expected, strict=False))
    )


def _unpack(path: Path, content: bytes) -> SlabHeader:
    def corrupt(what: str) -> CorruptState:
        return CorruptState(f"The header of the slab {path} {what}.", _CURE)

    if len(content) < SLAB_HEADER_BYTES:
        raise corrupt(f"ends after {len(content)} of {SLAB_HEADER_BYTES} bytes")
    magic, version, flags, identity, rank, nbytes = _FIELDS.unpack_from(content)
    if magic != _MAGIC:
        raise corrupt(f"begins with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise IncompatibleCheckpoint(
            f"The slab {path} has format version {version}, and this version of infinity reads {_VERSION}.",
            "Load it with the version of infinity that wrote it.",
        )
    if flags & ~_COMMITTED:
        raise corrupt(f"has unknown flags {flags:#x}")
    uuid = identity.hex()
    named = parse_slab_name(path.name)
    if named is not None and named != (rank, uuid):
        raise corrupt(f"is that of {slab_name(rank, uuid)}")
    if nbytes == 0 or nbytes % 4096 or nbytes > 1 << 62:
        raise corrupt(f"says {nbytes} bytes of pages, which is no positive multiple of 4096")
    if any(content[_FIELDS.size :]):
        raise corrupt("has bytes behind its fields that are not zero")
    return SlabHeader(uuid, rank, nbytes, bool(flags & _COMMITTED))
