"""Copy source: reads a directory that `write_copy` has written; see [Note: files of a copy].

The copy is checked as a whole when it is opened, before any of its tensors is read. Files are opened one at a
time, by the names that run.json gives them, in the copy's directory and never through a symbolic link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.array_source import VALUES, SavedOptimizer, SavedParameter
from infinity.checkpoint.manifest import DataFile
from infinity.checkpoint.run_copy import DATA, FORMAT, RECORD, VERSION, state_name
from infinity.checkpoint.tensor_files import DTYPES
from infinity.checkpoint.tensor_reader import TensorReader, corrupt, corrupt_if, regular_size
from infinity.checkpoint.typed_json import loads, typed
from infinity.checksum import crc32c
from infinity.errors import ConfigError, IncompatibleCheckpoint
from infinity.formats.moments import DTYPES as MOMENT_DTYPES
from infinity.formats.optimizer_rules import TRAINABLE
from infinity.layout.strides import in_memory_order, is_dense, row_major, same_order
from infinity.model.materialize import listed
from infinity.system.disk_files import DiskFiles

_FILE = re.compile(r"(?:model(?:-\d{5,}-of-\d{5,})?|states-\d{5,}-of-\d{5,})\.safetensors", re.ASCII)

Expected = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name of a tensor -> its dtype and shape."""


