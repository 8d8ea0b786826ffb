"""Device workspace: memory on the device that the plan reserves beside the pages for updates.

It holds a table of all pieces (infinity/device_update/table.py) and the sum of squares of each block of BLOCK
gradient elements. This module computes sizes only.
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
"""Bytes of an entry of a `DeviceTable`, which describes one piece of a parameter."""
_LENGTH = 256
"""The length of every part of the workspace is a multiple of this number of bytes."""


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """The size of a workspace for parameters that chunks cut into `pieces` pieces."""

    pieces: int
    blocks: int
    """Number of blocks of gradients. A piece is cut into blocks of BLOCK elements and a shorter last one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of the four parts of the workspace, in order: the sum of squares of each block, the table's
        entry of each piece, the number of tiles (elements of one warp) before each piece, and the number of
        blocks before each piece.
        """
        counts = (
            8 * self.blocks,
            PIECE_BYTES * self.pieces,
            4 * (self.pieces + 1),
            4 * (self.pieces + 1),
        )
        return tuple(round_up(each, _LENGTH) for each in counts)

    @property
    def nbytes(self) -> int:
        """A multiple of 4096."""
        return round_up(sum(self.lengths), PAGE_ALIGNMENT)


def workspace_of(units: Iterable[UnitLayout]) -> WorkspaceSize:
    pieces = [piece for unit in units for chunk in unit.chunks for piece in chunk.pieces]
    return WorkspaceSize(
        pieces=len(pieces),
        blocks=sum(-(-piece.count // BLOCK) for piece in pieces),
    )


def largest_workspace(sizes: Iterable[int], chunk_elements: int) -> WorkspaceSize:
    """Return a workspace that is enough for parameters of these sizes, wherever chunks cut them into pieces.
    sizes: number of elements of each parameter. chunk_elements: length of a chunk in elements.
    """
    counts = list(sizes)
    return WorkspaceSize(
        pieces=sum(-(-numel // chunk_elements) + 1 for numel in counts),
        blocks=sum(-(-numel // BLOCK) for numel in counts),
    )
