"""Mixes: what becomes of each block's activations, and estimates of the steps. Pure.

[Note: mixes of blocks] The earliest pages leave ([Note: what leaves] in
infinity/activations/residual_pages.py), so where something leaves and something stays, what stays is of the
last blocks. The blocks that run again come before those whose pages leave, so a model has n blocks that run
again, then m that leave, then k that stay (`Mix`). The work, and the bytes that move, would be the same in
another order. But the backward comes to the blocks that run again when those of the m + k others are gone,
and the pages of the m blocks have the time in which the k last ones compute to go down, and to come up.

How long a step takes with each mix is predicted from estimates, which three kinds of steps without data give:
the one that keeps all, and those in which all that is saved leaves, with no block or every block run again.
Bytes on the device are those of the latter and what stays. The step that is chosen is run without data, for
its exact bytes. Of mixes that cannot be the best the plans are not made: the plan for the least of all that
several mixes take (`Mixes.least`) is assumed to be as fast as the fastest of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import NamedTuple

from infinity.activations.fake_steps import StepFacts
from infinity.config import round_up
from infinity.planning.fake_step import FakeStep
from infinity.planning.predict import Work
from infinity.planning.residual_states import ResidualBytes, window_of
from infinity.tiers import PAGE_ALIGNMENT

PARTS = (1, 2, 4, 8, 16, 32, 64)
"""RAM has room for all that leaves, divided by one of these numbers."""


class Mix(NamedTuple):
    """What becomes of the blocks of a model, and of what is saved after them."""

    again: int
    """Number of the first blocks, which run again. Their inputs leave."""
    away: int
    """Number of the next ones, whose saved tensors leave. If it is one more than there are, so does what is
    saved after the last block.
    """
    part: int
    """RAM has room for all that leaves, divided by this number."""


@dataclass(frozen=True)
class Demand:
    """What a step takes."""

    step: FakeStep
    room: ResidualBytes


@dataclass(frozen=True, kw_only=True)
class Mixes:
    """Estimates of what steps take; see [Note: mixes of blocks]."""

    names: tuple[str, ...] = ()
    """The blocks, in the order of their forwards."""
    works: Sequence[Work]
    """The work of a step in which the first n blocks run again, for each n from 0."""
    kept: FakeStep
    """The step that keeps all."""
    none: StepFacts
    """The step from which all saved tensors leave and in which no block runs again."""
    every: StepFacts
    """The step from which all saved tensors leave and in which all blocks run again."""
    nvme: bool
    """Whether what leaves may go on to disk."""
    _demands: dict[Mix, Demand] = field(default_factory=dict, init=False, repr=False)
    """The results of `demand`."""

    @functools.cached_property
    def points(self) -> list[Mix]:
        """All mixes in which something leaves and for which RAM is large enough."""
        blocks = len(self.names)
        pairs = [(again, away) for again in range(blocks + 1) for away in range(blocks + 2 - again)]
        mixes = [mix for pair in pairs for mix in self.of(*pair)]
        return [mix for mix in mixes if self._left(mix) and (mix.part == 1 or self._is_enough(mix))]

    def of(self, again: int, away: int) -> list[Mix]:
        """The mixes of these numbers of blocks."""
        return [Mix(again, away, part) for part in (PARTS if self.nvme else (1,))]

    def _is_enough(self, mix: Mix) -> bool:
        largest, room = max(self.none.largest, self.every.largest), self.demand(mix).room
        return room.ram >= room.window + 2 * largest

    @functools.cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """For the steps `none` and `every`: bytes of pages saved before the end of each block, in the order
        of blocks, after a 0 and before the bytes of all.
        """
        saved = [[each.blocks[name].saved for name in self.names] for each in (self.none, self.every)]
        none, every = ([*accumulate([0, *ends], max)] for ends in saved)  # blocks may be called in turns
        return [*none, self.none.room.saved], [*every, self.every.room.saved]

    def _left(self, mix: Mix) -> int:
        """Bytes of pages that leave."""
        none, every = self._ends
        return every[mix.again] + none[mix.again + mix.away] - none[mix.again]

    def _kept(self, mix: Mix) -> int:
        """Bytes of pages that stay."""
        return self._ends[0][-1] - self._ends[0][mix.again + mix.away]

    def _activations(self, mix: Mix) -> int:
        """Peak bytes of activations. The backward of a block that stays has no more than its second run
        would have, and what the blocks before it keep.
        """
        base = max(
            (self.every.step.activations or 0) * bool(mix.again),
            (self.none.step.activations or 0) * (bool(mix.away) or not mix.again),
        )
        kept, ends, blocks = self._kept(mix), self._ends[0], len(self.names)
        most, first = base + kept, mix.again + mix.away
        if not blocks or any(self.none.blocks[name].calls > 1 for name in self.names):
            return most
        before = [self.every.blocks[name].before for name in self.names]
        if not mix.away:  # what is saved after the last block was counted twice
            before[-1] -= max(0, before[-1] + ends[-1] - (self.kept.activations or 0))
        held = [max(0, ends[block + 1] - ends[first]) for block in range(blocks - 1)]
        phases = (bytes_before + more for bytes_before, more in zip(before, [*held, kept], strict=True))
        return min(most, max(base, *phases))

    def demand(self, mix: Mix) -> Demand:
        """What a step with this mix takes."""
        if mix not in self._demands:
            left, kept = self._left(mix), self._kept(mix)
            shares = (each.room.ram / each.room.down for each in (self.none, self.every) if each.room.down)
            saved = left + kept
            if not kept:
                left -= self.none.room.saved - self.none.room.down  # the newest page never leaves
            ram, window = round_up(int(left * max(shares, default=1)), PAGE_ALIGNMENT), window_of(saved)
            ram = round_up(ram // mix.part, PAGE_ALIGNMENT)
            read = max(0, left - ram) * (mix.part > 1)
            written = min(left, read + window) * (mix.part > 1)
            room = ResidualBytes(
                kept=kept,
                window=window,
                ram=ram,
                disk=round_up(written, PAGE_ALIGNMENT),
                saved=saved,
                down=left,
                up=left,
                written=written,
                read=read,
            )
            self._demands[mix] = Demand(FakeStep(self._activations(mix), self.works[mix.again]), room)
        return self._demands[mix]

    def least(self, mixes: Sequence[Mix]) -> Demand:
        """The least of each of the numbers of what steps with these mixes take."""
        demands = [self.demand(mix) for mix in mixes]
        names = [each.name for each in fields(ResidualBytes)]
        room = {name: min(getattr(each.room, name) for each in demands) for name in names}
        work = self.works[min(mix.again for mix in mixes)]
        activations = min(each.step.activations or 0 for each in demands)
        return Demand(FakeStep(activations, work), ResidualBytes(**room))
