"""Copy phases: the parts of saving and of loading a copy of a run, which succeed on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.distributed.ballots import Ballots, check_same
from infinity.distributed.communicator import Communicator
from infinity.distributed.told_errors import error_of, told
from infinity.errors import InfinityError


class CopyPhases:
    """Implements infinity.checkpoint.copies.CopyingRanks. Used by the thread that trains alone."""

    def __init__(self, communicator: Communicator) -> None:
        self.writes = communicator.ranks.rank == 0
        """Whether this rank writes the copy."""
        self._communicator = communicator
        self._ballots: Ballots = communicator.ballots

    def end(
        self, phase: str, failure: InfinityError | None, same: Mapping[str, object], *, first: bool
    ) -> None:
        """Wait until all ranks have ended a phase, without the runtime's lock.

        phase: its name, as in an error's text. failure: the error by which it has failed here, which the
        caller raises. same: name -> what must be equal on all ranks. first: whether it is the first phase of
        a call. If it is, other ranks may not come; else they are in the call, and are waited for as long as
        they live. Raises an error of the same class for one that another rank has had, RankDivergence for a
        fact that differs or for a rank that does not come, and RankFailure.
        """
        facts = {"failure": None if failure is None else told(failure), **same}
        heard = self._ballots.agree(phase, facts, patient=lambda: not first)
        if failure is not None:
            return
        for rank, said in heard.items():
            if said["failure"] is not None:
                raise error_of(f"Rank {rank} failed in {phase}", said["failure"])
        check_same(phase, heard, same, "Give all ranks the same copy.")

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one ends with an error, so that none waits for it."""
        self._communicator.fail(error)
