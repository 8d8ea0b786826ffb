"""Tensor reader: one safetensors file of a checkpoint, checked strictly and read by ranges of elements.

The safetensors library maps a file into memory, where a file that another process truncates ends the process
with SIGBUS, and it does not tell where a tensor lies. So the header is read here:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.tensor_files import METADATA, NAMES
from infinity.errors import CorruptState, InfinityError, StorageError, storage_errors
from infinity.system.disk_files import DiskFiles

_MOST_HEADER = 100 << 20
"""The most bytes of a header, as in the safetensors library."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_COPY_AGAIN = "Copy the checkpoint again, or take another one."


@dataclass(frozen=True)
class StoredTensor:
    """The dtype and shape of a tensor in a file, and where in the file its elements begin, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class TensorReader:
    """The tensors in one safetensors file. The file is opened for each read, and never through a link."""

    def __init__(self, path: Path, disk: DiskFiles) -> None:
        """Read and check the header. Raises CorruptState if the file is not in the format of safetensors or
        is no regular file, and StorageError if it cannot be read.
        """
        self.path = path
        self._disk = disk
        size = regular_size(path)
        with corrupt_if(path, "its header is not that of a safetensors file"):
            length = int.from_bytes(self._bytes(0, 8), "little")
            if length > min(_MOST_HEADER, size - 8):
                raise ValueError(length)
            header = parse_json(self._bytes(8, length))
            self.tensors = dict(_tensors(header, 8 + length, size))

    def read(self, name: str, first: int, count: int) -> torch.Tensor:
        """Read elements [first, first + count) of the tensor `name`, in row-major order.

        Returns a flat CPU tensor with memory of its own. Raises StorageError if they cannot be read, and
        CorruptState if the file has become shorter.
        """
        tensor = self.tensors[name]
        size = tensor.dtype.itemsize
        if count == 0:
            return torch.empty(0, dtype=tensor.dtype, device="cpu")
        return torch.frombuffer(
            bytearray(self._bytes(tensor.offset + first * size, count * size)), dtype=tensor.dtype
        )

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        with missing_is_corrupt(self.path):
            found = self._disk.read(self.path, limit=nbytes, offset=offset)
        if len(found) != nbytes:
            raise corrupt(self.path, f"it ends before byte {offset + nbytes}")
        return found


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes. Raises CorruptState if there is no regular file at `path`.

    Raises StorageError if the system cannot look at `path`.
    """
    with missing_is_corrupt(path), storage_errors("look at", path):
        found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(path, "it is no regular file")
    return found.st_size


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raises ValueError or RecursionError if it is not JSON, or if an object has a key twice."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    return json.loads(data.decode("utf-8"), object_pairs_hook=unique)


def corrupt(path: Path, what: str) -> CorruptState:
    """The CorruptState for a file of a checkpoint. what: what is wrong with it."""
    return CorruptState(f"{path} cannot be used: {what}.", _COPY_AGAIN)


@contextmanager
def corrupt_if(path: Path, what: str) -> Iterator[None]:
    """Context that raises CorruptState about `path` in place of the errors that wrong content leads to."""
    try:
        yield
    except InfinityError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise corrupt(path, what) from error


@contextmanager
def missing_is_corrupt(path: Path) -> Iterator[None]:
    """Context that raises CorruptState where a file of the checkpoint is missing or is a symbolic link."""
    try:
        yield
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            raise corrupt(path, "it is missing, or is no regular file") from error
        raise


def _tensors(header: dict[str, Any], start: int, size: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and place of each tensor of a header. Raises ValueError, LookupError or TypeError if
    the header is wrong. start: where the tensors begin in the file. size: bytes of the file.
    """
    said = {name: entry for name, entry in header.items() if name != METADATA}
    end = start
    for name, entry in sorted(said.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, last) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
            raise ValueError(name)
        if start + first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(name)
        end = start + last
        yield name, StoredTensor(dtype, tuple(shape), start + first)
    if end != size:
        raise ValueError(size)
