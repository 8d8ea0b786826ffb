"""Gradient page: the gradients of one unit, chunk by chunk: which exist, and where in memory they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from infinity.config import round_up
from infinity.errors import ConfigError
from infinity.layout.chunks import Piece, UnitLayout
from infinity.layout.shards import kept_pieces
from infinity.pages.gradient_copies import GradientCopies, GradientCopy
from infinity.pages.home import Home
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT
from infinity.tiers.link import Transfer


@dataclass(eq=False)
class FreshGradient:
    """A gradient as autograd made it, which takes device memory as long as a piece of it stays there."""

    nbytes: int


@dataclass(slots=True, eq=False)
class StayingPiece:
    """The gradient of a piece that waits in device memory for an update there."""

    gradient: torch.Tensor
    """(piece.count,) on the device."""
    home: torch.Tensor
    """Its place in host RAM, of the same form."""
    whole: FreshGradient
    """The gradient to whose memory it belongs."""


@dataclass(slots=True, eq=False)
class GradientChunk:
    """Where the gradients of one chunk are, which of them have arrived, and the sums of their squares.

    An update takes the object when it is decided, and the page gets another one with the next step's
    gradients.
    """

    staged: torch.Tensor | None = None
    """The gradients of the chunk while they are in staging, host RAM that is leased to updates and gradients:
    uint8, in the layout that they have at home. What lies at home is out of date meanwhile.
    """
    waiting: set[int] = field(default_factory=set)
    """While staged, indices of the parameters whose gradient is still awaited in the running backward."""
    staying: dict[tuple[int, int], StayingPiece] = field(default_factory=dict)
    """(index of a parameter, index in the parameter of a piece's first element) -> the piece's gradient, for
    those that wait in device memory.
    """
    copy: GradientCopy | None = None
    """The last copy of a gradient from the device straight to the chunk; None if there is no such copy."""
    sent: int = 0
    """The number of the last job of GradientCopies that adds to the chunk; 0 if there is no such job."""
    stored: bool = False
    """Whether gradients of this step were written from staging (host RAM) to the chunk's place in the
    gradient page's home.
    """
    at_home: bool = False
    """Whether `staged` lies at home, too. Only an update that has taken the object still refers to `staged`
    then.
    """
    blocks: dict[tuple[int, int], npt.NDArray[np.float64] | None] = field(default_factory=dict)
    """(index of a parameter, index in the parameter of its first element that lies in this chunk) -> sums of
    squares of blocks of the parameter's gradient. A block is cpu_adam.BLOCK elements, counted from the
    parameter's first element, and has its sum in one array of one chunk. An array is empty if an earlier
    chunk's array has the sums of its blocks. None: the sums of the range of `GradientPage.runs` that begins
    there have not been computed yet.
    """


class GradientPage:
    """The gradients of one unit's trainable parameters."""

    def __init__(
        self, index: int, layout: UnitLayout, home: Home, plan: Plan, copies: GradientCopies | None = None
    ) -> None:
        """index: the unit's index. layout: where the unit's parameters lie. home: the page's place in a
        tier. copies: the gradients on their way from a device with its own memory; None if the device has no
        memory of its own.
        """
        self._copies = copies
        self.index = index
        self.layout = layout
        self.home = home
        self.content: set[int] = set()
        """Indices of the parameters whose gradient is stored in this step."""
        self.zeros: set[int] = set()
        """Indices of the parameters that have a gradient of zeros unless they are in `content`. Such a
        gradient, which `zero_grad(set_to_none=False)` leaves, is not stored.
        """
        self.arrivals: Counter[int] = Counter()
        """Index of a parameter -> number of gradients received since the last `Gradients.clear`."""
        self.piece_arrivals: Counter[tuple[int, int]] = Counter()
        """(index of a parameter, first element of a piece) -> number of micro-batches for which the piece has
        the gradients of all ranks. Used only with several ranks.
        """
        self.consumed = False
        """Whether an eager update has taken the gradients during backward. No other code may use the
        gradients after that.
        """
        self._runs: dict[int, list[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]] = {}
        self.chunks = [GradientChunk() for _ in layout.chunks]
        self.latest_copy: GradientCopy | None = None
        """The latest of the chunks' `copy`."""
        self.latest_job = 0
        """The latest of the chunks' `sent`."""
        share = plan.share
        self.pieces = kept_pieces(layout, share, whole=share.whole_gradients)
        """Function from a parameter's index to the parameter's pieces whose gradients are in this page."""
        self.owned = kept_pieces(layout, share, whole=False)
        """Function from a parameter's index to the parameter's pieces whose gradients this rank adds up."""
        self._trainable = [
            index
            for index, each in enumerate(layout.parameters)
            if each.trainable and (share.whole_gradients or self.pieces(index))
        ]
        self._offsets = [plan.gradient_offset(index, each) for each in range(len(layout.chunks))]
        self._dtypes = [plan.gradient_dtype(layout.regions[c.region].dtype) for c in layout.chunks]
        self._stored_dtypes = [plan.gradient_dtype(each.dtype) for each in layout.parameters]
        self.as_they_come = frozenset(
            index
            for index in self._trainable
            if self._stored_dtypes[index] != plan.precision.accumulate_dtype(layout.parameters[index].dtype)
        )
        """Indices of parameters whose gradient is stored in the parameter's dtype because only one backward a
        step was declared, instead of in the accumulation dtype. A second gradient in a step is an error.
        """

    @property
    def having(self) -> set[int]:
        """Indices of the parameters that have a gradient, whether it is stored or known to be all zeros."""
        return self.content | self.zeros if self.zeros else self.content

    def check_single(self, parameter: int, dtype: torch.dtype) -> None:
        """Check a new gradient of a parameter in `as_they_come`. dtype: the new gradient's dtype.

        Raises ConfigError if the parameter already has a gradient, or if `dtype` is not the parameter's
        dtype.
        """
        layout = self.layout.parameters[parameter]
        name = layout.names[0]
        if parameter in self.content:
            raise ConfigError(
                f"One more gradient of {name} came than accumulation=1 declares for a step.",
                "Call zero_grad() after step(), and declare with accumulation= the number of backwards in a "
                "step, or leave accumulation= out (a parameter in several reentrant checkpoints gets one "
                "gradient from each).",
            )
        if dtype != layout.dtype:
            raise ConfigError(
                f"The gradient of {name} came in {dtype}, but accumulation=1 stores gradients in the "
                f"parameter's dtype, {layout.dtype}, which may not hold all of the gradient's bits.",
                "Do not change the parameter's grad_dtype, or leave accumulation= out.",
            )

    def complete(self, parameters: Sequence[torch.Tensor], accumulation: int) -> bool:
        """Whether every parameter that requires a gradient has received `accumulation` gradients.

        parameters: all parameters of the unit.
        """
        if accumulation <= 0:
            return True
        # The first parameters' gradients come last, so the first comparison usually decides.
        return not any(
            self.arrivals.get(index, 0) < accumulation and parameters[index].requires_grad
            for index in self._trainable
        )

    def has_piece(self, chunk_index: int, piece: Piece) -> bool:
        """Whether a gradient of a piece is stored."""
        return (piece.parameter, piece.start) in self.chunks[chunk_index].blocks

    def forget_piece(self, chunk_index: int, piece: Piece) -> None:
        """Forget the gradient of a piece, if one is stored. The next gradient begins a new sum."""
        self.chunks[chunk_index].blocks.pop((piece.parameter, piece.start), None)
        self.chunks[chunk_index].staying.pop((piece.parameter, piece.start), None)

    def arrived_piece(self, piece: Piece) -> None:
        """Count one more micro-batch whose gradients have been added to a piece on all ranks.

        The count of a parameter, in `arrivals`, becomes the smallest count of its pieces in this page.
        """
        self.piece_arrivals[piece.parameter, piece.start] += 1
        self.arrivals[piece.parameter] = min(
            self.piece_arrivals[piece.parameter, each.start] for _, each in self.pieces(piece.parameter)
        )

    def blank(self, parameter: int, count: int) -> torch.Tensor:
        """Return zeros in the form of `count` elements of a parameter's stored gradient: flat, in RAM."""
        return torch.zeros(count, dtype=self.stored_dtype(parameter), device="cpu")

    def stored_dtype(self, parameter: int) -> torch.dtype:
        """Dtype in which the gradient of a trainable parameter is stored."""
        return self._stored_dtypes[parameter]

    def dtype(self, chunk_index: int) -> torch.dtype:
        """Dtype in which the gradients of a chunk are stored."""
        return self._dtypes[chunk_index]

    def nbytes(self, chunk_index: int) -> int:
        """Bytes that the gradients of a chunk take at home, rounded up to whole 4 KiB blocks."""
        return round_up(
            self.layout.chunks[chunk_index].count * self._dtypes[chunk_index].itemsize, PAGE_ALIGNMENT
        )

    def offset(self, chunk_index: int) -> int:
        """Bytes from the start of the gradient page to the gradients of a chunk."""
        return self._offsets[chunk_index]

    def in_ram(self, chunk_index: int) -> torch.Tensor | None:
        """Return the gradients of a chunk as uint8 (nbytes,) if they are in staging or at home in host RAM;
        else None.

        Waits until all gradients of the chunk have come from the device. Raises `GradientCopies.failure` if
        one was lost on the way.
        """
        self.settle(chunk_index)
        return self.memory(chunk_index)

    def is_in_ram(self, chunk_index: int) -> bool:
        """Whether the memory where the gradients of a chunk are accumulated is in host RAM now, in staging or
        at home. New gradients may still be on their way to it.
        """
        return self.home.in_place or self.chunks[chunk_index].staged is not None

    def arrived(self, chunk_index: int) -> bool:
        """Whether all gradients of a chunk have come from the device, or stay there. Never blocks."""
        chunk = self.chunks[chunk_index]
        copied = chunk.copy is None or chunk.copy.done()
        return copied and (self._copies is None or self._copies.arrived(chunk.sent))

    @property
    def all_arrived(self) -> bool:
        """Whether all gradients of the page have come from the device. Never blocks."""
        copied = self.latest_copy is None or self.latest_copy.done()
        return copied and (self._copies is None or self._copies.arrived(self.latest_job))

    def settle(self, chunk_index: int) -> None:
        """Wait until all gradients of a chunk have come from the device.

        Raises `GradientCopies.failure` if a gradient was lost on the way.
        """
        self.send_home(chunk_index)
        self._await_copies(chunk_index)

    def send_home(self, chunk_index: int) -> None:
        """Begin to copy the gradients of a chunk that stay in device memory to their home in host RAM."""
        chunk = self.chunks[chunk_index]
        for key, piece in [*chunk.staying.items()]:
            assert self._copies is not None
            chunk.copy = self.latest_copy = self._copies.copy(piece.gradient, [(0, piece.home)], None)
            del chunk.staying[key]

    def _await_copies(self, chunk_index: int) -> None:
        chunk = self.chunks[chunk_index]
        if self._copies is not None and (chunk.copy is not None or chunk.sent):
            if chunk.copy is not None:
                chunk.copy.wait()
            if chunk.sent:
                self._copies.wait(chunk.sent)
            self._copies.check()

    def arriving(self, chunk_indices: Sequence[int]) -> list[Transfer | None]:
        """Return for each chunk the copy after which all its gradients have come from the device; None if
        they have.

        Waits for gradients that a worker adds. Raises `GradientCopies.failure` if a gradient was lost.
        """
        if self._copies is None:
            return [None] * len(chunk_indices)
        chunks = [self.chunks[each] for each in chunk_indices]
        self._copies.wait(max([each.sent for each in chunks]))
        self._copies.check()
        return [None if each.copy is None else each.copy.transfer for each in chunks]

    def memory(self, chunk_index: int, taken: GradientChunk | None = None) -> torch.Tensor | None:
        """Return the gradients of a chunk as `in_ram` does, but without waiting for gradients that have not
        come from the device yet.

        Called by code that adds a gradient to the chunk, and by the chunk's update. taken: the GradientChunk
        that an update has taken; None: the page's present one.
        """
        staged = (taken or self.chunks[chunk_index]).staged
        if staged is not None:
            return staged
        return (
            self.home.view(self._offsets[chunk_index], self.nbytes(chunk_index))
            if self.home.in_place
            else None
        )

    def runs(self, parameter: int) -> Sequence[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        """List the ranges of a parameter's gradient that are contiguous in the memory of the page's home, in
        order. There is one range if no padding between chunks divides the gradient.

        Each range is a tuple (start, elements, pieces). start: index in the parameter of the range's first
        element. elements: flat tensor, a view of the home. pieces: for each piece of the parameter in the
        range, (index of the piece's chunk, index in the parameter of the piece's first element). The home
        must be in memory, not on NVMe.
        """
        if parameter not in self._runs:
            self._runs[parameter] = list(self._find_runs(parameter))
        return self._runs[parameter]

    def forget_runs(self) -> None:
        """Forget the cached results of `runs`, because they are views of the home's memory and keep it
        alive.
        """
        self._runs.clear()

    def _find_runs(self, parameter: int) -> Iterator[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        start = offset = nbytes = 0
        places: list[tuple[int, int]] = []
        pieces = self.pieces(parameter)
        for chunk_index, piece in pieces:
            size = self.dtype(chunk_index).itemsize
            begin = self.offset(chunk_index) + piece.offset * size
            if places and begin != offset + nbytes:
                yield start, self.home.view(offset, nbytes).view(self.dtype(places[0][0])), places
                places = []
            if not places:
                start, offset, nbytes = piece.start, begin, 0
            nbytes += piece.count * size
            places.append((chunk_index, piece.start))
        if places:
            yield start, self.home.view(offset, nbytes).view(self.dtype(places[0][0])), places

    def typed(self, chunk_index: int, data: torch.Tensor) -> torch.Tensor:
        """Return a view of the beginning of `data` as the gradients of a chunk: a flat tensor with one
        gradient for each element of the chunk, in the dtype in which they are stored.

        data: the chunk's gradients as uint8, for example the result of `in_ram`.
        """
        count = self.layout.chunks[chunk_index].count
        return data[: count * self._dtypes[chunk_index].itemsize].view(self._dtypes[chunk_index])

    def squares(self, parameter: int, *, arrived: bool = False) -> list[npt.NDArray[np.float64]]:
        """Return the sums of squares of a parameter's stored gradient: arrays that hold together one sum for
        each block of cpu_adam.BLOCK elements, counted from the parameter's first element.

        Waits until the gradient has arrived in host RAM, unless the caller knows that it has (`arrived`).
        Raises `GradientCopies.failure` if a gradient was lost on the way.
        """
        found, arrived = [], arrived or self.all_arrived
        if arrived and self._copies is not None:
            self._copies.check()
        for chunk_index, piece in self.owned(parameter):
            if not arrived:
                self._await_copies(chunk_index)
            blocks = self.chunks[chunk_index].blocks
            sums = blocks[parameter, piece.start]
            if sums is None:
                assert self._copies is not None
                stored = next(each for start, each, _ in self.runs(parameter) if start == piece.start)
                sums = blocks[parameter, piece.start] = self._copies.measure(stored)
            found.append(sums)
        return found

    def finite(self, parameter: int, *, arrived: bool = False) -> bool:
        """Return whether all elements of a parameter's stored gradient are finite.

        Waits and raises as `squares` does, with the same `arrived`.
        """
        # The square of a finite element is far below the largest float64, so only others spoil a sum.
        sums = self.squares(parameter, arrived=arrived)
        return not sums or bool(np.isfinite(np.concatenate(sums)).all())
