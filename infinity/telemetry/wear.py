"""Wear: the days after which a drive has taken the writes that it is rated for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_DAY = 86_400

_TERABYTE = 10**12
"""Bytes of a terabyte in the ratings of drives ("TBW", terabytes written), which are decimal."""


def days_until_worn(terabytes_written: float, bytes_per_day: float | None) -> float | None:
    """Days until `terabytes_written` terabytes (10^12 bytes) are written at a rate of `bytes_per_day`. None
    if the rate is unknown (None) or zero.
    """
    return terabytes_written * _TERABYTE / bytes_per_day if bytes_per_day else None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written to disk in a number of finished steps, by steps and by commits."""

    bytes: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Wall time of the steps in seconds."""

    @property
    def per_step(self) -> float | None:
        """Bytes written in a step on average; None without steps."""
        return self.bytes / self.steps if self.steps else None

    @property
    def per_day(self) -> float | None:
        """Bytes written in a day of such steps; None without steps, or if they took no time."""
        return self.bytes * SECONDS_PER_DAY / self.seconds if self.seconds else None

    def __add__(self, other: Written) -> Written:
        return Written(
            bytes=self.bytes + other.bytes,
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
        )
