"""The workspace of updates on the device: memory that the plan has reserved there beside the pages.

It has the table of where pieces of parameters lie (infinity/device_update/table.py), the sums of squares of
the gradients' blocks, and their totals. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity import _cpu_adam
from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.layout.chunks import UnitLayout
from infinity.tiers import PAGE_ALIGNMENT

PIECE_BYTES: int = _cpu_adam.PIECE_BYTES
"""Of a piece in the table."""
_LENGTH = 256
"""Bytes of which every part is a multiple."""


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """What there is room for."""

    pieces: int
    blocks: int
    """Of gradients, whose squares are summed one by one."""
    parameters: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of the totals, the sums, the pieces, what comes before each piece in tiles and in blocks, and
        what comes before each parameter in blocks."""
        counts = (
            8 * self.parameters,
            8 * self.blocks,
            PIECE_BYTES * self.pieces,
            4 * (self.pieces + 1),
            4 * (self.pieces + 1),
            4 * (self.parameters + 1),
        )
        return tuple(round_up(each, _LENGTH) for each in counts)

    @property
    def nbytes(self) -> int:
        """Bytes of all; a multiple of 4096."""
        return round_up(sum(self.lengths), PAGE_ALIGNMENT)


def workspace_of(units: Iterable[UnitLayout]) -> WorkspaceSize:
    """Of updates of these units."""
    pieces = [piece for unit in units for chunk in unit.chunks for piece in chunk.pieces]
    return WorkspaceSize(
        pieces=len(pieces),
        blocks=sum(-(-piece.count // BLOCK) for piece in pieces),
        # Each has one piece that is its first.
        parameters=sum(piece.start == 0 for piece in pieces),
    )


def largest_workspace(sizes: Iterable[int], chunk_elements: int) -> WorkspaceSize:
    """Of parameters of so many elements, however chunks of `chunk_elements` cut them."""
    counts = list(sizes)
    return WorkspaceSize(
        pieces=sum(-(-numel // chunk_elements) + 1 for numel in counts),
        blocks=sum(-(-numel // BLOCK) for numel in counts),
        parameters=len(counts),
    )
