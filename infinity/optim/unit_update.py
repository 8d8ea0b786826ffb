"""Unit update: the chains of one unit, and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.optim.chain import Chain
from infinity.optim.decision import Decision


@dataclass(slots=True)
class UnitUpdate:
    """The chains of one unit, and how far their updates have come."""

    chains: Sequence[Chain]
    parameters: frozenset[int]
    """Indices of the unit's parameters that lie in chains."""
    rests: bool
    """Whether all memory of the unit's chains is at home in host RAM, so that no chain needs staging."""
    left: int = 0
    """Number of chains whose gate was opened and whose results the model cannot use yet."""
    unread: bool = False
    """Whether a read for one of the chains failed. The read is repeated when a caller waits for the unit."""
    resting: Sequence[Chain] = ()
    """DUE chains that are in no queue, because they begin at once. All memory of these chains is at home in
    host RAM, and the CPU computes the model too.
    """

    @staticmethod
    def of(chains: Sequence[Chain]) -> UnitUpdate:
        """The update of a unit that has these chains."""
        parameters = frozenset(piece.parameter for chain in chains for piece in chain.chunk.pieces)
        return UnitUpdate(chains, parameters, rests=all([chain.rests for chain in chains]))

    def changed_by(self, decision: Decision) -> Sequence[Chain]:
        """The chains in which at least one parameter is updated by the decision."""
        parameters = decision.parameters
        if parameters.keys() >= self.parameters:
            return self.chains
        return [
            chain
            for chain in self.chains
            if any([piece.parameter in parameters for piece in chain.chunk.pieces])
        ]
