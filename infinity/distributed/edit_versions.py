"""Edit versions: when what user code writes to parameters may be published to other ranks.

All ranks make the same edits in the same order, but not at the same time. A unit's edit version counts the
operations that have changed its parameters in place. It is equal on all ranks once all have made the same
edits.

[Note: edits over ranks]
The home of a page is what other ranks see. Two rules keep every rank's view that of its own place in the
program. A rank writes edits home only when all ranks have come to the same version, so none reads edits that
it has not made itself. And a request carries the asking rank's version; it is served when what is at home has
that version, so none misses edits that it has made. No circle of ranks can wait for each other: whoever waits
has come further in the program than the rank for which it waits.

An update may be written home from the memory where the model computes, and would take along what user code
changes there meanwhile. So user code gets a page when such writes have ended (`settle_for_user`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity.distributed.ballots import Ballots
from infinity.distributed.lock import TrainerLock
from infinity.distributed.message import Kind
from infinity.distributed.wire import Wire
from infinity.errors import RankDivergence
from infinity.pages.parameter_page import ParameterPage


class EditVersions:
    """The edit versions of all units, here and on other ranks. Called under the runtime's lock."""

    def __init__(
        self, wire: Wire, ballots: Ballots, pages: Sequence[ParameterPage], lock: TrainerLock
    ) -> None:
        self._wire = wire
        self._ballots = ballots
        self._pages = pages
        self._lock = lock
        self._known: dict[tuple[int, int], int] = {}
        """(rank, unit) -> the highest version that the rank has said to have reached."""
        self._asked: dict[tuple[int, int], int] = {}
        """(rank, unit) -> the highest version that this rank has asked for."""
        self._questions: list[tuple[int, int, int]] = []
        """(source, unit, version) of questions of other ranks that this rank cannot answer yet."""

    def reached(self, page: ParameterPage, version: int) -> bool:
        """Whether all other ranks have reached a version of a page, as far as is known. If not, they are
        asked, so that it will be known.
        """
        behind = [peer for peer in self._wire.peers if self._known.get((peer, page.index), -1) < version]
        for peer in behind:
            if self._asked.get((peer, page.index), -1) < version:
                self._asked[peer, page.index] = version
                self._wire.post(peer, Kind.QUESTION, page.index, version)
        return not behind

    def await_all(self, page: ParameterPage) -> None:
        """Wait, without the runtime's lock, until all ranks have made the edits that this rank has made.

        Raises RankFailure, and RankDivergence if a rank does not make them within the time-out.
        """
        version = page.version
        if self.reached(page, version):
            return
        with self._wire.meter.awaiting("edits"), self._lock.released():
            come = self._wire.bell.wait_for(
                lambda: all(self._known.get((each, page.index), -1) >= version for each in self._wire.peers)
            )
        if not come:
            late = [each for each in self._wire.peers if self._known.get((each, page.index), -1) < version]
            raise RankDivergence(
                f"Parameters of {page.layout.name or 'the root'} were edited here, and rank {late[0]} has "
                f"not made the same edits within {self._wire.bell.timeout:g} s.",
                "Make the same edits of parameters on all ranks.",
            )

    def differing(self, digests: Mapping[str, int]) -> list[str]:
        """Tell all ranks the digests of edited parameters, by name, and return the names that differ.

        All ranks that have edits call it. Raises RankDivergence if a rank does not, and RankFailure.
        """
        heard = self._ballots.agree("the end of full_parameters with edits", dict(digests))
        names = sorted({name for said in heard.values() for name in said})
        return [name for name in names if len({said.get(name) for said in heard.values()}) > 1]

    # --- the conductor ----------------------------------------------------------------------------------

    def questioned(self, source: int, unit: int, version: int) -> None:
        """Take another rank's question whether this rank has reached a version of a unit."""
        self._questions.append((source, unit, version))
        self.answer()

    def answered(self, source: int, unit: int, version: int) -> None:
        """Note that another rank has reached a version of a unit."""
        self._known[source, unit] = max(version, self._known.get((source, unit), -1))
        self._wire.bell.ring()

    def answer(self) -> bool:
        """Answer the questions that can be answered. Returns whether some are left."""
        left = []
        for source, unit, version in self._questions:
            now = self._pages[unit].version
            if now >= version:
                self._wire.post(source, Kind.ANSWER, unit, now)
            else:
                left.append((source, unit, version))
        self._questions = left
        return bool(left)
