"""Export: writes a model to safetensors files in Hugging Face's layout.

At any time RAM holds at most two parts of one tensor, or one whole parameter if its memory is not contiguous.

[Note: order in a file]
Tensors are distributed over the files in the order of state_dict. Inside a file, tensors of larger dtypes
come first, as in the safetensors library, so that every tensor is aligned to its elements. Tensors of one
dtype keep their order. The header can be written first, because the sizes of tensors follow from shapes
alone. Offsets leave no gap, and spaces pad the header to a multiple of 8 bytes:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.atomic_directory import Writer, check_destination, published, storing, sync
from infinity.checkpoint.safetensors_files import DTYPES, persistent
from infinity.config import Size, parse_size
from infinity.errors import ConfigError
from infinity.formats.master_weights import join
from infinity.layout.chunks import Piece
from infinity.model.paged_parameter import PagedParameter, Place
from infinity.model.pager import Pager
from infinity.pages.optimizer_page import StatePage, States
from infinity.pages.store import Store

_WINDOW = 1 << 20
"""Greatest number of elements in one of the parts in which a tensor is read and written."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
"""The name in safetensors of each of torch's dtypes."""

_METADATA = "__metadata__"
"""The key of the metadata in a safetensors header; every other key is the name of a tensor."""

_EXPORTED = ("compute", "fp32")


@dataclass(frozen=True)
class Source:
    """The model to export, with components of its runtime.

    The caller holds the runtime's lock, and has written the user's edits of parameters to their pages' homes.
    """

    model: nn.Module
    pager: Pager
    store: Store
    states: States | None
    compute_dtype: torch.dtype

    def parts(self, place: Place, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield a parameter's elements in memory order, as flat CPU tensors of up to _WINDOW elements.

        The tensors have memory of their own. place: the parameter's page, and its index in the page. dtype:
        the parameter's own dtype, or float32. In float32 the elements are those of the parameter's fp32
        master. The elements of a parameter without a master are converted to float32.
        """
        page, index = place.page, place.index
        layout = page.layout.parameters[index]
        master = self._master(place, dtype)
        pieces = page.layout.pieces(index) if master is not None else ((0, Piece(index, 0, 0, layout.numel)),)
        for chunk_index, piece in pieces:
            for done in range(0, piece.count, _WINDOW):
                count = min(_WINDOW, piece.count - done)
                part = Piece(index, piece.start + done, piece.offset + done, count)
                if master is not None and layout.dtype != torch.bfloat16:
                    yield self._state(master, chunk_index, "master", part).view(torch.float32)
                    continue
                size = layout.dtype.itemsize
                found = self.store.fetch(page.home, page.start(index) + part.start * size, count * size)
                values = found.view(layout.dtype)
                if master is not None:
                    yield join(values, self._state(master, chunk_index, "remainder", part).view(torch.int16))
                else:
                    yield values.to(dtype)

    def _master(self, place: Place, dtype: torch.dtype) -> StatePage | None:
        """Return the optimizer page with a parameter's fp32 master; None if the export needs no master.

        For a bf16 parameter the page holds only the bits of the master that the bf16 values lack. No master
        is needed if the export is in the parameter's own dtype, if the parameter is not trained, or if the
        user edited it. place, dtype: as in `parts`.
        """
        layout = place.page.layout.parameters[place.index]
        if self.states is None or not layout.trainable or dtype == layout.dtype:
            return None
        state = self.states.pages[place.page.index]
        return None if place.index in state.edited else state

    def _state(self, page: StatePage, chunk_index: int, name: str, part: Piece) -> torch.Tensor:
        return self.store.fetch(page.home, *page.place(chunk_index, name, part))


@dataclass(frozen=True)
class _Entry:
    """A tensor to be exported: its name, dtype, shape and size, and a function that yields its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterable[torch.Tensor]]
    """Function that returns the tensor's elements in row-major order, as flat CPU tensors."""


def export(source: Source, path: str | os.PathLike[str], *, dtype: str, shard: Size) -> None:
    """Write a model into the directory `path`, which must be empty or not exist yet. Parents are made.

    source: the model, with the components of its runtime that hold its parameters.

    The directory gets one file, model.safetensors. If the tensors have more than `shard` bytes, it gets
    model-00001-of-0000N.safetensors and so on, with model.safetensors.index.json. A tensor is never divided:
    a tensor of more than `shard` bytes has a file of its own. Every parameter and persistent buffer is
    written once, contiguous, under its first name in state_dict. Moments of the optimizer are not exported.

    dtype: "compute" writes parameters in the dtype in which the model computes. "fp32" writes the fp32
    masters of trainable floating-point parameters, and converts the other floating-point parameters to fp32.
    Buffers keep their dtype.

    For a transformers model, config.json and generation_config.json are written too. A config has only one
    dtype. Therefore from_pretrained casts parameters that `Precision(keep=...)` kept in fp32 to that dtype,
    unless it is called with dtype=torch.float32.

    RAM holds at most two parts of a tensor at a time, of up to 2**20 elements each. A parameter that is not
    contiguous, such as channels_last, is held as a whole. Raises ConfigError, before anything is written, if
    an argument cannot be used or safetensors cannot hold a tensor. Raises StorageFull, StorageError or
    BudgetError if the export fails. After an error `path` is as it was before.
    """
    limit = parse_size(shard, what="shard size")
    if limit == 0:
        raise ConfigError("The shard size is zero.", 'Give the largest size of a file, such as "4GiB".')
    if dtype not in _EXPORTED:
        raise ConfigError(f"The export dtype is {dtype!r}.", f"Give one of {', '.join(_EXPORTED)}.")
    target = check_destination(path)
    entries = _entries(source, as_masters=dtype == "fp32")
    files = _files(entries, limit)
    with storing("export to", target), published(target) as directory, Writer() as writer:
        _save_config(source.model, directory, torch.float32 if dtype == "fp32" else source.compute_dtype)
        contents: dict[str, Iterable[bytes | memoryview]] = {
            name: _content(inside) for name, inside in files.items()
        }
        if len(files) > 1:
            contents["model.safetensors.index.json"] = [_index(entries, files)]
        for name, content in contents.items():
            with storing("write", target / name):
                writer.write(directory / name, content)


