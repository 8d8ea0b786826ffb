"""Wire: messages between this rank and each other one, and payloads that arrive in memory named beforehand.

[Note: threads of the wire] Each peer has a thread that sends and a thread that receives. Gloo gives no notice
of an operation's end but to a thread that waits in it, and notices the peer's death only where the peer is
named, hence a thread for each. Messages to one peer arrive in the order of `post` and `deliver`. Receiving
threads never wait for anything but their peer, so ranks cannot block each other in a circle.
"""

from __future__ import annotations

import functools
import itertools
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from infinity.distributed.bell import TIMEOUT_VARIABLE, Bell
from infinity.distributed.mesh import FOREVER, Ranks
from infinity.distributed.message import HEADER_BYTES, Kind, Message, bytes_behind, pack, unpack
from infinity.errors import ConfigError, InfinityError, RankDivergence, rank_failure

_HEADER, _BEHIND, _PAYLOAD = 1, 2, 3
"""Tags of gloo, so that no transfer can be taken for one of another purpose."""

Inbox = queue.SimpleQueue[tuple[int, Message]]


@dataclass
class Traffic:
    """What has crossed the wire so far: payloads in bytes by their label, and messages with their headers."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    messages_sent: int = 0
    messages_received: int = 0


class _Transfer:
    """A payload under way. It satisfies the protocol of infinity/tiers/link.py."""

    def __init__(
        self, bell: Bell, peer: int, number: int, label: str, told: Callable[[Any], None] | None = None
    ) -> None:
        self._told = told
        """Called with this object when it has ended; None: nobody is."""
        self.peer = peer
        self.number = number
        self.label = label
        self._bell = bell
        self._ended = False
        self._failure: InfinityError | None = None

    def done(self) -> bool:
        """Whether it has ended, successfully or with an error. Never blocks."""
        return self._ended or self._bell.failure is not None

    def wait(self, timeout: float | None = None) -> object:
        """Wait without the GIL until it has ended.

        timeout: seconds; None: the bell's time-out. Raises RankFailure if the peer died, left, refused or
        does not come within the time, or the failure of the run; RankDivergence if the peer sent or refused
        something because it does otherwise than this rank. After an error the memory may still be written or
        read, until the wire's threads have ended.
        """
        if not self._bell.wait_for(lambda: self._ended, timeout):
            seconds = self._bell.timeout if timeout is None else timeout
            raise rank_failure(
                self.peer, f"did not {self._verb} {self.label} within {seconds:g} s ({TIMEOUT_VARIABLE})"
            )
        if self._failure is not None:
            raise self._failure.again()
        return None

    _verb = ""

    @property
    def timing(self) -> None:
        """None: transfers between ranks are not timed."""
        return None

    def end(self, failure: InfinityError | None = None) -> None:
        """Called by the wire. The first end counts."""
        if not self._ended:
            self._failure = None if failure is None else failure.again()
            self._ended = True
            self._bell.ring()
            if self._told is not None:
                self._told(self)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, which `wait` raises."""
        return self._failure is not None


