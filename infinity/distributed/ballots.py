"""Agreements: calls that all ranks make together, found out by ballots that each casts to all others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from infinity.distributed.bell import TIMEOUT_VARIABLE
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

_KINDS: dict[str, type[InfinityError]] = {
    each.__name__: each for each in (ConfigError, CorruptState, IncompatibleCheckpoint, RankDivergence)
}
"""The classes of whose errors other ranks need no more than the cause and the cure."""
_SAME = "Make the same calls in the same order on all ranks."


class Ballots:
    """Casts this rank's ballots, and collects those of the others. Used by the thread that trains alone."""

    def __init__(
        self,
        ranks: Ranks,
        wire: Wire,
        released: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """released: makes the context in which ballots are waited for, such as `RuntimeLock.released`."""
        self._ranks = ranks
        self._wire = wire
        self._released = released
        self._cast: dict[int, dict[int, tuple[str, Any]]] = {}
        """Number of an agreement -> rank -> (call, facts). Agreements that are over are not in it."""
        self._last: dict[int, str] = {}
        """Rank -> the call in which it was last known to be."""
        self.number = 0
        """Number of the last agreement for which this rank has cast its ballot. All ranks count alike."""
        self._failure: InfinityError | None = None
        """The error after which this rank can agree to nothing more."""

    def agree(
        self,
        call: str,
        facts: Any = None,
        *,
        patient: Callable[[], bool] = lambda: False,
        anyway: bool = False,
    ) -> dict[int, Any]:
        """Say that this rank makes a call, and wait until all ranks have said so.

        call: as in an error's text, such as "step()". facts: anything that JSON can hold. patient: asked
        after every time-out of the bell whether to go on waiting. anyway: whether to agree even if an earlier
        agreement has failed. Returns the facts of all ranks: rank -> facts, in the order of ranks. Raises
        RankDivergence if a rank makes another call or does not come while it is waited for, and RankFailure
        if one is lost or has left. Every later agreement raises the same error: what other ranks have made of
        this one is not known.
        """
        if anyway:
            self._check_wire()
        else:
            self.check()
        number = self.number + 1
        ballots = self._cast.setdefault(number, {})
        ballots[self._ranks.rank] = call, facts
        self._post(number, call, facts)
        with self._wire.meter.awaiting(call), self._released():
            while not self._wire.bell.wait_for(lambda: self._settled(ballots)) and patient():
                pass
        if any(each != call for each, _ in tuple(ballots.values())):
            raise self._ended(
                RankDivergence(_sentence({rank: each for rank, (each, _) in sorted(ballots.items())}), _SAME)
            )
        absent = [peer for peer in self._ranks.peers if peer not in ballots]
        if absent and self._wire.failure is not None:
            raise self._wire.failure.again()
        for peer in absent:
            if self._wire.left(peer) is not None:
                what = f"closed its runtime while rank {self._ranks.rank} was in {call}"
                raise self._ended(rank_failure(peer, what))
        if absent:
            raise self._ended(self._late(absent[0], call))
        del self._cast[number]
        return {rank: ballots[rank][1] for rank in range(self._ranks.size)}

    def check(self) -> None:
        """Raise the error after which this rank can agree to nothing more, if there is one."""
        self._check_wire()
        if self._failure is not None:
            raise self._failure.again()

    def _check_wire(self) -> None:
        if self._wire.failure is not None:
            raise self._wire.failure.again()

    def end(self, error: InfinityError) -> None:
        """Have every later agreement of this rank raise `error`. The first one counts."""
        self._failure = self._failure or error.again()

    def _ended(self, error: InfinityError) -> InfinityError:
        self.end(error)
        return error

    def _post(self, number: int, call: str, facts: Any) -> None:
        """Cast a ballot to all other ranks."""
        self.number = number
        for peer in self._ranks.peers:
            self._wire.post(peer, MessageKind.BALLOT, number, call, facts)

    def _settled(self, ballots: dict[int, tuple[str, Any]]) -> bool:
        left = {peer for peer in self._ranks.peers if self._wire.left(peer) is not None}
        while True:  # behind the line above, so that the last ballots of those that have left are here
            try:
                source, (_, fields) = self._wire.ballots.get_nowait()
            except queue.Empty:
                break
            number, call, facts = fields
            self._last[source] = call
            self._cast.setdefault(number, {})[source] = call, facts
        if len(ballots) == self._ranks.size or len({call for call, _ in ballots.values()}) > 1:
            return True
        return any(peer not in ballots for peer in left)

    def _late(self, peer: int, call: str) -> RankDivergence:
        last = f"it was last in {self._last[peer]}" if peer in self._last else "it has agreed to nothing yet"
        return RankDivergence(
            f"Rank {peer} did not come to {call} within {self._wire.bell.timeout:g} s: {last}.",
            f"{_SAME} {TIMEOUT_VARIABLE} sets how long a rank waits, in seconds.",
        )


def check_same(call: str, heard: Mapping[int, Mapping[str, Any]], names: Iterable[str], cure: str) -> None:
    """Check that all ranks have said the same in an agreement.

    heard: what `Ballots.agree` has returned for the call. names: those of the facts that must be equal. cure:
    of the error. Raises RankDivergence.
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
    """Such as "Rank 0 is in step(), rank 1 is in clip_grad_norm_()."."""
    text = ", ".join(f"rank {rank} is in {call}" for rank, call in calls.items())
    return f"{text[0].upper()}{text[1:]}."


def told(failure: BaseException, again: str = "") -> dict[str, Any]:
    """What other ranks are told of an error, as JSON can hold it.

    again: the call that all ranks are to make again after an error of another kind than ours, such as
    KeyboardInterrupt; needed if there can be one.
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
    """The error of this rank for that of another one, of the same class where that makes sense here, too.

    what: the start of its text. said: what `told` has returned on the other rank.
    """
    cause, cure, kind = f"{what}: {said['cause']}", said["cure"], said["kind"]
    if kind in ("StorageError", "StorageFull"):
        storage = StorageFull if kind == "StorageFull" else StorageError
        return storage(cause, cure, path=said["path"], errno=said["errno"])
    return _KINDS.get(kind, ConfigError)(cause, cure)
