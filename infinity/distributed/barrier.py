"""Barriers: calls that all ranks make together. Each rank tells all others that it has come to the call.

A commit of several ranks counts if every rank commit is durable; otherwise none counts.
`CommitVotes` decides this.

[Note: two phases]
1. Each rank makes its rank commit durable: its pages, and its manifest under its final name. The
   slots of the previous commit stay as they are.
2. Each rank tells all others that it is ready, or why it is not. Once a rank has heard that all are ready,
   the commit counts, and the rank frees the slots that only the previous commit holds.

So at any time there is a commit of which every rank commit is whole: a rank frees slots of the previous
commit only when it knows that all ranks have the new one. A restart continues the newest commit that all
ranks have (infinity/checkpoint/continued_commit.py). No rank decides for the others, so no lost rank has to
be asked.

If one rank is not ready, the commit fails on all. The others then take back their manifests before they free
the commit's slots, so that no restart finds rank commits of a failed commit among whole ones. For the
same reason, numbers of commits are never used twice.

[Note: one vote]
A rank votes once for each commit: a second vote could reach some ranks after they have freed slots, and
others before. save() can fail on one rank. If this rank's commit thread has voted by then, the commit
continues; otherwise the rank votes that it is not ready. Votes carry the number of the agreement that begins
the commit, which all ranks count, because a rank on which this agreement fails does not know the commit's
number.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infinity.distributed.failure_event import TIMEOUT_VARIABLE
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.wire import Wire
from infinity.errors import (
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    InfinityError,
    RankDivergence,
    StorageError,
    StorageFull,
    rank_failure,
)
from infinity.ranks import SingleVotes

_KINDS: dict[str, type[InfinityError]] = {
    each.__name__: each for each in (ConfigError, CorruptState, IncompatibleCheckpoint, RankDivergence)
}
"""Name -> class of the errors that can be made again on another rank from their cause and cure alone."""
_SAME = "Make the same calls in the same order on all ranks."


class Barrier:
    """Tells other ranks which call this rank makes, and waits for theirs. For the training thread alone."""

    def __init__(self, ranks: Ranks, wire: Wire) -> None:
        self._ranks = ranks
        self._wire = wire
        self._come: dict[int, dict[int, tuple[str, Any]]] = {}
        """Number of an agreement that is not over -> rank -> (call, facts)."""
        self._last: dict[int, str] = {}
        """Rank -> the last call that it told of."""
        self.number = 0
        """Number of the last agreement to which this rank has come. All ranks count alike."""
        self._failure: InfinityError | None = None
        """The error that every later agreement raises; None while agreements are possible."""

    def agree(
        self,
        call: str,
        facts: Any = None,
        *,
        patient: Callable[[], bool] = lambda: False,
        anyway: bool = False,
    ) -> dict[int, Any]:
        """Tell all ranks that this rank makes a call, and wait until all have told the same.

        call: its name for errors, such as "step()". facts: a JSON value for the other ranks. patient: asked
        after each time-out of the failure event whether to wait again. anyway: agree even if an earlier
        agreement has failed. Returns rank -> facts, in the order of ranks. Raises RankDivergence if a rank
        makes another call or does not come in time, and RankFailure if a rank is lost or has left. Every
        later agreement raises the same error, because other ranks may have taken this one for successful.
        """
        if anyway:
            self._check_wire()
        else:
            self.check()
        number = self.number + 1
        come = self._come.setdefault(number, {})
        come[self._ranks.rank] = call, facts
        self._post(number, call, facts)
        with self._wire.awaiting(call):
            while not self._wire.failure_event.wait_for(lambda: self._settled(come)) and patient():
                pass
        if any(each != call for each, _ in tuple(come.values())):
            raise self._ended(
                RankDivergence(_sentence({rank: each for rank, (each, _) in sorted(come.items())}), _SAME)
            )
        absent = [peer for peer in self._ranks.peers if peer not in come]
        if absent and self._wire.failure is not None:
            raise self._wire.failure.again()
        for peer in absent:
            if self._wire.left(peer) is not None:
                what = f"closed its runtime while rank {self._ranks.rank} was in {call}"
                raise self._ended(rank_failure(peer, what))
        if absent:
            raise self._ended(self._late(absent[0], call))
        del self._come[number]
        return {rank: come[rank][1] for rank in range(self._ranks.size)}

    def check(self) -> None:
        """Raise the error that an agreement would raise at once, if there is one: the error that ended the
        run, or that of an earlier agreement.
        """
        self._check_wire()
        if self._failure is not None:
            raise self._failure.again()

    def _check_wire(self) -> None:
        if self._wire.failure is not None:
            raise self._wire.failure.again()

    def end(self, error: InfinityError) -> None:
        """Have every later agreement of this rank raise `error`, unless an earlier error was given."""
        self._failure = self._failure or error.again()

    def _ended(self, error: InfinityError) -> InfinityError:
        self.end(error)
        return error

    def _post(self, number: int, call: str, facts: Any) -> None:
        """Tell all other ranks that this one has come to a call."""
        self.number = number
        for peer in self._ranks.peers:
            self._wire.post(peer, MessageKind.BARRIER, number, call, facts)

    def _settled(self, come: dict[int, tuple[str, Any]]) -> bool:
        left = {peer for peer in self._ranks.peers if self._wire.left(peer) is not None}
        while True:  # behind the line above, so that the last messages of those that have left are here
            try:
                source, (_, fields) = self._wire.barriers.get_nowait()
            except queue.Empty:
                break
            number, call, facts = fields
            self._last[source] = call
            self._come.setdefault(number, {})[source] = call, facts
        if len(come) == self._ranks.size or len({call for call, _ in come.values()}) > 1:
            return True
        return any(peer not in come for peer in left)

    def _late(self, peer: int, call: str) -> RankDivergence:
        last = f"it was last in {self._last[peer]}" if peer in self._last else "it has agreed to nothing yet"
        return RankDivergence(
            f"Rank {peer} did not come to {call} within {self._wire.failure_event.timeout:g} s: {last}.",
            f"{_SAME} {TIMEOUT_VARIABLE} sets how long a rank waits, in seconds.",
        )


def check_same(call: str, heard: Mapping[int, Mapping[str, Any]], names: Iterable[str], cure: str) -> None:
    """Check that all ranks gave equal facts in an agreement. Raises RankDivergence.

    heard: what `Barrier.agree` returned. names: the facts to compare. cure: the error's cure.
    """
    for name in names:
        for rank, said in heard.items():
            if said[name] != heard[0][name]:
                raise RankDivergence(
                    f"At {call} the {name} of rank {rank} and of rank 0 differ: {said[name]} and "
                    f"{heard[0][name]}.",
                    cure,
                )


def _sentence(calls: dict[int, str]) -> str:
    """Say where ranks are: "Rank 0 is in step(), rank 1 is in clip_grad_norm_()." is an example."""
    text = ", ".join(f"rank {rank} is in {call}" for rank, call in calls.items())
    return f"{text[0].upper()}{text[1:]}."


def told(failure: BaseException, again: str = "") -> dict[str, Any]:
    """Return a JSON object that describes an error to the other ranks, where `error_of` makes an error from
    it.

    again: the call that all ranks should make again after an error that is no InfinityError, such as
    KeyboardInterrupt. The cure names this call. Required if `failure` may be such an error.
    """
    if not isinstance(failure, InfinityError):
        assert again
        text = f"{type(failure).__name__}: {failure}".rstrip(": .")
        return {"kind": "", "cause": f"{text}.", "cure": f"Call {again} again on all ranks."}
    said: dict[str, Any] = {"kind": type(failure).__name__, "cause": failure.cause, "cure": failure.cure}
    if isinstance(failure, StorageError):
        said |= {"path": failure.path, "errno": failure.errno}
    return said


def error_of(what: str, said: Mapping[str, Any]) -> InfinityError:
    """Make an error of the same class as another rank's error, or a ConfigError if `said` is not enough for
    an error of that class.

    what: the start of the new error's text. said: what `told` returned on the other rank.
    """
    cause, cure, kind = f"{what}: {said['cause']}", said["cure"], said["kind"]
    if kind in ("StorageError", "StorageFull"):
        storage = StorageFull if kind == "StorageFull" else StorageError
        return storage(cause, cure, path=said["path"], errno=said["errno"])
    return _KINDS.get(kind, ConfigError)(cause, cure)


_SLICE = 0.1
"""Seconds between looks at whether this rank's training waits for the commit, while it waits for votes."""


