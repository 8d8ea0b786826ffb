"""Commit files: the two files of a commit, from the first byte written to the last check when it is read.

A commit of generation g is `commit-<g>.safetensors` (checksums, and tensors of encoded values) and
`commit-<g>` (the manifest), in this order: the manifest has the length and the CRC-32C of the data file, so
it is written last, and it appears under its name whole (see [Note: what a crash keeps] in
infinity/system/disk_files.py). The format is in docs/file-format.md.

[Note: block identities]
The table of a data file has for each block the CRC-32C of its bytes, exclusive-or that of its identity: the
commit, the array, the parameter, and the block's first element. So bytes that are exchanged between two
places, or are those of another commit, do not pass, even if their entries in the table come with them.
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
from infinity.checkpoint.manifest import BLOCK, CODECS, FORMAT, DataFile, Manifest, blocks
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
"""The most bytes of a manifest's file that are read; a larger file is no manifest."""

_NAME = re.compile(r"commit-(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(rf"\.{_NAME.pattern}\.tmp")
_LEFTOVER = re.compile(rf"{_NAME.pattern}\.safetensors|{_TEMPORARY.pattern}")
_FIRST_LINE = re.compile(rb"infinity-commit ([1-9][0-9]{0,8}) (0|[1-9][0-9]{0,17}) ([0-9a-f]{8})\n")
_LINE_LIMIT = 64
_CHECKSUMS = "checksums"
"""The name of the tensor that holds the table of checksums, uint32 (n,)."""


@dataclass(frozen=True)
class SavedCommit:
    """What the files of one commit say: of one that was read and found whole, or of one to be written."""

    manifest: Manifest
    checksums: npt.NDArray[np.uint32]
    """The CRC-32Cs of blocks' bytes to which `StoredArray.checksum` refers; shape (n,)."""
    tensors: Tensors
    """The tensors to which encoded values in the manifest refer."""
    skipped: tuple[str, ...] = ()
    """For each newer commit that is not whole, a sentence that says what is wrong with it; newest first."""

    @property
    def run(self) -> RunState:
        """The state of the run that is in no page."""
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
    """Write a commit into `directory`; when this returns, it is durable.

    The pages that it describes must be durable before the call. A data file and a temporary file of this
    generation, which a crash left behind, are replaced. tier: has the slabs, which are given the names of
    committed ones; see [Note: the name of a slab says whose it is] in infinity/tiers/slab.py.

    Raises StorageError, StorageFull if the disk is full, and StorageError (EEXIST) if there is a manifest of
    this generation. After an error before the manifest has its name, neither file is left, and slabs have the
    names of before. Raises ConfigError if the files could not be read again, for instance because a name has
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
    tier: its slabs get back their names of before; None if another commit needs them.
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
    """Take a commit that does not count back, and remove its files.

    tier: has the slabs, which get the names of new ones, if no other commit needs them; None otherwise.
    leave: whether the temporary manifest stays for `unfinished_slabs`, which removes the slabs that it names.
    Raises StorageError; the manifest may have its name then.
    """
    files.rename(manifest_path(directory, generation), _temporary_path(directory, generation))
    files.sync_directory(directory)
    if not leave:
        with contextlib.suppress(StorageError):
            _undo(directory, generation, files, tier)


def contents(saved: SavedCommit) -> tuple[bytes, bytes]:
    """The contents of a commit's data file and of its manifest. Raises ConfigError if they could not be read
    again.
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
    """The content of a data file: the checksums, bound to what they are of, and the tensors. Raises
    CorruptState if arrays refer to checksums past the end of the table, or to more than there are.
    """
    bound = saved.checksums ^ _block_identities(saved.manifest, len(saved.checksums))
    return packed({_CHECKSUMS: torch.from_numpy(bound), **saved.tensors})


def manifest_bytes(manifest: Manifest, data: bytes) -> bytes:
    """The content of a manifest's file. data: the content of the commit's data file."""
    body = dumps({"data": DataFile.of(data), **vars(manifest)})
    start = f"infinity-commit {FORMAT} {len(body)} ".encode()
    return b"".join((start, f"{crc32c(body, crc32c(start)):08x}\n".encode(), body))


def generations(directory: str | os.PathLike[str]) -> list[int]:
    """The generations of which a directory has a manifest, whole or not, in ascending order.

    Raises StorageError if the directory cannot be read.
    """
    with storage_errors("list", directory):
        found = (_NAME.fullmatch(name) for name in os.listdir(directory))
        return sorted(int(match[1]) for match in found if match)


def newest(directory: str | os.PathLike[str], files: DiskFiles) -> SavedCommit | None:
    """The newest commit of a directory that is whole; None if there is no manifest at all.

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
    """The commit of this generation. skipped: `SavedCommit.skipped`.

    Raises CorruptState for files that are missing, not regular, or have other bytes than were written. Raises
    IncompatibleCheckpoint for another format, or another version of what bytes of pages mean, and
    StorageError for a file that cannot be read. Memory is bounded by a multiple of the files' sizes.
    """
    path, data = manifest_path(directory, generation), data_path(directory, generation)
    tree, entry = _tree(_content(path, files, MANIFEST_LIMIT), path)
    return _commit(tree, entry, path, _content(data, files, entry.nbytes, exactly=True), skipped)


def named_slabs(directory: str | os.PathLike[str], files: DiskFiles) -> frozenset[str]:
    """UUIDs of the slabs of all commits of a directory that can be read. Raises StorageError."""
    found: set[str] = set()
    for generation in generations(directory):
        with contextlib.suppress(CorruptState, IncompatibleCheckpoint):
            found |= _slabs(manifest_path(directory, generation), files)
    return frozenset(found)


def unfinished_slabs(directory: str | os.PathLike[str], files: DiskFiles) -> frozenset[str]:
    """UUIDs of the slabs that a crash has left with the names of committed ones, and of which no commit
    needs anything. None of them if there is a commit that cannot be read, as it may need any slab. Raises
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
    """UUIDs of the slabs that the manifest `path` names."""
    tree, _ = _tree(_content(path, files, MANIFEST_LIMIT), path)
    return {slab.uuid for slab in typed(tree, Manifest, path.name).volume.slabs}


def from_bytes(manifest: bytes, data: bytes, path: Path) -> SavedCommit:
    """The commit whose files have these bytes. path: that of the manifest. Raises as `read` does."""
    return _commit(*_tree(manifest, path), path, data, ())


def _tree(content: bytes, path: Path) -> tuple[Json, DataFile]:
    """The tree of a manifest, and its entry for the data file. content: of the file `path`."""
    tree = parse(_manifest_text(content, path), path.name)
    if not isinstance(tree, dict) or "data" not in tree:
        raise corrupt(path.name, "lacks 'data'")
    return tree, typed(tree.pop("data"), DataFile, (path.name, ".data"))


def _commit(tree: Json, entry: DataFile, path: Path, content: bytes, skipped: tuple[str, ...]) -> SavedCommit:
    """The commit with the tree of a manifest, which is the file `path`, and the content of the data file."""
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
    """The CRC-32C of what each block is, by its index in the table of checksums: uint32 (count,). It is 0 at
    an index to which no array refers.
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
    """The identity of a block without the 8 bytes of its first element, with which it ends."""
    text = f"{manifest.generation}\n{manifest.created}\n{array}\n{parameter}\n"
    return text.encode("utf-8", "surrogatepass")


def _followed(label: bytes) -> int:
    """By what the CRC of `label` and any 8 bytes differs from that of the 8 bytes: a CRC is linear."""
    return crc32c(bytes(8), crc32c(label)) ^ crc32c(bytes(8))


def remove(directory: str | os.PathLike[str], generation: int, files: DiskFiles) -> None:
    """Remove a commit: its manifest, and only when that is durable its data file.

    Does nothing for files that are missing. Raises StorageError.
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
    """The JSON text in the content of a manifest's file, whose checksum and version have been checked."""
    line = _FIRST_LINE.match(content, 0, _LINE_LIMIT)
    if line is None:
        raise corrupt(path.name, "does not begin as a manifest")
    body = memoryview(content)[line.end() :]
    if int(line[2]) != len(body):
        raise corrupt(path.name, f"has {len(body)} bytes behind its first line, not {int(line[2])}")
    if crc32c(body, crc32c(content[: line.start(3)])) != int(line[3], 16):
        raise corrupt(path.name, "has other bytes than were written: its CRC-32C is another")
    if int(line[1]) != FORMAT:
        raise IncompatibleCheckpoint(
            f"{path} has version {int(line[1])} of the format, and this infinity reads version {FORMAT}.",
            "Resume it with the version of infinity that wrote it; its weights go anywhere by "
            "`infinity checkpoint export` of that version.",
        )
    return bytes(body)


def _content(path: Path, files: DiskFiles, limit: int, *, exactly: bool = False) -> bytes:
    """The bytes of a regular file of at most `limit` bytes, or of exactly as many."""
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
