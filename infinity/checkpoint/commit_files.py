"""Commit files: writes the two files of a commit, and reads, checks and removes them.

A commit of generation g has the data file `commit-<g>.safetensors` (checksums, and tensors of encoded values)
and the manifest `commit-<g>`. The manifest contains the length and the CRC-32C of the data file, so it is
written second, and it appears under its name whole (see [Note: what a crash keeps] in
infinity/system/disk_files.py). docs/file-format.md describes the format.

[Note: block identities]
The table of a data file has an entry for each block: the CRC-32C of its bytes XOR the CRC-32C of its
identity. The identity names the commit, the array, the parameter and the block's first element. So bytes that
were exchanged between two places, or belong to another commit, do not pass the check, even if their entries
of the table were moved with them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint.codec import Tensors
from infinity.checkpoint.manifest import BLOCK, CODECS, FORMAT, READABLE, DataFile, Manifest, blocks
from infinity.checkpoint.run_state import RunState
from infinity.checkpoint.tensor_files import packed, unpacked
from infinity.checkpoint.typed_json import CURE, Json, corrupt, dumps, parse, typed
from infinity.checksum import crc32c, crc32c_blocks
from infinity.errors import (
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    StorageError,
    storage_error,
    storage_errors,
)
from infinity.system.disk_files import DiskFiles

if TYPE_CHECKING:
    from infinity.tiers import NvmeTier

MANIFEST_LIMIT = 1 << 30
"""Greatest size of a manifest in bytes. A larger file is refused."""

_NAME = re.compile(r"commit-(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(rf"\.{_NAME.pattern}\.tmp")
_LEFTOVER = re.compile(rf"{_NAME.pattern}\.safetensors|{_TEMPORARY.pattern}")
_FIRST_LINE = re.compile(rb"infinity-commit ([1-9][0-9]{0,8}) (0|[1-9][0-9]{0,17}) ([0-9a-f]{8})\n")
_LINE_LIMIT = 64
_CHECKSUMS = "checksums"
"""The name of the tensor that holds the table of checksums, uint32 (n,)."""


@dataclass(frozen=True)
class SavedCommit:
    """The content of a commit's two files, which were read and found whole, or are to be written."""

    manifest: Manifest
    checksums: npt.NDArray[np.uint32]
    """CRC-32Cs of the bytes of blocks, shape (n,). `StoredArray.checksum` is an index into them."""
    tensors: Tensors
    """The tensors to which encoded values in the manifest refer."""
    skipped: tuple[str, ...] = ()
    """For each newer commit that is not whole, a sentence that says what is wrong with it; newest first."""

    @property
    def run(self) -> RunState:
        """The state of the run outside of pages."""
        return RunState(self.manifest.run, self.tensors)


def manifest_path(directory: str | os.PathLike[str], generation: int) -> Path:
    """The path of the manifest of a commit."""
    return Path(directory) / f"commit-{generation}"


def data_path(directory: str | os.PathLike[str], generation: int) -> Path:
    """The path of the data file of a commit."""
    return Path(directory) / f"commit-{generation}.safetensors"


def _temporary_path(directory: str | os.PathLike[str], generation: int) -> Path:
    return Path(directory) / f".commit-{generation}.tmp"


def write(
    saved: SavedCommit,
    directory: str | os.PathLike[str],
    files: DiskFiles,
    *,
    tier: NvmeTier | None = None,
) -> None:
    """Write a commit into `directory`. When this returns, the commit is durable.

    The pages that the commit describes must be durable before the call. A data file and a temporary file of
    this generation, which a crash left, are replaced. tier: its slabs get the names of committed slabs; see
    [Note: the name of a slab says whose it is] in infinity/tiers/slab.py.

    Raises StorageError, StorageFull if the disk is full, and StorageError (EEXIST) if there is a manifest of
    this generation. After an error before the manifest has its name, neither file is left, and slabs have
    their former names. Raises ConfigError if `read` would refuse the files, for instance because a name has
    half a surrogate pair.
    """
    generation = saved.manifest.generation
    path, data, temporary = (
        each(directory, generation) for each in (manifest_path, data_path, _temporary_path)
    )
    content, text = contents(saved)
    if os.path.lexists(path):
        raise storage_error("create", os.fspath(path), None, errno.EEXIST, cure="Use a new generation.")
    files.remove(data)
    files.remove(temporary)
    first = tier is not None and not tier.keep
    try:
        files.create(data, content)
        files.create(temporary, text)
        if tier is not None:
            tier.commit()
        files.rename(temporary, path)
    except BaseException:
        if not os.path.lexists(path):
            with contextlib.suppress(StorageError):
                _undo(directory, generation, files, tier if first else None)
        raise
    files.sync_directory(directory)


