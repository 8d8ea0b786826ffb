"""Tensor files: named tensors, distributed over safetensors files that are written in one stream.

[Note: order in a file]
Tensors are distributed over the files in the order in which the caller lists them. Inside a file, tensors of
larger dtypes come first, as in the safetensors library, so that every tensor is aligned to its elements.
Tensors of one dtype keep their order. The header can be written first, because the sizes of tensors follow
from shapes alone. Offsets leave no gap, and spaces pad the header to a multiple of 8 bytes:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, deserialize

from infinity.checkpoint.typed_json import corrupt, short
from infinity.config import Size, parse_size
from infinity.errors import ConfigError

WINDOW = 1 << 20
"""The most elements of a tensor that are read or written at a time."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch's dtypes by their names in safetensors. Files are read and written with these dtypes only."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names in safetensors by torch's dtypes: the inverse of DTYPES."""

_BYTES = (
    *("complex32", "complex128"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES} | {
    name: getattr(torch, name) for name in _BYTES if hasattr(torch, name)
}
"""The dtypes of DTYPES, and those that commits store as bytes, by torch's names."""

TORCH_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch's names by dtypes: the inverse of TORCH_DTYPES."""

METADATA = "__metadata__"
"""The key of the metadata in a safetensors header; every other key is the name of a tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, dtype, shape and size, and a function that yields its elements.

    Raises ConfigError if safetensors cannot hold the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterable[torch.Tensor]]
    """Function that returns the tensor's elements in row-major order, as flat CPU tensors."""

    def __post_init__(self) -> None:
        if self.dtype not in NAMES:
            raise ConfigError(
                f"{self.name} is of {self.dtype}, for which safetensors has no name.",
                f"Convert it to one of {', '.join(str(each).removeprefix('torch.') for each in NAMES)}.",
            )
        # A name with half of a surrogate pair is not valid Unicode.
        if self.name == METADATA or self.name.encode(errors="ignore").decode() != self.name:
            raise ConfigError(
                f"A tensor is called {self.name!r}, which safetensors cannot store.",
                "Register it under another name.",
            )


def shard_bytes(shard: Size) -> int:
    """Convert the largest size of a file to bytes. Raises ConfigError if it is zero or cannot be read."""
    limit = parse_size(shard, what="shard size")
    if limit == 0:
        raise ConfigError("The shard size is zero.", 'Give the largest size of a file, such as "4GiB".')
    return limit


def in_logical_order(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of `view` in row-major order, as flat CPU tensors of up to WINDOW elements.

    view: a tensor of any strides, on any device.
    """
    if view.numel() <= WINDOW:
        values = view.cpu().resolve_conj().resolve_neg().contiguous()
        yield values.as_strided((values.numel(),), (1,))  # a dimension of size 1 may have any stride
        return
    rows = max(1, WINDOW // view[0].numel())
    for start in range(0, len(view), rows):
        yield from in_logical_order(view[start] if rows == 1 else view[start : start + rows])


def whole(entry: Entry) -> torch.Tensor:
    """Return the tensor of an entry, contiguous and in RAM."""
    made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    flat, done = made.view(-1), 0
    for part in entry.parts():
        flat[done : done + part.numel()] = part
        done += part.numel()
    return made


def distribute(
    entries: Sequence[Entry], limit: int, stem: str, *, number_one: bool = False
) -> dict[str, list[Entry]]:
    """Distribute tensors over files; return file name -> the file's tensors. See [Note: order in a file].

    limit: the most bytes of tensors in a file that has several tensors. stem: what the names of files begin
    with: a single file is stem.safetensors, and several are stem-00001-of-0000N.safetensors and so on.
    number_one: whether a single file is numbered too.
    """
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.nbytes
    names = [f"{stem}.safetensors"]
    if len(shards) > 1 or number_one:
        names = [f"{stem}-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    return {
        name: sorted(shard, key=lambda entry: -entry.dtype.itemsize)
        for name, shard in zip(names, shards, strict=True)
    }


def content(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in order: the header, then the tensors `entries`."""
    yield _header(entries)
    for entry in entries:
        for part in entry.parts():
            yield part.view(torch.uint8).numpy().data


def packed(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a safetensors file with these tensors."""
    entries = [
        Entry(name, each.dtype, tuple(each.shape), each.nbytes, functools.partial(in_logical_order, each))
        for name, each in tensors.items()
    ]
    return b"".join(content(sorted(entries, key=lambda entry: -entry.dtype.itemsize)))


def unpacked(content: bytes, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors in the content of a safetensors file, by name, on the CPU.

    where: names the file in errors. Raises CorruptState if the content is not in the format of safetensors.
    """
    try:
        return {name: _tensor(**each) for name, each in deserialize(content)}  # type: ignore[no-untyped-call]
    except (SafetensorError, KeyError) as error:
        raise corrupt(where, f"is not a safetensors file ({short(str(error))})") from None


def _tensor(dtype: str, shape: Sequence[int], data: bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(list(shape), dtype=DTYPES[dtype], device="cpu")
    return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(list(shape))


def shard_index(entries: Sequence[Entry], files: dict[str, list[Entry]]) -> bytes:
    """Encode the index of several files, which says in which file each tensor is.

    files: file name -> the file's tensors, from `distribute(entries, ...)`.
    """
    places = {entry.name: name for name, inside in files.items() for entry in inside}
    said = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: places[entry.name] for entry in entries},
    }
    return (json.dumps(said, indent=2, ensure_ascii=False) + "\n").encode()


def _header(entries: Sequence[Entry]) -> bytes:
    """Return 8 bytes with the length of a safetensors file's header, and then the header."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    said = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    said += b" " * (-len(said) % 8)
    return struct.pack("<Q", len(said)) + said
