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
    """Indices, within the unit, of the parameters that have elements in the chunk of at least one chain."""
    rests: bool
    """Whether the parameters, gradients and states of all chains are at home in host RAM, so that no chain
    needs staging.
    """
    left: int = 0
    """Number of chains whose update was decided (by `step()` or an eager update) and whose results the
    model cannot use yet.
    """
    unread: bool = False
    """Whether a read for one of the chains failed. The read is repeated when a caller waits for the unit."""
    resting: Sequence[Chain] = ()
    """Chains whose update is decided and has not begun, and which are not in `UpdateQueue.due`. Always empty
    unless `rests` is true and the CPU computes the model too.
    """

    @staticmethod
    def of(chains: Sequence[Chain]) -> UnitUpdate:
        """Make the record of a unit's update. chains: all chains of the unit, of which none is under way."""
        parameters = frozenset(piece.parameter for chain in chains for piece in chain.chunk.pieces)
        return UnitUpdate(chains, parameters, rests=all([chain.rests for chain in chains]))

    def changed_by(self, decision: Decision) -> Sequence[Chain]:
        """Return the chains that the update has to run: those with elements of an updated or averaged
        parameter.

        decision: says which of the unit's parameters are updated, and how.
        """
        parameters = decision.parameters.keys() | decision.averaged
        if parameters >= self.parameters:
            return self.chains
        return [
            chain
            for chain in self.chains
            if any([piece.parameter in parameters for piece in chain.chunk.pieces])
        ]
