"""Plans of what one of several ranks does wrong, and what may follow; see hang_ranks.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

UNWATCHED = ("meeting", "agreeing")
"""Points at which ranks may not have met yet, so that no heartbeat shows that one was stopped. Nothing but
the time-out shows that one has ended before the meeting.
"""
ENDS = ("kill", "stop", "raise", "interrupt", "exit")
"""Faults that end a rank, or stop it. The others need no time-out to notice."""
CALLS = (
    "clipping",
    "a backward more",
    "no step",
    "no zero_grad",
    "other options",
    "an edit",
)
"""Calls that one rank makes otherwise than the others."""
HARMLESS = ("an evaluation", "a longer evaluation", "a state_dict", "delays")
"""Faults with which all ranks train on, with the bits that they have without the fault."""
SLOW = ("slow disk", "slow computation")
"""Faults by which one rank is slower than the others."""
FAULTS = (*ENDS, "sleep", *CALLS, *HARMLESS, "read", "write")

POINTS = {
    "meeting": 1,
    "agreeing": 5,
    "opening tiers": 1,
    "taking values": 4,
    "having values": 1,
    "serving": 1,
    "forward": 4,
    "in forward": 7,
    "backward": 4,
    "in backward": 6,
    "accumulate()": 1,
    "clip_grad_norm_()": 1,
    "step()": 3,
    "zero_grad()": 3,
    "between steps": 3,
    "evaluation": 1,
    "full_parameters": 1,
    "in full_parameters": 1,
    "state_dict": 1,
    "close()": 1,
    "leaving": 1,
    "closing tiers": 1,
    "closing the wire": 1,
}
"""Point -> how often it comes, at the least."""
CONNECTING = {"starting the group": 1, "coming": 1, "waiting for others": 1}
"""Points, as above, while ranks meet, at which links are lost alone."""
CLOSING = ("close()", "leaving", "closing tiers", "closing the wire")
"""Points of the end."""
READING = ("evaluation", "full_parameters", "in full_parameters", "state_dict", *CLOSING)
"""Points at which other ranks may have all that they need, so that they end well."""


@dataclass(frozen=True)
class Plan:
    """What one rank of a training does wrong."""

    fault: str
    """One of FAULTS or SLOW, or of link_faults.py, "none", or "pause": the rank waits until a test
    removes `mark`.
    """
    point: str = ""
    """The point at which it ends, sleeps or pauses."""
    nth: int = 1
    """How many times the point comes; or the number of a transfer that fails, or a seed of delays."""
    rank: int = 0
    size: int = 2
    partition: str | None = "parameters"
    host: str = "760KiB"
    """The host budget. Most pages are on NVMe with the smaller ones."""
    managed: bool = True
    """Whether the runtime is a context manager."""
    closed: bool = True
    """Whether the training ends with `close`."""
    timeout: float = 300.0
    """Seconds for which ranks wait for each other."""
    latest: float = 0.005
    """Seconds by which a message, a transfer or a computation is late at the most."""
    directory: str = ""
    """Of the NVMe tier."""

    @property
    def mark(self) -> Path:
        """A file beside the directory that is there while the rank pauses."""
        return Path(f"{self.directory}.paused")


def plan_of(number: int) -> Plan:
    """The plan of a number. Kinds of faults take turns."""
    draw = random.Random(number)
    fault = ("kill", "raise", "calls", "end", "io", "harmless", "sleep")[number % 7]
    kinds = {
        "calls": CALLS,
        "end": ("exit", "interrupt", "stop"),
        "io": ("read", "write"),
        "harmless": HARMLESS,
    }
    if fault in kinds:
        fault = kinds[fault][number // 7 % len(kinds[fault])]
    size = draw.choice((2, 2, 3))
    rank = draw.randrange(size)
    fitting = [each for each in POINTS if rank or each != "taking values"]  # rank 0 takes none
    point = draw.choice(fitting)
    nth = draw.randint(1, POINTS[point] if fault in (*ENDS, "sleep") else 16)
    unseen = (fault in ENDS and point == "meeting") or (fault == "stop" and point in UNWATCHED)
    waits = unseen or fault in (*CALLS, "sleep")
    return Plan(
        fault,
        point,
        nth,
        rank=rank,
        size=size,
        partition=draw.choice(("parameters", "parameters", "gradients", "optimizer", None)),
        host=draw.choice(("760KiB", "720KiB", "64MiB")),
        managed=draw.random() < 0.5,
        closed=draw.random() < 0.7 or point in CLOSING,
        timeout=3.0 if waits else 300.0,
    )