def _undo(
    directory: str | os.PathLike[str], generation: int, files: DiskFiles, tier: NvmeTier | None
) -> None:
    """Remove the data file and the temporary manifest of a commit whose manifest has not got its final name.

    tier: the tier whose slabs get the names of uncommitted slabs again; None if another commit needs them.
    """
    if tier is not None:
        tier.uncommit()
    files.remove(_temporary_path(directory, generation))
    files.remove(data_path(directory, generation))


def take_back(
    directory: str | os.PathLike[str],
    generation: int,
    files: DiskFiles,
    tier: NvmeTier | None = None,
    *,
    leave: bool = False,
) -> None:
    """Take the name of a commit's manifest away, so that the commit does not count, then remove its files.

    tier: its slabs get the names of uncommitted slabs; None if another commit needs the slabs. leave: whether
    the files stay, so that `unfinished_slabs` finds the slabs to remove in the temporary manifest. Raises
    StorageError if the name cannot be taken away durably; the manifest may still have it then. Errors while
    files are removed are ignored.
    """
    files.rename(manifest_path(directory, generation), _temporary_path(directory, generation))
    files.sync_directory(directory)
    if not leave:
        with contextlib.suppress(StorageError):
            _undo(directory, generation, files, tier)


def contents(saved: SavedCommit) -> tuple[bytes, bytes]:
    """Make the contents of a commit's data file and of its manifest. Raises ConfigError if `read` would
    refuse them.
    """
    generation = saved.manifest.generation
    path = manifest_path("", generation)
    try:
        data = data_bytes(saved)
        text = manifest_bytes(saved.manifest, data)
        if len(text) > MANIFEST_LIMIT:
            raise corrupt(path.name, f"would have {len(text)} bytes, more than {MANIFEST_LIMIT}")
        from_bytes(text, data, path)
    except CorruptState as error:
        cure = "Rename what the text names, or file a bug if it names nothing of yours."
        raise ConfigError(f"Commit {generation} could not be read again: {error.cause}", cure) from error
    return data, text


def data_bytes(saved: SavedCommit) -> bytes:
    """Make the content of a data file: the table of checksums ([Note: block identities]), and the tensors.
    Raises CorruptState if arrays refer to checksums past the end of the table, or to one checksum twice.
    """
    bound = saved.checksums ^ _block_identities(saved.manifest, len(saved.checksums))
    return packed({_CHECKSUMS: torch.from_numpy(bound), **saved.tensors})


def manifest_bytes(manifest: Manifest, data: bytes) -> bytes:
    """Make the content of a manifest's file. data: the content of the commit's data file."""
    body = dumps({"data": DataFile.of(data), **vars(manifest)})
    start = f"infinity-commit {FORMAT} {len(body)} ".encode()
    return b"".join((start, f"{crc32c(body, crc32c(start)):08x}\n".encode(), body))


def generations(directory: str | os.PathLike[str]) -> list[int]:
    """List the generations whose manifests are in a directory, whole or not, in ascending order.

    Raises StorageError if the directory cannot be read.
    """
    with storage_errors("list", directory):
        found = (_NAME.fullmatch(name) for name in os.listdir(directory))
        return sorted(int(match[1]) for match in found if match)


def newest(directory: str | os.PathLike[str], files: DiskFiles) -> SavedCommit | None:
    """Read the newest whole commit of a directory. Returns None if there is no manifest at all.

    Newer commits that are not whole are passed over, and named in `SavedCommit.skipped`. Raises CorruptState,
    with the reason for each, if no commit is whole. Raises IncompatibleCheckpoint for a whole manifest of
    another format, and StorageError for a file that cannot be read.
    """
    skipped: list[str] = []
    for generation in reversed(generations(directory)):
        try:
            return read(directory, generation, files, tuple(skipped))
        except CorruptState as error:
            skipped.append(error.cause)
    if not skipped:
        return None
    raise CorruptState(f"No commit in {os.fspath(directory)} is whole: {' '.join(skipped)}", CURE)


