"""Safetensors files: named weights, which are streamed into a model with one tensor in RAM at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from infinity.checkpoint.tensor_files import DTYPES
from infinity.errors import ConfigError, StorageError, storage_errors
from infinity.layout.adapters import base_names
from infinity.layout.names import named_modules, plain_name
from infinity.model.adapters import initialise_adapters
from infinity.model.materialize import Fill, Registered, listed, materialize, registered

_INDEX = ".safetensors.index.json"
_FILES = ".safetensors"

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are converted: a weight of one of them may fill a model's tensor of any other of them. float8
is left out, because the scales of its values are in other tensors."""

_CONVERT = "Save the model with safetensors (save_pretrained does), and give the directory or the file."


@dataclass(frozen=True)
class _WeightEntry:
    file: Path
    shape: tuple[int, ...]
    dtype: str


class Weights:
    """The named tensors in safetensors files. No file stays open, and no tensor is kept in memory."""

    def __init__(self, path: Path, entries: dict[str, _WeightEntry]) -> None:
        self.path = path
        self._entries = entries

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, file by file."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor `name`. Raises ConfigError if DTYPES lacks the type."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise ConfigError(
                f"{name} in {entry.file} is of type {entry.dtype}, which cannot be loaded.",
                f"Save it as one of {', '.join(DTYPES)}.",
            )
        return DTYPES[entry.dtype]

    def described(self, name: str) -> str:
        """Text for an error message about the tensor `name`."""
        return name

    def keep_format(self) -> None:
        """Store the weights' format in the model that they have filled, if a later save needs it."""

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor `name`: contiguous, on the CPU.

        The tensor's memory is mapped from the file, so only a copy of the tensor may be edited. Raises
        StorageError if the file cannot be read, or has changed since it was opened.
        """
        entry = self._entries[name]
        dtype = self.dtype(name)
        # The file is opened for each tensor (some 0.1 ms): while open, it keeps all that was read mapped.
        with _reading(entry.file), safe_open(entry.file, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != entry.shape or tensor.dtype != dtype:
            raise _corrupt(entry.file, f"{name} has changed since it was opened")
        return tensor


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open the weights at `path`, reading only the headers of files.

    path: a safetensors file, an index (*.safetensors.index.json), or a directory. In a directory the index is
    taken if there is one, otherwise model.safetensors, otherwise all *.safetensors files.

    Raises ConfigError if there are no such files, or if an index does not fit its files. Raises StorageError
    if a file cannot be read or is not in the format of safetensors.
    """
    path = Path(path)
    with _reading(path):
        if path.is_dir():
            return _open_directory(path)
        if not path.exists():
            raise ConfigError(f"There is no {path} to load weights from.", "Give a path that exists.")
        if path.name.endswith(_INDEX):
            return _open_index(path)
        if path.suffix != _FILES:
            raise ConfigError(f"{path} is not a safetensors file.", _CONVERT)
        return Weights(path, _merge([path]))


def _open_directory(directory: Path) -> Weights:
    index = _one_of(directory, _INDEX)
    if index is not None:
        return Weights(directory, _open_index(index)._entries)
    whole = directory / f"model{_FILES}"
    files = [whole] if whole.is_file() else sorted(directory.glob(f"*{_FILES}"))
    if not files:
        raise ConfigError(f"{directory} holds no safetensors file.", _CONVERT)
    return Weights(directory, _merge(files))


def _one_of(directory: Path, ending: str) -> Path | None:
    preferred = directory / f"model{ending}"
    found = sorted(directory.glob(f"*{ending}"))
    if preferred in found or not found:
        return preferred if found else None
    if len(found) > 1:
        raise ConfigError(
            f"{directory} holds several indexes: {listed([file.name for file in found])}.",
            "Give the path of the index to use.",
        )
    return found[0]


