"""Connections: sends the messages of this rank to others, and receives theirs, with bytes of streams.

[Note: sockets and threads] Messages between ranks of a node that have a mailbox
(infinity/distributed/mailbox.py) go through it, all others by ZeroMQ. A rank has one bound socket, which a
thread of its own reads alone, and one socket that connects to each peer when the first message goes there,
which all threads use in turn. So threads are as many for any number of ranks, and a connection carries bytes
in one direction. The thread that receives waits for no other rank, so that ranks cannot block each other in a
circle.

[Note: what the library holds] The library copies what is sent, in portions of PORTION bytes, and holds no
more of it at either end than streams allow (UNREAD bytes of a lane).

[Note: a connection that breaks] The library connects again by itself, but what was in the old connection may
be lost. So a peer whose connection breaks is lost, unless it has said BYE. A peer acknowledges a BYE
(PARTED), and keeps its connections until all have acknowledged its own. Until it was there once, a
connection is tried again and again: the network may be down for some seconds. A rank with a mailbox is lost
when its process ends. What it has put there outlasts it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from infinity.distributed.liveness import Liveness
from infinity.distributed.mailbox import LOOK, Mailbox
from infinity.distributed.message import (
    LONGEST_FRAME,
    WITH_BYTES,
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

PORTION = LONGEST_FRAME
UNREAD = 4 * PORTION
"""The most bytes of a lane that are under way and not read; see infinity/distributed/streams.py."""
_AT_ONCE = 64
"""The most messages that are read before heartbeats and connections are looked after again."""
_LAST_WORDS = 0.1
"""Seconds in which a rank whose connection broke may be heard: its last message may say why."""
_NOT_URGENT = {MessageKind.GRADIENT_SHARD}
"""Kinds of messages for which no mate has to wake at once: the end of the backward follows."""
_BROKEN_MS = 20_000
"""Milliseconds after which bytes that the other end does not acknowledge break a connection."""
_log = logging.getLogger("infinity")


class Ends(Protocol):
    """Callbacks from a thread that reads messages, which they must not hold up."""

    def heard(self, peer: int, message: Message, portion: Sequence[memoryview]) -> None:
        """A message has come, and bytes of the stream that it names. Behind BYE comes nothing of the peer but
        ROOM and FAILED.
        """

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
        held = 2 * 2 * UNREAD >> 20  # at both ends, in the lane of answers and in one of gradients
        return f"{safety} · bound to {host} · up to {held} MiB of RAM for each other rank"

    def close(self) -> None:
        """Close the sockets at once. Only for an endpoint that no `Connections` has got."""
        self.context.destroy(linger=0)


@dataclass(slots=True)
class _Peer:
    """What this rank knows of the way to a peer, and of that from it."""

    rank: int
    by_mail: bool
    """Whether messages to it and from it go by the mailbox."""
    name: bytes
    """The peer's routing identifier in the socket that sends."""
    address: str
    connected: bool = False
    gone: bool = False
    """Nothing more is sent to it."""
    sent: int = 0
    """The number of the last message to it."""
    heard: int = 0
    """The number of the last message from it."""
    said_bye: bool = False
    heard_bye: bool = False
    parted: bool = False
    """It has read this rank's BYE."""


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
        mailbox: Mailbox | None = None,
    ) -> None:
        """addresses: of all ranks' endpoints. endpoint: this rank's, and mailbox: that of this rank if it has
        mates. Both are closed with the connections. key: of the messages' MACs.
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
        """Held to use the socket that sends, the mailbox's sending half, what is known of peers' sending, and
        `liveness`.
        """
        mates = () if mailbox is None else mailbox.mates
        self._peers = {
            at: _Peer(at, at in mates, str(at).encode(), address)
            for at, address in enumerate(addresses)
            if at != rank
        }
        self._at_address = {each.address.encode(): each for each in self._peers.values()}
        self._broken: dict[int, tuple[float, str]] = {}
        """Peer -> (time.monotonic() from which it is lost if it has not said BYE, why)."""
        self._mailbox = mailbox
        self._reading = threading.Lock()
        """Held to read messages of mates."""
        self._closing = self._stopping = self._warned = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.thread = threading.Thread(target=self._run, name="infinity messages", daemon=True)

    def start(self) -> None:
        """Begin to receive messages."""
        self.thread.start()

    # --- any thread ---------------------------------------------------------------------------------------

    def post(self, to: int | Collection[int], message: Message, portion: Sequence[memoryview] = ()) -> None:
        """Send a message to a peer, or to several, and bytes with it if its kind is in WITH_BYTES. Never
        blocks. One to a peer that is gone is dropped.
        """
        body, urgent = encoded(message), message.kind not in _NOT_URGENT
        with self._lock:
            for each in (to,) if isinstance(to, int) else to:
                self._send(self._peers[each], body, portion, urgent=urgent)

    def _send(
        self, peer: _Peer, message: bytes, portion: Sequence[memoryview] = (), *, urgent: bool = True
    ) -> None:
        if peer.gone:
            return
        if peer.by_mail:
            assert self._mailbox is not None
            try:
                sent = self._mailbox.post(peer.rank, message, portion, urgent=urgent)
            except RuntimeError as error:
                sent, self._broken[peer.rank] = False, (0.0, f"is no rank any more: {error}")
            if not sent:
                os.eventfd_write(self._wake, 1)  # the thread sends the rest, or parts from the peer
            return
        if not peer.connected:
            peer.connected = True
            self._out.setsockopt(zmq.CONNECT_ROUTING_ID, peer.name)
            self._out.connect(peer.address)
        peer.sent += 1
        frames = pack(self._key, Head(self._rank, peer.rank, peer.sent), message)
        self._out.send_multipart([peer.name, *frames, *portion], zmq.NOBLOCK)

    def say_bye(self, rank: int) -> None:
        """Send BYE to a peer, unless it was sent. Only what belongs to connections is sent afterwards."""
        peer = self._peers[rank]
        with self._lock:
            if not peer.said_bye:
                self._send(peer, encoded(Message(MessageKind.BYE, [])))
                peer.said_bye = True

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
                for rank, message, portion in mailbox.read():
                    self._heard_by_mail(self._peers[rank], message, portion)
            finally:
                if inbox is not None:
                    inbox.quiet = 0
                self._reading.release()
        if inbox is not None:
            mailbox.looked()

    def _heard_by_mail(self, peer: _Peer, body: bytes | None, portion: Sequence[memoryview]) -> None:
        if peer.gone or peer.heard_bye:
            return
        with self._lock:
            self._liveness.heard(peer.rank)
        try:
            message = decoded(body or b"")
        except ValueError as error:
            with self._lock:
                self._broken[peer.rank] = 0.0, f"sent what is no message: {error}"
            self._wake_up()
            return
        peer.heard_bye = message.kind is MessageKind.BYE
        if message.kind is not MessageKind.BEAT:
            self._ends.heard(peer.rank, message, portion)
        if peer.heard_bye:
            self._departed(peer)
            self._wake_up()

    def _departed(self, peer: _Peer) -> None:
        with self._lock:
            self._liveness.departed(peer.rank)

    def close_mailbox(self) -> None:
        """Close the mailbox, once the thread has ended."""
        with self._reading, self._lock:
            mailbox, self._mailbox = self._mailbox, None
            if mailbox is not None:
                mailbox.close()

    def close(self) -> None:
        """Have the thread end when this rank has said BYE to all peers, and all of them to this rank."""
        self._closing = True
        self._wake_up()

    def stop(self) -> None:
        """Have the thread end soon, whatever peers do."""
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread that receives -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # no peer would hear of this rank any more
            self._ends.lost(self._rank, f"cannot receive messages any more: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _receive(self) -> None:
        poller, mailbox = zmq.Poller(), self._mailbox
        processes = {} if mailbox is None else mailbox.processes
        for each in (self._in, self._monitor, self._wake, *processes):
            poller.register(each, zmq.POLLIN)
        if mailbox is not None:
            poller.register(mailbox.descriptor, zmq.POLLIN)
        next_round = 0.0
        while not self._stopping and not (self._closing and self._parted()):
            seconds = max(0.0, next_round - time.monotonic())
            seconds = min(seconds, _LAST_WORDS) if self._broken else seconds
            if mailbox is not None:
                seconds = min(seconds, self._look_at_mail(mailbox))
            ready = dict(poller.poll(1 + int(1000 * seconds)))
            if mailbox is not None and mailbox.descriptor in ready:
                mailbox.woken()
            for each in processes.keys() & ready.keys():
                poller.unregister(each)
                self._has_ended(self._peers[processes[each]], 0.0, "its process has ended")
            if self._in in ready:
                self._read_messages()
            if self._broken:
                self._lose_broken()
            if self._monitor in ready:
                self._look_at_connections()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if time.monotonic() >= next_round:
                self._beat()
                next_round = time.monotonic() + self._liveness.interval

    def _parted(self) -> bool:
        """Whether nothing more has to be sent to peers or received from them."""
        return all(map(self._has_parted, self._peers.values()))

    def _has_parted(self, peer: _Peer) -> bool:
        if peer.gone or not (peer.heard_bye and peer.said_bye):
            return peer.gone
        if self._mailbox is not None and peer.by_mail:
            return peer.rank not in self._mailbox.left
        return peer.parted

    def _look_at_mail(self, mailbox: Mailbox) -> float:
        """Read messages of mates if no other thread does. Returns the most seconds until the next look."""
        others = mailbox.watch()
        if not others:
            self.read_mail()
        mailbox.ring()
        with self._lock:
            for rank, why in mailbox.flush():
                self._broken[rank] = 0.0, f"is no rank any more: {why}"
        mailbox.rouse_now()
        return LOOK if others else self._liveness.interval

    def _read_messages(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._read(frame)

    def _read(self, frame: bytes) -> None:
        """Read the message that begins with a frame, and act on it."""
        frames = [frame]
        if kind_of(frame) not in WITH_BYTES:
            while self._in.getsockopt(zmq.RCVMORE):
                frames.append(self._in.recv())
        try:
            head, message = unpack(self._key, frames)
        except ValueError:
            self._refuse("is not of this run")
            return
        peer = self._peers.get(head.source)
        if peer is None or head.to != self._rank or head.number <= peer.heard:
            self._refuse("is for another rank, or has come before")
            return
        if head.number != peer.heard + 1:
            self._lose(peer, "is gone: some of its messages were lost")
        if peer.gone:
            self._skip()
            return
        peer.heard = head.number
        with self._lock:
            self._liveness.heard(peer.rank)
        portion = []
        while self._in.getsockopt(zmq.RCVMORE):
            portion.append(self._in.recv(copy=False).buffer)
        if message.kind is MessageKind.BYE:
            peer.heard_bye = True
            self._departed(peer)
            self.post(peer.rank, Message(MessageKind.PARTED, []))
        if message.kind is MessageKind.PARTED:
            peer.parted = True
        elif message.kind is not MessageKind.BEAT:
            self._ends.heard(peer.rank, message, portion)

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

    # --- peers that live, and connections -----------------------------------------------------------------

    def _beat(self) -> None:
        with self._lock:
            silent, neighbours = self._liveness.round(), tuple(self._liveness.silent)
        self.post(neighbours, Message(MessageKind.BEAT, []))
        for each in silent:
            why = "it is dead, stopped, cut off, or its GIL is held"
            patience = f"{self._liveness.patience:g} s"
            self._lose(self._peers[each], f"has given no sign of life for {patience}: {why}")

    def _look_at_connections(self) -> None:
        while self._monitor.poll(0):
            event: Any = recv_monitor_message(self._monitor)
            peer = self._at_address[event["endpoint"]]
            if event["event"] == zmq.EVENT_DISCONNECTED or peer.heard_bye:
                self._has_ended(peer, _LAST_WORDS, "the connection to it broke")

    def _has_ended(self, peer: _Peer, patience: float, how: str) -> None:
        if peer.heard_bye:  # it has left
            self._part(peer)
        else:
            with self._lock:
                self._broken[peer.rank] = time.monotonic() + patience, f"is gone: {how}"

    def _lose_broken(self) -> None:
        self.read_mail()  # a peer's last words may be there
        with self._reading, self._lock:  # another thread may have them
            now = time.monotonic()
            due = {each: why for each, (until, why) in self._broken.items() if until <= now}
            for each in due:
                del self._broken[each]
        for each, why in sorted(due.items()):
            peer = self._peers[each]
            if peer.heard_bye:
                self._part(peer)
            else:
                self._lose(peer, why)

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
