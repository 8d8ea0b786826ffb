"""Gradient page: one unit's gradients by chunk, which of them are there, and in which memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from infinity import cpu_adam
from infinity.config import round_up
from infinity.errors import ConfigError
from infinity.layout.chunks import UnitLayout
from infinity.pages.gradient_ring import GradientRing
from infinity.pages.home import Home
from infinity.planning.plan import Plan
from infinity.tiers import PAGE_ALIGNMENT


@dataclass(slots=True)
class StagedGradient:
    """A chunk of a gradient page that is in staging, where it is newer than at home."""

    data: torch.Tensor
    """The chunk's bytes, uint8, in the same form as at home."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradient is still expected in this backward."""


@dataclass(slots=True)
class GradientChunk:
    """The state of one chunk of a gradient page."""

    staged: StagedGradient | None = None
    sent: int = 0
    """Number of the last job of the ring that changes the chunk; 0: none."""
    stored: bool = False
    """Whether the home holds anything of this step."""
    blocks: dict[tuple[int, int], npt.NDArray[np.float64]] = field(default_factory=dict)
    """(parameter, first element) of a piece -> its blocks' sums of squares."""


class GradientPage:
    """The gradients of one unit's trainable parameters."""

    def __init__(
        self, index: int, layout: UnitLayout, home: Home, plan: Plan, ring: GradientRing | None = None
    ) -> None:
        """ring: the ring through which gradients leave a device with its own memory; None without one."""
        self._ring = ring
        self.index = index
        self.layout = layout
        self.home = home
        self.content: set[int] = set()
        """Parameters that have a gradient."""
        self.arrivals: Counter[int] = Counter()
        """Parameter -> number of gradients added for it since the last `Gradients.clear`."""
        self.consumed = False
        """Whether an eager update has taken the gradients; no other code may use them then."""
        self._runs: dict[int, list[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]] = {}
        self.chunks = [GradientChunk() for _ in layout.chunks]
        self._trainable = [index for index, each in enumerate(layout.parameters) if each.trainable]
        self._offsets = [plan.gradient_offset(index, each) for each in range(len(layout.chunks))]
        self._dtypes = [plan.gradient_dtype(layout.regions[c.region].dtype) for c in layout.chunks]
        self.as_they_come = frozenset(
            index
            for index in self._trainable
            if plan.gradient_dtype(layout.parameters[index].dtype)
            != plan.precision.accumulate_dtype(layout.parameters[index].dtype)
        )
        """Parameters whose gradient is stored in its own dtype, not the accumulation's: one for each step."""

    def check_single(self, parameter: int, dtype: torch.dtype) -> None:
        """Check a gradient for a parameter of `as_they_come`.

        Raises ConfigError if it is the second of the step, or not of the parameter's dtype.
        """
        layout = self.layout.parameters[parameter]
        name = layout.names[0]
        if parameter in self.content:
            raise ConfigError(
                f"One more gradient of {name} came than the one that accumulation=1 declares for a step.",
                "Call zero_grad() after step(), and declare with accumulation= how many there are in a step, "
                "or leave it out (a parameter that several reentrant checkpoints use has one of each).",
            )
        if dtype != layout.dtype:
            raise ConfigError(
                f"The gradient of {name} came in {dtype}, and with accumulation=1 it would rest in "
                f"{layout.dtype}, which need not have all of its bits.",
                "Leave the parameter's grad_dtype as it is, or accumulation= out.",
            )

    def complete(self, parameters: Sequence[torch.Tensor], accumulation: int) -> bool:
        """Whether every parameter that requires a gradient has had `accumulation` of them.

        parameters: all of the unit's.
        """
        if accumulation <= 0:
            return True
        # The first parameters' gradients come last, so the first comparison usually decides.
        return not any(
            self.arrivals.get(index, 0) < accumulation and parameters[index].requires_grad
            for index in self._trainable
        )

    def dtype(self, chunk_index: int) -> torch.dtype:
        """Dtype of a chunk's elements."""
        return self._dtypes[chunk_index]

    def nbytes(self, chunk_index: int) -> int:
        """Bytes of a chunk at home, in whole 4 KiB blocks."""
        return round_up(
            self.layout.chunks[chunk_index].count * self._dtypes[chunk_index].itemsize, PAGE_ALIGNMENT
        )

    def offset(self, chunk_index: int) -> int:
        """Bytes from the page's start to a chunk."""
        return self._offsets[chunk_index]

    def in_ram(self, chunk_index: int) -> torch.Tensor | None:
        """A chunk's bytes, uint8 (nbytes,), if they are in host RAM, staged or at home; else None.

        Waits until all that was added to the chunk has arrived. Raises the ring's failure.
        """
        self.settle(chunk_index)
        return self.memory(chunk_index)

    def is_in_ram(self, chunk_index: int) -> bool:
        """Whether a chunk is in host RAM, even if gradients for it are still arriving."""
        return self.home.in_place or self.chunks[chunk_index].staged is not None

    def arrived(self, chunk_index: int) -> bool:
        """Whether all that was added to a chunk has arrived. Never blocks."""
        return self._ring is None or self._ring.arrived(self.chunks[chunk_index].sent)

    def settle(self, chunk_index: int) -> None:
        """Wait until all that was added to a chunk has arrived. Raises the ring's failure."""
        if self._ring is not None and self.chunks[chunk_index].sent:
            self._ring.settle(self.chunks[chunk_index].sent)

    def memory(self, chunk_index: int) -> torch.Tensor | None:
        """`in_ram` without waiting, for code that adds to the chunk."""
        staged = self.chunks[chunk_index].staged
        if staged is not None:
            return staged.data
        return (
            self.home.view(self._offsets[chunk_index], self.nbytes(chunk_index))
            if self.home.in_place
            else None
        )

    def runs(self, parameter: int) -> Sequence[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        """The contiguous runs of a parameter's gradient at home in memory; one if its chunks have no gap.

        Each is (first element, gradient, [(chunk, first element) of each piece in the run]).
        """
        if parameter not in self._runs:
            self._runs[parameter] = list(self._find_runs(parameter))
        return self._runs[parameter]

    def forget_runs(self) -> None:
        """Drop the views of memory at home."""
        self._runs.clear()

    def _find_runs(self, parameter: int) -> Iterator[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        start = offset = nbytes = 0
        places: list[tuple[int, int]] = []
        pieces = self.layout.pieces(parameter)
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
        """A chunk's elements, a view of uint8 `data` that starts with them."""
        count = self.layout.chunks[chunk_index].count
        return data[: count * self._dtypes[chunk_index].itemsize].view(self._dtypes[chunk_index])

    def squares(self, parameter: int) -> float:
        """The sum of squares of a stored gradient: finite if and only if every element is.

        Waits until the gradient has arrived. Raises the ring's failure.
        """
        total = 0.0
        for chunk_index, piece in self.layout.pieces(parameter):
            self.settle(chunk_index)
            sums = self.chunks[chunk_index].blocks[parameter, piece.start]
            if sums.size:
                total = cpu_adam.sum_in_order(sums, total)
        return total
