"""Anchor: a moment whose time on the host is known, and at which the device recorded an event.

CUDA gives no time of an event, only the time between two events. The time between the anchor's event and a
later event, added to the anchor's time on the host, gives the later event's time on the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from infinity.tiers.driver import Event, Stream

_ANCHORED_NS = 10_000_000_000
"""Nanoseconds after which an anchor is replaced by a new anchor. CUDA gives the time between two events in
milliseconds as a float32, which after ten seconds is still precise to about one microsecond.
"""


class Anchor:
    """A moment at which the device recorded an event, with its time by time.perf_counter_ns(), `at`."""

    def __init__(self, idle: Stream) -> None:
        """Record an event on `idle` now, wait for it, and note the time.

        idle: a CUDA stream without work, so that the device records the event at once.
        """
        self._event = idle.record(timing=True)
        self._event.synchronize()
        self.at = time.perf_counter_ns()

    @property
    def old(self) -> bool:
        """Whether this anchor was made more than ten seconds ago. `time_of` is then too imprecise, and a
        new Anchor should take its place.
        """
        return time.perf_counter_ns() - self.at > _ANCHORED_NS

    def time_of(self, event: Event) -> int:
        """The time at which `event` happened, in nanoseconds of time.perf_counter_ns().

        event: an event with timing that was recorded after the anchor and has happened.
        """
        return self.at + round(event.milliseconds_since(self._event) * 1e6)


@dataclass(frozen=True)
class EventTiming:
    """The times at which a copy began and ended, from two events around the copy on its CUDA stream.

    Implements the protocol infinity.tiers.link.Timing.
    """

    anchor: Anchor
    began: Event
    ended: Event

    def times(self) -> tuple[int, int] | None:
        if not self.ended.done():
            return None
        return self.anchor.time_of(self.began), self.anchor.time_of(self.ended)
