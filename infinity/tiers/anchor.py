"""Anchor: the device's clock in the host's time, which tells when the events around a copy happened."""

from __future__ import annotations

import time
from dataclasses import dataclass

from infinity.tiers.driver import Event, Stream

_ANCHORED_NS = 10_000_000_000
"""Nanoseconds for which an anchor is used. CUDA measures from event to event in float32 milliseconds, which
over ten seconds still tell a microsecond."""


class Anchor:
    """A moment that is known in the host's time and in the device's."""

    def __init__(self, idle: Stream) -> None:
        """idle: a stream with nothing on it, so that the event happens when it is recorded."""
        self._event = idle.record(timing=True)
        self._event.synchronize()
        self.at = time.perf_counter_ns()

    @property
    def old(self) -> bool:
        """Whether the anchor is so long ago that times measured from it are coarse."""
        return time.perf_counter_ns() - self.at > _ANCHORED_NS

    def time_of(self, event: Event) -> int:
        """The time of an event recorded after the anchor, in nanoseconds of time.perf_counter_ns()."""
        return self.at + round(event.milliseconds_since(self._event) * 1e6)


@dataclass(frozen=True)
class EventTiming:
    """The timing of a copy by the two events around it on its stream; see infinity.tiers.link.Timing."""

    anchor: Anchor
    began: Event
    ended: Event

    def times(self) -> tuple[int, int] | None:
        if not self.ended.done():
            return None
        return self.anchor.time_of(self.began), self.anchor.time_of(self.ended)
