"""Wear: the days after which a drive has taken the writes that it is rated for. Pure."""

from __future__ import annotations

SECONDS_PER_DAY = 86_400

_TERABYTE = 10**12
"""Bytes of a terabyte in the ratings of drives ("TBW", terabytes written), which are decimal."""


def days_until_worn(terabytes_written: float, bytes_per_day: float | None) -> float | None:
    """Days until `terabytes_written` terabytes (10^12 bytes) are written at a rate of `bytes_per_day`. None
    if the rate is unknown (None) or zero.
    """
    return terabytes_written * _TERABYTE / bytes_per_day if bytes_per_day else None
