"""Chain state: how far the update of one chunk has come, and which state may follow which."""

from __future__ import annotations

import enum


class ChainState(enum.Enum):
    """The state of a chain, and the staging that the chain holds in this state."""

    IDLE = "idle"
    """There is nothing to do. The chain holds no staging."""
    DUE = "due"
    """The gate is open, and the chain waits for staging. It holds no staging except that of its gradient."""
    READING = "reading"
    """Bytes that are not in RAM are being read. From now on the chain holds all the staging it needs."""
    GATED = "gated"
    """The states have arrived, and the gate is still closed."""
    COMPUTING = "computing"
    """The update's kernel is queued or runs."""
    WRITING = "writing"
    """The results are on their way home. The transfers hold the staging until they are done."""
    LOST = "lost"
    """A write failed: the only copy of the chunk's new bytes is gone."""

    __hash__ = object.__hash__
    """Hash by identity, which is faster than Enum's own hash."""


NEXT = {
    ChainState.IDLE: (ChainState.DUE, ChainState.READING),
    ChainState.DUE: (ChainState.READING, ChainState.COMPUTING, ChainState.IDLE),
    ChainState.READING: (ChainState.GATED, ChainState.COMPUTING, ChainState.DUE, ChainState.IDLE),
    ChainState.GATED: (ChainState.READING, ChainState.IDLE),
    ChainState.COMPUTING: (ChainState.WRITING, ChainState.LOST, ChainState.IDLE),
    ChainState.WRITING: (ChainState.IDLE, ChainState.LOST),
    ChainState.LOST: (ChainState.IDLE,),
}
"""State -> the states that may follow. When the runtime ends, any state may also be followed by IDLE."""
