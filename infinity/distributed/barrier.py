"""Barriers: calls that all ranks make together, each with facts for the others.

[Note: agreements by a tree]
A rank that comes to an agreement tells its parent (infinity/distributed/tree.py), once its children have
told the same for all ranks below them. The root then tells all, down the tree. An error that ends the
agreement goes directly from the rank that notices it to all others. A rank whose time is nearly over asks all
others directly, and those that wait, too, answer: the ranks behind one that is absent are not heard by tree.

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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from infinity.distributed.failure_event import TIMEOUT_VARIABLE
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.tree import place
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
Heard = Mapping[int, Mapping[str, Any]]
"""Rank -> its facts in an agreement, by name."""
_SAME = "Make the same calls in the same order on all ranks."
_ANSWER = 5.0
"""The most seconds in which a rank that waits in an agreement answers another one."""


class Barrier:
    """Tells other ranks which call this rank makes, and waits for theirs. For the training thread alone."""

    def __init__(self, ranks: Ranks, wire: Wire) -> None:
        self._ranks = ranks
        self._wire = wire
        self._place = place(ranks.rank, ranks.nodes)
        self._come: dict[int, dict[int, tuple[str, Any]]] = {}
        """Number of an agreement that is not over -> rank -> (call, facts)."""
        self._ended: dict[int, tuple[int, str, str]] = {}
        """Number of an agreement -> (rank that ended it, the error's cause, its cure). Without a cause, the
        rank has left, and comes to no later one either.
        """
        self._asking: dict[int, set[int]] = {}
        """Number of an agreement -> ranks to which this one answers when it has come."""
        self._last = ""
        """The last call on which all ranks agreed."""
        self.number = 0
        """Number of the last agreement to which this rank has come. All ranks count alike."""
        self._told = False
        """Whether the parent has been told that all ranks below have come to it."""
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
        self.check(anyway=anyway)
        timeout = self._wire.failure_event.timeout
        answer = min(_ANSWER, timeout / 2)
        try:
            come = self._enter(call, facts)
            with self._wire.awaiting(call):
                while not self._over_within(timeout - answer, anyway):
                    self._tell(self._ranks.peers, [self._ranks.rank], [])
                    if self._over_within(answer, anyway):
                        break
                    if not patient():
                        raise self._late(come)
        except InfinityError as error:
            self.end(error)
            raise
        except BaseException:
            if self.number in self._come:
                self.end(self._end_all(f"Rank {self._ranks.rank} was interrupted in {call}."))
            raise
        return {rank: come[rank][1] for rank in range(self._ranks.size)}

    def check(self, *, anyway: bool = False) -> None:
        """Raise the error that an agreement would raise at once, if there is one: the error that ended the
        run, or that of an earlier agreement. anyway: as in `agree`.
        """
        failure = self._wire.failure or (None if anyway else self._failure)
        if failure is not None:
            raise failure.again()

    def end(self, error: InfinityError) -> None:
        """Have every later agreement of this rank raise `error`, unless an earlier error was given."""
        self._failure = self._failure or error.again()

    def leave(self) -> None:
        """Tell all other ranks that this one comes to no further agreement. Its BYE may come before what it
        said in the last one, which takes the way of the tree.
        """
        self._wire.post(self._ranks.peers, MessageKind.BARRIER, self.number + 1, [], ["", ""])

    def _enter(self, call: str, facts: Any) -> dict[int, tuple[str, Any]]:
        self.number, self._told = self.number + 1, False
        come = self._come.setdefault(self.number, {})
        come[self._ranks.rank] = call, facts
        return come

    def _over_within(self, seconds: float, anyway: bool) -> bool:
        """Wait until the agreement is over. Returns False if it is not within the time."""
        until = time.monotonic() + seconds
        while not self._over(anyway):
            left = until - time.monotonic()
            if not self._wire.failure_event.wait_for(lambda: not self._wire.barriers.empty(), left):
                return False
        return True

    def _over(self, anyway: bool) -> bool:
        """Act on what others have told. Returns whether all ranks have come; raises the errors of `agree`."""
        self._read()
        number, rank, come = self.number, self._ranks.rank, self._come[self.number]
        call, _ = come[rank]
        for each, (source, cause, cure) in sorted(self._ended.items()):
            if each == number or (each < number and not (anyway and cause)):
                if not cause:
                    self.check(anyway=True)  # the rank may have told before why it leaves
                    raise rank_failure(source, f"closed its runtime while rank {rank} was in {call}")
                raise RankDivergence(cause, cure) if each == number else self._end_all(cause, cure)
        if any(each != call for each, _ in come.values()):
            raise self._end_all(_sentence({each: said for each, (said, _) in sorted(come.items())}))
        if len(come) == self._ranks.size:
            self._tell(self._place.children, come)
            self._last = call
            del self._come[number]
            return True
        if not self._told and self._place.below <= come.keys():
            self._told = True
            self._tell(self._place.parent, self._place.below)
        return False

    def _read(self) -> None:
        """Take note of the messages of agreements that are here, and answer those that ask."""
        while not self._wire.barriers.empty():
            source, (_, (number, said, end)) = self._wire.barriers.get()
            if end and (number not in self._ended or not end[0]):
                self._ended[number] = source, *end
            if number < self.number:
                continue  # it is over
            for rank, call, facts in said:
                self._come.setdefault(number, {}).setdefault(rank, (call, facts))
            if end == []:
                self._asking.setdefault(number, set()).add(source)
        self._tell(self._asking.pop(self.number, ()), [self._ranks.rank])

    def _tell(self, to: Collection[int], ranks: Iterable[int], end: Sequence[str] | None = None) -> None:
        """Tell other ranks what `ranks` have said in this agreement. end: of MessageKind.BARRIER."""
        if to:
            said = [[rank, *self._come[self.number][rank]] for rank in ranks]
            self._wire.post(to, MessageKind.BARRIER, self.number, said, end)

    def _end_all(self, cause: str, cure: str = _SAME) -> RankDivergence:
        """Tell all other ranks of an error that ends this agreement, and return the error."""
        self._tell(self._ranks.peers, [], [cause, cure])
        return RankDivergence(cause, cure)

    def _late(self, come: Mapping[int, tuple[str, Any]]) -> RankDivergence:
        absent = next(peer for peer in self._ranks.peers if peer not in come)
        within = f"{come[self._ranks.rank][0]} within {self._wire.failure_event.timeout:g} s"
        last = f"it was last in {self._last}" if self._last else "it has agreed to nothing yet"
        cure = f"{_SAME} {TIMEOUT_VARIABLE} sets how long a rank waits, in seconds."
        return self._end_all(f"Rank {absent} did not come to {within}: {last}.", cure)


def check_same(call: str, heard: Heard, cure: str, names: Iterable[str] | None = None) -> None:
    """Check that all ranks gave equal facts in an agreement. Raises RankDivergence.

    heard: what `Barrier.agree` returned. cure: the error's cure. names: the facts to compare; by default all.
    """
    first = heard[0]
    for rank, said in heard.items():
        for name in names or {**first, **said}:
            here, there = first.get(name), said.get(name)
            if here != there:
                cause = f"At {call} the {name} of rank {rank} and of rank 0 differ: {there} and {here}."
                raise RankDivergence(cause, cure)


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
                self._wire.post(self._ranks.peers, MessageKind.DRIVE, number)
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
            self._wire.post(self._ranks.peers, MessageKind.VOTE, agreement, failure)

    def _decided(self, heard: Mapping[int, Mapping[str, Any] | None]) -> bool:
        left = {peer for peer in self._ranks.peers if self._wire.left(peer) is not None}
        while not self._wire.votes.empty():  # behind the line above: last votes of those that left are here
            source, (_, (agreement, failure)) = self._wire.votes.get()
            self._heard.setdefault(agreement, {})[source] = failure
        if any(failure is not None for failure in heard.values()):
            return True
        return all(peer in heard or peer in left for peer in self._ranks.peers)
