"""Tensor reader: one safetensors file of a checkpoint, checked strictly and read by ranges of elements.

The safetensors library maps a file into memory, where a file that another process truncates ends the process
with SIGBUS, and it does not tell where a tensor lies. So the header is read here:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.tensor_files import DTYPES, METADATA
from infinity.checkpoint.typed_json import loads
from infinity.errors import CorruptState, InfinityError, StorageError, storage_errors
from infinity.system.disk_files import DiskFiles

_MOST_HEADER = 100 << 20
"""The most bytes of a header, as in the safetensors library."""

_COPY_AGAIN = "Copy the checkpoint again, or take another one."


@dataclass(frozen=True)
class StoredTensor:
    """The dtype and shape of a tensor in a file, and where in the file its elements begin, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
            header = loads(self._bytes(8, length))
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


def unpacked(content: bytes, where: str) -> dict[str, torch.Tensor]:
    """The tensors in the content of a safetensors file, by name, on the CPU. They share one copy of it.

    where: names the file in errors. Raises CorruptState if the content is not in the format of safetensors.
    """
    with corrupt_if(where, "it is not a safetensors file"):
        start = 8 + int.from_bytes(content[:8], "little")
        places = dict(_tensors(loads(content[8:start]), start, len(content)))
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return {
            name: whole[each.offset : each.offset + each.nbytes].view(each.dtype).reshape(each.shape)
            for name, each in places.items()
        }


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes. Raises CorruptState if there is no regular file at `path`.

    Raises StorageError if the system cannot look at `path`.
    """
    with missing_is_corrupt(path), storage_errors("look at", path):
        found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(path, "it is no regular file")
    return found.st_size


def corrupt(path: Path | str, what: str) -> CorruptState:
    """The CorruptState for a file of a checkpoint. what: what is wrong with it."""
    return CorruptState(f"{path} cannot be used: {what}.", _COPY_AGAIN)


@contextmanager
def corrupt_if(path: Path | str, what: str) -> Iterator[None]:
    """Context that raises CorruptState about `path` in place of the errors that wrong content leads to."""
    try:
        yield
    except InfinityError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
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
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
            raise ValueError(name)
        if start + first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(name)
        end = start + last
        yield name, StoredTensor(dtype, tuple(shape), start + first)
    if end != size:
        raise ValueError(size)
