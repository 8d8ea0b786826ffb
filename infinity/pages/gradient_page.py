"""A gradient page: one unit's gradients, chunk by chunk: what there is of them, and where."""

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
class Stage:
    """A chunk of a gradient page in staging, newer than its home."""

    data: torch.Tensor
    """uint8, as the chunk at home."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradient is still expected in this backward."""


@dataclass(slots=True)
class ChunkState:
    """What is known of one chunk of a gradient page."""

    stage: Stage | None = None
    sent: int = 0
    """The number of the last job of the ring that changes the chunk; 0: none."""
    stored: bool = False
    """Whether the home holds anything of this step."""
    blocks: dict[tuple[int, int], npt.NDArray[np.float64]] = field(default_factory=dict)
    """(parameter, first element) of a piece -> its blocks' sums of squares."""


class GradientPage:
    """The gradients of one unit's trainable parameters."""

    def __init__(
        self, index: int, layout: UnitLayout, home: Home, plan: Plan, ring: GradientRing | None = None
    ) -> None:
        """ring: through which gradients come down, where they do."""
        self._ring = ring
        self.index = index
        self.layout = layout
        self.home = home
        self.content: set[int] = set()
        """Parameters that have a gradient."""
        self.arrivals: Counter[int] = Counter()
        """Parameter -> how many gradients were added for it since the last `Gradients.clear`."""
        self.consumed = False
        """Whether eager updates have them, so that nobody else does."""
        self._runs: dict[int, list[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]] = {}
        self.states = [ChunkState() for _ in layout.chunks]
        self._trainable = [index for index, each in enumerate(layout.parameters) if each.trainable]
        self._offsets = [plan.gradient_offset(index, each) for each in range(len(layout.chunks))]
        self._dtypes = [plan.gradient_dtype(layout.regions[c.region].dtype) for c in layout.chunks]
        self.as_they_come = frozenset(
            index
            for index in self._trainable
            if plan.gradient_dtype(layout.parameters[index].dtype)
            != plan.precision.accumulate_dtype(layout.parameters[index].dtype)
        )
        """Parameters whose gradient rests as it comes, not in the dtype of sums: one, and no more."""

    def check_single(self, parameter: int, dtype: torch.dtype) -> None:
        """Of one of `as_they_come`. Raises ConfigError where a gradient of this dtype cannot rest so."""
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
        """Whether all of these, the unit's parameters, that take gradients have had so many."""
        if accumulation <= 0:
            return True
        # The first ones' come last: as a rule the first look ends it.
        return not any(
            self.arrivals.get(index, 0) < accumulation and parameters[index].requires_grad
            for index in self._trainable
        )

    def dtype(self, number: int) -> torch.dtype:
        """Of a chunk's elements."""
        return self._dtypes[number]

    def nbytes(self, number: int) -> int:
        """Of a chunk at home, in whole 4 KiB blocks."""
        return round_up(self.layout.chunks[number].count * self._dtypes[number].itemsize, PAGE_ALIGNMENT)

    def offset(self, number: int) -> int:
        """Of a chunk in the page, in bytes."""
        return self._offsets[number]

    def in_ram(self, number: int) -> torch.Tensor | None:
        """A chunk where it is in host RAM, uint8 (nbytes,): staged, or at home there; else None.

        Waits until all that was added to it is there. Raises the ring's failure.
        """
        self.settle(number)
        return self.memory(number)

    def is_in_ram(self, number: int) -> bool:
        """Whether a chunk is in host RAM, or what is added to it on its way there."""
        return self.home.in_place or self.states[number].stage is not None

    def arrived(self, number: int) -> bool:
        """Whether all that was added to a chunk is there. Never blocks."""
        return self._ring is None or self._ring.arrived(self.states[number].sent)

    def settle(self, number: int) -> None:
        """Wait until all that was added to a chunk is there. Raises the ring's failure."""
        if self._ring is not None and self.states[number].sent:
            self._ring.settle(self.states[number].sent)

    def memory(self, number: int) -> torch.Tensor | None:
        """`in_ram`, for who adds: without waiting."""
        stage = self.states[number].stage
        if stage is not None:
            return stage.data
        return self.home.view(self._offsets[number], self.nbytes(number)) if self.home.in_place else None

    def runs(self, parameter: int) -> Sequence[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        """The parts of a parameter's gradient, at home in memory, that lie in one piece of it.

        (first element, gradient, (chunk, first element) of each piece); one, where chunks have no gap.
        """
        if parameter not in self._runs:
            self._runs[parameter] = list(self._find_runs(parameter))
        return self._runs[parameter]

    def forget_runs(self) -> None:
        """Let go of memory at home."""
        self._runs.clear()

    def _find_runs(self, parameter: int) -> Iterator[tuple[int, torch.Tensor, Sequence[tuple[int, int]]]]:
        start = offset = nbytes = 0
        places: list[tuple[int, int]] = []
        pieces = self.layout.pieces(parameter)
        for number, piece in pieces:
            size = self.dtype(number).itemsize
            begin = self.offset(number) + piece.offset * size
            if places and begin != offset + nbytes:
                yield start, self.home.view(offset, nbytes).view(self.dtype(places[0][0])), places
                places = []
            if not places:
                start, offset, nbytes = piece.start, begin, 0
            nbytes += piece.count * size
            places.append((number, piece.start))
        if places:
            yield start, self.home.view(offset, nbytes).view(self.dtype(places[0][0])), places

    def typed(self, number: int, data: torch.Tensor) -> torch.Tensor:
        """A chunk's elements in uint8 `data` that starts with them."""
        count = self.layout.chunks[number].count
        return data[: count * self._dtypes[number].itemsize].view(self._dtypes[number])

    def squares(self, parameter: int) -> float:
        """The sum of squares of what is stored: finite if and only if every element is.

        Waits for it. Raises the ring's failure.
        """
        total = 0.0
        for number, piece in self.layout.pieces(parameter):
            self.settle(number)
            sums = self.states[number].blocks[parameter, piece.start]
            if sums.size:
                total = cpu_adam.sum_in_order(sums, total)
        return total
