"""Wire: sends and receives messages of all ranks, and payloads, which arrive in memory named beforehand.

Its connections (infinity/distributed/connections.py) transfer them. The wire knows which payloads are
expected, and counts bytes and messages.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.distributed.connections import Connections
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.liveness import Liveness
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import ANSWERS, Message, MessageKind
from infinity.distributed.streams import Streams
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.errors import ConfigError, InfinityError, RankDivergence, rank_failure
from infinity.telemetry.meter import Meter


class Inbox:
    """Messages of all ranks, (source, message), in each source's order."""

    def __init__(self) -> None:
        self.messages: deque[tuple[int, Message]] = deque()
        """Taken from the left."""
        self.quiet = 0
        """A thread that acts by itself on what it puts here; 0: none does."""
        self._there = threading.Lock()
        """Free when `wait` may return."""
        self._there.acquire()

    def put(self, message: tuple[int, Message]) -> None:
        self.messages.append(message)
        if threading.get_ident() != self.quiet:
            self.wake()

    def wake(self) -> None:
        """Have `wait` return."""
        with suppress(RuntimeError):  # it is free already
            self._there.release()

    def wait(self) -> None:
        """Wait until something is put here, or `wake` is called, since the last call. For one thread."""
        self._there.acquire()

    def get(self) -> tuple[int, Message]:
        """Wait for a message, and take it."""
        while not self.messages:
            self.wait()
        return self.messages.popleft()

    def empty(self) -> bool:
        return not self.messages


