"""Optimizer states that the next forward needs first are read while the backward still computes.

A lazy update begins after the backward, when the disk had little to do, and ends before its unit's forward,
when it has everything to do. So the states of the first chunks are brought up as soon as their gradients are
complete: into the slot that the gradient waits in, or a free one. Who needs that slot first takes it, and the
states are read again by their update; as they are after a failure, or when they were written meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.gradients import Gradients
from infinity.page import ParameterPage
from infinity.states import States
from infinity.store import Store
from infinity.tiers.link import Transfer


@dataclass(slots=True, eq=False)
class StatesAhead:
    """A chunk's states, on their way into a slot."""

    states: torch.Tensor
    """uint8, the chunk's part of the optimizer page."""
    rest: torch.Tensor
    """What is left of the slot."""
    read: Transfer
    version: int
    """Of the optimizer page that was read."""
    staged: bool
    """Whether the gradient's stage has the same slot."""

    def end(self) -> None:
        """Wait until the slot is not touched any more."""
        with contextlib.suppress(InfinityError):
            self.read.wait()


class ReadAhead:
    """What is read ahead for one runtime's updates. Called under the runtime's lock."""

    def __init__(
        self,
        pages: Sequence[ParameterPage],
        gradients: Gradients,
        states: States,
        store: Store,
        *,
        accumulation: int,
    ) -> None:
        """accumulation: gradients of each parameter in a step."""
        self._pages = pages
        self._gradients = gradients
        self._states = states
        self._store = store
        self._accumulation = accumulation
        self._most = store.plan.slots // 2
        """Chunks: the other slots keep gradients moving."""
        self._chosen: Mapping[int, Sequence[int]] = {}
        """Unit -> its chunks that are to be read ahead in a backward."""
        self._held: dict[tuple[int, int], StatesAhead] = {}
        """(unit, chunk) -> its states, oldest first."""

    def choose(self, order: Sequence[int]) -> None:
        """From the next backward on, read what is updated first in this order of units."""
        chosen, left = {}, self._most
        for unit in order:
            state = self._states.pages[unit]
            if left and state.home.extent is not None:
                chosen[unit] = range(min(left, len(state.formats)))
                left -= len(chosen[unit])
        self._chosen = chosen

    def look(self, unit: int) -> None:
        """A gradient of the unit was added: if that was the last, read ahead what is chosen of it."""
        gradients = self._gradients.pages[unit]
        if unit not in self._chosen or not gradients.complete(
            self._pages[unit].parameters, self._accumulation
        ):
            return
        for number in self._chosen[unit]:
            if (unit, number) not in self._held and self._states.pages[unit].begun[number]:
                self._begin(unit, number)

    def take(self, unit: int, number: int) -> StatesAhead | None:
        """The states of a chunk for its update, unless they are not what the page holds now."""
        ahead = self._held.pop((unit, number), None)
        if ahead is None:
            return None
        stage = self._gradients.pages[unit].states[number].stage
        if ahead.version == self._states.pages[unit].version and ahead.staged == (stage is not None):
            return ahead
        ahead.end()
        return None

    def free_a_slot(self) -> bool:
        """Give up what was read last; False if there is nothing."""
        if not self._held:
            return False
        self._held.popitem()[1].end()
        return True

    def clear(self) -> None:
        """Give up everything."""
        while self.free_a_slot():
            pass

    def _begin(self, unit: int, number: int) -> None:
        state = self._states.pages[unit]
        gradients = self._gradients.pages[unit]
        stage = gradients.states[number].stage
        if stage is not None:
            slot = stage.rest
        elif gradients.home.in_place:
            slot = self._store.try_slot()
        else:  # it went home: the slots are needed
            slot = None
        if slot is None:
            return
        nbytes = state.formats[number].nbytes
        with contextlib.suppress(InfinityError):  # the update reads it again, and says what is wrong
            read = self._store.read(state.home, state.offset(number), slot[:nbytes])
            self._held[unit, number] = StatesAhead(
                slot[:nbytes], slot[nbytes:], read, state.version, stage is not None
            )
            if stage is not None:
                stage.shared = True
