"""Device updates: optimizer updates of pages on the device, with the same bits as on the CPU.

One thread computes one element ([Note: one source] in csrc/cpu_adam/vec_warp.hpp). A step takes one launch
for the sums of squares of all gradients, and one launch for the update of each unit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infinity import _cpu_adam
from infinity.cpu_adam import Hyper
from infinity.device_update.kernels import Kernels, UpdateKind
from infinity.device_update.table import MOST_HYPERS, MOST_PARAMETERS, DeviceChunk, DeviceTable


class ParameterUpdate(NamedTuple):
    hyper: Hyper
    seed: int
    """The seed of stochastic rounding, 32 bits; see cpu_adam.Segment."""
    gradient: torch.Tensor | None = None
    """The parameter's gradient, (numel,), contiguous, on the device; None if it lies in the chunks' arrays.
    """


class DeviceUpdates:
    """Updates, on the device, of chunks whose arrays stay at the same addresses for a whole run."""

    def __init__(self, chunks: Sequence[DeviceChunk], memory: torch.Tensor, kernels: Kernels) -> None:
        """Write the DeviceTable of `chunks` into `memory`, a uint8 tensor on the device with at least
        `WorkspaceSize.nbytes` elements for `chunks`.
        """
        self.table = DeviceTable(chunks, memory)
        self.kernels = kernels
        self._stream: torch.cuda.Stream | None = None

    def update(self, updates: Mapping[Hashable, ParameterUpdate], scale: float) -> None:
        """Queue an optimizer step on the device for some of the parameters; other parameters do not change.

        updates: a parameter's key, as in `DeviceChunk.parameters` -> its update. scale: the factor of the
        gradients, as in cpu_adam.Update. Gradients that are not finite are used like all others and are not
        reported. The call allocates no device memory and does not wait for the device. One launch is enough
        if the parameters' indices (`DeviceTable.rows`) span at most MOST_PARAMETERS and they have at most
        MOST_HYPERS different hyper-parameters.
        """
        self.order()
        rows = sorted(
            ((self.table.rows[whose], update) for whose, update in updates.items()), key=lambda each: each[0]
        )
        for some in _launches(rows):
            self._launch(some, scale)

    def measure(self) -> None:
        """Queue the computation of the sum of squares of each block of BLOCK elements of each gradient.

        `DeviceTable.squares` gives the sums. A sum is finite if and only if all elements of its block are,
        because the square of any finite element is far below the largest float64.
        """
        self.order()
        table = self.table
        self.kernels.launch("infinity_squares", table.blocks, table.squares_launch().tobytes())

    def order(self) -> None:
        """Make torch's current stream wait for the stream that was current at the previous call. A backward
        may use several streams, which all read and write the same gradients. Does nothing on the CPU.
        """
        if self.kernels.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.kernels.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def give_back(self, gradient: torch.Tensor) -> None:
        """Tell torch's allocator, before the caller drops a tensor, that updates that are queued read it."""
        if gradient.device.type == "cuda":
            gradient.record_stream(torch.cuda.current_stream(gradient.device))

    def _launch(self, rows: Sequence[tuple[int, ParameterUpdate]], scale: float) -> None:
        first, end = rows[0][0], rows[-1][0] + 1
        launch = self.table.update_launch(first, end)
        known: dict[Hyper, int] = {}
        for row, update in rows:
            number = known.setdefault(update.hyper, len(known))
            launch["hyper"][row - first] = number
            launch["seeds"][row - first] = update.seed
            if update.gradient is not None:
                launch["gradients"][row - first] = update.gradient.data_ptr()
        folded = [_cpu_adam.fold(hyper.native(), scale) for hyper in known]
        launch["hypers"][: len(folded)] = [np.void(each) for each in folded]
        rules = {each[0] for each in folded}
        kinds = frozenset(UpdateKind(rule, *rest) for rule in rules for rest in self.table.kinds)
        tiles = self.table.tiles
        warps = int(tiles[int(launch["end"])] - tiles[int(launch["first"])])
        if warps:
            self.kernels.launch("infinity_update", warps, launch.tobytes(), kinds)


def _launches(rows: Sequence[tuple[int, ParameterUpdate]]) -> Iterator[Sequence[tuple[int, ParameterUpdate]]]:
    """Divide `rows` into as few launches as MOST_PARAMETERS and MOST_HYPERS allow. rows: pairs (index of a
    parameter in the DeviceTable, its update), sorted by index. Yields the pairs of each launch.
    """
    start = 0
    hypers: set[Hyper] = set()
    for end, (row, update) in enumerate(rows):
        if row - rows[start][0] >= MOST_PARAMETERS or len(hypers | {update.hyper}) > MOST_HYPERS:
            yield rows[start:end]
            start, hypers = end, set()
        hypers.add(update.hyper)
    if rows:
        yield rows[start:]