class CommitVotes(SingleVotes):
    """Decides together with all ranks whether a commit counts; see [Note: two phases], [Note: one vote], and
    [Note: commits of ranks] in infinity/checkpoint/committer.py.
    """

    def __init__(self, ranks: Ranks, wire: Wire, barrier: Barrier) -> None:
        self._ranks = ranks
        self._wire = wire
        self._barrier = barrier
        self._last = 0
        """The largest number of a commit so far, failed commits included."""
        self._lock = threading.Lock()
        """Guards the two attributes below, which two threads of this rank use."""
        self._open = 0
        """Number of the agreement on a commit for which this rank has yet to vote; 0: there is none."""
        self._refusal: Mapping[str, Any] | None = None
        """The error of this rank's last vote against a commit; None if there was no such vote."""
        self._heard: dict[int, dict[int, Mapping[str, Any] | None]] = {}
        """Number of an agreement -> rank -> its vote: None if ready, else its error. Commit's thread only."""

    def begin(self, last: int, now: str, failure: InfinityError | None) -> tuple[int, str]:
        said = None if failure is None else told(failure)
        self._open = self._barrier.number + 1
        mine = max(self._last, last) + 1
        heard = self._barrier.agree("save()", {"number": mine, "created": now, "failure": said})
        number = max(each["number"] for each in heard.values())
        hindered = {rank: each["failure"] for rank, each in sorted(heard.items()) if each["failure"]}
        if hindered:
            self._open = 0  # no rank begins it
        if failure is not None:
            raise failure.again()
        for rank, each in hindered.items():
            raise error_of(f"Rank {rank} could not begin commit {number}", each)
        self._last = number
        return number, heard[0]["created"]

    def refuse(self, failure: BaseException) -> bool:
        with self._lock:
            if not 0 < self._open <= self._barrier.number:
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
        while not self._wire.failure_event.wait_for(lambda: self._decided(heard), _SLICE):
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
        """Send this rank's vote to all others: None if it is ready, else its error."""
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
