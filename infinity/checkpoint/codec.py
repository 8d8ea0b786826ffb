"""Codec: Python values as JSON nodes, with the elements of tensors and arrays in tensors beside them.

A node is a JSON value. For a value that JSON lacks it is an object with one key, which begins with "$" and
names the kind of value; docs/file-format.md lists the kinds. The device and `requires_grad` of a tensor, the
attributes of an OrderedDict and the flag by which an array is read-only are not kept. An object that has two
names comes back as two objects.

[Note: values from a file]
Each stored byte belongs to at most one value, so a file cannot ask for more memory than its own size. Nothing
that a file names is executed or imported. Bytes of bools other than 0 and 1, which compiled code could not
bear, are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from infinity.checkpoint.tensor_files import NAMES, TORCH_DTYPES, TORCH_NAMES
from infinity.checkpoint.typed_json import HALF_PAIR, LARGEST, Json, Path, corrupt, short, shown
from infinity.errors import ConfigError, CorruptState
from infinity.layout.strides import is_dense

Tensors = dict[str, torch.Tensor]
DEEPEST = 64
"""The greatest depth of containers inside of containers."""
_MAPPINGS = (dict, OrderedDict, Counter)
_MEMBERS: dict[str, Any] = {each.__name__: each for each in (tuple, set, frozenset, *_MAPPINGS)}
_ARRAYS = re.compile(r"[<>|][biufcmMSU][1-9]\d{0,8}(?:\[\d{0,9}[A-Za-z]{1,2}\])?")
_CURE = "Keep plain Python values, tensors and NumPy arrays: of others their state_dict() or a plain copy."


def encode(value: Any, tensors: Tensors, where: Path = "state", depth: int = 0) -> Json:
    """Return the JSON node of `value`, and copy the elements of its tensors and arrays into `tensors`, flat,
    on the CPU.

    where: names the value in errors. depth: the number of containers around `value`. Raises ConfigError,
    naming the path of keys and the type, for a value that `decode` would not give back with its type, and for
    containers that are nested deeper than DEEPEST.
    """
    kind = type(value)
    finite = value is None or kind is bool or (kind is float and math.isfinite(value))
    if finite or (kind is int and abs(value) <= LARGEST) or (kind is str and not HALF_PAIR.search(value)):
        return value
    if kind is list or kind in _MEMBERS.values():
        if depth == DEEPEST:
            _refuse(where, f"lies in {DEEPEST} other containers, or in itself", "Give a flatter state.")
        return _container(value, kind, tensors, where, depth + 1)
    if kind in _LEAVES and (kind is not torch.dtype or value in TORCH_NAMES):
        return {f"${kind.__name__}": _LEAVES[kind][0](value)}
    if kind is torch.Tensor:
        return _tensor(value, tensors, where)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        if kind in (np.ndarray, value.dtype.type) and _ARRAYS.fullmatch(value.dtype.str):
            return _array(value, tensors)
        name += f" of {value.dtype}"
    _refuse(where, f"is of the type {name}, which a checkpoint does not keep", _CURE)


def _container(value: Any, kind: type, tensors: Tensors, path: Path, depth: int) -> Json:
    if kind in (list, tuple):
        nodes = [encode(each, tensors, (path, index), depth) for index, each in enumerate(value)]
        return nodes if kind is list else {"$tuple": nodes}
    in_keys: Tensors = {}
    keys = [encode(key, in_keys, path, depth) for key in value]
    if in_keys:
        _refuse(path, "has a tensor in a key or member", "Take a number or a text instead.")
    if kind in (set, frozenset):  # their order differs from process to process; the file shall not
        return {f"${kind.__name__}": sorted(keys, key=json.dumps)}
    nodes = [encode(each, tensors, (path, (key,)), depth) for key, each in value.items()]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in keys):
        return dict(zip(keys, nodes, strict=True))
    return {f"${kind.__name__}": [list(pair) for pair in zip(keys, nodes, strict=True)]}


def _tensor(value: torch.Tensor, tensors: Tensors, path: Path = "") -> Json:
    if value.is_meta or value.layout is not torch.strided or value.dtype not in TORCH_NAMES:
        _refuse(path, f"is a tensor of {value.dtype}, {value.layout}, on {value.device}", "Give a dense one.")
    values = value.detach().resolve_conj().resolve_neg()
    if not values.numel() or not is_dense(values.shape, values.stride()):
        values = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    data = values.as_strided((values.numel(),), (1,)).view(torch.uint8).to("cpu", copy=True)
    data = data.ne(0) if value.dtype is torch.bool else data
    stored = str(len(tensors))
    tensors[stored] = data.view(value.dtype) if value.dtype in NAMES else data
    return {"$tensor": [TORCH_NAMES[value.dtype], list(values.shape), list(values.stride()), stored]}


def _array(value: Any, tensors: Tensors) -> Json:
    values = value.view(np.uint8) != 0 if value.dtype.kind == "b" else value
    if not isinstance(value, np.ndarray):
        return {"$scalar": [value.dtype.str, values.tobytes().hex()]}
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    data = torch.from_numpy(np.frombuffer(bytearray(values.tobytes(order)), np.uint8))
    return {"$array": [value.dtype.str, list(value.shape), order, _tensor(data, tensors)]}


def decode(node: Json, tensors: Tensors, where: Path = "state") -> Any:
    """Return the value of a node that `encode` has made. Its tensors are on the CPU, with memory of their
    own.

    where: names the value in errors. Raises CorruptState, naming the place, for a node that is not valid.
    """
    return _value(node, dict(tensors), where, 0)


def _value(node: Json, left: Tensors, path: Path, depth: int) -> Any:
    """Return the value of a node, as `decode` does.

    left: stored tensors that no value uses yet. path: the place of the value, for errors. depth: the number
    of lists and objects around `node`.
    """
    if type(node) not in (list, dict):
        return node
    if depth == 3 * DEEPEST:  # what is in a dict may be in an object, a list and a list
        raise corrupt(path, "lies in too many other containers")
    if type(node) is list:
        return [_value(each, left, (path, index), depth + 1) for index, each in enumerate(node)]
    if not any(key.startswith("$") for key in node):
        return {key: _value(each, left, (path, (key,)), depth + 1) for key, each in node.items()}
    try:
        ((kind, content),) = node.items()
        return _tagged(kind[1:], content, left, path, depth + 1)
    except CorruptState:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise corrupt(path, f"is {short(node)}, which is no value ({short(str(error))})") from None


def _tagged(kind: str, content: Json, left: Tensors, path: Path, depth: int) -> Any:
    if kind in _DECODERS:
        return _DECODERS[kind](content)
    if kind == "scalar":
        name, digits = content
        return _elements(name, np.frombuffer(bytes.fromhex(digits), np.uint8)).reshape(())[()]
    if kind == "tensor":
        return _decode_tensor(content, left)
    if kind == "array":
        name, shape, order, stored = content
        return _elements(name, _value(stored, left, path, depth).numpy()).reshape(shape, order=order)
    members = _value(content, left, path, depth)
    found = _MEMBERS[kind](dict(members) if _MEMBERS[kind] in _MAPPINGS else members)
    if type(content) is not list or len(found) != len(content):
        raise ValueError("it is no list, or has a key or member twice")
    return found


def _decode_tensor(content: Json, left: Tensors) -> torch.Tensor:
    name, shape, stride, stored = content
    dtype, found = TORCH_DTYPES[name], left.pop(stored)
    fits = found.nbytes == math.prod(shape) * dtype.itemsize and is_dense(shape, stride)
    if not fits or found.dtype != (dtype if dtype in NAMES else torch.uint8):
        raise ValueError(f"{found.nbytes} bytes of {found.dtype} are stored for it, or it is not dense")
    data = found.reshape(-1).view(torch.uint8).clone()
    if dtype is torch.bool:
        _elements("|b1", data.numpy())
    return data.view(dtype).as_strided(shape, stride) if len(data) else found.new_empty(shape, dtype=dtype)


def _elements(name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View bytes as an array of the dtype `name`. Raises ValueError; see [Note: values from a file]."""
    if not _ARRAYS.fullmatch(name) or (name == "|b1" and data.max(initial=0) > 1):
        raise ValueError("such arrays are not kept, or a truth value is neither 0 nor 1")
    return data.view(name)


