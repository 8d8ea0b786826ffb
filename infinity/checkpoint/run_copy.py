"""Run copy: a directory with a model in Hugging Face's layout, and all that is needed to go on training it.

[Note: files of a copy]
- model*.safetensors with its index, and config.json: what `export` writes in the dtype of compute.
- states-00001-of-0000N.safetensors: the state arrays of every trainable parameter, each under the name
  `parameter|array` and with the bits that the optimizer page has, flat and in memory order: the array
  "remainder" or "master" (`StateArray`), the moments if they have values, and the array "average" if running
  averages have values. int8 moments are codes, with one exponent for each 64 elements in the array
  `moment.scale`. There is no such file without an optimizer.
- run.json: the version of the format, the parameters, the optimizer, the names of the files above, and
  `record`, which is the runtime's.
- run.safetensors: tensors to which `record` refers, if there are any.

Whoever reads a copy opens the files that run.json names, all of them beside it, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint import tensor_files
from infinity.checkpoint.array_source import SavedOptimizer, SavedParameter, saved_parameters
from infinity.checkpoint.atomic_directory import Writer, check_destination, published, storing
from infinity.checkpoint.export import Source, model_entries, model_files, save_config
from infinity.checkpoint.manifest import DataFile
from infinity.checkpoint.tensor_files import Entry, content, distribute, shard_bytes
from infinity.checkpoint.typed_json import dumps
from infinity.config import Size
from infinity.errors import ConfigError
from infinity.formats.optimizer_rules import StateArray
from infinity.layout.adapters import has_adapters
from infinity.layout.chunks import ModelLayout
from infinity.pages.optimizer_page import StatePage, States

FORMAT = "infinity run"
VERSION = 2
"""The version of the format. A reader refuses every other version."""

RECORD = "run.json"
DATA = "run.safetensors"


def write_copy(
    source: Source,
    path: str | os.PathLike[str],
    *,
    record: object,
    shard: Size,
    data: bytes | None = None,
) -> None:
    """Write a run into the directory `path`, which must be empty or not exist yet. Parents are made.

    The directory appears whole or not at all, and only this user may read it. [Note: files of a copy] says
    what is in it. source: the model, with the components of its runtime that hold its parameters and states;
    no update may be due or under way. record: what else belongs to the run, as `typed_json.dumps` takes it.
    shard: the most bytes of tensors in a file that has several tensors. data: the content of the safetensors
    file that belongs to `record`, or None.

    RAM holds at most two parts of a tensor at a time, of up to 2**20 elements each, or one whole parameter if
    its memory is not contiguous. Raises ConfigError, before anything is written, if an argument cannot be
    used, if safetensors cannot hold a tensor, or if a parameter was added, replaced, renamed or removed after
    the model was offloaded. Raises StorageFull or StorageError if a file cannot be written or a page cannot
    be read. After an error `path` is as it was before.
    """
    limit = shard_bytes(shard)
    target = check_destination(path, "save to")
    layout = source.store.plan.layout
    model = model_entries(source, as_masters=False)
    parameters = saved_parameters(layout, source.states)
    names = {entry.name for entry in model}
    for name in parameters:
        if name not in names:
            raise ConfigError(
                f"The parameter {name} was renamed or removed after the model was offloaded.",
                "Change the model first, then offload it (close the runtime and offload again).",
            )
    contents = model_files(model, limit)
    states: dict[str, list[Entry]] = {}
    if source.states is not None:
        entries = list(_state_entries(layout, source.states, parameters))
        states = distribute(entries, limit, "states", number_one=True)
        contents |= {name: content(inside) for name, inside in states.items()}
    if data is not None:
        contents[DATA] = [data]
    said = {
        "format": FORMAT,
        "version": VERSION,
        "optimizer": None if source.states is None else _described(SavedOptimizer.of(source.states)),
        "parameters": [_parameter(each) for each in parameters.values()],
        "buffers": [entry.name for entry in model if entry.name not in parameters],
        "files": [name for name in contents if name.endswith(".safetensors") and name != DATA],
        "data": None if data is None else DataFile.of(data),
        "record": record,
    }
    contents[RECORD] = [dumps(said, indent=1)]
    _write(source, target, contents)


def _write(source: Source, target: Path, contents: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    with storing("save to", target), published(target, private=True) as directory, Writer() as writer:
        if not has_adapters(source.model):  # their tensors have other names than transformers would look for
            save_config(source.model, directory, source.compute_dtype)
        for name, pieces in contents.items():
            with storing("write", target / name):
                writer.write(directory / name, pieces)


def state_name(parameter: str, array: str) -> str:
    """The name in a file of states of a parameter's state array. No two pairs have the same name."""
    return f"{parameter}|{array}"


def _state_entries(
    layout: ModelLayout, states: States, parameters: Mapping[str, SavedParameter]
) -> Iterator[Entry]:
    optimizer = SavedOptimizer.of(states)
    for unit, unit_layout in enumerate(layout.units):
        for index, each in enumerate(unit_layout.parameters):
            for array in parameters[each.names[0]].state_arrays(optimizer):
                yield _state_entry(states, states.pages[unit], index, array)


def _state_entry(states: States, page: StatePage, parameter: int, array: StateArray) -> Entry:
    layout = page.layout.parameters[parameter]

    def parts() -> Iterator[torch.Tensor]:
        for chunk_index, piece in page.layout.pieces(parameter):
            for part in piece.parts(tensor_files.WINDOW):
                yield states.entries(page, chunk_index, array.name, part).view(array.dtype)

    _, entries = array.entries(0, layout.numel)
    name = state_name(layout.names[0], array.name)
    return Entry(name, array.dtype, (entries,), entries * array.dtype.itemsize, parts)


def _described(optimizer: SavedOptimizer) -> dict[str, Any]:
    said = {"name": optimizer.name, "states": optimizer.states, "moments": list(optimizer.moments)}
    return said if optimizer.averaged is None else said | {"averaged": optimizer.averaged}


def _parameter(saved: SavedParameter) -> dict[str, Any]:
    return {
        "names": list(saved.names),
        "shape": list(saved.shape),
        "stride": list(saved.stride),
        "dtype": tensor_files.NAMES[saved.dtype],
        "trainable": saved.trainable,
        "step": saved.step,
        "has_moments": saved.has_moments,
        "edited": saved.edited,
    }
