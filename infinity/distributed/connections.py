"""Connections: sends the messages and payloads of this rank to others by ZeroMQ, and receives theirs.

[Note: sockets and threads] A rank has one bound socket, which a thread of its own reads alone, and one socket
that connects to each peer when the first message goes there, which all threads use in turn. So threads are as
many for any number of ranks, and a connection carries bytes in one direction. The thread that receives waits
for no other rank, so that ranks cannot block each other in a circle.

Messages between ranks of a node that have a mailbox (infinity/distributed/mailbox.py) go through it. Only
payloads and what belongs to connections, such as heartbeats, take a connection between these, too, and BYE
goes when all payloads have been read. So a rank connects to the ranks alone to which it sends those.

[Note: what the library holds] A payload goes in portions of PORTION bytes, which the library copies, and the
receiver says how many it has read (READ). No more than WINDOW bytes of payloads are under way from one rank
to another, so the library holds no more of them at either end, and a message waits behind no more of them.

[Note: a connection that breaks] The library connects again by itself, but what was in the old connection may
be lost. So a peer whose connection breaks is lost, unless it has said BYE. A peer acknowledges a BYE as it
does a portion, and keeps its connections until all have acknowledged its own. Until it was there once, a
connection is tried again and again: the network may be down for some seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from infinity.distributed.liveness import Liveness
from infinity.distributed.mailbox import LOOK, Mailbox
from infinity.distributed.message import (
    LONGEST_FRAME,
    Head,
    Message,
    MessageKind,
    decoded,
    encoded,
    kind_of,
    pack,
    unpack,
)
from infinity.distributed.secret import VARIABLE, Secret
from infinity.distributed.transfers import Dispatch

PORTION = LONGEST_FRAME
WINDOW = 4 * PORTION
"""Bytes."""
UNREAD = 2 * PORTION
"""The most bytes of a lane that are under way and not read; see infinity/distributed/streams.py."""
_AT_ONCE = 64
"""The most messages that are read before heartbeats and connections are looked after again."""
_LAST_WORDS = 0.1
"""Seconds in which a rank whose connection broke may be heard: its last message may say why."""
_NOT_BY_MAIL = {
    MessageKind.DATA,
    MessageKind.MORE,
    MessageKind.STREAM,
    MessageKind.READ,
    MessageKind.BEAT,
    MessageKind.ARRIVED,
    MessageKind.SENT,
    MessageKind.LANDED,
}
"""Kinds of messages that belong to the library's connections, or to a rank itself."""
_NOT_URGENT = {MessageKind.GRADIENT_SHARD}
"""Kinds of messages for which no mate has to wake at once: the end of the backward follows."""
_BROKEN_MS = 20_000
"""Milliseconds after which bytes that the other end does not acknowledge break a connection."""
_STREAMED = (MessageKind.STREAM, MessageKind.GRADIENT_SHARD)
_WITH_BYTES = (MessageKind.DATA, MessageKind.MORE, *_STREAMED)
"""Kinds of messages behind whose first frame are bytes of a payload or a stream."""
_log = logging.getLogger("infinity")


