"""Device table: tells the device's kernels where the pieces of all parameters lie that the device updates.

The table is written once in a run. The numpy dtypes describe the structs of the native core; see [Note:
device tables] in csrc/cpu_adam/device.hpp. Beside the pages, the plan reserves a workspace: memory for the
table and for the sum of squares of each block of gradient elements (`WorkspaceSize`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity import _cpu_adam
from infinity.config import round_up
from infinity.cpu_adam import BLOCK, Array, Segment, Update
from infinity.cpu_adam.page import GRAD_DTYPES, MOMENT_FORMATS, moment_dtype, parameter_format
from infinity.layout.chunks import Chunk
from infinity.tiers import PAGE_ALIGNMENT

PIECE_BYTES: int = _cpu_adam.PIECE_BYTES
"""Bytes of an entry of a `DeviceTable`, which describes one piece of a parameter."""
_LENGTH = 256
"""The length of every array in the workspace is a multiple of this number of bytes."""


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """The size of a workspace for parameters that chunks cut into `pieces` pieces."""

    pieces: int
    blocks: int
    """Number of blocks of gradients. A piece is cut into blocks of BLOCK elements and a shorter last one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of the five arrays in the workspace, in order: the sum of squares of each block, the table's
        entry of each piece, the number of tiles (elements of one warp) before each piece, the number of
        blocks before each piece, and `DeviceTable.stop`.
        """
        counts = (
            8 * self.blocks,
            PIECE_BYTES * self.pieces,
            4 * (self.pieces + 1),
            4 * (self.pieces + 1),
            4,
        )
        return tuple(round_up(each, _LENGTH) for each in counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace, a multiple of 4096."""
        return round_up(sum(self.lengths), PAGE_ALIGNMENT)


