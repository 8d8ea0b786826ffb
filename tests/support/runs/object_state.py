"""The state of objects, as text that can be compared."""

from __future__ import annotations

import random
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def state_of(*roots: Any) -> list[str]:
    """Describe all that can be reached from `roots`, one line for each object or value, in a fixed order.

    Values of tensors and states of generators are part of it. Objects are named by the order in which they
    are met, so two equal structures are described alike.
    """
    numbers: dict[int, int] = {}
    return [line for root in roots for line in _lines(root, "", numbers)]


def global_generators() -> list[Any]:
    """The states of the generators that torch, numpy and `random` share."""
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def _lines(it: Any, path: str, numbers: dict[int, int]) -> Iterator[str]:
    if it is None or isinstance(it, (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)):
        yield f"{path} = {it!r}"
        return
    if id(it) in numbers:
        yield f"{path} is object {numbers[id(it)]}"
        return
    numbers[id(it)] = len(numbers)
    yield f"{path}: {type(it).__name__} {_own(it)}"
    for name, value in _held(it):
        yield from _lines(value, f"{path}.{name}", numbers)


def _own(it: Any) -> str:
    if isinstance(it, Tensor):
        values = it.detach().double().tolist() if it.device.type == "cpu" else ""
        return f"{it.dtype} {it.device} {tuple(it.shape)} {it.stride()} {it.requires_grad} {values}"
    if isinstance(it, torch.Generator):
        return str(it.get_state().tolist())
    if isinstance(it, random.Random):
        return str(it.getstate())
    if isinstance(it, np.random.Generator):
        return str(it.bit_generator.state)
    return str(it.tolist()) if isinstance(it, np.ndarray) else ""


def _held(it: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(it, dict):
        yield from ((f"[{_key(key)}]", value) for key, value in it.items())
    elif isinstance(it, (list, tuple, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(it))
    elif isinstance(it, (set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(sorted(it, key=str)))
    elif isinstance(it, types.FunctionType):
        yield "defaults", it.__defaults__
        yield "cells", [cell.cell_contents for cell in it.__closure__ or ()]
    elif isinstance(it, types.MethodType):
        yield "self", it.__self__
    elif isinstance(it, weakref.ref):
        yield "referent", it()
    elif isinstance(it, Tensor):
        yield "grad", it.grad if it.is_leaf else None
    if not isinstance(it, (types.FunctionType, types.ModuleType)):
        yield from (getattr(it, "__dict__", None) or {}).items()


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__