class Ends(Protocol):
    """Callbacks from the thread that receives, which they must not hold up.

    began: when the transfer of a payload began, in nanoseconds of time.perf_counter_ns(). It ended just now.
    """

    def taken(self, dispatch: Dispatch, nbytes: int, began: int) -> None:
        """The peer has taken a payload of `nbytes` bytes. Nothing here refers to its memory any more."""

    def room_for(self, peer: int, number: int, sizes: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
        """Return memory for a payload, one tensor of each of `sizes` in bytes; None: drop the payload."""

    def arrived(self, peer: int, number: int, label: str, sizes: list[int], began: int) -> None:
        """A payload has arrived. Nothing here refers to its memory any more."""

    def streamed(self, peer: int, message: Message, portion: Sequence[memoryview]) -> None:
        """A message of the kind STREAM or GRADIENT_SHARD has come, and bytes of the stream that it names."""

    def heard(self, peer: int, message: Message) -> None:
        """A message of another kind than DATA and STREAM has come. BYE comes after all others of the peer."""

    def lost(self, rank: int, what: str) -> None:
        """A rank is lost, or this one can receive nothing more. what: the error's text after "Rank 3"."""


class Endpoint:
    """The bound socket of a rank's runtime, and the library's context with its I/O thread."""

    def __init__(self, host: str, secret: Secret | None) -> None:
        """host: an address of this machine. Binds a port that is free there. Raises zmq.ZMQError."""
        self.secret = secret
        self.context = zmq.Context()
        self.context.setsockopt(zmq.IPV6, int(":" in host))  # of all its sockets
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_FRAME + 64)  # room for what CURVE adds to a frame
        if secret is not None:
            secret.secure(self.socket, serves=True)
        try:
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def described(self) -> str:
        """Say how messages travel, and what the library may hold of them."""
        host = self.address.removeprefix("tcp://").rpartition(":")[0]
        safety = f"not encrypted, {VARIABLE} encrypts them" if self.secret is None else "encrypted"
        held = 2 * (WINDOW + UNREAD) >> 20
        return f"{safety} · bound to {host} · up to {held} MiB of RAM for each other rank"

    def close(self) -> None:
        """Close the sockets at once. Only for an endpoint that no `Connections` has got."""
        self.context.destroy(linger=0)


@dataclass(slots=True)
class _Sending:
    """A payload whose portions go to the library one after the other."""

    dispatch: Dispatch
    message: Message
    """DATA for the first portion, then MORE."""
    portions: Iterator[list[memoryview]]
    left: int
    """Number of portions that are still to be given to the library."""
    nbytes: int
    began: int = 0


@dataclass(slots=True)
class _Arriving:
    """A payload of which some portions have come."""

    number: int
    label: str
    sizes: list[int]
    portions: Iterator[list[memoryview]] | None
    """The memory of each portion; None: the payload is dropped."""
    left: int
    began: int


@dataclass(slots=True)
class _Peer:
    """What this rank knows of one connection in each direction."""

    rank: int
    name: bytes
    """The peer's routing identifier in the socket that sends."""
    address: str
    connected: bool = False
    gone: bool = False
    """Nothing more is sent to it."""
    done: bool = False
    """It takes no more payloads."""
    sent: int = 0
    """The number of the last message to it."""
    heard: int = 0
    """The number of the last message from it."""
    waiting: deque[_Sending] = field(default_factory=deque)
    under_way: deque[tuple[int, _Sending | None]] = field(default_factory=deque)
    """(bytes, the payload that ends with them or None) of each portion that it has not taken, and BYE."""
    bytes_under_way: int = 0
    arriving: _Arriving | None = None
    said_bye: bool = False
    heard_bye: bool = False