def workspace_of(chunks: Iterable[Chunk]) -> WorkspaceSize:
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    return WorkspaceSize(
        pieces=len(pieces),
        blocks=sum(-(-piece.count // BLOCK) for piece in pieces),
    )


def largest_workspace(sizes: Iterable[int], chunk_elements: int, ranks: int = 1) -> WorkspaceSize:
    """Return a workspace that is enough for parameters of these sizes, wherever chunks cut them into pieces.
    sizes: number of elements of each parameter. chunk_elements: length of a chunk in elements. ranks: number
    of ranks that divide the parameters, each of which needs a workspace for its own shards.
    """
    counts = list(sizes)
    # A shard may end inside of a parameter, and is rounded up to 4096 elements.
    more = 0 if ranks == 1 else 1 + -(-PAGE_ALIGNMENT // BLOCK)
    return WorkspaceSize(
        pieces=sum(-(-numel // (ranks * chunk_elements)) + 1 + more for numel in counts),
        blocks=sum(-(-numel // (ranks * BLOCK)) + more for numel in counts),
    )


TILE: int = _cpu_adam.TILE
"""Number of elements that one warp updates. A piece is divided into tiles of this size; the last may be
shorter.
"""
MOST_HYPERS: int = _cpu_adam.MOST_HYPERS
"""The most different sets of hyper-parameters in one launch of the update kernel."""
MOST_PARAMETERS: int = _cpu_adam.MOST_PARAMETERS
"""The most consecutive parameters of a DeviceTable that one launch of the update kernel covers."""
FOLDED_BYTES: int = _cpu_adam.FOLDED_BYTES

_Struct: TypeAlias = "npt.NDArray[np.void]"
_Counts: TypeAlias = "npt.NDArray[np.int64]"

_PIECE = np.dtype(
    {
        "names": [
            *("arrays", "start", "count", "index", "parameter", "gradient", "format", "moments"),
            "index_high",
        ],
        "formats": ["9<u8", "<u4", "<u4", "<u4", "<u4", "u1", "u1", "u1", "<u4"],
        "offsets": [0, 72, 76, 80, 84, 88, 89, 90, 92],
        "itemsize": PIECE_BYTES,
    }
)
UPDATE_LAUNCH = np.dtype(
    {
        "names": [
            *("pieces", "tiles", "stop", "gradients", "first", "end", "parameter", "hypers", "seeds"),
            "hyper",
        ],
        "formats": [
            *("<u8", "<u8", "<u8", f"{MOST_PARAMETERS}<u8", "<u4", "<u4", "<u4"),
            f"{MOST_HYPERS}V{FOLDED_BYTES}",
            f"{MOST_PARAMETERS}<u4",
            f"{MOST_PARAMETERS}u1",
        ],
        "offsets": [0, 8, 16, 24, 2072, 2076, 2080, 2084, 2788, 3812],
        "itemsize": 4072,
    }
)
MOST_PIECES: int = _cpu_adam.MOST_PIECES
"""The most pieces that one launch of the kernel for moving chunks updates."""
PIECES_LAUNCH = np.dtype(
    {
        "names": ["pieces", "tiles", "count", "hypers", "seeds", "hyper"],
        "formats": [
            (_PIECE, (MOST_PIECES,)),
            *(f"{MOST_PIECES + 1}<u4", "<u4", f"{MOST_HYPERS}V{FOLDED_BYTES}"),
            *(f"{MOST_PIECES}<u4", f"{MOST_PIECES}u1"),
        ],
        "offsets": [0, 2688, 2804, 2808, 3512, 3624],
        "itemsize": 3656,
    }
)
SQUARES_LAUNCH = np.dtype(
    {
        "names": ["pieces", "blocks", "count", "sums"],
        "formats": ["<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 32,
    }
)
FRESH_SQUARES_LAUNCH = np.dtype(
    {
        "names": ["gradient", "sums", "count", "stop", "number", "dtype"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "u1"],
        "offsets": [0, 8, 16, 24, 32, 36],
        "itemsize": 40,
    }
)


class Stop(NamedTuple):
    """What a kernel that measures a gradient does if an element of the gradient is not finite."""

    word: torch.Tensor
    """int32 (1,) on the device, which gets `number` if it is 0."""
    number: int


def fresh_squares_launch(gradient: torch.Tensor, sums: torch.Tensor, stop: Stop | None = None) -> _Struct:
    """Make the argument of the kernel that sums the squares of each block of BLOCK elements of one gradient.

    gradient: (n,), contiguous, on the device. sums: float64 on the device, one for each block. Returns a
    scalar array of the numpy dtype FRESH_SQUARES_LAUNCH. The kernel needs a warp for each block.
    """
    launch = np.zeros((), FRESH_SQUARES_LAUNCH)
    launch["gradient"], launch["sums"], launch["count"] = gradient.data_ptr(), sums.data_ptr(), len(gradient)
    launch["dtype"] = GRAD_DTYPES[gradient.dtype].value
    if stop is not None:
        launch["stop"], launch["number"] = stop.word.data_ptr(), stop.number
    return launch


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """The arrays of one chunk on the device, and the parameters that lie in it."""

    work: Update
    """The arrays of the chunk, and one segment for each piece of a parameter.

    Each array has at most 2**32 - 1 elements, and `accumulated` is None. Only `start`, `count` and `index` of
    a segment are used; hyper-parameters and seeds are given for each update.
    """
    parameters: Sequence[Hashable]
    """The key of the parameter of each segment of `work`."""


def work_of(
    chunk: Chunk,
    gradients: torch.Tensor,
    parameters: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    moments: Mapping[str, Any],
) -> Update:
    """Describe the arrays of a chunk for an update on the device, as in `DeviceChunk.work`.

    gradients: (chunk.count,) in their dtype, or empty if each update says where they are. parameters:
    (chunk.count,) in the dtype in which the model uses them. states: the chunk's optimizer states by name.
    moments: those of them that `Rule.moments_of` selects.
    """
    master = states.get("master")
    return Update(
        grad=gradients,
        segments=[Segment(each.offset, each.count, index=each.start) for each in chunk.pieces],
        hypers=[],
        parameter=parameters if master is None else master,
        copy=None if master is None else parameters,
        remainder=states.get("remainder"),
        **moments,
    )


class DeviceTable:
    """A table in the device's memory that says where each piece of some chunks lies, sorted by parameter. The
    methods make the arguments of the kernels that use the table.
    """

    def __init__(self, chunks: Sequence[DeviceChunk], memory: torch.Tensor) -> None:
        """Write the table of `chunks` into `memory`, and wait until it is there.

        memory: a uint8 tensor on the device, with at least `WorkspaceSize.nbytes` elements for these chunks,
        which the caller keeps and leaves unchanged while the table is used.
        """
        self.rows: dict[Hashable, int] = {}
        """Key of a parameter -> its index in this table."""
        for chunk in chunks:
            for whose in chunk.parameters:
                self.rows.setdefault(whose, len(self.rows))
        pieces = np.zeros(sum(len(chunk.parameters) for chunk in chunks), _PIECE)
        start = 0
        for chunk in chunks:
            start, before = start + len(chunk.parameters), start
            pieces[before:start] = describe(chunk.work, [self.rows[whose] for whose in chunk.parameters])
        index = np.array([each.index for chunk in chunks for each in chunk.work.segments], np.int64)
        pieces = pieces[np.lexsort((index, pieces["parameter"]))]
        self.tiles = _before(-(-pieces["count"].astype(np.int64) // TILE))
        """Number of tiles before each piece, then the number of all: int64 (pieces + 1,)."""
        self.pieces = np.searchsorted(pieces["parameter"], np.arange(len(self.rows) + 1))
        """Number of pieces before each parameter, then the number of all: int64 (parameters + 1,)."""
        blocks = _before(-(-pieces["count"].astype(np.int64) // BLOCK))
        self.blocks = int(blocks[-1])
        self._blocks_before = blocks[self.pieces]
        self.kinds = {(int(each["gradient"]), int(each["format"]), int(each["moments"])) for each in pieces}
        """The formats that occur: tuples (gradient, parameter, moments) of the numbers in `UpdateKind`."""
        contents = (
            pieces,
            self.tiles.astype(np.uint32),
            blocks.astype(np.uint32),
            np.zeros(1, np.uint32),
        )
        size = WorkspaceSize(len(pieces), self.blocks)
        parts = memory[: sum(size.lengths)].split(size.lengths)
        for part, content in zip(parts[1:], contents, strict=True):
            data = torch.from_numpy(content.view(np.uint8).reshape(-1))
            part[: data.numel()].copy_(data)
        self._addresses = [part.data_ptr() for part in parts]

    def squares(self, memory: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each block of BLOCK gradient elements, float64 (blocks,), a view of `memory`.
        Valid after the launch of `squares_launch`. memory: the tensor given to the constructor.
        """
        return memory[: 8 * self.blocks].view(torch.float64)

    def stop(self, memory: torch.Tensor) -> torch.Tensor:
        """The number of the first gradient that was not finite, of those measured alone by the launch of
        `fresh_squares_launch`; 0: all were. int32 (1,), a view of `memory`, as in `squares`.
        """
        start = self._addresses[4] - self._addresses[0]
        return memory[start : start + 4].view(torch.int32)

    def place(self, whose: Hashable) -> slice:
        """The range of a parameter's blocks in the result of `squares`. whose: the parameter's key."""
        row = self.rows[whose]
        return slice(int(self._blocks_before[row]), int(self._blocks_before[row + 1]))

    def update_launch(self, first: int, end: int) -> _Struct:
        """Make the argument of the update kernel for the parameters [first, end) of the table, as in `rows`.

        Returns a scalar array of the numpy dtype UPDATE_LAUNCH in which no parameter has an update. The
        caller sets four fields: `hypers`, the sets of hyper-parameters; `hyper`, the index of each
        parameter's set; `seeds`, each parameter's seed of stochastic rounding; and `gradients`, the address
        of each parameter's gradient, or 0 if it lies in the arrays of the chunks. Nothing is updated while
        `stop` is not 0.
        """
        launch = np.zeros((), UPDATE_LAUNCH)
        launch["pieces"], launch["tiles"], launch["stop"] = *self._addresses[1:3], self._addresses[4]
        launch["first"], launch["end"], launch["parameter"] = self.pieces[first], self.pieces[end], first
        launch["hyper"] = _cpu_adam.NO_UPDATE
        return launch

    def squares_launch(self) -> _Struct:
        """Make the argument of the kernel that sums the squares of each block of BLOCK gradient elements.

        Returns a scalar array of the numpy dtype SQUARES_LAUNCH. The kernel needs a warp for each of `blocks`
        blocks.
        """
        launch = np.zeros((), SQUARES_LAUNCH)
        launch["pieces"], launch["blocks"] = self._addresses[1], self._addresses[3]
        launch["count"], launch["sums"] = self.pieces[-1], self._addresses[0]
        return launch


def describe(work: Update, parameters: Sequence[int]) -> _Struct:
    """Make the table's entries for the pieces of a chunk, which are the segments of `work`: their addresses,
    ranges and formats. parameters: the number of each piece's parameter in its table.
    """
    arrays = (
        *(work.grad, work.accumulated, work.parameter, work.remainder, work.copy),
        *(work.first_moment, work.second_moment, work.first_scale, work.second_scale),
    )
    assert work.grad is not None
    pieces = np.zeros(len(work.segments), _PIECE)
    pieces["arrays"] = [0 if each is None else _address(each) for each in arrays]
    pieces["start"] = [each.start for each in work.segments]
    pieces["count"] = [each.count for each in work.segments]
    pieces["index"] = [each.index & 0xFFFFFFFF for each in work.segments]
    pieces["index_high"] = [each.index >> 32 for each in work.segments]
    pieces["parameter"] = parameters
    pieces["gradient"] = GRAD_DTYPES[work.grad.dtype].value
    pieces["format"] = parameter_format(work).value
    pieces["moments"] = MOMENT_FORMATS[moment_dtype(work)].value
    return pieces


def _before(counts: _Counts) -> _Counts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _address(array: Array) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.address