def _open_index(index: Path) -> Weights:
    mapping = _weight_map(index)
    for file in sorted(set(mapping.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(f"{index} names {file!r}, which is not a file beside it.", "Mend the index.")
        if not (index.parent / file).is_file():
            raise ConfigError(f"{index} names {file}, which is missing.", "Fetch or copy the file again.")
    entries = {}
    for file in sorted(set(mapping.values())):
        entries.update(
            {name: entry for name, entry in _headers(index.parent / file) if mapping.get(name) == file}
        )
    if absent := sorted(mapping.keys() - entries.keys()):
        raise ConfigError(
            f"{index} names tensors that its files lack: {listed(absent)}.", "Fetch or copy the files again."
        )
    return Weights(index, entries)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        mapping = content["weight_map"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _corrupt(index, "it is not an index") from error
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise _corrupt(index, "its weight_map does not map names to files")
    return mapping


def _merge(files: Iterable[Path]) -> dict[str, _WeightEntry]:
    entries: dict[str, _WeightEntry] = {}
    for file in files:
        for name, entry in _headers(file):
            if name in entries:
                raise ConfigError(
                    f"{name} is in {entries[name].file.name} and in {file.name}.",
                    "Give one of the files, or add an index that says which file counts.",
                )
            entries[name] = entry
    return entries


def _headers(path: Path) -> Iterator[tuple[str, _WeightEntry]]:
    with _reading(path), safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            described = file.get_slice(name)
            yield name, _WeightEntry(path, tuple(described.get_shape()), described.get_dtype())


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context that turns errors of safetensors and OSError into StorageError about `path`."""
    try:
        with storage_errors("read", path):
            yield
    except SafetensorError as error:
        raise _corrupt(path, str(error)) from error


def _corrupt(path: Path, what: str) -> StorageError:
    return StorageError(f"{path} cannot be used: {what}.", "Fetch or copy the file again.", path=str(path))


@dataclass(frozen=True)
class Assignment:
    """Which of the named tensors in safetensors files ("weights") fills which tensor of a model."""

    parameters: tuple[tuple[nn.Parameter, str], ...]
    """Pairs (parameter, name of its weight), one for each distinct parameter, in the model's order.

    Adapters of PEFT are not listed if the weights are those of the base model alone."""

    buffers: tuple[tuple[torch.Tensor, str], ...]
    """Pairs (persistent buffer, name of its weight), one for each distinct buffer, in the model's order."""

    unexpected: tuple[str, ...]
    """Names of weights that fill no tensor of the model, sorted.

    A weight that has a name of a tied tensor, which another weight fills, is not listed.
    """


def match(model: nn.Module, weights: Weights) -> Assignment:
    """Find the weight of every parameter and persistent buffer of a model.

    A weight belongs to a tensor if it has the same name; a tied tensor has several names, and any of them
    counts. Either the weights' names or the model's names may lack a prefix that the other side's names have,
    as between a transformers model and its base model. The prefix is base_model_prefix, or a first component
    that all names of the model, or of the weights, have in common. A weight of a floating-point type of 16
    bits or more fills a tensor of any other such type. Other types must be equal.

    A tensor of a model with adapters of PEFT has its name in the base model, too. Adapters may be without a
    weight, if none of them has one.

    Raises ConfigError with the names of tensors that have no weight, or whose weight has another shape or
    type.
    """
    wanted = loadable(model)
    files = {plain_name(name): name for name in weights.names}  # a compiled model's state_dict may be saved
    known = set(files)
    found = max((_assign(wanted, known, rename) for rename in _renamings(model, wanted, known)), key=len)
    found = {key: files[name] for key, name in found.items()}
    base = base_names(model)
    if all(key in base for key in found):
        wanted = {key: entry for key, entry in wanted.items() if key in base}
    missing = [entry.names[0] for key, entry in wanted.items() if key not in found]
    if missing:
        raise ConfigError(
            f"{weights.path} has no weights for {listed(missing)}.",
            "Give the weights of this model; what transformers before 5.22 saves in another format than the "
            "model has (mixtures of experts), save with save_pretrained(..., save_original_format=False).",
        )
    wrong = [
        f"{weights.described(name)} ({_describe(weights.shape(name), weights.dtype(name))}; the model has "
        f"{_describe(tuple(wanted[key].tensor.shape), wanted[key].tensor.dtype)})"
        for key, name in ((key, found[key]) for key in wanted)
        if not _fits(wanted[key].tensor, weights, name)
    ]
    if wrong:
        raise ConfigError(
            f"{weights.path} does not fit the model: {listed(wrong)}.",
            "Build the model from the configuration that the weights were saved with.",
        )
    parameters, buffers = [], []
    for key, entry in wanted.items():
        if isinstance(entry.tensor, nn.Parameter):
            parameters.append((entry.tensor, found[key]))
        else:
            buffers.append((entry.tensor, found[key]))
    names = {name for entry in wanted.values() for name in entry.names}
    unexpected = {files[name] for name in known - names} - set(found.values())
    return Assignment(tuple(parameters), tuple(buffers), tuple(sorted(unexpected)))


def persistent(model: nn.Module) -> dict[int, Registered]:
    """The parameters and persistent buffers of `model`, by id() of the tensor, in the order of state_dict.

    Each Registered has the tensor, its places in the model and its names in state_dict, without wrappers
    (infinity/layout/names.py).
    """
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in named_modules(model, remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    found = {}
    for key, entry in registered(model).items():
        names = [name for name in entry.names if name not in passing]
        if names:
            found[key] = Registered(entry.tensor, entry.places, names)
    return found


def loadable(model: nn.Module) -> dict[int, Registered]:
    """Return `persistent(model)`; with adapters, tensors have their names in the base model, too."""
    found, base = persistent(model), base_names(model)
    for key, entry in found.items():
        entry.names.extend(name for name in base.get(key, ()) if name not in entry.names)
    return found


def _renamings(model: nn.Module, wanted: dict[int, Registered], known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (prefix in the model, prefix in the weights that replaces it) to try, the likeliest first."""
    yield "", ""
    base = getattr(model, "base_model_prefix", "")
    prefixes = [f"{base}."] if isinstance(base, str) and base else []
    names = [name for entry in wanted.values() for name in entry.names]
    for side in (names, known):
        first = {name.split(".", 1)[0] for name in side}
        if len(first) == 1:
            prefixes.append(f"{first.pop()}.")
    for prefix in dict.fromkeys(prefixes):
        yield prefix, ""
        yield "", prefix


def _assign(wanted: dict[int, Registered], known: set[str], rename: tuple[str, str]) -> dict[int, str]:
    """Find weights for the tensors in `wanted`; return the tensor's key in `wanted` -> the weight's name.

    known: the names of the weights. rename: (prefix in the model, prefix in the weights). A weight with the
    tensor's own name is tried first, then one with the tensor's name after the second prefix has replaced the
    first. No weight is assigned to two tensors. Tensors without a weight are left out.
    """
    found: dict[int, str] = {}
    for ours, theirs in dict.fromkeys((("", ""), rename)):
        taken = set(found.values())
        for key, entry in wanted.items():
            candidates = [theirs + name[len(ours) :] for name in entry.names if name.startswith(ours)]
            weight = next((name for name in candidates if name in known and name not in taken), None)
            if key not in found and weight is not None:
                found[key] = weight
                taken.add(weight)
    return found


def _fits(tensor: torch.Tensor, weights: Weights, name: str) -> bool:
    dtype = weights.dtype(name)
    same = dtype == tensor.dtype or (dtype in _FLOATS and tensor.dtype in _FLOATS)
    return same and weights.shape(name) == tuple(tensor.shape)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def load(model: nn.Module, weights: Weights, fill: Fill, device: torch.device) -> Assignment:
    """Stream `weights` into `model`, with one tensor in RAM at a time.

    Returns which weight has filled which tensor.

    `fill(parameter, values)` is called once for each parameter, in the model's order. `values` is a tensor of
    the parameter's shape, in the dtype of the weight. Adapters of PEFT that have no weight keep their values;
    on the meta device they are initialised (infinity/model/adapters.py). Weights of persistent buffers are
    copied into the buffers; a buffer on the meta device is replaced by a real buffer on `device`. Buffers on
    the meta device that have no weight are initialised by their modules, as in infinity/model/materialize.py.

    Raises the errors of `match`, before anything is filled. Raises ConfigError if nothing initialises a
    buffer, and StorageError if a file cannot be read.
    """
    assignment = match(model, weights)
    entries = registered(model)
    names = {id(tensor): name for tensor, name in (*assignment.buffers, *assignment.parameters)}
    adapters = {key: entry.tensor for key, entry in persistent(model).items() if key not in names}
    blank = {key for key, tensor in adapters.items() if tensor.is_meta}
    if blank:
        initialise_adapters(model, blank, lambda each: weights.read(names[id(each)]), fill, device)
    for key, tensor in adapters.items():
        if isinstance(tensor, nn.Parameter) and key not in blank:
            fill(tensor, tensor)
    loaded = names.keys() | adapters.keys()
    passing = [
        entry.tensor
        for key, entry in entries.items()
        if key not in loaded and not isinstance(entry.tensor, nn.Parameter)
    ]
    materialize(model, device, fill, only=passing)
    with torch.no_grad():
        for buffer, name in assignment.buffers:
            if buffer.is_meta:
                real = torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=device)
                entries[id(buffer)].put(real.copy_(weights.read(name)))
            else:
                buffer.copy_(weights.read(name))
        for parameter, name in assignment.parameters:
            fill(parameter, weights.read(name))
    weights.keep_format()
    return assignment
