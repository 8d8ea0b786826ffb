"""The workspace of updates on the device: memory that the plan has reserved there beside the pages.

It holds the table of parameters' pieces (infinity/device_update/table.py), the sums of squares of the
gradients' blocks, and the totals of these sums. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity import _cpu_adam
from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.layout.chunks import UnitLayout
from infinity.tiers import PAGE_ALIGNMENT

PIECE_BYTES: int = _cpu_adam.PIECE_BYTES
"""Bytes of a piece's entry in the table."""
_LENGTH = 256
"""Bytes that the length of every part is a multiple of."""


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """The size of a workspace: the numbers of pieces, blocks and parameters that it has room for."""

    pieces: int
    blocks: int
    """Blocks of gradients; each has a sum of squares of its own."""
    parameters: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of each part: totals, sums, pieces, tiles before each piece, blocks before each piece, blocks
        before each parameter."""
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
        """Bytes of all parts; a multiple of 4096."""
        return round_up(sum(self.lengths), PAGE_ALIGNMENT)


def workspace_of(units: Iterable[UnitLayout]) -> WorkspaceSize:
    """The workspace that updates of these units need."""
    pieces = [piece for unit in units for chunk in unit.chunks for piece in chunk.pieces]
    return WorkspaceSize(
        pieces=len(pieces),
        blocks=sum(-(-piece.count // BLOCK) for piece in pieces),
        # Each parameter has one piece that is its first.
        parameters=sum(piece.start == 0 for piece in pieces),
    )


def largest_workspace(sizes: Iterable[int], chunk_elements: int) -> WorkspaceSize:
    """The largest workspace that parameters may need, however chunks of `chunk_elements` cut them.

    sizes: elements of each parameter.
    """
    counts = list(sizes)
    return WorkspaceSize(
        pieces=sum(-(-numel // chunk_elements) + 1 for numel in counts),
        blocks=sum(-(-numel // BLOCK) for numel in counts),
        parameters=len(counts),
    )
