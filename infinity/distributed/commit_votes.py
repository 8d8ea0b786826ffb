"""Commit votes: a commit of several ranks counts if every rank's part of it is durable, and else none does.

[Note: two phases]
1. Each rank makes its part of the commit durable: its pages, and its manifest under its name. What the commit
   before holds stays as it is.
2. Each rank tells all others that it is ready, or why not. Once a rank has heard that all are ready, the
   commit counts, and the rank frees the slots that only the commit before holds.

So at any time there is a commit of which every rank's part is whole: a rank that has freed the slots of the
one before knew that all have the new one. A restart continues the newest commit that all ranks have
(infinity/distributed/agreed_commit.py). No rank decides for the others, so no rank's loss leaves a decision
open that a restart would have to ask it for.

A rank that is not ready ends the commit on all. The others then take their manifests back before they free
the slots, so that no restart finds a part of a commit that was given up among whole ones. Numbers of commits
are never used twice, for the same reason.

[Note: one vote]
A rank votes once for each commit, for another vote could reach some ranks after they have freed slots, and
others before. An error can end save() on one rank. If its thread of the commit has voted by then, the commit
goes on; else the rank's vote is that it is not ready. A rank whose agreement on a commit fails does not know
the commit's number. So votes go by the number of that agreement, which all ranks count.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from infinity.distributed.ballots import Ballots, error_of, told
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError, InfinityError, rank_failure
from infinity.ranks import SingleVotes

_SLICE = 0.1
"""Seconds after which a rank that waits looks whether it waits for the commit meanwhile."""


class CommitVotes(SingleVotes):
    """See [Note: commits of ranks] in infinity/checkpoint/committer.py."""

    def __init__(self, ranks: Ranks, wire: Wire, ballots: Ballots) -> None:
        self._ranks = ranks
        self._wire = wire
        self._ballots = ballots
        self._lock = threading.Lock()
        """Guards the two attributes below, which two threads of this rank use."""
        self._open = 0
        """The agreement by which ranks begin a commit for which this rank has not voted; 0: there is none."""
        self._refusal: Mapping[str, Any] | None = None
        """This rank's last vote, unless that was for a commit."""
        self._heard: dict[int, dict[int, Mapping[str, Any] | None]] = {}
        """Number of an agreement -> rank -> what hinders it; None if it is ready. For the commit's thread."""

    def begin(self, number: int, created: str, failure: InfinityError | None) -> tuple[int, str]:
        said = None if failure is None else told(failure)
        self._open = self._ballots.number + 1
        heard = self._ballots.agree("save()", {"number": number, "created": created, "failure": said})
        number = max(each["number"] for each in heard.values())
        hindered = {rank: each["failure"] for rank, each in sorted(heard.items()) if each["failure"]}
        if hindered:
            self._open = 0  # no rank begins it
        if failure is not None:
            raise failure.again()
        for rank, each in hindered.items():
            raise error_of(f"Rank {rank} could not begin commit {number}", each)
        return number, heard[0]["created"]

    def refuse(self, failure: BaseException) -> bool:
        with self._lock:
            if not 0 < self._open <= self._ballots.number:
                return False
            self._refusal = told(failure, "save()")
            self._vote(self._refusal)
        return True

    def decide(self, number: int, wanted: Callable[[], bool]) -> InfinityError | None:
        with self._lock:
            agreement = self._open
            if not agreement:
                assert self._refusal is not None
                return error_of(f"Commit {number} was given up", self._refusal)
            self._vote(None)
        heard = self._heard.setdefault(agreement, {})
        driven = False
        while not self._wire.bell.wait_for(lambda: self._decided(heard), _SLICE):
            if wanted() and not driven:
                driven = True
                for peer in self._ranks.peers:
                    self._wire.post(peer, MessageKind.DRIVE, number)
        for each in [each for each in self._heard if each <= agreement]:
            del self._heard[each]
        for rank, failure in sorted(heard.items()):
            if failure is not None:
                return error_of(f"Rank {rank} could not make its part of commit {number}", failure)
        for peer in self._ranks.peers:
            if peer not in heard:
                raise rank_failure(peer, f"closed its runtime before commit {number} was made")
        return None

    def _vote(self, failure: Mapping[str, Any] | None) -> None:
        """Tell all ranks what hinders this one; None: nothing does."""
        agreement, self._open = self._open, 0
        with contextlib.suppress(ConfigError):  # the wire is closed, and others know that this rank has left
            for peer in self._ranks.peers:
                self._wire.post(peer, MessageKind.VOTE, agreement, failure)

    def _decided(self, heard: Mapping[int, Mapping[str, Any] | None]) -> bool:
        left = {peer for peer in self._ranks.peers if self._wire.left(peer) is not None}
        while True:  # behind the line above, so that the last votes of those that have left are here
            try:
                source, (_, (agreement, failure)) = self._wire.votes.get_nowait()
            except queue.Empty:
                break
            self._heard.setdefault(agreement, {})[source] = failure
        if any(failure is not None for failure in heard.values()):
            return True
        return all(peer in heard or peer in left for peer in self._ranks.peers)
