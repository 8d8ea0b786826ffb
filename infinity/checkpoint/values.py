"""Values: typed Python values as JSON nodes and blobs, without pickle; docs/file-format.md has all nodes.

`encode` refuses what `decode` would not give back with the same type and value. These are not kept: the
device and `requires_grad` of a tensor, that two names meant one object, attributes set on an OrderedDict, and
whether an array could be written to. `decode` runs no code that a file names.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from infinity.checkpoint import array_values
from infinity.checkpoint.array_values import DTYPE_NAMES, DTYPES, Json
from infinity.checkpoint.blobs import Blobs
from infinity.checkpoint.json_nodes import LARGEST, Node
from infinity.errors import ConfigError

DEEPEST = 64
"""The most containers that may lie one in another."""

_KEPT = (
    "Keep None, numbers, strings, bytes, lists, tuples, dicts, sets, tensors and NumPy arrays: "
    "of another object its state_dict()."
)
_KEYS = frozenset({type(None), bool, int, float, complex, str, bytes, tuple, frozenset})
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_BIG = re.compile("-?0x[1-9a-f][0-9a-f]*")
_DEVICE = re.compile(r"[a-z]{1,32}(?::\d{1,3})?")

Path = tuple[Any, ...]
"""Where a value lies: () for the root, else (path of the container, text such as "['a']")."""


def encode(value: object, blobs: Blobs, where: str = "state") -> Json:
    """The JSON node of `value`; bytes of strings and arrays are appended to `blobs`.

    where: names the value in errors. Raises ConfigError, naming the path of keys and the type, for a value
    that `decode` would not give back, for a container inside itself, and for more than DEEPEST containers one
    in another.
    """
    return _Encoder(blobs, where).node(value, (), frozenset())


def decode(node: Json, blobs: Blobs, where: str = "state") -> Any:
    """The value that `encode` turned into `node`; tensors are on the CPU.

    where: names the value in errors. Raises CorruptState, naming the place, for a node that `encode` does not
    make. The arrays and strings of bytes of the result take no more memory than `blobs` has bytes.
    """
    return Decoder(blobs).value(Node(node, where))


class _Encoder:
    """Encodes one value; see `encode`."""

    def __init__(self, blobs: Blobs, where: str) -> None:
        self._blobs = blobs
        self._where = where

    def node(self, value: Any, path: Path, inside: frozenset[int]) -> Json:
        """The node of `value`. inside: the ids of the containers in which it lies."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if abs(value) <= LARGEST else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": _bits(value)}
        if kind is str:
            return _text(value)
        if kind is list or kind in _LISTS or kind in _DICTS:
            return self._container(value, kind, path, inside)
        return self._leaf(value, kind, path)

    def _leaf(self, value: Any, kind: type, path: Path) -> Json:
        def refuse(what: str, cure: str) -> NoReturn:
            self._refuse(path, what, cure)

        if isinstance(value, torch.Tensor):
            kind = torch.Tensor
        elif isinstance(value, np.generic) and kind not in _LEAVES:
            kind = np.generic
        if kind not in _LEAVES:
            refuse(f"is of the type {_name(kind)}, which a checkpoint does not keep", _KEPT)
        tag, encoded = _LEAVES[kind]
        return {tag: encoded(value, self._blobs, refuse)}

    def _container(self, value: Any, kind: type, path: Path, inside: frozenset[int]) -> Json:
        if id(value) in inside:
            self._refuse(path, "contains itself", "Give it without the circle.")
        if len(inside) == DEEPEST:
            self._refuse(path, f"lies in {DEEPEST} other containers", "Give a flatter state.")
        inside = inside | {id(value)}
        if kind in _DICTS:
            pairs = []
            for key, each in value.items():
                below = (path, f"[{_shown(key)}]")
                pairs.append([self._key(key, below, inside), self.node(each, below, inside)])
            return {_DICTS[kind]: pairs}
        if kind is set or kind is frozenset:
            # The order of a set differs from process to process; the file shall not.
            members = sorted(value, key=lambda each: (type(each).__name__, _repr(each)))
            return {_LISTS[kind]: [self._key(each, (path, ""), inside) for each in members]}
        nodes = [self.node(each, (path, f"[{index}]"), inside) for index, each in enumerate(value)]
        return nodes if kind is list else {_LISTS[kind]: nodes}

    def _key(self, key: Any, path: Path, inside: frozenset[int]) -> Json:
        node = self.node(key, path, inside)
        self._check_key(key, path)
        return node

    def _check_key(self, key: Any, path: Path) -> None:
        if type(key) not in _KEYS:
            cure = "Use numbers, strings, bytes, None, or tuples of them."
            self._refuse(path, f"has a key or member of the type {_name(type(key))}", cure)
        for each in key if type(key) is tuple else ():
            self._check_key(each, path)

    def _refuse(self, path: Path, what: str, cure: str) -> NoReturn:
        parts = []
        while path:
            path, part = path
            parts.append(part)
        raise ConfigError(f"{self._where}{''.join(reversed(parts))} {what}.", cure)