def read(
    directory: str | os.PathLike[str], generation: int, files: DiskFiles, skipped: tuple[str, ...] = ()
) -> SavedCommit:
    """Read the commit of a generation. skipped: becomes `SavedCommit.skipped`.

    Raises CorruptState for files that are missing, not regular, or have other bytes than were written. Raises
    IncompatibleCheckpoint for another version of the format or of a codec (`CODECS`), and StorageError for a
    file that cannot be read. Memory is bounded by a multiple of the files' sizes.
    """
    path, data = manifest_path(directory, generation), data_path(directory, generation)
    tree, entry = _tree(_content(path, files, MANIFEST_LIMIT), path)
    return _commit(tree, entry, path, _content(data, files, entry.nbytes, exactly=True), skipped)


def named_slabs(directory: str | os.PathLike[str], files: DiskFiles) -> frozenset[str]:
    """List the UUIDs of the slabs of all readable commits in a directory. Raises StorageError."""
    found: set[str] = set()
    for generation in generations(directory):
        with contextlib.suppress(CorruptState, IncompatibleCheckpoint):
            found |= _slabs(manifest_path(directory, generation), files)
    return frozenset(found)


def unfinished_slabs(directory: str | os.PathLike[str], files: DiskFiles) -> frozenset[str]:
    """List the UUIDs of slabs that a crash has left under names of committed slabs, and that no commit needs.
    The result is empty if a commit cannot be read, because that commit may need any slab. Raises
    StorageError.
    """
    found: set[str] = set()
    with storage_errors("list", directory):
        names = [name for name in os.listdir(directory) if _TEMPORARY.fullmatch(name)]
    for name in names:
        with contextlib.suppress(CorruptState, IncompatibleCheckpoint):  # it was not written whole
            found |= _slabs(Path(directory) / name, files)
    try:
        for generation in generations(directory) if found else ():
            found -= _slabs(manifest_path(directory, generation), files)
    except (CorruptState, IncompatibleCheckpoint):
        found.clear()
    return frozenset(found)


def _slabs(path: Path, files: DiskFiles) -> set[str]:
    """Read the UUIDs of the slabs that the manifest `path` names."""
    tree, _ = _tree(_content(path, files, MANIFEST_LIMIT), path)
    return {slab.uuid for slab in typed(tree, Manifest, path.name).volume.slabs}


def from_bytes(manifest: bytes, data: bytes, path: Path) -> SavedCommit:
    """Make the commit whose files have these bytes. path: the manifest's. Raises the errors of `read`."""
    return _commit(*_tree(manifest, path), path, data, ())


def _tree(content: bytes, path: Path) -> tuple[Json, DataFile]:
    """Parse the content of the manifest `path`. Returns (tree without the data file's entry, that entry)."""
    tree = parse(_manifest_text(content, path), path.name)
    if not isinstance(tree, dict) or "data" not in tree:
        raise corrupt(path.name, "lacks 'data'")
    return tree, typed(tree.pop("data"), DataFile, (path.name, ".data"))


def _commit(tree: Json, entry: DataFile, path: Path, content: bytes, skipped: tuple[str, ...]) -> SavedCommit:
    """Make the commit of a manifest's tree and its data file's content, which is checked against `entry`."""
    where = f"{path.name}{data_path('', 0).suffix}"
    if DataFile.of(content) != entry:
        raise corrupt(where, "has other bytes than were written: its CRC-32C is another")
    tensors = unpacked(content, where)
    table = tensors.pop(_CHECKSUMS, None)
    if table is None or table.dtype != torch.uint32 or table.dim() != 1:
        raise corrupt(where, "has no table of checksums")
    checksums: npt.NDArray[np.uint32] = table.numpy()
    manifest = typed(tree, Manifest, path.name)
    RunState(manifest.run, tensors).check((path.name, ".run"))
    if path.name != manifest_path("", manifest.generation).name:
        raise corrupt(path.name, f"is the manifest of generation {manifest.generation}")
    for name, version in manifest.codecs.items():
        if CODECS.get(name) != version:
            raise IncompatibleCheckpoint(
                f"Commit {manifest.generation} has version {version} of {name}, and this infinity has "
                f"{CODECS.get(name)}.",
                "Load it with the infinity that wrote it.",
            )
    return SavedCommit(manifest, checksums ^ _block_identities(manifest, len(checksums)), tensors, skipped)


