"""Typed JSON: dataclasses as JSON, and strict reading of JSON from files that may be damaged.

`parse` also refuses repeated keys, NaN and Infinity. `typed` compares a tree with type hints: every field
must be there with its type, and no other field. It raises CorruptState with the path of the wrong place.
Memory is bounded by a multiple of the text's size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from infinity.errors import CorruptState

CURE = "Use an older commit, or restore the checkpoint's directory from a copy."
LARGEST = (1 << 63) - 1
"""The largest integer that `typed` accepts: one of 64 bits with a sign, which all languages can read."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Pattern of half a surrogate pair, which UTF-8 text cannot contain."""

Json = Any
"""What `json.dumps` takes: None, bool, int, float, str, list, or dict with str keys."""
Path = Any
"""A place in a tree: the root's name, or (path of the list or object around the place, key). The key is an
index of a list, a key of a mapping as a tuple of one, or a text such as ".name" for a field.
"""
_Typed = TypeVar("_Typed")
_Reader = Callable[[Any, Path], Any]


class Row:
    """Base class of dataclasses that are written as lists of their fields, which takes less space."""


def corrupt(path: Path, what: str) -> CorruptState:
    """Make the error for a wrong place in a file. what: the rest of a sentence that begins with the place,
    such as "is not finite".
    """
    return CorruptState(f"{shown(path)} {what}.", CURE)


def shown(path: Path) -> str:
    """Return the text of a path, such as "commit-7.units[0].name"."""
    text = ""
    while type(path) is tuple:
        path, key = path
        text = f"{key if type(key) is str else f'[{short(*key) if type(key) is tuple else key}]'}{text}"
    return f"{path}{text}"


def short(value: object) -> str:
    """Return the text of a plain value for an error, cut to 80 characters."""
    try:
        text = ascii(value)
    except ValueError:  # Python refuses to write very large integers in decimal digits
        text = f"a {type(value).__name__} with a large integer"
    return text if len(text) <= 80 else f"{text[:77]}..."


def dumps(value: Any) -> bytes:
    """Write JSON in ASCII on one line: dataclasses as objects, or as lists if they are rows."""
    return json.dumps(value, default=_fields, separators=(",", ":"), allow_nan=False).encode("ascii")


def _fields(value: Any) -> Any:
    fields = vars(value)
    return list(fields.values()) if isinstance(value, Row) else fields


def parse(data: bytes, where: str) -> Json:
    """Read the tree of a JSON text in UTF-8. where: names the text in errors. Raises CorruptState, also if an
    object has a key twice or a number is NaN or Infinity.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"is not JSON of this format ({short(str(error))})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def typed(content: Json, hint: type[_Typed], path: Path) -> _Typed:
    """Convert `content` to the type `hint`: lists to tuples or rows, objects to dataclasses or mappings.

    hint: a dataclass, int, float, bool, str, Json, or a Mapping from str, a tuple or an Optional of them. An
    int is from 0 to LARGEST, a float finite and written with a point, a str without half a surrogate pair. If
    a class has a method `check()`, it is called; it raises ValueError with a text that begins with the name
    of a field. path: the place of `content`, for errors. Raises CorruptState.
    """
    of: Any = hint
    found: _Typed = _reader(of)(content, path)
    return found


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Make the function (content, path) that converts content to the type `hint`, as `typed` says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(hint)}
        return functools.partial(_dataclass, hint, readers)
    if origin is tuple and arguments[-1] is not ...:
        return functools.partial(_row, [_reader(each) for each in arguments])
    if origin is None:
        return _PLAIN[hint]
    of = _reader(next(each for each in reversed(arguments) if each not in (type(None), ...)))
    if origin is tuple:
        return lambda content, path: tuple(
            [of(each, (path, index)) for index, each in enumerate(_of(list, content, path))]
        )
    if origin is Mapping:
        return lambda content, path: {
            _text(key, path): of(each, (path, (key,))) for key, each in _of(dict, content, path).items()
        }
    return lambda content, path: None if content is None else of(content, path)


def _of(kind: type, content: Json, path: Path) -> Any:
    if type(content) is not kind:
        raise corrupt(path, f"is {_NAMES.get(type(content), 'something else')}, not {_NAMES[kind]}")
    return content


def _integer(content: Json, path: Path) -> int:
    if type(content) is not int or not 0 <= content <= LARGEST:
        raise corrupt(path, f"is {short(_of(int, content, path))}, not 0 to {LARGEST}")
    return content


def _float(content: Json, path: Path) -> float:
    if not math.isfinite(_of(float, content, path)):
        raise corrupt(path, "is not finite")
    return float(content)


def _text(content: Json, path: Path) -> str:
    text: str = _of(str, content, path)
    if not text.isascii() and HALF_PAIR.search(text):
        raise corrupt(path, f"has {short(text)}, a string with half a surrogate pair")
    return text


def _row(readers: list[_Reader], content: Json, path: Path) -> tuple[Any, ...]:
    """Read a list that has one entry for each of `readers`."""
    if len(_of(list, content, path)) != len(readers):
        raise corrupt(path, f"has {len(content)} entries, not {len(readers)}")
    return tuple([read(content[index], (path, index)) for index, read in enumerate(readers)])


def _dataclass(kind: Any, readers: Mapping[str, _Reader], content: Json, path: Path) -> Any:
    """Read a dataclass of the type `kind`. readers: name of a field -> its reader."""
    if issubclass(kind, Row):
        found = kind(*_row(list(readers.values()), content, path))
    else:
        if missing := readers.keys() - _of(dict, content, path).keys():
            raise corrupt(path, f"lacks {min(missing)!r}")
        if more := content.keys() - readers.keys():
            raise corrupt(path, f"has {short(min(more))}, which this format does not know")
        found = kind(**{name: read(content[name], (path, f".{name}")) for name, read in readers.items()})
    if hasattr(kind, "check"):
        try:
            found.check()
        except ValueError as error:
            raise CorruptState(f"{shown((path, f'.{error}'))}.", CURE) from None
    return found


_PLAIN: dict[Any, _Reader] = {
    Any: lambda content, path: content,
    bool: functools.partial(_of, bool),
    int: _integer,
    float: _float,
    str: _text,
}
_NAMES = {
    type(None): "null",
    bool: "a truth value",
    int: "an integer",
    float: "a number with a point",
    str: "a string",
    list: "a list",
    dict: "an object",
}
