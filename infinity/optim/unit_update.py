"""Unit's update: the chains of one unit, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.optim.chain import Chain
from infinity.optim.decision import Decision


@dataclass(slots=True)
class UnitUpdate:
    """The update of one unit."""

    chains: Sequence[Chain]
    parameters: frozenset[int]
    """Of the unit, those that lie in chains."""
    rests: bool
    """Whether none of its chains ever needs staging."""
    left: int = 0
    """Chains whose gate was opened and whose outcome the model cannot be given yet."""
    unread: bool = False
    """A read ahead of time failed: nobody tries again before somebody waits for the unit."""
    resting: Sequence[Chain] = ()
    """Of a unit that `rests`, where the CPU computes the model: its DUE chains, which are in no queue."""

    @staticmethod
    def of(chains: Sequence[Chain]) -> UnitUpdate:
        """Of a unit with these chains."""
        parameters = frozenset(piece.parameter for chain in chains for piece in chain.chunk.pieces)
        return UnitUpdate(chains, parameters, rests=all([chain.rests for chain in chains]))

    def changed_by(self, decision: Decision) -> Sequence[Chain]:
        """The chains with a parameter that is updated."""
        parameters = decision.parameters
        if parameters.keys() >= self.parameters:
            return self.chains
        return [
            chain
            for chain in self.chains
            if any([piece.parameter in parameters for piece in chain.chunk.pieces])
        ]
