"""Option digests: short texts that tell whether the options of param groups are equal on all ranks."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

_PLAIN = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose `repr` says the value, the same in every process. numpy's numbers are numbers.Number, too."""


def option_digests(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of an option -> a short text that is equal for equal values of it in all param groups.

    A value that is neither plain nor made of plain values counts by its type, or by its name if it has one,
    as a function: its `repr` may have an address, which differs on ranks.
    """
    names = sorted({name for group in groups for name in group if name != "params"})
    return {
        name: _digest([_text(group[name]) if name in group else "" for group in groups]) for name in names
    }


def digest(groups: Sequence[Mapping[str, Any]]) -> str:
    """A short text that is equal for equal options of param groups; see `option_digests`."""
    return _digest(option_digests(groups))


def _digest(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def _text(value: Any) -> str:
    """A text that is equal for equal values on all ranks."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        values = None if value.is_meta else value.tolist()
        return f"{name}({values}, {value.dtype}, {tuple(value.shape)})"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        # Sorted, as sets are: their order may be another one in each process.
        return f"{name}({sorted((_text(key), _text(each)) for key, each in value.items())})"
    if isinstance(value, Set):
        return f"{name}({sorted(map(_text, value))})"
    if isinstance(value, Sequence):
        return f"{name}({[_text(each) for each in value]})"
    own = getattr(value, "__qualname__", "")
    return f"{name} {getattr(value, '__module__', '')}.{own}" if isinstance(own, str) and own else name
