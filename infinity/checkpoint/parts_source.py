"""Parts source: the arrays of a commit of several ranks, read from whichever part has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.checkpoint.manifest import Manifest, OptimizerRule, ParameterEntry
from infinity.checkpoint.part_ranges import PartRanges
from infinity.errors import IncompatibleCheckpoint

Read = Callable[[str, str, int, int], torch.Tensor]
"""Function (parameter, array, first, count): `ArraySource.read` for elements that a part has."""


class ReadablePart(NamedTuple):
    """A part of the commit that this rank can read, on its node or over the network."""

    ranges: PartRanges
    read: Read


class PartsSource:
    """Reads arrays of a commit from its parts."""

    def __init__(self, manifest: Manifest, parts: Sequence[ReadablePart]) -> None:
        """manifest: of any part: what it says of parameters, but for their ranges, is equal in all. parts:
        those that are read; of two that have an element the first one is.
        """
        self._generation = manifest.generation
        self._entries = {each.names[0]: each for each in manifest.parameters}
        self.rule: OptimizerRule | None = manifest.rule
        """The optimizer of the saved run."""
        self._parts = parts

    def parameters(self) -> Mapping[str, ParameterEntry]:
        """All parameters by their canonical names."""
        return self._entries

    def read(self, name: str, array: str, first: int, count: int) -> torch.Tensor:
        """Read entries of an array; `ArraySource.read` says which. Raises RankFailure, too, and
        IncompatibleCheckpoint for elements that no part has.
        """
        at, pieces = first, []
        while at < first + count:
            part = next((each for each in self._parts if each.ranges.end(name, at) > at), None)
            if part is None:
                raise IncompatibleCheckpoint(
                    f"Element {at} of {name} is in no part of commit {self._generation} that was read.",
                    "Load a copy of the run, which save(PATH) makes.",
                )
            end = min(part.ranges.end(name, at), first + count)
            pieces.append(part.read(name, array, at, end - at))
            at = end
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
