"""Conversion: transformers' own table between the tensors of its models and those in its files.

transformers saves many models in the format in which they were published: the experts of a mixture one by
one, or under older names. Its table (transformers.conversion_mapping) says which tensors of a file become
which tensors of a model, and the table's operations (transformers.core_model_loading) convert them in both
directions. transformers converts a whole state_dict; this file converts one group of tensors at a time.

Only this file imports the table, and it is imported only for models of transformers.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from infinity.checkpoint.safetensors_files import Weights, loadable
from infinity.checkpoint.tensor_files import Entry, in_logical_order, whole
from infinity.errors import ConfigError, InfinityError
from infinity.layout.names import plain_name
from infinity.model.materialize import listed

Read = Callable[[str], torch.Tensor]
"""Function that returns the tensor of a name."""


@dataclass(frozen=True)
class _Group:
    """Tensors that are converted together, into those of one or several parameters."""

    converter: Any
    """The table's WeightConverter. `convert` works on a copy of it."""
    first: str
    """Name of the first converted tensor; transformers derives the names of the others from it."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (name of a tensor to convert, pattern of the converter that it matches), in their order."""

    def convert(self, model: nn.Module, read: Read) -> dict[str, torch.Tensor]:
        """Return the converted tensors by name. `read` gives the tensors to convert, on any device.

        Raises ConfigError if an operation of transformers fails.
        """
        try:
            work = copy.deepcopy(self.converter)
            for name, pattern in self.sources:
                work.add_tensor(self.first, name, pattern, lambda name=name: read(name))
            found = work.convert(self.first, model=model, config=model.config)
        except InfinityError:
            raise
        except Exception as error:
            raise ConfigError(
                f"transformers could not convert {self.described} to {self.first} by "
                f"{self.converter.operations}: {type(error).__name__}: {error}",
                "Check that no tensor is missing and that the configuration is the one that the weights were "
                "saved with, or use tensors in the model's own format: "
                "save_pretrained(..., save_original_format=False).",
            ) from error
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}

    @property
    def described(self) -> str:
        """Text for an error message: the first tensor to convert, and how many tensors match each pattern."""
        count = collections.Counter(pattern for _, pattern in self.sources)
        each = ", ".join(f"{count[pattern]} of {pattern}" for pattern in self.converter.source_patterns)
        return f"{self.sources[0][0]} and its like ({each})"


class _Groups:
    """Converts groups of tensors when they are read. One group's tensors are in RAM at a time."""

    def __init__(self, model: nn.Module, groups: Iterable[_Group], blank: Read, read: Read) -> None:
        """blank: function that returns a tensor to be converted, without values, on the meta device. read:
        function that returns the same tensor with its values.

        Raises ConfigError if an operation fails for tensors without values.
        """
        self._model = model
        self._read = read
        self._held: dict[str, torch.Tensor] = {}
        self.group: dict[str, _Group] = {}
        self.blank: dict[str, torch.Tensor] = {}
        """The converted tensors on the meta device."""
        for group in groups:
            for name, tensor in group.convert(model, blank).items():
                self.group[name], self.blank[name] = group, tensor

    def read(self, name: str) -> torch.Tensor:
        """Return a converted tensor, contiguous. The other tensors of its group are kept until they are read,
        or until a tensor of another group is read.
        """
        if name not in self._held:
            self._held.clear()
            self._held = self.group[name].convert(self._model, self._read)
        return self._held.pop(name).contiguous()

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a converted tensor's elements in row-major order, as Entry.parts does."""
        yield from in_logical_order(self.read(name))