def _entries(source: Source, *, as_masters: bool) -> list[_Entry]:
    """List tensors to export, in the order of state_dict. as_masters: whether to write parameters in fp32.

    Raises ConfigError if safetensors cannot hold a tensor, or if a parameter was added or replaced after the
    model was offloaded.
    """
    entries = []
    for each in persistent(source.model).values():
        name, tensor = each.names[0], each.tensor
        if isinstance(tensor, PagedParameter) and tensor._place.pager is source.pager:
            entry = _of_parameter(source, name, tensor._place, as_masters)
        elif isinstance(tensor, nn.Parameter):
            raise ConfigError(
                f"The parameter {name} was added or replaced after the model was offloaded.",
                "Change the model first, then offload it (close the runtime and offload again).",
            )
        else:
            entry = _of_buffer(name, tensor)
        _check(entry)
        entries.append(entry)
    return entries


def _of_parameter(source: Source, name: str, place: Place, as_masters: bool) -> _Entry:
    layout = place.page.layout.parameters[place.index]
    dtype = torch.float32 if as_masters and layout.dtype.is_floating_point else layout.dtype

    def parts() -> Iterable[torch.Tensor]:
        found = source.parts(place, dtype)
        if torch.empty_strided(layout.shape, layout.stride, device="meta").is_contiguous():
            return found
        whole = torch.empty(layout.numel, dtype=dtype, device="cpu")
        done = 0
        for part in found:
            whole[done : done + part.numel()] = part
            done += part.numel()
        return _in_logical_order(whole.as_strided(layout.shape, layout.stride))

    return _Entry(name, dtype, tuple(layout.shape), layout.numel * dtype.itemsize, parts)


def _of_buffer(name: str, buffer: torch.Tensor) -> _Entry:
    if buffer.layout is not torch.strided:
        raise ConfigError(
            f"The buffer {name} is {buffer.layout}, and safetensors holds dense tensors alone.",
            "Make it dense (to_dense()), or register it with persistent=False.",
        )
    nbytes = buffer.numel() * buffer.dtype.itemsize
    return _Entry(name, buffer.dtype, tuple(buffer.shape), nbytes, lambda: _in_logical_order(buffer.detach()))


def _check(entry: _Entry) -> None:
    if entry.dtype not in _NAMES:
        raise ConfigError(
            f"{entry.name} is of {entry.dtype}, for which safetensors has no name.",
            f"Convert it to one of {', '.join(str(each).removeprefix('torch.') for each in _NAMES)}.",
        )
    # A name with half of a surrogate pair is not valid Unicode.
    if entry.name == _METADATA or entry.name.encode(errors="ignore").decode() != entry.name:
        raise ConfigError(
            f"A tensor is called {entry.name!r}, which safetensors cannot store.",
            "Register it under another name.",
        )


def _in_logical_order(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of `view` in row-major order, as flat CPU tensors of up to _WINDOW elements.

    view: a tensor of any strides, on any device.
    """
    if view.numel() <= _WINDOW:
        yield view.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return
    rows = max(1, _WINDOW // view[0].numel())
    for start in range(0, len(view), rows):
        yield from _in_logical_order(view[start] if rows == 1 else view[start : start + rows])


def _files(entries: Sequence[_Entry], limit: int) -> dict[str, list[_Entry]]:
    """Distribute tensors over files; return file name -> the file's tensors. See [Note: order in a file].

    entries: the tensors in the order of state_dict. limit: the most bytes of tensors in a file that has
    several tensors.
    """
    shards: list[list[_Entry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    return {
        name: sorted(shard, key=lambda entry: -entry.dtype.itemsize)
        for name, shard in zip(names, shards, strict=True)
    }


def _content(entries: Sequence[_Entry]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in order: the header, then the tensors `entries`."""
    yield _header(entries)
    for entry in entries:
        for part in entry.parts():
            yield part.view(torch.uint8).numpy().data


def _header(entries: Sequence[_Entry]) -> bytes:
    """Encode the header of a safetensors file: the dtypes, shapes and offsets of the tensors `entries`.

    Offsets are counted from the end of the header. The header also has the metadata that transformers
    requires. The first 8 bytes of the result are the length of the rest.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    return struct.pack("<Q", len(content)) + content


def _index(entries: Sequence[_Entry], files: dict[str, list[_Entry]]) -> bytes:
    places = {entry.name: name for name, inside in files.items() for entry in inside}
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: places[entry.name] for entry in entries},
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _save_config(model: nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json of a transformers model, as save_pretrained would.

    dtype: the dtype that the configuration names. For any other model nothing is written.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    said = {"dtype": str(dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    for name, value in said.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for each in (config, getattr(model, "generation_config", None)):
        if not callable(getattr(each, "save_pretrained", None)):
            continue
        try:
            each.save_pretrained(directory)  # type: ignore[union-attr]
        except OSError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The model's {type(each).__name__} cannot be saved: {error}", "Mend it, or set it to None."
            ) from error
    for file in directory.rglob("*"):
        sync(file)
