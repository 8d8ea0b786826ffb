"""Chain state: how far the update of one chunk (a chain) has come, and which state may follow which."""

from __future__ import annotations

import enum


class ChainState(enum.Enum):
    """The state of a chain, and the staging (buffers in host RAM) that the chain holds in this state.

    The gate of a chain is open while its update may run. `step()` or an eager update opens the gate, when
    the chunk's gradients are complete and the update's hyper-parameters are fixed.
    """

    IDLE = "idle"
    """The gate is closed, and no optimizer states are read ahead. The chain holds no staging."""
    DUE = "due"
    """The gate is open. The chain waits for staging or for its turn. Of the update's inputs only the
    gradient may already be in staging.
    """
    READING = "reading"
    """Inputs that are not in RAM are being read into staging: all inputs if the gate is open, only the
    optimizer states if it is closed. From this state on the chain holds all the staging that its update
    needs.
    """
    GATED = "gated"
    """The optimizer states have been read into staging, and the gate is still closed."""
    COMPUTING = "computing"
    """The update's kernel is queued or runs."""
    WRITING = "writing"
    """The writes of the results to the homes of their pages have begun. The chain has given up its staging,
    which the writes keep until they end.
    """
    LOST = "lost"
    """The results could not be written: the only copy of the chunk's new parameters or states is gone."""

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
"""State of a chain -> the states that may follow. When the runtime ends, IDLE may follow any state."""
