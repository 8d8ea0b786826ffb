"""Trace: the order in which a step uses its units, recorded while it runs and expected of the next step.

It is only a hint: a wrong expectation costs time, never correctness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

MOST_ACCESSES = 1 << 18
"""Accesses after which a step ends by itself, so that a loop that never steps takes bounded memory."""


class AccessKind(IntEnum):
    """The purpose of an access. An IntEnum, because accesses are hashed often and Enum hashes slowly."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class Access(NamedTuple):
    """One use of one unit."""

    unit: int
    kind: AccessKind


class _Sequence:
    """Accesses in order, with an index of where each one, and each pair of neighbours, occurs."""

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
        """The first place of `access` from `start` on, wrapping around; None if it does not occur."""
        return _at_or_after(self._places.get(access), start)

    def find_after(self, previous: Access | None, access: Access, start: int) -> int | None:
        """`find` for an `access` that directly follows `previous` (None: that begins the step)."""
        return _at_or_after(self._places_after.get((previous, access)), start)


def _at_or_after(places: list[int] | None, start: int) -> int | None:
    if not places:
        return None
    at = bisect_left(places, start)
    return places[at] if at < len(places) else places[0]


class Trace:
    """Records the step that runs now and follows it along the learned order of an earlier one.

    One thread records; `upcoming` may be read meanwhile, for a learned order never changes in place.
    """

    def __init__(self, *, window: int = 8) -> None:
        """window: number of learned accesses that may be left out without a divergence."""
        assert window >= 0
        self._window = window
        self._recorded = _Sequence()
        self._learned = _Sequence()
        self._cursor = 0
        self._skipped: deque[Access] = deque(maxlen=window)

    @property
    def learned(self) -> Sequence[Access]:
        """The order expected of this step; empty during the first one. Not to be changed."""
        return self._learned.entries

    def record(self, access: Access) -> bool:
        """Notes that `access` happens now; returns whether it was expected here.

        These are expected: the next learned access, one of the `window` after it (those between are skipped),
        one that was skipped just before and comes late, and an immediate repeat. Anything else is a
        divergence: the trace then moves to the next place, wrapping around, where the same two accesses
        follow each other, else to the next place of this one, and stays if there is none. Amortised
        O(log length).
        """
        previous = self._recorded.last
        if access == previous:
            return True
        if len(self._recorded.entries) >= MOST_ACCESSES:
            self.step_done()
        self._recorded.append(access)
        return self._follow(previous, access)

    def step_done(self) -> None:
        """Ends the step: the recorded order is expected from now on, from its start.

        A recording with neither a backward nor an update (an evaluation between steps, nothing at all) does
        not replace one that has them: the forwards of the learned step predict evaluations as well.
        """
        if self._recorded.entries and (self._recorded.trains or not self._learned.trains):
            self._learned = self._recorded
        self._recorded = _Sequence()
        self._cursor = 0
        self._skipped.clear()

    def upcoming(self, limit: int) -> Iterator[Access]:
        """The accesses expected from now on, into the next step; at most `limit`, and at most one cycle."""
        entries, cursor = self._learned.entries, self._cursor
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
        # A place more than half a cycle ahead is nearer behind: it is not a skip, however short the cycle.
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