def _block_identities(manifest: Manifest, count: int) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each block's identity as uint32 (count,), in the order of the table of checksums.

    count: number of checksums in the table. An entry of the table to which no array refers has the value 0.
    Raises CorruptState if arrays refer to entries past the end of the table, or to more than `count` entries.
    """
    found = np.zeros(count, dtype=np.uint32)
    referred = 0
    for parameter in manifest.parameters:
        of_array: dict[str, int] = {}
        for each in parameter.ranges:
            length = blocks(each.count)
            referred += length * len(each.arrays)
            if referred > count or any(stored.checksum + length > count for stored in each.arrays.values()):
                raise corrupt(
                    f"commit-{manifest.generation}",
                    "goes past the end of the table of checksums, or refers to one twice",
                )
            positions = np.arange(each.first, each.first + each.count, BLOCK, dtype="<i8")
            rows = np.array([(0, positions.nbytes, 8)], dtype=np.int64)
            of_position = crc32c_blocks(torch.from_numpy(positions.view(np.uint8)), rows)
            for array, stored in each.arrays.items():
                if array not in of_array:
                    of_array[array] = _followed(_label(manifest, array, parameter.names[0]))
                found[stored.checksum : stored.checksum + length] ^= of_position ^ np.uint32(of_array[array])
    return found


def _label(manifest: Manifest, array: str, parameter: str) -> bytes:
    """Return the identity of a block of an array without its last 8 bytes. These are the index of the block's
    first element, so all blocks of the array share the rest.
    """
    text = f"{manifest.generation}\n{manifest.created}\n{array}\n{parameter}\n"
    return text.encode("utf-8", "surrogatepass")


def _followed(label: bytes) -> int:
    """Compute crc(label + x) XOR crc(x), which is equal for all x of 8 bytes, because a CRC is linear."""
    return crc32c(bytes(8), crc32c(label)) ^ crc32c(bytes(8))


def remove(directory: str | os.PathLike[str], generation: int, files: DiskFiles) -> None:
    """Remove a commit's manifest durably, and then its data file. Files that are missing are ignored. Raises
    StorageError.
    """
    files.remove(manifest_path(directory, generation))
    files.sync_directory(directory)
    files.remove(data_path(directory, generation))


def remove_leftovers(directory: str | os.PathLike[str], files: DiskFiles) -> None:
    """Remove temporary manifests, and data files without a manifest, that a crash left in `directory`.

    No commit may be written into the directory meanwhile. Raises StorageError.
    """
    kept = {data_path(directory, generation).name for generation in generations(directory)}
    with storage_errors("list", directory):
        names = sorted(os.listdir(directory))
    for name in names:
        if _LEFTOVER.fullmatch(name) and name not in kept:
            files.remove(Path(directory) / name)


def _manifest_text(content: bytes, path: Path) -> bytes:
    """Check the checksum and version of a manifest's content, and return the JSON text in it."""
    line = _FIRST_LINE.match(content, 0, _LINE_LIMIT)
    if line is None:
        raise corrupt(path.name, "does not begin as a manifest")
    body = memoryview(content)[line.end() :]
    if int(line[2]) != len(body):
        raise corrupt(path.name, f"has {len(body)} bytes behind its first line, not {int(line[2])}")
    if crc32c(body, crc32c(content[: line.start(3)])) != int(line[3], 16):
        raise corrupt(path.name, "has other bytes than were written: its CRC-32C is another")
    if int(line[1]) not in READABLE:
        raise IncompatibleCheckpoint(
            f"{path} has version {int(line[1])} of the format, and this infinity reads versions "
            f"{' and '.join(map(str, READABLE))}.",
            "Resume it with the version of infinity that wrote it; its weights go anywhere by "
            "`infinity checkpoint export` of that version.",
        )
    return bytes(body)


def _content(path: Path, files: DiskFiles, limit: int, *, exactly: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes. exactly: whether the file must have `limit` bytes. Raises
    CorruptState if the file is missing, not regular, or of another size.
    """
    try:
        with storage_errors("look at", path):
            found = os.lstat(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise corrupt(path.name, "is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(path.name, "is not a regular file")
    if found.st_size > limit or (exactly and found.st_size != limit):
        raise corrupt(path.name, f"has {found.st_size} bytes, not {'' if exactly else 'at most '}{limit}")
    content = files.read(path, limit=found.st_size)
    if len(content) != found.st_size:
        raise corrupt(path.name, f"ended after {len(content)} of {found.st_size} bytes")
    return content
