"""Updates and sums of squares for pages that rest on the device: the same bits as on the CPU.

The kernels are those of the CPU's updates, one element a thread ([Note: one source] in
csrc/cpu_adam/vec_warp.hpp). A step takes two launches for all squares, and one for the update of a unit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infinity import _cpu_adam
from infinity.cpu_adam import Hyper
from infinity.device_update.kernels import Kernels, UpdateKind
from infinity.device_update.table import MOST_HYPERS, MOST_PARAMETERS, Chunk, DeviceTable


class ParameterUpdate(NamedTuple):
    """A parameter's update in one step."""

    hyper: Hyper
    seed: int
    """The seed of rounding: 32 bits, see cpu_adam.Segment."""


class DeviceUpdates:
    """Updates of chunks whose arrays stay in their places for a whole run."""

    def __init__(self, chunks: Sequence[Chunk], memory: torch.Tensor, kernels: Kernels) -> None:
        """memory: for the DeviceTable, on the chunks' device; see there."""
        self.table = DeviceTable(chunks, memory)
        self.kernels = kernels
        self._stream: torch.cuda.Stream | None = None

    def row(self, whose: Hashable) -> int:
        """The index of a parameter's sum among the totals."""
        return self.table.rows[whose]

    def update(self, updates: Mapping[Hashable, ParameterUpdate], scale: float) -> None:
        """Queue an optimizer step of these parameters; the others of their chunks are not touched.

        scale: see cpu_adam.Update. Gradients that are not finite are used as they are, as by the CPU's
        kernels, and not reported. Nothing is allocated on the device, and nothing waits for it. Parameters
        whose rows of the table lie together share a launch: at most MOST_PARAMETERS of them, with at most
        MOST_HYPERS different hyper-parameters.
        """
        self.order()
        rows = sorted(
            ((self.table.rows[whose], update) for whose, update in updates.items()), key=lambda each: each[0]
        )
        for some in _launches(rows):
            self._launch(some, scale)

    def measure(self) -> None:
        """Queue the sums of squares of all gradients, which the table's `totals` then holds; see `row`.

        A parameter's sum is finite if and only if all elements of its gradient are: the square of any finite
        element is far below float64's largest value.
        """
        self.order()
        table = self.table
        self.kernels.launch("infinity_squares", table.blocks, table.squares_launch().tobytes())
        self.kernels.launch("infinity_totals", len(table.rows), table.totals_launch().tobytes())

    def order(self) -> None:
        """Order work that is queued from now on after work queued on the stream of the last call.

        A backward may run on several streams, and gradients on the device have one place.
        """
        if self.kernels.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.kernels.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _launch(self, rows: Sequence[tuple[int, ParameterUpdate]], scale: float) -> None:
        first, end = rows[0][0], rows[-1][0] + 1
        launch = self.table.update_launch(first, end)
        known: dict[Hyper, int] = {}
        for row, update in rows:
            number = known.setdefault(update.hyper, len(known))
            launch["hyper"][row - first] = number
            launch["seeds"][row - first] = update.seed
        folded = [_cpu_adam.fold(hyper.native(), scale) for hyper in known]
        launch["hypers"][: len(folded)] = [np.void(each) for each in folded]
        rules = {each[0] for each in folded}
        kinds = frozenset(UpdateKind(rule, *rest) for rule in rules for rest in self.table.kinds)
        tiles = self.table.tiles
        warps = int(tiles[int(launch["end"])] - tiles[int(launch["first"])])
        if warps:
            self.kernels.launch("infinity_update", warps, launch.tobytes(), kinds)


def _launches(rows: Sequence[tuple[int, ParameterUpdate]]) -> Iterator[Sequence[tuple[int, ParameterUpdate]]]:
    """The rows, divided into as few launches as hold them."""
    start = 0
    hypers: set[Hyper] = set()
    for end, (row, update) in enumerate(rows):
        if row - rows[start][0] >= MOST_PARAMETERS or len(hypers | {update.hyper}) > MOST_HYPERS:
            yield rows[start:end]
            start, hypers = end, set()
        hypers.add(update.hyper)
    if rows:
        yield rows[start:]