class Connections:
    """This rank's connections to all others, from the construction until both sides have said BYE."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        endpoint: Endpoint,
        ends: Ends,
        *,
        key: bytes,
        liveness: Liveness,
    ) -> None:
        """addresses: of all ranks' endpoints. endpoint: this rank's, which is closed with the connections.
        key: of the messages' MACs.
        """
        self._rank, self._key, self._ends, self._liveness = rank, key, ends, liveness
        self._endpoint = endpoint
        self._in = endpoint.socket
        self._out = endpoint.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.LINGER, 500),  # milliseconds, also of a connection to a lost peer, which is given up
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.CONNECT_TIMEOUT, 2000),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.TCP_MAXRT, _BROKEN_MS),
        ):
            self._out.setsockopt(option, value)
        if endpoint.secret is not None:
            endpoint.secret.secure(self._out, serves=False)
        self._monitor = self._out.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._lock = threading.Lock()
        """Held to use the socket that sends, and what is known of peers' sending."""
        self._peers = {
            at: _Peer(at, str(at).encode(), address) for at, address in enumerate(addresses) if at != rank
        }
        self._at_address = {each.address.encode(): each for each in self._peers.values()}
        self._broken: set[int] = set()
        """Peers whose connections broke since anything was last heard."""
        self._mailbox: Mailbox | None = None
        """Has all messages to and from its mates but payloads and what belongs to connections."""
        self._reading = threading.Lock()
        """Held to read messages of mates."""
        self._parting: deque[tuple[int, str]] = deque()
        """(mate, what is wrong with what it has sent) since the thread has last looked; "" after its BYE."""
        self._closing = self._stopping = self._warned = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.thread = threading.Thread(target=self._run, name="infinity messages", daemon=True)
        self.thread.start()

    # --- any thread ---------------------------------------------------------------------------------------

    def post(self, to: int | Collection[int], message: Message) -> None:
        """Send a message to a peer, or to several. Never blocks. One to a peer that is gone is dropped."""
        body = encoded(message)
        with self._lock:
            mates = () if self._mailbox is None else self._mailbox.mates
            for each in (to,) if isinstance(to, int) else to:
                if each in mates and message.kind not in _NOT_BY_MAIL:
                    self._mail(self._peers[each], body, urgent=message.kind not in _NOT_URGENT)
                else:
                    self._send(self._peers[each], body)

    def _mail(self, peer: _Peer, message: bytes, *, urgent: bool = True) -> None:
        assert self._mailbox is not None
        try:
            if not peer.gone and not self._mailbox.post(peer.rank, message, urgent=urgent):
                os.eventfd_write(self._wake, 1)  # the thread sends the rest
        except RuntimeError as error:
            self._parting.append((peer.rank, str(error)))
            os.eventfd_write(self._wake, 1)

    def use_mailbox(self, mailbox: Mailbox) -> None:
        """Exchange messages with the mates of a mailbox by it from now on."""
        with self._lock:
            self._mailbox = mailbox
        self._wake_up()

    def has_mail(self, peer: int) -> bool:
        """Whether messages to a peer go by the mailbox."""
        return self._mailbox is not None and peer in self._mailbox.mates

    def read_mail(self, inbox: Any = None, *, block: bool = True) -> None:
        """Read messages of mates that are here. inbox: gets messages on which the calling thread acts itself.
        block: wait if another thread reads them now.
        """
        mailbox = self._mailbox
        if mailbox is None:
            return
        if mailbox.unread():
            if not self._reading.acquire(blocking=block):
                return
            try:
                if inbox is not None:
                    inbox.quiet = threading.get_ident()
                for rank, message in mailbox.read():
                    self._heard_by_mail(self._peers[rank], message)
            finally:
                if inbox is not None:
                    inbox.quiet = 0
                self._reading.release()
        if inbox is not None:
            mailbox.looked()

    def _heard_by_mail(self, peer: _Peer, body: bytes | None) -> None:
        if peer.gone or peer.heard_bye:
            return
        try:
            message = decoded(body or b"")
            if message.kind in _NOT_BY_MAIL:
                raise ValueError(f"a message of the kind {message.kind.name}")
            peer.heard_bye = message.kind is MessageKind.BYE
            self._ends.heard(peer.rank, message)
        except ValueError as error:
            self._part_from(peer, f"sent what is no message: {error}")
        if peer.heard_bye:
            self._part_from(peer, "")

    def _part_from(self, peer: _Peer, why: str) -> None:
        """Have the thread part from a mate. why: what is wrong with what it has sent; "" after its BYE."""
        self._parting.append((peer.rank, why))
        self._wake_up()

    def close_mailbox(self) -> None:
        """Close the mailbox, once the thread has ended."""
        with self._reading, self._lock:
            mailbox, self._mailbox = self._mailbox, None
            if mailbox is not None:
                mailbox.close()

    def post_with(self, to: int, message: Message, portion: Sequence[memoryview]) -> None:
        """Send a message of the kind STREAM or GRADIENT_SHARD to a peer, and bytes with it."""
        with self._lock:
            self._send(self._peers[to], encoded(message), portion)

    def deliver(self, dispatch: Dispatch, message: Message, pieces: Sequence[torch.Tensor]) -> bool:
        """Queue a payload, with its message of the kind DATA, for `go_on`. Returns False, and does nothing,
        if the peer takes no more payloads.
        """
        nbytes = sum(message.fields[-1])
        views = [bytes_of(each) for each in pieces]
        peer = self._peers[dispatch.peer]
        with self._lock:
            if not peer.done:
                peer.waiting.append(_Sending(dispatch, message, _portions(views), _count(nbytes), nbytes))
            return not peer.done

    def go_on(self, rank: int) -> None:
        """Give the library what may go to a peer now."""
        while True:
            with self._lock:  # anew for each portion: others send meanwhile
                if not self._send_next(self._peers[rank]):
                    return

    def forget(self, rank: int) -> list[Dispatch]:
        """Drop the payloads to a peer that takes no more of them, and return their dispatches."""
        peer = self._peers[rank]
        with self._lock:
            peer.done = True
            dropped = [*(each for _, each in peer.under_way if each is not None), *peer.waiting]
            peer.waiting.clear()
            peer.under_way = deque((nbytes, None) for nbytes, _ in peer.under_way)
        return [each.dispatch for each in dropped]

    def close(self) -> None:
        """Say BYE to each peer behind all else. Nothing may be sent afterwards."""
        self._closing = True
        for each in self._peers:
            self.go_on(each)
        self._wake_up()

    def stop(self) -> None:
        """Have the thread end soon, whatever peers do."""
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _send_next(self, peer: _Peer) -> bool:
        """Send the next portion to a peer, or BYE behind all of them, and return whether there was one."""
        if peer.gone or peer.bytes_under_way >= WINDOW:
            return False
        if peer.waiting:
            sending = peer.waiting[0]
            sending.began = sending.began or time.perf_counter_ns()
            sending.left -= 1
            portion = next(sending.portions)
            self._send(peer, encoded(sending.message), portion)
            sending.message = Message(MessageKind.MORE, [])
            nbytes = sum(map(len, portion))
            peer.bytes_under_way += nbytes
            peer.under_way.append((nbytes, None if sending.left else peer.waiting.popleft()))
            return True
        if self._closing and not peer.said_bye and self.has_mail(peer.rank):
            peer.said_bye = not peer.under_way  # behind all payloads, which take another way
            if peer.said_bye:
                self._mail(peer, encoded(Message(MessageKind.BYE, [])))
        elif self._closing and not peer.said_bye:
            peer.said_bye = True
            self._send(peer, encoded(Message(MessageKind.BYE, [])))
            peer.under_way.append((0, None))
            return True
        return False

    def _send(self, peer: _Peer, message: bytes, portion: Sequence[memoryview] = ()) -> None:
        if peer.gone:
            return
        if not peer.connected:
            peer.connected = True
            self._out.setsockopt(zmq.CONNECT_ROUTING_ID, peer.name)
            self._out.connect(peer.address)
        peer.sent += 1
        frames = pack(self._key, Head(self._rank, peer.rank, peer.sent), message)
        self._out.send_multipart([peer.name, *frames, *portion], zmq.NOBLOCK)

    # --- the thread that receives -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # no peer would hear of this rank any more
            self._ends.lost(self._rank, f"cannot receive messages any more: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _receive(self) -> None:
        poller = zmq.Poller()
        for each in (self._in, self._monitor, self._wake):
            poller.register(each, zmq.POLLIN)
        next_round = 0.0
        while not self._stopping and not (self._closing and self._parted()):
            seconds = max(0.0, next_round - time.monotonic())
            seconds = min(seconds, _LAST_WORDS) if self._broken else seconds
            if self._mailbox is not None:
                poller.register(self._mailbox.descriptor, zmq.POLLIN)
                seconds = min(seconds, self._look_at_mail(self._mailbox))
            ready = dict(poller.poll(1 + int(1000 * seconds)))
            if self._mailbox is not None and self._mailbox.descriptor in ready:
                self._mailbox.woken()
            if self._in in ready:
                self._read_messages()
            elif self._broken:
                self._lose_broken()
            if self._monitor in ready:
                self._look_at_connections()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if time.monotonic() >= next_round:
                self._beat()
                next_round = time.monotonic() + self._liveness.interval
            if self._mailbox is not None:
                self._mailbox.rouse_now()

    def _parted(self) -> bool:
        """Whether nothing more has to be sent to peers or received from them."""
        left = () if self._mailbox is None else self._mailbox.left
        return all(
            each.gone or (each.heard_bye and each.said_bye and not each.under_way and each.rank not in left)
            for each in self._peers.values()
        )

    def _look_at_mail(self, mailbox: Mailbox) -> float:
        """Read messages of mates if no other thread does. Returns the most seconds until the next look."""
        others = mailbox.watch()
        if not others:
            self.read_mail()
        while self._parting:
            rank, why = self._parting.popleft()
            if why:
                self._lose(self._peers[rank], why)
            else:
                self._liveness.departed(rank)
        mailbox.ring()
        with self._lock:
            sent = mailbox.flush()
        return LOOK if others or not sent else self._liveness.interval

    def _read_messages(self) -> None:
        taken: Counter[int] = Counter()
        for _ in range(_AT_ONCE):
            try:
                frame = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            source = self._read(frame)
            if source is not None:
                taken[source] += 1
        for source, count in taken.items():
            self.post(source, Message(MessageKind.READ, [count]))

    def _read(self, frame: bytes) -> int | None:
        """Read the message that begins with a frame. Returns its source if this rank must acknowledge it."""
        frames = [frame]
        if kind_of(frame) not in _WITH_BYTES:
            while self._in.getsockopt(zmq.RCVMORE):
                frames.append(self._in.recv())
        try:
            head, message = unpack(self._key, frames)
        except ValueError:
            self._refuse("is not of this run")
            return None
        peer = self._peers.get(head.source)
        if peer is None or head.to != self._rank or head.number <= peer.heard:
            self._refuse("is for another rank, or has come before")
            return None
        if head.number != peer.heard + 1:
            self._lose(peer, "is gone: some of its messages were lost")
        if peer.gone:
            self._skip()
            return None
        peer.heard = head.number
        self._liveness.heard(peer.rank)
        return peer.rank if self._act(peer, message) else None

    def _act(self, peer: _Peer, message: Message) -> bool:
        """Act on a peer's message. Returns whether this rank must acknowledge it."""
        if message.kind is MessageKind.BEAT:
            return False
        if message.kind is MessageKind.READ:
            self._taken(peer, *message.fields)
            return False
        if message.kind is MessageKind.DATA:
            peer.arriving = self._begin(peer, *message.fields)
        if message.kind in (MessageKind.DATA, MessageKind.MORE):
            self._read_portion(peer)
            return True
        if message.kind in _STREAMED:
            portion = []
            while self._in.getsockopt(zmq.RCVMORE):
                portion.append(self._in.recv(copy=False).buffer)
            self._ends.streamed(peer.rank, message, portion)
            return False
        if message.kind is MessageKind.BYE:
            peer.heard_bye = True
            self._liveness.departed(peer.rank)
        self._ends.heard(peer.rank, message)
        return message.kind is MessageKind.BYE

    def _refuse(self, why: str) -> None:
        """Drop the rest of a message that no peer has sent now, and say so once."""
        self._skip()
        if not self._warned:
            self._warned = True
            _log.warning(
                "Messages of a stranger to rank %d are dropped: the first one %s. %s keeps strangers out.",
                self._rank,
                why,
                VARIABLE,
            )

    def _skip(self) -> None:
        """Drop the rest of a message."""
        while self._in.getsockopt(zmq.RCVMORE):
            self._in.recv_into(bytearray())

    def _begin(self, peer: _Peer, number: int, label: str, sizes: list[int]) -> _Arriving:
        began = time.perf_counter_ns()
        into = self._ends.room_for(peer.rank, number, sizes)
        portions = None if into is None else _portions([bytes_of(each) for each in into])
        return _Arriving(number, label, sizes, portions, _count(sum(sizes)), began)

    def _read_portion(self, peer: _Peer) -> None:
        arriving = peer.arriving
        if arriving is None:
            self._lose(peer, "sent a portion of no payload")
            return
        if arriving.portions is None:
            self._skip()
        else:
            self._fill(next(arriving.portions))
        arriving.left -= 1
        if not arriving.left:
            peer.arriving = arriving.portions = None
            self._ends.arrived(peer.rank, arriving.number, arriving.label, arriving.sizes, arriving.began)

    def _fill(self, portion: list[memoryview]) -> None:
        for each in portion:
            assert self._in.getsockopt(zmq.RCVMORE) and self._in.recv_into(each) == len(each)

    def _taken(self, peer: _Peer, count: int) -> None:
        ended = []
        with self._lock:
            for _ in range(count):
                nbytes, sending = peer.under_way.popleft()
                peer.bytes_under_way -= nbytes
                if sending is not None:
                    ended.append((sending.dispatch, sending.nbytes, sending.began))
                sending = None
        self.go_on(peer.rank)
        for each in ended:
            self._ends.taken(*each)

    # --- peers that live, and connections -----------------------------------------------------------------

    def _beat(self) -> None:
        silent = self._liveness.round()
        self.post(tuple(self._liveness.silent), Message(MessageKind.BEAT, []))
        for each in silent:
            why = "it is dead, stopped, cut off, or its GIL is held"
            patience = f"{self._liveness.patience:g} s"
            self._lose(self._peers[each], f"has given no sign of life for {patience}: {why}")

    def _look_at_connections(self) -> None:
        while self._monitor.poll(0):
            event: Any = recv_monitor_message(self._monitor)
            peer = self._at_address[event["endpoint"]]
            if peer.heard_bye:  # it has left, and its process has ended
                self._part(peer)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._broken.add(peer.rank)

    def _lose_broken(self) -> None:
        self.read_mail()  # a peer's last words may be there
        for each in sorted(self._broken):
            if not self._peers[each].heard_bye:
                self._lose(self._peers[each], "is gone: the connection to it broke")
        self._broken.clear()

    def _lose(self, peer: _Peer, what: str) -> None:
        """Tell this rank and all others that a peer is lost."""
        if peer.gone:
            return
        self._part(peer)
        # First to the others: when this rank knows, its own BYE may follow at once.
        self.post(self._peers, Message(MessageKind.FAILED, [peer.rank, what]))
        self._ends.lost(peer.rank, what)

    def _part(self, peer: _Peer) -> None:
        with self._lock:
            if peer.connected and not peer.gone:
                self._out.disconnect(peer.address)
            peer.gone = True
            if self._mailbox is not None:
                self._mailbox.forget(peer.rank)
        self._liveness.departed(peer.rank)

    def _end(self) -> None:
        """Close the sockets. What was sent is still on its way for some moments."""
        if self._mailbox is not None:
            self._mailbox.rouse_now()
        with self._lock:
            for each in self._peers.values():
                each.gone = True
            os.close(self._wake)
            self._wake = -1
            self._out.disable_monitor()
            self._monitor.close(0)
            self._in.close(0)
            self._out.close(500 if self._stopping else 5000)
        if self._closing:
            self.close_mailbox()
        self._endpoint.context.term()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in RAM."""
    numpy: Any = tensor.view(torch.uint8).numpy()
    return memoryview(numpy)


def _count(nbytes: int) -> int:
    """The number of portions of a payload."""
    return max(1, -(-nbytes // PORTION))


def _portions(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut a payload into portions of PORTION bytes each but the last, each in parts of one piece."""
    portion, room, cut = [], PORTION, False
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + room]
            portion.append(part)
            at += len(part)
            room -= len(part)
            if not room:
                yield portion
                portion, room, cut = [], PORTION, True
    if portion or not cut:
        yield portion