class Decoder:
    """Decodes values whose arrays and strings of bytes together take at most the bytes of `blobs`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._left = blobs.nbytes

    def value(self, node: Node, depth: int = 0) -> Any:
        """The value that `node` describes; see `decode`. depth: the number of containers around it."""
        content = node.content
        kind = type(content)
        if kind is str:
            return node.text()
        if kind is list:
            self._deeper(node, depth)
            return [self.value(each, depth + 1) for each in node.items()]
        if kind is dict:
            return self._tagged(node, depth)
        if kind is float and not math.isfinite(content):
            node.fail("is not finite")
        if kind is int:
            return node.integer(-LARGEST)
        if content is not None and kind is not bool and kind is not float:
            node.fail("is not JSON")
        return content

    def _tagged(self, node: Node, depth: int) -> Any:
        if len(node.content) != 1:
            node.fail("has not exactly one key, the kind of value")
        (tag,) = node.content
        inside = Node(node.content[tag], tag, node) if tag in KINDS else node
        if tag in _MAPPINGS:
            self._deeper(node, depth)
            return self._mapping(_MAPPINGS[tag], inside, depth + 1)
        if tag in _SEQUENCES:
            self._deeper(node, depth)
            return self._sequence(_SEQUENCES[tag], inside, depth + 1)
        if tag in _WITH_BLOBS:
            return _WITH_BLOBS[tag](inside, self._take)
        if tag in _PLAIN:
            return _PLAIN[tag](inside)
        node.fail("is of a kind that this format does not know")

    def _mapping(self, kind: type, node: Node, depth: int) -> Any:
        found: dict[Any, Any] = kind()
        for number, pair in enumerate(node.items()):
            key, value = pair.tuple_of(2)
            found[self._key(key, depth)] = self.value(value, depth)
            if len(found) != number + 1:
                key.fail("is a key for the second time")
        return found

    def _sequence(self, kind: type, node: Node, depth: int) -> Any:
        if kind is tuple:
            return tuple([self.value(each, depth) for each in node.items()])
        members = [self._key(each, depth) for each in node.items()]
        found = kind(members)
        if len(found) != len(members):
            node.fail("has a member twice")
        return found

    def _key(self, node: Node, depth: int) -> Any:
        key = self.value(node, depth)
        self._check_key(key, node)
        return key

    def _check_key(self, key: Any, node: Node) -> None:
        if type(key) not in _KEYS:
            node.fail("is not a key or member")
        if type(key) is tuple:
            for each in key:
                self._check_key(each, node)

    def _take(self, reference: Node) -> memoryview:
        self._left -= self._blobs.bounds(reference)[1]
        if self._left < 0:
            reference.fail("refers to bytes to which other places refer, too")
        return self._blobs.get(reference)

    def _deeper(self, node: Node, depth: int) -> None:
        if depth >= DEEPEST:
            node.fail(f"lies in {DEEPEST} other containers")


def _dtype(value: torch.dtype, blobs: Blobs, refuse: array_values.Refuse) -> str:
    if value not in DTYPE_NAMES:
        refuse(f"is {value}, which a checkpoint does not keep", "Keep its name.")
    return DTYPE_NAMES[value]


def _text(value: str) -> Json:
    if value.isascii() or not _HALF_PAIR.search(value):
        return value
    return {"str": value.encode("utf-8", "surrogatepass").hex()}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _shown(key: object) -> str:
    text = _repr(key) if type(key) in _KEYS else f"a {_name(type(key))}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _repr(key: object) -> str:
    try:
        return repr(key)
    except ValueError:  # Python refuses to write very large integers in decimal digits
        return hex(key) if type(key) is int else f"a {type(key).__name__} of large integers"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _decode_text(node: Node) -> str:
    try:
        found = array_values.from_hex(node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        node.fail("is not text")
    if not _HALF_PAIR.search(found):
        node.fail("is text that needs no digits")
    return found


def _decode_numpy_text(node: Node) -> np.str_:
    text = _decode_text(node.fields("str")[0]) if type(node.content) is dict else node.text()
    found: np.str_ = np.str_(text)
    return found


def _decode_integer(node: Node) -> int:
    text = node.text()
    if not _BIG.fullmatch(text) or abs(found := int(text, 16)) <= LARGEST:
        node.fail("is not a large integer in hexadecimal digits")
    return found


def _decode_bits(node: Node) -> float:
    data = array_values.from_hex(node)
    if len(data) != 8:
        node.fail("is not the 8 bytes of a number")
    (found,) = struct.unpack(">d", data)
    return float(found)


def _decode_float(node: Node) -> float:
    found = _decode_bits(node)
    if math.isfinite(found):
        node.fail("is finite, and needs no digits")
    return found


def _decode_complex(node: Node) -> complex:
    real, imaginary = node.tuple_of(2)
    return complex(_decode_bits(real), _decode_bits(imaginary))


def _decode_size(node: Node) -> torch.Size:
    return torch.Size([each.integer() for each in node.items()])


def _decode_device(node: Node) -> torch.device:
    text = node.text()
    try:
        if _DEVICE.fullmatch(text):
            return torch.device(text)
    except RuntimeError:
        pass
    node.fail("is not a device that this torch knows")


_LEAVES: Mapping[type, tuple[str, Callable[[Any, Blobs, array_values.Refuse], Json]]] = {
    bytes: ("bytes", lambda value, blobs, _: blobs.add(value)),
    bytearray: ("bytearray", lambda value, blobs, _: blobs.add(value)),
    complex: ("complex", lambda value, *_: [_bits(value.real), _bits(value.imag)]),
    torch.Tensor: ("tensor", array_values.encode_tensor),
    torch.Size: ("size", lambda value, *_: list(value)),
    torch.device: ("device", lambda value, *_: str(value)),
    torch.dtype: ("dtype", _dtype),
    np.ndarray: ("array", array_values.encode_array),
    np.str_: ("str_", lambda value, *_: _text(str.__str__(value))),  # str() would cut at NUL
    np.bytes_: ("bytes_", lambda value, blobs, _: blobs.add(bytes(value))),
    np.generic: ("scalar", lambda value, _, refuse: array_values.encode_scalar(value, refuse)),
}
_MAPPINGS: Mapping[str, type] = {tag: kind for kind, tag in _DICTS.items()}
_SEQUENCES: Mapping[str, type] = {tag: kind for kind, tag in _LISTS.items()}
_WITH_BLOBS: Mapping[str, Callable[[Node, array_values.Take], Any]] = {
    "bytes": lambda node, take: bytes(take(node)),
    "bytearray": lambda node, take: bytearray(take(node)),
    "bytes_": lambda node, take: np.bytes_(bytes(take(node))),
    "tensor": array_values.decode_tensor,
    "array": array_values.decode_array,
}
_PLAIN: Mapping[str, Callable[[Node], Any]] = {
    "int": _decode_integer,
    "float": _decode_float,
    "complex": _decode_complex,
    "str": _decode_text,
    "str_": _decode_numpy_text,
    "size": _decode_size,
    "device": _decode_device,
    "dtype": lambda node: DTYPES[node.choice(*DTYPES)],
    "scalar": array_values.decode_scalar,
}
KINDS = frozenset({*_MAPPINGS, *_SEQUENCES, *_WITH_BLOBS, *_PLAIN})
"""The keys of the JSON objects that stand for values."""
