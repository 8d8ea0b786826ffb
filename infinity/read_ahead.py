"""Optimizer states that are read before their update is due.

A lazy update begins after the backward, when the disk had little to do, and ends before its unit's forward,
when it has everything to do. So the states of the first chunks are brought up as soon as their gradients are
complete (`AfterGradients`): into the slot that the gradient waits in, or a free one.

An eager update begins with its unit's last gradient. Units on disk lie between others, so that the disk would
have nothing to do now and too much then: while enough slots are free, the states of the next unit in the
order of the backward are read before its gradients come (`BeforeGradients`), which then take the front of the
same slot.

Who needs a slot first takes it, and the states are read again by their update; as they are after a failure,
or when they were written meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.gradients import Gradients
from infinity.page import ParameterPage
from infinity.states import States
from infinity.store import Store
from infinity.tiers.link import Transfer

_LEFT = 4
"""One in so many slots is left to gradients for which nothing is read ahead. With every second one the disk
waited for room (309M parameters, all on NVMe: 3.7 s a step, now 2.9), with none the gradients did (3.4 s)."""


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
    unclaimed: torch.Tensor | None = None
    """The whole slot, while its front waits for a gradient that is to be staged."""

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
        self._held: dict[tuple[int, int], StatesAhead] = {}
        """(unit, chunk) -> its states, oldest first."""
        self._chosen: dict[int, range] = {}
        """Unit -> its chunks that are to be read once their gradients are complete."""
        self._next: deque[int] = deque()
        """Units whose states are to be read before their gradients come, in that order."""
        self._cleared = False
        """Whether the gradients of the last step are forgotten, so that the next one's can be told."""

    def choose(self, due: Sequence[int], order: Sequence[int]) -> None:
        """A step was made. due: its units that are not updated yet, in this order. order: of all units in the
        next forward, as far as it is expected."""
        raise NotImplementedError

    def advance(self, pending: Callable[[int], bool]) -> None:
        """Nobody waits for the disk: read on. pending: of a unit, whether its last update is not over."""

    def take(self, unit: int, number: int) -> StatesAhead | None:
        """The states of a chunk for its update, unless they are not what the page holds now."""
        ahead = self._held.pop((unit, number), None)
        if ahead is None:
            return None
        stage = self._gradients.pages[unit].states[number].stage
        current = ahead.version == self._states.pages[unit].version
        if current and ahead.staged == (stage is not None) and ahead.unclaimed is None:
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

    def _read(self, unit: int, number: int, place: torch.Tensor, *, staged: bool) -> StatesAhead | None:
        """Start to read a chunk's states to the front of `place`; None where that fails at once."""
        state = self._states.pages[unit]
        nbytes = state.formats[number].nbytes
        with contextlib.suppress(InfinityError):  # the update reads it again, and says what is wrong
            read = self._store.read(state.home, state.offset(number), place[:nbytes])
            found = StatesAhead(place[:nbytes], place[nbytes:], read, state.version, staged)
            self._held[unit, number] = found
            return found
        return None


class AfterGradients(ReadAhead):
    """For lazy updates: states of what the next forward needs first, once their gradients are complete."""

    def choose(self, due: Sequence[int], order: Sequence[int]) -> None:
        """From the next backward on, read what is updated first in the order of `due`."""
        chosen: dict[int, range] = {}
        left = self._store.plan.slots // 2  # the other slots keep gradients moving
        for unit in due:
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

    def _begin(self, unit: int, number: int) -> None:
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
        if self._read(unit, number, slot, staged=stage is not None) is not None and stage is not None:
            stage.shared = True


class BeforeGradients(ReadAhead):
    """For eager updates: the states of the units whose gradients come next, while slots are free."""

    def choose(self, due: Sequence[int], order: Sequence[int]) -> None:
        """The next backward brings gradients the other way round than its forward uses units."""
        pages, deferred = self._states.pages, self._store.plan.deferred
        self._next = deque(
            unit
            for unit in reversed(order)
            if unit in pages and pages[unit].home.extent is not None and unit not in deferred
        )
        self._cleared = False

    def advance(self, pending: Callable[[int], bool]) -> None:
        """Read the states of the next units, each as a whole, while enough slots are free."""
        self._cleared = self._cleared or not self._gradients.any
        while self._next and self._cleared:
            unit = self._next[0]
            gradients, parameters = self._gradients.pages[unit], self._pages[unit].parameters
            if not gradients.spent and not gradients.complete(parameters, self._accumulation):
                early = not gradients.complete(parameters, self._accumulation - 1)
                if early or pending(unit) or not self._read_unit(unit):
                    return
            self._next.popleft()

    def claim(self, unit: int, number: int) -> torch.Tensor | None:
        """The slot in whose front a chunk's gradient is to be staged, if its states are in that slot."""
        ahead = self._held.get((unit, number))
        if ahead is None or ahead.unclaimed is None:
            return None
        slot, ahead.unclaimed, ahead.staged = ahead.unclaimed, None, True
        return slot

    def whole(self, unit: int) -> bool:
        """Whether an update of the unit finds all of its states read."""
        begun = self._states.pages[unit].begun
        return all((unit, number) in self._held for number in range(len(begun)))

    def _read_unit(self, unit: int) -> bool:
        """Whether it has been tried: not before there is room, and no write under way."""
        state, gradients, slots = self._states.pages[unit], self._gradients.pages[unit], self._store.slots
        missing = [
            number
            for number in range(len(state.formats))
            if state.begun[number]
            and (unit, number) not in self._held
            and gradients.states[number].stage is None
        ]
        free = self._store.plan.slots - slots.leased // self._store.slot_bytes
        left = max(1, self._store.plan.slots // _LEFT)
        if free - len(missing) < left or state.home.busy(0, state.home.nbytes, False):
            return False
        for number in missing:
            slot = self._store.try_slot()
            if slot is None:
                return False
            front = 0 if gradients.home.in_place else gradients.nbytes(number)
            ahead = self._read(unit, number, slot[front:], staged=False)
            if ahead is not None and front:
                ahead.unclaimed = slot
        return True
