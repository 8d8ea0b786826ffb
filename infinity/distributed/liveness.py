"""Liveness: which ranks send each other heartbeats, and whose silence has lasted too long.

Neighbours in the tree of ranks (infinity/distributed/tree.py) send each other heartbeats. A failure that one
rank notices is told to all.

[Note: silence is counted] A rank counts the silence of others in rounds of its own heartbeat, not in seconds.
So a process that was stopped and continues does not take the others for dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.distributed.tree import neighbours


class Liveness:
    """Counts the rounds in which this rank has heard nothing of each of its neighbours. For one thread at a
    time.

    A rank whose process lives but runs no Python, as when native code keeps the GIL for longer than
    `patience`, is taken for dead.
    """

    def __init__(
        self, rank: int, nodes: Sequence[int], *, interval: float = 2.0, patience: float = 15.0
    ) -> None:
        """nodes: rank -> its node. interval: seconds between rounds. patience: seconds of silence that count
        as a rank's death.
        """
        self.interval = interval
        self.patience = patience
        self.rounds = 0
        self._rank = rank
        self._nodes = nodes
        self._there = set(range(len(nodes)))
        self.silent = dict.fromkeys(neighbours(rank, nodes, self._there), 0)
        """Neighbour -> this rank's rounds since it has last been heard."""

    def heard(self, rank: int) -> None:
        """Take note of a sign of life."""
        if rank in self.silent:
            self.silent[rank] = 0

    def departed(self, rank: int) -> None:
        """Stop watching a rank that has left or is lost; others may become neighbours instead."""
        self._there.discard(rank)
        now = neighbours(self._rank, self._nodes, self._there)
        self.silent = {each: self.silent.get(each, 0) for each in now}

    def round(self) -> list[int]:
        """Count a round, and return the neighbours that have been silent for too long."""
        self.rounds += 1
        for each in self.silent:
            self.silent[each] += 1
        return [each for each, count in self.silent.items() if count * self.interval > self.patience]