class Delivery(_Transfer):
    """Bytes that are expected from a peer. `number` goes with the request, and comes back with the bytes."""

    _verb = "deliver"

    def __init__(
        self,
        bell: Bell,
        peer: int,
        number: int,
        label: str,
        *,
        into: tuple[torch.Tensor, ...],
        told: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(bell, peer, number, label, told)
        self.into = into
        """Where the bytes go: contiguous uint8 tensors in CPU memory, kept until the delivery has ended."""

    def end(self, failure: InfinityError | None = None) -> None:
        self.into = ()
        super().end(failure)


class Dispatch(_Transfer):
    """Bytes on their way to a peer. Once it is done they may change: the peer has them."""

    _verb = "take"


class _Parcel(NamedTuple):
    message: Message
    pieces: tuple[torch.Tensor, ...] = ()
    dispatch: Dispatch | None = None


class Wire:
    """All that this rank says to other ranks, and hears from them. Methods may be called by any thread."""

    def __init__(self, ranks: Ranks, bell: Bell | None = None) -> None:
        """bell: rung whenever something has come; its failure ends all waits."""
        self.bell = Bell() if bell is None else bell
        self.inbox: Inbox = queue.SimpleQueue()
        """(source, message): all messages but DATA, REFUSAL, BALLOT and LEAVING, in each source's order. A
        peer's last one is BYE, or FAILED if it is lost.
        """
        self.ballots: Inbox = queue.SimpleQueue()
        """(source, message): the messages of the kind BALLOT, in each source's order."""
        self._ranks = ranks
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._leaving: set[int] = set()
        """Peers that have said LEAVING."""
        self._expected: dict[tuple[int, int], Delivery] = {}
        self._ended: dict[int, InfinityError] = {}
        """Peer that will send nothing more -> error of what is expected from it."""
        self._traffic = Traffic()
        self._closed = False
        self._numbers = itertools.count(1)
        self._outboxes: dict[int, queue.SimpleQueue[_Parcel | None]] = {}
        self._threads: list[threading.Thread] = []
        for peer in ranks.peers:
            self._outboxes[peer] = queue.SimpleQueue()
            for target, name in ((self._send_all, "to"), (self._receive_all, "from")):
                thread = threading.Thread(
                    target=target, args=(peer,), name=f"infinity {name} rank {peer}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    @property
    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return self._ranks.peers

    def left(self, peer: int) -> InfinityError | None:
        """The error for what is expected from a peer that has left or is lost; None while it is there."""
        return self._ended.get(peer)

    @property
    def leaving(self) -> bool:
        """Whether a peer closes its runtime."""
        return bool(self._leaving)

    def wait_for_step(self, come: Callable[[], bool]) -> bool:
        """Do what `Bell.wait_for` does, for what belongs to a step that all ranks have still to take.

        Raises RankFailure if a peer closes its runtime, for then the step never comes.
        """
        if not self.bell.wait_for(lambda: come() or self.leaving):
            return False
        if not come():
            raise rank_failure(min(self._leaving), "closes its runtime, and this rank goes on training")
        return True

    @property
    def failure(self) -> InfinityError | None:
        """The failure that ended the run, or None."""
        return self.bell.failure

    def traffic(self) -> Traffic:
        """A copy of the counters. Bytes sent count once the peer has taken them."""
        with self._lock:
            mine = self._traffic
            return Traffic(
                Counter(mine.sent), Counter(mine.received), mine.messages_sent, mine.messages_received
            )

    def post(self, peer: int, kind: Kind, *fields: Any) -> None:
        """Queue a message. Never blocks. What is posted to a peer that has left is dropped."""
        self._queue(peer, _Parcel(Message(kind, list(fields))))

    def expect(
        self, peer: int, into: Sequence[torch.Tensor], label: str = "parameters", *, tell: bool = False
    ) -> Delivery:
        """Name the memory for bytes that the peer will be asked for; ask it with the delivery's number.

        into: contiguous uint8 tensors in CPU memory. The peer sends pieces of exactly these sizes. tell:
        whether a message ARRIVED comes into the inbox when the delivery has ended.
        """
        told = functools.partial(self._tell, Kind.ARRIVED) if tell else None
        delivery = Delivery(self.bell, peer, next(self._numbers), label, into=tuple(into), told=told)
        with self._lock:
            error = self._ended.get(peer)
            if error is None:
                self._expected[peer, delivery.number] = delivery
        if error is not None:
            delivery.end(error)
        return delivery

    def deliver(
        self,
        peer: int,
        number: int,
        pieces: Sequence[torch.Tensor],
        label: str = "parameters",
        *,
        tell: bool = False,
    ) -> Dispatch:
        """Send the bytes that the peer expects under `number`.

        pieces: contiguous uint8 tensors in CPU memory. They are kept, and must not change, until the
        dispatch is done. tell: whether a message SENT comes into the inbox then.
        """
        told = functools.partial(self._tell, Kind.SENT) if tell else None
        dispatch = Dispatch(self.bell, peer, number, label, told)
        message = Message(Kind.DATA, [number, label, [each.nbytes for each in pieces]])
        self._queue(peer, _Parcel(message, tuple(pieces), dispatch))
        return dispatch

    def refuse(self, peer: int, number: int, error: InfinityError) -> None:
        """Have the peer's delivery fail with the text of `error`."""
        self.post(peer, Kind.REFUSAL, number, type(error).__name__, error.cause, error.cure)

    def declare(self, what: str) -> None:
        """Tell all peers that this rank cannot go on. what: goes on after "Rank 3"."""
        for peer in self.peers:
            self.post(peer, Kind.FAILED, what)

    def _tell(self, kind: Kind, transfer: _Transfer) -> None:
        self.inbox.put((transfer.peer, Message(kind, [transfer])))

    def lost(self, peer: int, what: str) -> None:
        """End all that waits, because a peer is gone. what: goes on after "Rank 3"."""
        error = rank_failure(peer, what)
        self.bell.fail(error)  # before it is known that the peer sends no more, or it would seem to have left
        self._end_of(peer, error)
        self.inbox.put((peer, Message(Kind.FAILED, [error.cause])))

    def close(self, patience: float = 10.0) -> bool:
        """Send BYE to all peers behind all that is queued, and wait until theirs have come.

        patience: seconds. Peers that take longer are left to threads that end by themselves later; after a
        failure nothing is waited for longer than a second. Returns whether all threads have ended.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for outbox in self._outboxes.values():
                outbox.put(_Parcel(Message(Kind.BYE, [])))
                outbox.put(None)
        if self.failure is not None:
            patience = min(patience, 1.0)
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- sending ------------------------------------------------------------------------------------------

    def _queue(self, peer: int, parcel: _Parcel) -> None:
        with self._lock:  # nothing may come behind BYE
            if self._closed:
                raise ConfigError("The wire is closed.", "Use the runtime before its close().")
            self._outboxes[peer].put(parcel)

    def _send_all(self, peer: int) -> None:
        """Body of the thread that sends."""
        while self._send_next(peer):
            pass  # no variable here keeps memory of the last payload alive

    def _send_next(self, peer: int) -> bool:
        parcel = self._outboxes[peer].get()
        if parcel is None:
            return False
        dispatch, nbytes = parcel.dispatch, sum(each.nbytes for each in parcel.pieces)
        failure = None
        try:
            self._send(peer, parcel)
        except RuntimeError as error:
            # Whether the peer has left or is lost is known to the thread that receives from it.
            failure = rank_failure(peer, f"took no bytes any more ({_line(error)})")
        del parcel
        if failure is None:
            with self._lock:
                self._traffic.messages_sent += 1
                if dispatch is not None:
                    self._traffic.sent[dispatch.label] += nbytes
        if dispatch is not None:  # only now, when nothing here refers to its memory
            dispatch.end(failure)
        return True

    def _send(self, peer: int, parcel: _Parcel) -> None:
        """Send all of a parcel at once, and wait until the peer has it."""
        header, behind = pack(parcel.message)
        parts = [(_bytes(header), _HEADER)]
        if behind is not None:
            parts.append((_bytes(behind), _BEHIND))
        parts += [(each, _PAYLOAD) for each in parcel.pieces if each.nbytes]
        works = [self._ranks.send(each, peer, tag) for each, tag in parts]
        for work in works:
            work.wait(FOREVER)

    # --- receiving ----------------------------------------------------------------------------------------

    def _receive_all(self, peer: int) -> None:
        """Body of the thread that receives."""
        header = bytearray(HEADER_BYTES)
        room = _bytes(header)
        try:
            while self._receive_next(peer, header, room):
                pass  # no variable here keeps memory of the last payload alive
        except Exception as error:  # whatever it is, nothing more can be heard from this peer
            self.lost(peer, f"is gone: the connection to it broke ({_line(error)})")

    def _receive_next(self, peer: int, header: bytearray, room: torch.Tensor) -> bool:
        self._ranks.receive(room, peer, _HEADER).wait(FOREVER)
        behind = None
        if more := bytes_behind(header):
            behind = bytearray(more)
            self._ranks.receive(_bytes(behind), peer, _BEHIND).wait(FOREVER)
        message = unpack(header, behind)
        with self._lock:
            self._traffic.messages_received += 1
        if message.kind is Kind.DATA:
            self._receive_payload(peer, *message.fields)
        elif message.kind is Kind.REFUSAL:
            self._refused(peer, *message.fields)
        elif message.kind is Kind.BYE:
            self._end_of(peer, rank_failure(peer, "has closed its runtime"))
            self.inbox.put((peer, message))
            self.bell.ring()
            return False
        elif message.kind is Kind.FAILED:
            self.lost(peer, *message.fields)
        elif message.kind is Kind.LEAVING:
            self._leaving.add(peer)
            self.bell.ring()
        elif message.kind is Kind.BALLOT:
            self.ballots.put((peer, message))
            self.bell.ring()
        else:
            self.inbox.put((peer, message))
        return True

    def _receive_payload(self, peer: int, number: int, label: str, sizes: list[int]) -> None:
        with self._lock:
            delivery = self._expected.get((peer, number))
        wanted = None if delivery is None else [each.nbytes for each in delivery.into]
        self._receive_pieces(peer, sizes, delivery.into if delivery is not None and wanted == sizes else None)
        with self._lock:
            self._traffic.received[label] += sum(sizes)
            self._expected.pop((peer, number), None)
        if delivery is not None:  # only now, when nothing here refers to its memory
            delivery.end(None if wanted == sizes else _other_sizes(peer, sizes, wanted or []))

    def _receive_pieces(self, peer: int, sizes: Sequence[int], into: tuple[torch.Tensor, ...] | None) -> None:
        """Receive pieces of a payload into the memory that was named for them, or else drop them."""
        if into is None:
            into = tuple(torch.empty(size, dtype=torch.uint8) for size in sizes)
        works = [self._ranks.receive(each, peer, _PAYLOAD) for each in into if each.nbytes]
        for work in works:
            work.wait(FOREVER)

    def _refused(self, peer: int, number: int, name: str, cause: str, cure: str) -> None:
        with self._lock:
            delivery = self._expected.pop((peer, number), None)
        if delivery is None:
            return
        if name == RankDivergence.__name__:
            delivery.end(RankDivergence(cause, cure))
        else:
            delivery.end(rank_failure(peer, f"could not deliver {delivery.label}: {name}: {cause} {cure}"))

    def _end_of(self, peer: int, error: InfinityError) -> None:
        """Nothing more comes from a peer."""
        with self._lock:
            self._ended.setdefault(peer, error.again())
            keys = [key for key in self._expected if key[0] == peer]
            deliveries = [self._expected.pop(key) for key in keys]
        for each in deliveries:
            each.end(error)


def _bytes(buffer: bytearray) -> torch.Tensor:
    """A tensor over the buffer's own memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _line(error: Exception) -> str:
    """The error's class and the first sentence of its text, without gloo's place in its source."""
    text = (str(error).splitlines() or [""])[0]
    text = re.sub(r"^\[\S+:\d+\] ", "", text).split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {text}"


def _other_sizes(peer: int, sizes: Sequence[int], wanted: Sequence[int]) -> RankDivergence:
    return RankDivergence(
        f"Rank {peer} sent pieces of {list(sizes)} bytes instead of {list(wanted)}.",
        "Give all ranks the same model and options.",
    )
