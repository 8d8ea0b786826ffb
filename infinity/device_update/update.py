"""Device updates: optimizer updates of pages on the device, with the same bits as on the CPU.

One thread computes one element ([Note: one source] in csrc/cpu_adam/vec_warp.hpp). A step takes one launch
for the sums of squares of all gradients, and one launch for the update of each unit.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infinity import _cpu_adam
from infinity.cpu_adam import Hyper, Update
from infinity.device_update.kernels import Kernels, UpdateKind
from infinity.device_update.table import (
    MOST_HYPERS,
    MOST_PARAMETERS,
    MOST_PIECES,
    PIECES_LAUNCH,
    TILE,
    DeviceChunk,
    DeviceTable,
    describe,
)


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
        for some in _launches(rows, MOST_PARAMETERS):
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
        rules = _write_updates(launch, [(row - first, update) for row, update in rows], scale)
        for row, update in rows:
            if update.gradient is not None:
                launch["gradients"][row - first] = update.gradient.data_ptr()
        kinds = frozenset(UpdateKind(rule, *rest) for rule in rules for rest in self.table.kinds)
        tiles = self.table.tiles
        warps = int(tiles[int(launch["end"])] - tiles[int(launch["first"])])
        if warps:
            self.kernels.launch("infinity_update", warps, launch.tobytes(), kinds)


def _launches(
    rows: Sequence[tuple[int, ParameterUpdate]], most: int
) -> Iterator[Sequence[tuple[int, ParameterUpdate]]]:
    """Divide `rows` into as few launches as possible, in each of which the indices span at most `most`, with
    at most MOST_HYPERS different hyper-parameters. rows: pairs (index, update), sorted by index. Yields the
    pairs of each launch.
    """
    start = 0
    hypers: set[Hyper] = set()
    for end, (row, update) in enumerate(rows):
        if row - rows[start][0] >= most or len(hypers | {update.hyper}) > MOST_HYPERS:
            yield rows[start:end]
            start, hypers = end, set()
        hypers.add(update.hyper)
    if rows:
        yield rows[start:]


def _write_updates(
    launch: npt.NDArray[np.void], updates: Sequence[tuple[int, ParameterUpdate]], scale: float
) -> set[int]:
    """Write updates into the argument of a kernel: their hyper-parameters and seeds. Returns the numbers of
    their rules. updates: pairs (index in the argument's arrays `hyper` and `seeds`, update).
    """
    known: dict[Hyper, int] = {}
    for place, update in updates:
        launch["hyper"][place] = known.setdefault(update.hyper, len(known))
        launch["seeds"][place] = update.seed
    folded = [_folded(hyper, scale) for hyper in known]
    launch["hypers"][: len(folded)] = [np.void(each) for each in folded]
    return {each[0] for each in folded}


@functools.lru_cache(maxsize=64)
def _folded(hyper: Hyper, scale: float) -> bytes:
    """The hyper-parameters as the kernels take them, which all chunks of a step share."""
    return _cpu_adam.fold(hyper.native(), scale)


class MovingChunk:
    """The update on the device of a chunk whose states and gradients lie elsewhere in each step."""

    def __init__(self, work: Update, states: torch.Tensor) -> None:
        """work: the arrays of the chunk, and one segment for each of its pieces. Those of its arrays that lie
        in `states`, uint8 on the device, move with it; `grad` only gives the dtype of gradients.
        """
        self._pieces = describe(work, range(len(work.segments)))
        assert work.grad is not None
        self._states, self._item = states.data_ptr(), work.grad.dtype.itemsize
        addresses = self._pieces["arrays"]
        self._moves = (addresses >= self._states) & (addresses < self._states + states.nbytes)
        self._launches: dict[tuple[int, ...], _PiecesLaunch] = {}
        """Indices of the pieces of a launch -> what is equal in all such launches."""

    def update(
        self,
        kernels: Kernels,
        states: torch.Tensor,
        gradients: Sequence[int | None],
        updates: Sequence[ParameterUpdate],
        scale: float,
    ) -> None:
        """Queue the optimizer step of some pieces on torch's current stream; other pieces do not change.

        states: the chunk's states on the device, in the form of the tensor that the constructor got.
        gradients: the address on the device of each piece's gradient; None: the piece is not updated.
        updates: the update of each piece that has a gradient, in order. scale: as in `DeviceUpdates.update`.
        """
        moved = np.uint64(states.data_ptr() - self._states & _ADDRESS)
        chosen = [(number, each) for number, each in enumerate(gradients) if each is not None]
        rows = [*zip(range(len(chosen)), updates, strict=True)]
        for some in _launches(rows, MOST_PIECES):
            used = chosen[some[0][0] : some[-1][0] + 1]
            numbers = tuple([number for number, _ in used])
            if numbers not in self._launches:
                self._launches[numbers] = _PiecesLaunch(self._pieces, self._moves, numbers)
            prepared = self._launches[numbers]
            launch = prepared.launch.copy()
            arrays = launch["pieces"]["arrays"]
            arrays += prepared.moves * moved
            for row, (_, gradient) in enumerate(used):
                arrays[row, 0] = gradient - prepared.starts[row] * self._item & _ADDRESS
            rules = _write_updates(launch, [*enumerate([update for _, update in some])], scale)
            kernels.launch(
                "infinity_update_pieces", prepared.warps, launch.tobytes(), prepared.kinds(frozenset(rules))
            )


class _PiecesLaunch:
    """What is equal in all launches for the same pieces of a MovingChunk."""

    def __init__(
        self, pieces: npt.NDArray[np.void], moves: npt.NDArray[np.bool_], numbers: Sequence[int]
    ) -> None:
        """pieces: the descriptions of all pieces of the chunk. moves: which of their arrays move with the
        chunk's states. numbers: indices of the pieces of the launch.
        """
        there, count = pieces[list(numbers)], len(numbers)
        self.launch = np.zeros((), PIECES_LAUNCH)
        """The kernel's argument, without addresses of gradients, and without updates."""
        self.launch["pieces"][:count], self.launch["count"] = there, count
        tiles = np.cumsum(-(-there["count"].astype(np.int64) // TILE))
        self.launch["tiles"][1 : count + 1] = tiles
        self.warps = int(tiles[-1])
        self.moves = np.zeros(self.launch["pieces"]["arrays"].shape, np.uint64)
        """1 for each array in `launch` that moves with the chunk's states, else 0."""
        self.moves[:count] = moves[list(numbers)]
        self.starts: list[int] = there["start"].tolist()
        """Index in the chunk of each piece's first element."""
        self._formats = {(int(each["gradient"]), int(each["format"]), int(each["moments"])) for each in there}
        self.kinds = functools.cache(self._kinds)
        """Function from the rules of a launch to the kinds of kernels that it needs."""

    def _kinds(self, rules: frozenset[int]) -> frozenset[UpdateKind]:
        return frozenset(UpdateKind(rule, *rest) for rule in rules for rest in self._formats)


_ADDRESS = (1 << 64) - 1
"""The bits of an address, in which sums and differences wrap as in C."""
