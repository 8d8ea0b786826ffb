"""JSON nodes: reading JSON that nobody vouches for, with errors that say which node is wrong.

`parse` turns the bytes of a file into a tree of dicts, lists, strings and numbers. A `Node` is one place in
the tree; its methods return what the place must hold, or raise CorruptState. Memory is bounded by a multiple
of the file's size, and no tree can exhaust the stack.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from infinity.errors import CorruptState

CURE = "Use an older commit, or restore the checkpoint's directory from a copy."
LARGEST = (1 << 63) - 1
"""The largest integer that a file may hold as a JSON number."""
DEEPEST = 256
"""The most brackets that may be open at a time. `json` needs stack for each, as does Python's recursion."""

# Also matches a string without an end, so that the search never goes back: it would take quadratic time.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_DIGITS = len(str(LARGEST)) + 1


def corrupt(where: str, what: str) -> CorruptState:
    """The error for a place `where` of a file that is wrong. what: a clause about the place."""
    return CorruptState(f"{where} {what}.", CURE)


def parse(data: bytes, where: str) -> Any:
    """The tree that the JSON text `data` describes. where: names the text in errors.

    Raises CorruptState for text that is not JSON (RFC 8259) in UTF-8, has a key twice in one object, an
    integer of 64 bits or more, a number that is not finite as a float, or more than DEEPEST open brackets.
    """
    if _depth(data) > DEEPEST:
        raise corrupt(where, f"has more than {DEEPEST} brackets open at a time")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"is not JSON of this format ({_short(str(error))})") from None


def _depth(data: bytes) -> int:
    """The most brackets that are open at a time in `data`, which need not be JSON."""
    deepest = depth = 0
    text = _STRING.sub(b"", data)
    for start in range(0, len(text), 1 << 20):
        codes = np.frombuffer(text, np.uint8, min(1 << 20, len(text) - start), start)
        steps = ((codes == 0x5B) | (codes == 0x7B)).astype(np.int32)
        steps -= (codes == 0x5D) | (codes == 0x7D)
        depths = steps.cumsum(dtype=np.int64) + depth
        deepest, depth = max(deepest, int(depths.max())), int(depths[-1])
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _integer(text: str) -> int:
    if len(text) > _DIGITS or abs(found := int(text)) > LARGEST:
        raise ValueError("an integer is too long")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError("a number is not finite")
    return float(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


class Node:
    """A place in a tree that `parse` returned: its content, and its path for errors.

    Every method raises CorruptState, naming the path, where the content is not what the method returns. A
    place knows the place around it, and the text of its path is only made for an error.
    """

    __slots__ = ("_around", "_key", "content")

    def __init__(self, content: Any, key: str | int | tuple[str], around: Node | None = None) -> None:
        """around: the place in which this one lies; None for a root, whose name in errors is `key`.

        key: of this place in the other: an index of a list, a known name, or a free key as a tuple of one.
        """
        self.content = content
        self._key = key
        self._around = around

    @property
    def where(self) -> str:
        """The path of the place, for errors."""
        parts: list[str] = []
        node: Node | None = self
        while node is not None:
            key = node._key
            if isinstance(key, str):
                parts.append(key if node._around is None else f".{key}")
            else:
                parts.append(f"[{key}]" if isinstance(key, int) else f"[{_short(ascii(key[0]))}]")
            node = node._around
        return "".join(reversed(parts))

    def fail(self, what: str) -> NoReturn:
        """Raise the CorruptState for this place. what: a clause, such as "is not a list"."""
        raise corrupt(self.where, what)

    def has(self, kind: type) -> Any:
        """The content, which must be of exactly the type `kind`."""
        if type(self.content) is not kind:
            self.fail(f"is {_NAMES.get(type(self.content), 'something else')}, not {_NAMES[kind]}")
        return self.content

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        """The content, an integer of at least `low` and at most `high`."""
        found: int = self.has(int)
        if not low <= found <= high:
            self.fail(f"is {found}, not {low}" if low == high else f"is {found}, not {low} to {high}")
        return found

    def boolean(self) -> bool:
        """The content, true or false."""
        found: bool = self.has(bool)
        return found

    def text(self) -> str:
        """The content, a string without lone surrogates."""
        found: str = self.has(str)
        if not found.isascii() and _LONE.search(found):
            self.fail("is a string with half a surrogate pair")
        return found

    def choice(self, *choices: str) -> str:
        """The content, one of the strings `choices`."""
        found: str = self.has(str)
        if found not in choices:
            self.fail(f"is {_short(ascii(found))}, not one of {', '.join(choices)}")
        return found

    def items(self) -> Iterator[Node]:
        """The places in a list of any length."""
        found: list[Any] = self.has(list)
        return (Node(each, index, self) for index, each in enumerate(found))

    def tuple_of(self, count: int) -> list[Node]:
        """The places in a list of `count` entries."""
        found: list[Any] = self.has(list)
        if len(found) != count:
            self.fail(f"has {len(found)} entries, not {count}")
        return [Node(each, index, self) for index, each in enumerate(found)]

    def integers(self, count: int) -> list[int]:
        """The content, a list of `count` integers from 0 to LARGEST."""
        found: list[int] = self.has(list)
        if len(found) == count and all(type(each) is int and 0 <= each <= LARGEST for each in found):
            return found
        return [each.integer() for each in self.tuple_of(count)]

    def entry(self, index: int) -> Node:
        """The place at `index` of a list that has it."""
        return Node(self.content[index], index, self)

    def fields(self, *names: str) -> list[Node]:
        """The places in an object that has exactly the keys `names`, in the order of `names`."""
        found: dict[str, Any] = self.has(dict)
        for name in names:
            if name not in found:
                self.fail(f"lacks {name!r}")
        if len(found) != len(names):
            more = next(key for key in found if key not in names)
            self.fail(f"has {_short(ascii(more))}, which this format does not know")
        return [Node(found[name], name, self) for name in names]

    def entries(self) -> Iterator[tuple[str, Node]]:
        """The keys, which are free, and places of an object."""
        found: dict[str, Any] = self.has(dict)
        for key, each in found.items():
            if not key.isascii():
                Node(key, f"a key of {self.where}").text()
            yield key, Node(each, (key,), self)

    def unique(self, names: Sequence[str]) -> tuple[str, ...]:
        """`names` as a tuple. Raises CorruptState if a name is in it twice."""
        if len(set(names)) != len(names):
            self.fail("names something twice")
        return tuple(names)


_LONE = re.compile("[\ud800-\udfff]")
_NAMES = {
    type(None): "null",
    bool: "a truth value",
    int: "an integer",
    float: "a number with a point",
    str: "a string",
    list: "a list",
    dict: "an object",
}