class ConvertedWeights(Weights):
    """Weights in files, under the names and in the shapes that a model of transformers gives them.

    A weight stays as it is in the files if transformers' conversion table does not convert it, or converts it
    to a tensor that the model lacks.
    """

    def __init__(self, model: Any, weights: Weights) -> None:
        """model: a PreTrainedModel. weights: in the model's own format, or as save_pretrained writes them.

        Raises ConfigError if transformers cannot convert a weight.
        """
        super().__init__(weights.path, {})
        self._files = weights
        self._model = model
        self._table = get_model_conversion_mapping(model)
        self._same: dict[str, str] = {}
        """Name -> name in the files, of each weight that is not converted."""
        groups: dict[str, _Group] = {}
        renamings, converters = _sides(self._table)
        owner = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix = model.base_model_prefix
        tensors = {name: each.tensor for each in loadable(model).values() for name in each.names}
        for name in sorted(weights.names, key=lambda each: dot_natural_key(plain_name(each))):
            plain = plain_name(name)
            renamed, pattern = rename_source_key(plain, renamings, converters, prefix, tensors)
            if renamed not in tensors and plain in tensors:
                renamed, pattern = rename_source_key(plain, [], [], prefix, tensors)
            if renamed not in tensors:
                self._same.setdefault(name, name)
            elif pattern is None:
                self._same.setdefault(renamed, name)
            else:
                groups.setdefault(renamed, _Group(owner[pattern], renamed)).sources.append((name, pattern))
        self._groups = _Groups(model, groups.values(), self._blank, weights.read)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._same, *self._groups.group)

    def shape(self, name: str) -> tuple[int, ...]:
        group = name in self._groups.group
        return tuple(self._groups.blank[name].shape) if group else self._files.shape(self._same[name])

    def dtype(self, name: str) -> torch.dtype:
        group = name in self._groups.group
        return self._groups.blank[name].dtype if group else self._files.dtype(self._same[name])

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor `name`, as Weights.read does. RAM holds up to twice the bytes of a group of
        converted tensors. Raises ConfigError if an operation of transformers fails.
        """
        return self._groups.read(name) if name in self._groups.group else self._files.read(self._same[name])

    def described(self, name: str) -> str:
        group = self._groups.group.get(name)
        return self._same[name] if group is None else f"{name}, made from {group.described}"

    def keep_format(self) -> None:
        """Store the path and the conversions that were used in the model, as from_pretrained does, so that
        save_pretrained can convert back.
        """
        self._model.name_or_path = self._model.name_or_path or str(self.path)
        self._model._weight_conversions = [each for each in self._table if each.was_used()]

    def _blank(self, name: str) -> torch.Tensor:
        return torch.empty(self._files.shape(name), dtype=self._files.dtype(name), device="meta")


def as_saved(model: Any, entries: Sequence[Entry]) -> list[Entry]:
    """Return the tensors that save_pretrained would write in place of `entries`, the tensors of a model.

    model: a PreTrainedModel. The table with which the model was loaded is applied, or else the table of its
    class. Tensors of one group follow each other, so that each group is converted once. RAM holds up to twice
    the bytes of one group while its tensors are written.

    Raises ConfigError if transformers cannot undo a conversion, or if several tensors would get one name.
    """
    table = getattr(model, "_weight_conversions", None)
    if table is None:  # as in transformers' revert_weight_conversion
        made = get_model_conversion_mapping(model, add_legacy=False)
        table = [each for each in made if not isinstance(each, PrefixChange)]
    renamings, converters = _sides([_reversed(each) for each in table[::-1]])
    owner = {pattern: each for each in converters for pattern in each.source_patterns}
    known = {entry.name: entry for entry in entries}
    groups: dict[str, _Group] = {}
    saved: dict[str, list[Entry]] = {}
    for name in sorted(known, key=dot_natural_key):
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            renamed = apply_renamings(name, renamings)
            saved.setdefault(renamed, []).append(replace(known[name], name=renamed))
        else:
            groups.setdefault(renamed, _Group(owner[pattern], renamed)).sources.append((name, pattern))
            saved.setdefault(renamed, [])

    def blank(name: str) -> torch.Tensor:
        return torch.empty(known[name].shape, dtype=known[name].dtype, device="meta")

    converted = _Groups(model, groups.values(), blank, lambda name: whole(known[name]))
    for inner, group in converted.group.items():
        like = converted.blank[inner]
        saved[group.first].append(
            Entry(
                apply_renamings(inner, renamings),
                like.dtype,
                tuple(like.shape),
                like.numel() * like.dtype.itemsize,
                functools.partial(converted.parts, inner),
            )
        )
    found = [entry for each in saved.values() for entry in each]
    count = collections.Counter(entry.name for entry in found)
    if twice := [name for name in count if count[name] > 1]:
        raise _no_way_back(f"several tensors of the model that would all be called {listed(twice)}")
    return found


def _reversed(transform: Any) -> Any:
    try:
        return transform.reverse_transform()
    except Exception as error:
        by = getattr(transform, "operations", "a renaming")
        raise _no_way_back(f"{transform} by {by} ({type(error).__name__}: {error})") from error


def _no_way_back(what: str) -> ConfigError:
    return ConfigError(
        f"transformers has no way back to the format of the model's files for {what}.",
        "Save the model in its own format: runtime.close(keep=True), then "
        "model.save_pretrained(path, save_original_format=False).",
    )


def _sides(table: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Divide transformers' table into its renamings and its converters, each in the table's order."""
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    return renamings, [each for each in table if isinstance(each, WeightConverter)]
