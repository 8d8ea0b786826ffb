"""Part ranges: which elements of each parameter a rank's part of a commit has."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.checkpoint.manifest import Manifest


class _Ends(NamedTuple):
    firsts: Sequence[int]
    ends: Sequence[int]
    """The element behind each range, whose first one is in `firsts`. Ranges ascend and do not overlap."""


class PartRanges:
    """The ranges of elements of a part."""

    def __init__(self, ranges: Mapping[str, _Ends]) -> None:
        """ranges: by canonical name; a parameter of which the part has nothing may be missing."""
        self._ranges = ranges

    @staticmethod
    def of(manifest: Manifest) -> PartRanges:
        """The ranges of the part that has this manifest."""
        return PartRanges(
            {
                each.names[0]: _Ends(
                    [within.first for within in each.ranges],
                    [within.first + within.count for within in each.ranges],
                )
                for each in manifest.parameters
            }
        )

    def end(self, name: str, at: int) -> int:
        """The end of the elements from element `at` of a parameter that the part has in one range; `at` if it
        does not have that element.
        """
        firsts, ends = self._ranges.get(name, _Ends((), ()))
        found = bisect.bisect_right(firsts, at) - 1
        return max(at, ends[found]) if found >= 0 else at

    def has(self, name: str, first: int, count: int) -> bool:
        """Whether the part has elements [first, first + count) of a parameter."""
        at = first
        while at < first + count:
            end = self.end(name, at)
            if end == at:
                return False
            at = end
        return True


def table_of(manifest: Manifest) -> torch.Tensor:
    """The ranges of a part as rows of (number of the parameter in the manifest, first element, end): int64
    (rows, 3). All parts of a commit number parameters alike.
    """
    rows = [
        (number, within.first, within.first + within.count)
        for number, each in enumerate(manifest.parameters)
        for within in each.ranges
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 3)


def from_table(table: torch.Tensor, manifest: Manifest) -> PartRanges:
    """The ranges in a table of another part. manifest: of any part of the commit."""
    found: dict[str, _Ends] = {}
    for number, first, end in table.tolist():
        firsts, ends = found.setdefault(manifest.parameters[number].names[0], _Ends([], []))
        firsts.append(first)  # type: ignore[attr-defined]
        ends.append(end)  # type: ignore[attr-defined]
    return PartRanges(found)
