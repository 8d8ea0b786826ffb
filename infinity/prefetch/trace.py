"""Trace: the order in which a step uses its units, recorded in one step and expected of the next step.

The trace is only a hint: a wrong expectation costs time, never correctness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

MOST_ACCESSES = 1 << 18
"""The most accesses that are recorded in one step; the next one begins a new step of the trace. This bounds
the memory of the trace in a loop that never calls `step`.
"""


class AccessKind(IntEnum):
    """The purpose for which a unit is used. An IntEnum, because members of an Enum hash slowly."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class Access(NamedTuple):
    unit: int
    kind: AccessKind


class _Sequence:
    """A list of accesses, with an index of the positions of each access and each pair of neighbours."""

    def __init__(self) -> None:
        self.entries: list[Access] = []
        self.trains = False
        self._places: dict[Access, list[int]] = {}
        self._places_after: dict[tuple[Access | None, Access], list[int]] = {}

    @property
    def last(self) -> Access | None:
        return self.entries[-1] if self.entries else None

    def append(self, access: Access) -> None:
        place = len(self.entries)
        self._places.setdefault(access, []).append(place)
        self._places_after.setdefault((self.last, access), []).append(place)
        self.entries.append(access)
        self.trains = self.trains or access.kind != AccessKind.FORWARD

    def find(self, access: Access, start: int) -> int | None:
        """The first position of `access` from `start` on, or else from 0 on; None if there is none."""
        return _at_or_after(self._places.get(access), start)

    def find_after(self, previous: Access | None, access: Access, start: int) -> int | None:
        """The first position of `access` directly after `previous`, from `start` on, or else from 0 on; None
        if there is none. previous: None for an access that begins the step.
        """
        return _at_or_after(self._places_after.get((previous, access)), start)


def _at_or_after(places: list[int] | None, start: int) -> int | None:
    if not places:
        return None
    at = bisect_left(places, start)
    return places[at] if at < len(places) else places[0]


class Trace:
    """Records the accesses of the running step, and follows the step along the order of an earlier step.

    Only one thread may record. Others may iterate over `upcoming` meanwhile: a learned order never changes in
    place.
    """

    def __init__(self, *, window: int = 8) -> None:
        """window: the most accesses that a step may skip at once and still follow the expected order."""
        assert window >= 0
        self._window = window
        self._recorded = _Sequence()
        self._learned = _Sequence()
        self._cursor = 0
        self._skipped: deque[Access] = deque(maxlen=window)

    @property
    def learned(self) -> Sequence[Access]:
        """The accesses expected of this step, in order; empty in the first step. Must not be changed."""
        return self._learned.entries

    def record(self, access: Access) -> bool:
        """Record that `access` happens now; returns whether the trace expected it.

        Expected are a repeat of the previous access and, in the learned order of an earlier step: the next
        access; one of the `window` accesses after the next, which skips those between; an access that was
        just skipped. Any other access moves the trace past the next place where the previous access and this
        one are neighbours, or else past the next place of `access`; if there is none, the trace stays where
        it is. Searches wrap around. The amortised time is O(log length).
        """
        previous = self._recorded.last
        if access == previous:
            return True
        if len(self._recorded.entries) >= MOST_ACCESSES:
            self.step_done()
        self._recorded.append(access)
        return self._follow(previous, access)

    def step_done(self) -> None:
        """End the step: the recorded order becomes the learned order, which is followed from its start.

        A recording without a backward or an update, such as an evaluation between steps, does not replace a
        learned order that has one: its forwards predict the next evaluation too. An empty recording replaces
        nothing.
        """
        if self._recorded.entries and (self._recorded.trains or not self._learned.trains):
            self._learned = self._recorded
        self._recorded = _Sequence()
        self._cursor = 0
        self._skipped.clear()

    @property
    def trains(self) -> bool:
        """Whether the learned order has a backward or an update, so that a step ends at its end."""
        return self._learned.trains

    def upcoming(self, limit: int, *, wrap: bool = True) -> Iterator[Access]:
        """Return an iterator over the accesses that are expected next, in order: at most `limit`, and at most
        as many as the learned order has. wrap: whether the iterator continues at the order's start after its
        end.
        """
        entries, cursor = self._learned.entries, self._cursor
        if not wrap:
            return iter(entries[cursor : cursor + limit])
        stop = cursor + min(limit, len(entries))
        places = chain(range(cursor, min(stop, len(entries))), range(stop - len(entries)))
        return map(entries.__getitem__, places)

    def _follow(self, previous: Access | None, access: Access) -> bool:
        learned, cursor = self._learned, self._cursor
        place = learned.find(access, cursor)
        if place is None:
            return False
        length = len(learned.entries)
        distance = (place - cursor) % length
        # A place more than half a cycle ahead counts as a place behind, not as a skip, even in a short cycle.
        if distance <= min(self._window, (length - 1) // 2):
            self._skipped.extend(learned.entries[(cursor + step) % length] for step in range(distance))
        elif access in self._skipped:
            self._skipped.remove(access)
            return True
        else:
            self._skipped.clear()
            again = learned.find_after(previous, access, cursor)
            self._cursor = ((place if again is None else again) + 1) % length
            return False
        self._cursor = (place + 1) % length
        return True