def _refuse(path: Path, what: str, cure: str) -> NoReturn:
    raise ConfigError(f"{shown(path)} {what}.", cure)


def _number(name: str, digits: str) -> Any:
    return np.frombuffer(bytes.fromhex(digits), name).item()


def _hex(text: str) -> str:
    return str.encode(text, "utf-8", "surrogatepass").hex()


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


_LEAVES: dict[Any, tuple[Callable[[Any], Json], Callable[[Any], Any]]] = {
    int: (hex, lambda digits: int(digits, 16)),
    float: (lambda value: np.float64(value).tobytes().hex(), lambda digits: _number("<f8", digits)),
    complex: (lambda value: np.complex128(value).tobytes().hex(), lambda digits: _number("<c16", digits)),
    str: (_hex, _text),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    np.str_: (_hex, lambda digits: np.str_(_text(digits))),
    np.bytes_: (bytes.hex, lambda digits: np.bytes_(bytes.fromhex(digits))),
    torch.Size: (list, torch.Size),
    torch.device: (str, torch.device),
    torch.dtype: (TORCH_NAMES.get, TORCH_DTYPES.__getitem__),
}
_DECODERS = {kind.__name__: decoder for kind, (_, decoder) in _LEAVES.items()}
KINDS = frozenset({"tensor", "array", "scalar", *_MEMBERS, *_DECODERS})
