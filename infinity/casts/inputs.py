"""Inputs: the cast of the forward's arguments that `Precision.inputs` names to the compute dtype."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import inspect
import itertools
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.config import Precision
from infinity.errors import ConfigError

_CHECKED_CALLS = 3
"""The first calls whose inputs are compared before and after the cast. Each comparison waits for a GPU."""


class InputCast:
    """Casts the arguments of a model's forward that `Precision.inputs` names; "keep" casts nothing."""

    def __init__(self, model: nn.Module, precision: Precision, *, warn: bool = True) -> None:
        """warn: whether to warn of lost values. Raises ConfigError if a pattern of `precision.inputs` matches
        no argument of the model's forward.
        """
        self._inputs = precision.inputs
        self.dtype = precision.compute_dtype
        self._checks = _CHECKED_CALLS if warn else 0
        self._warned: set[str] = set()
        if self._inputs == "keep":
            return
        parameters = inspect.signature(model.forward).parameters.values()
        self._positional = [
            each.name
            for each in parameters
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        rest = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
        self._rest = rest[0] if rest else ""
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return  # an argument can have any name
        names = [each.name for each in parameters]
        for pattern in self._inputs if isinstance(self._inputs, tuple) else ():
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"The pattern {pattern!r} of inputs= matches no argument of {type(model).__name__}.",
                    f"Name arguments of its forward: {', '.join(names)}.",
                )

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one call of forward. Containers with tensors that are cast are copied. In
        the first calls, warns once for each argument whose values the cast changes.
        """
        if self._inputs == "keep":
            return args, kwargs
        self._checks -= 1
        names = itertools.chain(self._positional, itertools.repeat(self._rest))
        return (
            tuple(self._argument(name, value) for name, value in zip(names, args, strict=False)),
            {name: self._argument(name, value) for name, value in kwargs.items()},
        )

    def mixed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a floating-point tensor among the arguments has another dtype than the compute dtype."""
        found = False

        def look(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            found = found or (tensor.is_floating_point() and tensor.dtype != self.dtype)
            return tensor

        map_tensors(look, (args, kwargs))
        return found

    def _argument(self, name: str, value: Any) -> Any:
        if self._inputs != "cast" and not any(fnmatch.fnmatchcase(name, each) for each in self._inputs):
            return value

        changed = False

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal changed
            if not tensor.is_floating_point() or tensor.dtype == self.dtype:
                return tensor
            changed = True
            result = tensor.to(self.dtype)
            if self._checks >= 0 and name not in self._warned:
                self._compare(name, tensor, result)
            return result

        result = map_tensors(cast, value)
        return result if changed else value

    def _compare(self, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        if before.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(before):
            return
        with torch.no_grad():
            changed = (after.to(before.dtype) != before) & ~before.isnan()
            if not changed.any():
                return
            old, new = before[changed][0].item(), after[changed][0].item()
        self._warned.add(name)
        warnings.warn(
            f"The input {name!r} is not the same after its cast from {before.dtype} to {after.dtype}: "
            f"{old:.9g} becomes {new:.9g}. Timesteps, coordinates and targets should not be cast: give "
            'Precision(inputs="keep"), or as inputs= the names of the arguments that are to be cast.',
            stacklevel=2,
        )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return a copy of `values` in which every tensor is replaced by function(tensor).

    Tensors are found in the containers that torch.utils._pytree knows, in objects of classes derived from
    them or from collections.UserDict, and in the fields of dataclasses.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, (dict, UserDict)):
            copied = copy.copy(leaf)
            for key, value in leaf.items():
                copied[key] = map_tensors(function, value)
            return copied
        if isinstance(leaf, list):
            listed = copy.copy(leaf)
            listed[:] = [map_tensors(function, value) for value in leaf]
            return listed
        if isinstance(leaf, tuple) and hasattr(leaf, "_make"):
            return leaf._make(map_tensors(function, value) for value in leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        record = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(record, field.name, map_tensors(function, getattr(leaf, field.name)))
        return record

    return tree_map(replaced, values)