@dataclass
class Traffic:
    """Counters of a wire: bytes of payloads by label, and numbers of messages. A payload counts as one
    message; heartbeats and acknowledgements do not count.
    """

    sent: Counter[str] = field(default_factory=Counter)
    received_from: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(rank that sent them, label) -> bytes."""
    copied: Counter[str] = field(default_factory=Counter)
    """Label -> those bytes of `received_from` that this rank has copied itself from RAM of other ranks."""
    messages_sent: int = 0
    messages_received: int = 0

    @property
    def received(self) -> Counter[str]:
        """Label -> bytes from all ranks."""
        found: Counter[str] = Counter()
        for (_, label), nbytes in self.received_from.items():
            found[label] += nbytes
        return found


class Wire:
    """Sends messages and payloads to other ranks, and receives theirs. Any thread may call its methods."""

    def __init__(
        self,
        ranks: Ranks,
        failure_event: FailureEvent | None = None,
        meter: Meter | None = None,
        released: Callable[[], AbstractContextManager[None]] = nullcontext,
        liveness: Liveness | None = None,
    ) -> None:
        """ranks: its endpoint is the wire's from now on. failure_event: is notified of each arrival; a
        failure that is set in it ends all waits. meter: counts the bytes. released: makes the context in
        which this rank waits for others, such as `RuntimeLock.released`. liveness: by default one that
        watches this rank's neighbours among `ranks`.
        """
        self.failure_event = FailureEvent() if failure_event is None else failure_event
        self.meter = Meter() if meter is None else meter
        self.inbox = Inbox()
        """(source, message): all messages but DATA, REFUSAL, REDIRECT, BARRIER, VOTE and LEAVING, in each
        source's order. A peer's last one is BYE, or FAILED if it is lost.
        """
        self.barriers = Inbox()
        """(source, message): the messages of the kind BARRIER, in each source's order."""
        self.votes = Inbox()
        """(source, message): the messages of the kind VOTE, in each source's order."""
        self._ranks = ranks
        self._released = released
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._leaving: set[int] = set()
        """Peers that have said LEAVING."""
        self._expected: dict[tuple[int, int], Delivery] = {}
        self._ended: dict[int, InfinityError] = {}
        """Peer that will send nothing more -> the error of deliveries from it."""
        self._traffic = Traffic()
        self._closed = False
        self._numbers = itertools.count(1)
        self._connections = Connections(
            ranks.rank,
            ranks.addresses,
            ranks.endpoint,
            self,
            key=ranks.token,
            liveness=Liveness(ranks.rank, ranks.nodes) if liveness is None else liveness,
            mailbox=ranks.mailbox,
        )
        self._streams = Streams(self._connections)
        self._connections.start()

    def read_mail(self, *, block: bool) -> None:
        """Read messages of mates that are here. The calling thread then acts on what is in the inbox. block:
        whether to wait for a thread that reads now; else that one acts on what it reads.
        """
        self._connections.read_mail(self.inbox, block=block)

    @property
    def peers(self) -> tuple[int, ...]:
        """All other ranks."""
        return self._ranks.peers

    def left(self, peer: int) -> InfinityError | None:
        """Return the error of deliveries from a peer that has left or is lost; None if the peer is there."""
        return self._ended.get(peer)

    @property
    def leaving(self) -> bool:
        """Whether a peer closes its runtime."""
        return bool(self._leaving)

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Context of a wait for other ranks, without the runtime's lock. what: as for `Meter.awaiting`."""
        with self.meter.awaiting(what), self._released():
            yield

    def wait(self, come: Callable[[], bool], what: str) -> bool:
        """Wait until `come()` is true, without the runtime's lock; return False if the time-out passes first.

        If `come()` is no longer true once the lock is taken again, waits again. what: as for `awaiting`.
        """
        while not come():
            with self.awaiting(what):
                if not self.failure_event.wait_for(come):
                    return False
        return True

    def wait_for_step(self, come: Callable[[], bool], what: str) -> bool:
        """Wait as `wait` does, for an event of a step that all ranks have yet to take.

        Called by the training thread. Raises RankFailure if a peer closes its runtime, so that no step comes.
        """
        while not come():
            if self.leaving:
                raise rank_failure(min(self._leaving), "closes its runtime, and this rank goes on training")
            if not self.wait(lambda: come() or self.leaving, what):
                return False
        return True

    @property
    def failure(self) -> InfinityError | None:
        """The failure that ended the run, or None."""
        return self.failure_event.failure

    def traffic(self) -> Traffic:
        """Return a copy of the counters. Bytes sent are counted when the peer has taken them."""
        with self._lock:
            mine = self._traffic
            counters = Counter(mine.sent), Counter(mine.received_from), Counter(mine.copied)
            return Traffic(*counters, mine.messages_sent, mine.messages_received)

    def post(self, to: int | Collection[int], kind: MessageKind, *fields: Any) -> None:
        """Send a message to a peer, or to several. Never blocks. One to a peer that has left is dropped."""
        with self._lock:  # nothing may come behind BYE
            self._check_open()
            self._connections.post(to, Message(kind, list(fields)))
            self._traffic.messages_sent += 1 if isinstance(to, int) else len(to)

    def expect(
        self,
        peer: int,
        into: Sequence[torch.Tensor],
        label: str = "parameters",
        *,
        unit: int | None = None,
        told: Callable[[Delivery], None] | None = None,
        instead: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Register memory for bytes from a peer, and return the delivery. The caller then requests the bytes
        from the peer with the delivery's number.

        into: contiguous uint8 tensors in CPU memory. The peer sends pieces of exactly these sizes. label:
        what the bytes are, for errors and counters. unit: index of the unit, for timelines. told: called with
        the delivery when it has ended, by a thread that reads messages, or by the calling thread if the peer
        has already left. instead: called with the delivery if the peer answers without bytes.
        """
        delivery = Delivery(
            self.failure_event,
            peer,
            next(self._numbers),
            label,
            into=tuple(into),
            unit=unit,
            told=told,
            instead=instead,
            awaiting=self.awaiting,
        )
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
        unit: int | None = None,
    ) -> Dispatch:
        """Send the bytes that the peer expects under `number`.

        pieces: contiguous uint8 tensors in CPU memory. They are kept, and must not change, until the dispatch
        is done. unit: as in `expect`.
        """
        dispatch = Dispatch(self.failure_event, peer, number, label, unit=unit)
        sizes = [each.nbytes for each in pieces]
        self._push(dispatch, Message(MessageKind.DATA, [number, sizes, ANSWERS]), pieces)
        return dispatch

    def push(self, peer: int, message: Message, memory: torch.Tensor, *, label: str, unit: int) -> Dispatch:
        """Send a message whose last field is the lane of a stream, and bytes in this lane, and put a message
        SENT into the inbox when the peer has read them. Arguments: as for `deliver`.
        """
        told = functools.partial(self._tell, MessageKind.SENT)
        dispatch = Dispatch(self.failure_event, peer, next(self._numbers), label, unit=unit, told=told)
        self._push(dispatch, message, [memory])
        return dispatch

    def _push(self, dispatch: Dispatch, message: Message, pieces: Sequence[torch.Tensor]) -> None:
        ended = []
        with self._lock:
            self._check_open()
            error = self._ended.get(dispatch.peer)
            if error is None:
                ended = self._streams.push(dispatch, message, [*map(_bytes_of, pieces)])
        if error is not None:
            dispatch.end(error)
        self._taken(ended)

    def pull(self, peer: int, lane: int, into: torch.Tensor, *, label: str, unit: int) -> Delivery:
        """Read the next bytes of a lane of a peer's stream into uint8 memory, and put a message ARRIVED into
        the inbox when they are there.
        """
        told = functools.partial(self._tell, MessageKind.ARRIVED)
        delivery = self.expect(peer, [into], label, unit=unit, told=told)
        if not delivery.done():
            self._have_read(self._streams.pull(peer, lane, [_bytes_of(into)], delivery))
        return delivery

    def drop(self, peer: int, lane: int, nbytes: int) -> None:
        """Drop the next bytes of a lane of a peer's stream."""
        self._have_read(self._streams.drop(peer, lane, nbytes))

    def refuse(self, peer: int, number: int, error: InfinityError) -> None:
        """Have the peer's delivery fail with the text of `error`."""
        self.post(peer, MessageKind.REFUSAL, number, type(error).__name__, error.cause, error.cure)

    def declare(self, what: str) -> None:
        """Tell all peers that this rank cannot go on. what: the rest of the error text after the
        rank's name, such as "failed: ..." in "Rank 3 failed: ...".
        """
        self.post(self.peers, MessageKind.FAILED, self._ranks.rank, what)

    def _tell(self, kind: MessageKind, transfer: Delivery | Dispatch) -> None:
        self.inbox.put((transfer.peer, Message(kind, [transfer])))

    def close(self, patience: float = 10.0) -> bool:
        """Send BYE to all peers after all else, and wait until theirs have come.

        patience: seconds, after a failure at most 1. Returns whether the thread that receives has ended.
        Without a failure it ends later, when slower peers have said BYE.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            self._traffic.messages_sent += len(self.peers) * first
        if first:
            self._streams.forget_gradients()
            for each in self.peers:
                self._say_bye(each)
            self._connections.close()
        thread = self._connections.thread
        thread.join(patience if self.failure is None else min(patience, 1.0))
        if self.failure is not None:
            self._connections.stop()
            thread.join()
        if not thread.is_alive():
            self._connections.close_mailbox()
            for each in self.peers:
                self._streams.forget(each)  # it refers to memory
        return not thread.is_alive()

    def _say_bye(self, peer: int) -> None:
        """Send BYE to a peer, once this rank is closed and the peer has read all answers to its requests."""
        if self._closed and not self._streams.answers(peer):
            self._connections.say_bye(peer)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("The wire is closed.", "Use the runtime before its close().")

    def copied(self, peer: int, label: str, unit: int, nbytes: int, began: int) -> None:
        """Count bytes that this rank has copied itself from a peer's RAM. began: perf_counter_ns()."""
        self.meter.crossed(f"from rank {peer}", label, unit, nbytes, began)
        with self._lock:
            self._traffic.received_from[peer, label] += nbytes
            self._traffic.copied[label] += nbytes

    # --- told by the connections --------------------------------------------------------------------------
    # The meter is told first: whoever finds a payload counted or ended finds it in the timeline, too.

    def heard(self, peer: int, message: Message, portion: Sequence[memoryview]) -> None:
        if message.kind is MessageKind.ROOM:
            self._taken(self._streams.has_read(peer, *message.fields))
            self._say_bye(peer)
            return
        if message.kind is MessageKind.DATA:
            self._begin(peer, *message.fields)
        if portion:
            self._have_read(self._streams.came(peer, message.fields[-1], portion))
        if message.kind is not MessageKind.STREAM:
            self._act(peer, message)

    def _begin(self, peer: int, number: int, sizes: list[int], lane: int) -> None:
        """Read an answer that comes in a lane into the memory of its delivery, if that is still expected."""
        with self._lock:
            delivery = self._expected.get((peer, number))
            into = () if delivery is None else delivery.into
        wanted = [each.nbytes for each in into]
        if delivery is not None and wanted == sizes:
            self._have_read(self._streams.pull(peer, lane, [*map(_bytes_of, into)], delivery))
            return
        self.drop(peer, lane, sum(sizes))
        delivery = self._no_longer_expected(peer, number)
        if delivery is not None:
            delivery.end(_other_sizes(peer, sizes, wanted))

    def _taken(self, ended: Sequence[tuple[Dispatch, int, int]]) -> None:
        """Count and end what peers have read: (dispatch, bytes, when they were pushed)."""
        for dispatch, nbytes, began in ended:
            self.meter.crossed(f"to rank {dispatch.peer}", dispatch.label, dispatch.unit, nbytes, began)
            with self._lock:
                self._traffic.messages_sent += 1
                self._traffic.sent[dispatch.label] += nbytes
            dispatch.end()

    def _have_read(self, ended: Sequence[tuple[Delivery, int]]) -> None:
        """Count and end what this rank has read: (delivery, when it began)."""
        for delivery, began in ended:
            if self._no_longer_expected(delivery.peer, delivery.number) is not None:
                nbytes = sum(each.nbytes for each in delivery.into)
                peer, label = delivery.peer, delivery.label
                self.meter.crossed(f"from rank {peer}", label, delivery.unit, nbytes, began)
                with self._lock:
                    self._traffic.received_from[peer, label] += nbytes
                delivery.end()

    def _act(self, peer: int, message: Message) -> None:
        with self._lock:
            self._traffic.messages_received += 1
        if message.kind is MessageKind.REFUSAL:
            self._refused(peer, *message.fields)
        elif message.kind is MessageKind.REDIRECT:
            self.redirected(peer, *message.fields)
        elif message.kind is MessageKind.DATA:
            pass  # its bytes come in the stream
        elif message.kind is MessageKind.BYE:
            self._end_of(peer, rank_failure(peer, "has closed its runtime"))
            self.inbox.put((peer, message))
            self.failure_event.notify()
        elif message.kind is MessageKind.FAILED:
            self.lost(*message.fields)
        elif message.kind is MessageKind.LEAVING:
            self._leaving.add(peer)
            self.failure_event.notify()
        elif message.kind in (MessageKind.BARRIER, MessageKind.VOTE):
            (self.barriers if message.kind is MessageKind.BARRIER else self.votes).put((peer, message))
            self.failure_event.notify()
        else:
            self.inbox.put((peer, message))

    def lost(self, rank: int, what: str) -> None:
        """End all waits with an error, because a rank is gone.

        what: the error's text after the rank's name, which is "Rank 3" for rank 3.
        """
        error = rank_failure(rank, what)
        # Before it is known that the peer sends no more, or it would seem to have left.
        self.failure_event.fail(error)
        if rank != self._ranks.rank:
            self._end_of(rank, error)
        self.inbox.put((rank, Message(MessageKind.FAILED, [rank, what])))

    def _refused(self, peer: int, number: int, name: str, cause: str, cure: str) -> None:
        delivery = self._no_longer_expected(peer, number)
        if delivery is None:
            return
        if name == RankDivergence.__name__:
            delivery.end(RankDivergence(cause, cure))
        else:
            text = f"{name}: {cause} {cure}".rstrip(".")
            delivery.end(rank_failure(peer, f"could not deliver {delivery.label}: {text}"))

    def redirected(self, peer: int, number: int) -> None:
        """Have a delivery end without bytes of the peer; see `instead` of `expect`."""
        delivery = self._no_longer_expected(peer, number)
        if delivery is not None and delivery.instead is not None:
            try:
                delivery.instead(delivery)
            except InfinityError as error:
                delivery.end(error)

    def _no_longer_expected(self, peer: int, number: int) -> Delivery | None:
        with self._lock:
            return self._expected.pop((peer, number), None)

    def _end_of(self, peer: int, error: InfinityError) -> None:
        """Fail all deliveries from a peer, now and later, because it sends nothing more."""
        with self._lock:
            self._ended.setdefault(peer, error.again())
            keys = [key for key in self._expected if key[0] == peer]
            deliveries = [self._expected.pop(key) for key in keys]
        for each in [*deliveries, *self._streams.forget(peer)]:
            each.end(error)
        self._say_bye(peer)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in RAM."""
    numpy: Any = tensor.view(torch.uint8).numpy()
    return memoryview(numpy)


def _other_sizes(peer: int, sizes: Sequence[int], wanted: Sequence[int]) -> RankDivergence:
    return RankDivergence(
        f"Rank {peer} sent pieces of {list(sizes)} bytes instead of {list(wanted)}.",
        "Give all ranks the same model and options.",
    )
