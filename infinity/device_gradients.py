"""Gradients of the units that the device updates: accumulated where they rest, and measured there.

Nothing is measured before somebody asks: then the sums of squares of all that have changed are taken, over
the same blocks as on the CPU and in float64 too, but added in another order, and one copy brings them down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from infinity.cpu_adam import BLOCK
from infinity.device_update import sum_squares
from infinity.gradient_page import GradientPage
from infinity.layout import Piece
from infinity.store import Store
from infinity.tiers.link import User
from infinity.workspace import Workspace


class DeviceGradients:
    """Gradient pages that are at home on the device and updated there. Called under the runtime's lock."""

    def __init__(self, pages: Mapping[int, GradientPage], store: Store) -> None:
        """pages: all of the runtime's, by unit; those that the plan has updated on the device are taken."""
        self._pages = {unit: page for unit, page in pages.items() if unit in store.plan.updated_on_device}
        self._store = store
        self._sums: dict[tuple[int, int, int], slice] = {}
        """(unit, parameter, first element) of a piece -> its blocks' place among `Workspace.sums`."""
        self._changed: dict[tuple[int, int], None] = {}
        """(unit, parameter) of gradients that are not what was measured."""
        end = 0
        for page, _, piece in self._pieces():
            start, end = end, end + -(-piece.count // BLOCK)
            self._sums[page.index, piece.parameter, piece.start] = slice(start, end)

    def __contains__(self, unit: int) -> bool:
        return unit in self._pages

    @property
    def _space(self) -> Workspace:
        assert self._store.workspace is not None
        return self._store.workspace

    def add(self, unit: int, parameter: int, fresh: torch.Tensor) -> None:
        """Queue the addition of a fresh gradient, flat in memory order, to a parameter's."""
        page = self._pages[unit]
        again = parameter in page.content
        self._space.order()
        with torch.no_grad():
            for number, piece in page.layout.pieces(parameter):
                target = _elements(page, number, piece)
                part = fresh[piece.start : piece.start + piece.count]
                self._store.link.uses(User.COMPUTE, target, writes=True, label="gradient")
                if again:
                    target.add_(part)
                else:
                    target.copy_(part)
        self._changed[unit, parameter] = None

    def bring_down(self) -> None:
        """Give the host the sums of all gradients that there are, once the device has come to them."""
        if not self._changed:
            return
        self._measure()
        there = self._space.sums
        here = torch.empty(there.shape, dtype=there.dtype, device="cpu")
        self._store.link.uses(User.COMPUTE, there, writes=True, label="sums of squares")
        self._store.copy_down(here, there).wait()
        self._store.link.uses(User.HOST, here, writes=False, label="sums of squares")
        blocks = here.numpy()
        for page, number, piece in self._pieces():
            place = self._sums[page.index, piece.parameter, piece.start]
            page.states[number].blocks[piece.parameter, piece.start] = blocks[place]

    def _measure(self) -> None:
        """Queue the sums of what has changed."""
        space = self._space
        space.order()
        for unit, parameter in self._changed:
            page = self._pages[unit]
            if parameter not in page.content:  # forgotten since
                continue
            for number, piece in page.layout.pieces(parameter):
                place = self._sums[unit, parameter, piece.start]
                sum_squares(_elements(page, number, piece), space.sums[place], space)
        self._changed.clear()

    def _pieces(self) -> Iterator[tuple[GradientPage, int, Piece]]:
        """(page, chunk, piece) of all pieces, in one order."""
        for page in self._pages.values():
            for number, chunk in enumerate(page.layout.chunks):
                for piece in chunk.pieces:
                    yield page, number, piece


def _elements(page: GradientPage, number: int, piece: Piece) -> torch.Tensor:
    """A piece's gradient where it rests, (piece.count,)."""
    chunk = page.typed(number, page.home.view(page.offset(number), page.nbytes(number)))
    return chunk[piece.offset : piece.offset + piece.count]
