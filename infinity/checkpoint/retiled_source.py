"""Retiled source: reads a commit of a model with tiled weights as one of a model with other tiles or none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from infinity.checkpoint.commit_source import CommitSource
from infinity.checkpoint.manifest import VALUES, ParameterEntry
from infinity.layout.chunks import ModelLayout, ParameterLayout
from infinity.layout.tiles import whole_name


def retiled(source: CommitSource, layout: ModelLayout) -> CommitSource:
    """Return a source with the parameters of a commit in the tiles of a model, or whole where it has none.

    layout: the model's. What the model lacks, and what the commit lacks, stays as it is in the commit.
    """
    here = {each.names[0]: each for unit in layout.units for each in unit.parameters}
    there = source.parameters()
    tiles = {name for name in here.keys() ^ there.keys() if whole_name(name)[0] != name}
    return _RetiledSource(source, here, there) if tiles else source


class _Part(NamedTuple):
    """A saved parameter or tile."""

    first: int
    """Its first element in the whole weight."""
    entry: ParameterEntry


class _RetiledSource(CommitSource):
    """The source that `retiled` returns."""

    def __init__(
        self,
        source: CommitSource,
        here: Mapping[str, ParameterLayout],
        there: Mapping[str, ParameterEntry],
    ) -> None:
        self.rule = source.rule
        self._source = source
        self._first: dict[str, int] = {}
        self._parts: dict[str, tuple[_Part, ...]] = {}
        """Name of a parameter here that is cut otherwise -> the saved ones in which it lies, in order."""
        wholes: dict[str, list[_Part]] = {}
        for entry in there.values():
            for name in entry.names:
                whole, row = whole_name(name)
                wholes.setdefault(whole, []).append(_Part(row * math.prod(entry.shape[1:]), entry))
        self._entries = dict(there)
        for name, layout in here.items():
            if name not in there:
                self._retile(layout, sorted(wholes.get(whole_name(name)[0], ()), key=lambda each: each.first))
        for part in (each for parts in self._parts.values() for each in parts):
            self._entries.pop(part.entry.names[0], None)

    def has(self, name: str, first: int, count: int) -> bool:
        found = self._within(name, first, count)
        return all(self._source.has(entry.names[0], at, number) for entry, at, number in found)

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        parts = []
        for entry, at, number in self._within(name, first, count):
            if entry.edited and not self._entries[name].edited and array in ("master", "remainder"):
                # Other parts have masters. An edited one is its own master, of which nothing remains.
                values = self._source.read(entry.names[0], VALUES, at, number)
                parts.append(values.float() if array == "master" else torch.zeros(number, dtype=torch.int16))
            else:
                parts.append(self._source.read(entry.names[0], array, at, number))
        return torch.cat(parts)

    def _retile(self, layout: ParameterLayout, saved: Sequence[_Part]) -> None:
        """Make the entry of a parameter here of those of a weight in the commit. If they do not fit, `match`
        says what is missing.
        """
        first = layout.first_row * math.prod(layout.shape[1:])
        parts = tuple(each for each in saved if each.first < first + layout.numel and first < _end(each))
        joined = all(_end(one) == other.first for one, other in itertools.pairwise(parts))
        if not parts or not joined or parts[0].first > first or _end(parts[-1]) < first + layout.numel:
            return
        entries = [each.entry for each in parts]
        form = [
            (each.shape[1:], each.dtype, each.trainable, each.step, each.moments, _is_contiguous(each))
            for each in entries
        ]
        if len(set(form)) > 1 or form[0][0] != tuple(layout.shape[1:]) or not form[0][-1]:
            return
        if layout.tile_of is None and (parts[0].first, _end(parts[-1])) != (0, layout.numel):
            return
        self._parts[layout.names[0]] = parts
        self._entries[layout.names[0]] = replace(
            entries[0],
            names=layout.names,
            shape=tuple(layout.shape),
            stride=tuple(layout.stride),
            edited=all(each.edited for each in entries),
            ranges=(),
        )
        self._first[layout.names[0]] = first

    def _within(self, name: str, first: int, count: int) -> Iterator[tuple[ParameterEntry, int, int]]:
        """Yield (saved entry, first element in it, number) of elements [first, first + count)."""
        if name not in self._parts:
            yield self._entries[name], first, count
            return
        at = self._first[name] + first
        end = at + count
        for part in self._parts[name]:
            low, high = max(at, part.first), min(end, _end(part))
            if low < high:
                yield part.entry, low - part.first, high - low


def _end(part: _Part) -> int:
    return part.first + part.entry.numel


def _is_contiguous(entry: ParameterEntry) -> bool:
    return torch.empty(entry.shape, device="meta").stride() == entry.stride
