"""Unit update: the chains (updates of single chunks) of one unit, and how many of them have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.optim.chain import Chain
from infinity.optim.decision import Decision


@dataclass(slots=True)
class UnitUpdate:
    """The chains of one unit, and how far they have come. A chain is the update of one chunk."""

    chains: Sequence[Chain]
    parameters: frozenset[int]
    """Indices of all parameters of which at least one chain can update a part."""
    rests: bool
    """Whether the parameters, gradients and states of all chains are at home in host RAM, so that no chain
    needs staging.
    """
    left: int = 0
    """Number of chains whose update was decided and whose results the model cannot use yet."""
    unread: bool = False
    """Whether a read for one of the chains failed. The read is repeated when a caller waits for the unit."""
    resting: Sequence[Chain] = ()
    """Chains whose update is decided and that are in no queue, because they begin at once. All memory of
    these chains is at home in host RAM, and the CPU computes the model too.
    """

    @staticmethod
    def of(chains: Sequence[Chain]) -> UnitUpdate:
        """Make the UnitUpdate of the unit that has these chains. No update is decided at first."""
        parameters = frozenset(piece.parameter for chain in chains for piece in chain.chunk.pieces)
        return UnitUpdate(chains, parameters, rests=all([chain.rests for chain in chains]))

    def changed_by(self, decision: Decision) -> Sequence[Chain]:
        """The chains whose chunk has a part of at least one parameter that `decision` updates."""
        parameters = decision.parameters
        if parameters.keys() >= self.parameters:
            return self.chains
        return [
            chain
            for chain in self.chains
            if any([piece.parameter in parameters for piece in chain.chunk.pieces])
        ]