class CopySource:
    """An ArraySource over a copy of a run. No file stays open."""

    def __init__(self, path: str | os.PathLike[str], disk: DiskFiles | None = None) -> None:
        """Open the copy in the directory `path`, reading run.json and the headers of the tensors' files.

        disk: reads the files; None: a new one. Raises ConfigError if there is no copy at `path`,
        IncompatibleCheckpoint if another version of the format wrote it, and CorruptState if a file or a
        tensor is missing, superfluous, or not what run.json says. Raises StorageError if a file cannot be
        read.
        """
        self._directory = Path(path)
        self._disk = disk or DiskFiles()
        self.digest = ""
        """The checksum (CRC32C) of run.json, in hexadecimal digits, by which ranks compare their copies."""
        said = self._said()
        with corrupt_if(self._directory / RECORD, "it does not describe a run"):
            self.record: Any = said["record"]
            """What the runtime wrote with the copy: the value of `record` that `write_copy` was given."""
            self.optimizer = _optimizer(said["optimizer"])
            self._parameters = dict(_parameters(said["parameters"], self.optimizer))
            self._data = None if said["data"] is None else typed(said["data"], DataFile, RECORD)
            buffers = set(_strings(said["buffers"]))
            files = _strings(said["files"])
            if len(set(files)) != len(files) or not all(_FILE.fullmatch(file) for file in files):
                raise ValueError(files)
        self._values: dict[str, TensorReader] = {}
        """Name of a tensor of the model -> the file in which it is."""
        self._states: dict[str, TensorReader] = {}
        """Name of a state array (`state_name`) -> the file in which it is."""
        self._open(files, buffers)
        self._whole: tuple[str, torch.Tensor] | None = None
        """The name and values, (numel,) in memory order, of the parameter that `read` has read last, if that
        parameter's memory order is not the order of its file.
        """

    def parameters(self) -> Mapping[str, SavedParameter]:
        """All parameters by their canonical names."""
        return self._parameters

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read entries of an array, as ArraySource says.

        RAM holds the values of a whole parameter if its memory is not contiguous.
        """
        saved = self._parameters[name]
        if array == VALUES:
            if not same_order(saved.shape, saved.stride, row_major(saved.shape)):
                return self._in_memory_order(name)[first : first + count].clone()
            return self._values[name].read(name, first, count)
        per = next(each for each in saved.state_arrays(self.optimizer) if each.name == array)
        where = state_name(name, array)
        return self._states[where].read(where, *per.entries(first, count))

    def data(self) -> bytes | None:
        """Read the bytes that were written with `record`; None if there were none."""
        if self._data is None:
            return None
        path = self._directory / DATA
        if regular_size(path) != self._data.nbytes:
            raise corrupt(path, f"it does not have {self._data.nbytes} bytes")
        found = self._disk.read(path, limit=self._data.nbytes)
        if DataFile.of(found) != self._data:
            raise corrupt(path, "it has other bytes than were written: its CRC-32C is another")
        return found

    def _said(self) -> dict[str, Any]:
        """Read run.json. Raises the errors of the constructor."""
        path = self._directory / RECORD
        if not os.path.lexists(path):
            raise ConfigError(
                f"{self._directory} holds no copy of a run.", "Give a directory that runtime.save(path) made."
            )
        size = regular_size(path)
        data = self._disk.read(path, limit=size)
        self.digest = f"{crc32c(data):08x}"
        with corrupt_if(path, "it is not JSON"):
            said = loads(data)
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise corrupt(path, "it does not describe a run")
        if said.get("version") != VERSION or isinstance(said["version"], bool):
            raise IncompatibleCheckpoint(
                f"{path} is of version {said.get('version')!r}, and this program reads version {VERSION}.",
                "Load it with the version of infinity that wrote it; its model.safetensors goes anywhere.",
            )
        return said

    def _open(self, files: list[str], buffers: set[str]) -> None:
        """Read the headers of all files, and check that their tensors are those that must be there."""
        values = {name: (each.dtype, each.shape) for name, each in self._parameters.items()}
        states = dict(_states(self._parameters, self.optimizer))
        for file in files:
            reader = TensorReader(self._directory / file, self._disk)
            if file.startswith("states"):
                self._add(reader, self._states, states, set())
            else:
                self._add(reader, self._values, values, buffers)
        absent = [*((values.keys() | buffers) - self._values.keys()), *(states.keys() - self._states.keys())]
        if absent:
            raise corrupt(self._directory, f"its files lack {listed(sorted(absent))}")

    def _add(
        self, reader: TensorReader, known: dict[str, TensorReader], expected: Expected, others: set[str]
    ) -> None:
        """Add the tensors of a file to those known. expected: what a tensor of a parameter must be. others:
        names of further tensors that may be there. Raises CorruptState for a tensor that may not.
        """
        for name, tensor in reader.tensors.items():
            found = tensor.dtype, tensor.shape
            if name in known or (name not in expected and name not in others):
                raise corrupt(reader.path, f"{name} does not belong there")
            if found != expected.get(name, found):
                raise corrupt(reader.path, f"{name} is {_shown(*found)} and not {_shown(*expected[name])}")
            known[name] = reader

    def _in_memory_order(self, name: str) -> torch.Tensor:
        if self._whole is None or self._whole[0] != name:
            self._whole = None  # before the next one is read
            saved = self._parameters[name]
            values = self._values[name].read(name, 0, saved.numel).view(saved.shape)
            self._whole = name, in_memory_order(values, saved.stride)
        return self._whole[1]


def _states(
    parameters: Mapping[str, SavedParameter], optimizer: SavedOptimizer | None
) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    for name, saved in parameters.items():
        for array in saved.state_arrays(optimizer):
            _, entries = array.entries(0, saved.numel)
            yield state_name(name, array.name), (array.dtype, (entries,))


def _optimizer(said: Any) -> SavedOptimizer | None:
    if said is None:
        return None
    if not isinstance(said["name"], str) or said["states"] not in MOMENT_DTYPES:
        raise ValueError(said)
    averaged = said.get("averaged")
    if not (averaged is None or _is_count(averaged)):
        raise ValueError(said)
    return SavedOptimizer(said["name"], said["states"], tuple(_strings(said["moments"])), averaged)


def _parameters(said: Any, optimizer: SavedOptimizer | None) -> Iterator[tuple[str, SavedParameter]]:
    """Yield the parameters that run.json describes, by canonical name. Raises ValueError, LookupError or
    TypeError if they are no description of a model's parameters.
    """
    known: set[str] = set()
    for each in said:
        names, shape, stride = _strings(each["names"]), each["shape"], each["stride"]
        saved = SavedParameter(
            names=tuple(names),
            shape=tuple(shape),
            stride=tuple(stride),
            dtype=DTYPES[each["dtype"]],
            trainable=each["trainable"],
            step=each["step"],
            has_moments=each["has_moments"],
            edited=each["edited"],
        )
        flags = (saved.trainable, saved.has_moments, saved.edited)
        if not names or known & set(names) or len(set(names)) != len(names):
            raise ValueError(names)
        if not all(map(_is_count, (*shape, *stride, saved.step))) or not all(type(f) is bool for f in flags):
            raise ValueError(each)
        if len(shape) != len(stride) or not is_dense(shape, stride):
            raise ValueError(each)
        if not saved.trainable and any((saved.step, saved.has_moments, saved.edited)):
            raise ValueError(each)
        if saved.trainable and optimizer is not None and saved.dtype not in TRAINABLE:
            raise ValueError(each)
        known |= set(names)
        yield names[0], saved


def _strings(said: Any) -> list[str]:
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise ValueError(said)
    return said


def _is_count(said: Any) -> bool:
    return type(said) is int and 0 <= said < 1 << 62


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
