"""Streams: bytes that a rank sends to another one, and that wait there until they are read.

[Note: bytes that come unasked]
Bytes of one lane are read in the order in which they were sent; lanes do not wait for each other. Gradients
come unasked, and are read when their turn has come (infinity/distributed/gradient_shards.py). Answers to
requests have the lane ANSWERS, and are read at once. The receiver keeps what it has not read where it has
come, and says how much it has read (ROOM). The sender has at most UNREAD bytes of a lane under way that are
not read. So this is the most that a receiver keeps for a lane, however slow it is, and the most that a
message waits behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.distributed.connections import PORTION, UNREAD, Connections
from infinity.distributed.message import ANSWERS, Message, MessageKind
from infinity.distributed.transfers import Delivery, Dispatch


@dataclass(slots=True)
class _Outgoing:
    """A lane at its sender. Numbers are bytes since it was last empty."""

    left: deque[memoryview] = field(default_factory=deque)
    """What has not been sent."""
    ends: deque[tuple[int, Dispatch, int, int]] = field(default_factory=deque)
    """(number of bytes up to its end, its dispatch, its bytes, when it was pushed in nanoseconds) of what is
    not read to its end.
    """
    pushed: int = 0
    sent: int = 0
    read: int = 0

    def portion(self) -> list[memoryview]:
        """Take what may be sent now in one message."""
        room, found = min(PORTION, UNREAD - (self.sent - self.read)), []
        while self.left and room:
            view = self.left.popleft()
            if len(view) > room:
                self.left.appendleft(view[room:])
            found.append(view[:room])
            self.sent += len(found[-1])
            room -= len(found[-1])
        return found

    def ended(self) -> list[tuple[Dispatch, int, int]]:
        """Take what the peer has read to its end."""
        found = []
        while self.ends and self.ends[0][0] <= self.read:
            found.append(self.ends.popleft()[1:])
        return found


@dataclass(slots=True)
class _Wanted:
    into: memoryview | None
    """None: the bytes are dropped."""
    left: int
    delivery: Delivery | None = None
    """What ends with these bytes."""
    began: int = 0


@dataclass(slots=True)
class _Incoming:
    """A lane at its receiver."""

    here: deque[memoryview] = field(default_factory=deque)
    """What has come and is not read."""
    wanted: deque[_Wanted] = field(default_factory=deque)


class Streams:
    """The streams from and to all other ranks. Any thread may call its methods, which never block."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        """Guards the attributes below, and keeps the order of what is sent."""
        self._out: dict[tuple[int, int], _Outgoing] = {}
        """(peer, lane) -> what is not read; no empty ones."""
        self._in: dict[tuple[int, int], _Incoming] = {}

    def push(
        self, dispatch: Dispatch, message: Message, pieces: Sequence[memoryview]
    ) -> list[tuple[Dispatch, int, int]]:
        """Send a message, whose last field is the lane, and bytes behind it, which must not change before the
        dispatch is done. Returns what `has_read` returns, if there are no bytes.
        """
        peer, lane, nbytes = dispatch.peer, message.fields[-1], sum(map(len, pieces))
        with self._lock:
            out = self._out.setdefault((peer, lane), _Outgoing())
            out.pushed += nbytes
            out.ends.append((out.pushed, dispatch, nbytes, time.perf_counter_ns()))
            waits = bool(out.left)
            out.left.extend(each for each in pieces if each)
            self._connections.post(peer, message, () if waits else out.portion())
            return self._go_on(peer, lane, out)

    def has_read(self, peer: int, lane: int, nbytes: int) -> list[tuple[Dispatch, int, int]]:
        """Note that a peer has read bytes. Returns (dispatch, bytes, when they were pushed) of what it has
        read to the end.
        """
        with self._lock:
            out = self._out.get((peer, lane))
            if out is None:  # this rank has closed its streams
                return []
            out.read += nbytes
            return self._go_on(peer, lane, out)

    def _go_on(self, peer: int, lane: int, out: _Outgoing) -> list[tuple[Dispatch, int, int]]:
        """Send what may be sent now, and return what the peer has read to its end."""
        while portion := out.portion():
            self._connections.post(peer, Message(MessageKind.STREAM, [lane]), portion)
        ended = out.ended()
        if not out.ends:
            del self._out[peer, lane]
        return ended

    def answers(self, peer: int) -> bool:
        """Whether the peer has not read all answers to its requests."""
        return (peer, ANSWERS) in self._out

    def pull(
        self, peer: int, lane: int, into: Sequence[memoryview], delivery: Delivery
    ) -> list[tuple[Delivery, int]]:
        """Read the next bytes of a lane into memory, for a delivery. Returns (delivery, when it began) of all
        that has been read to its end by now.
        """
        wanted = [_Wanted(each, len(each)) for each in into]
        return self._want(peer, lane, [*wanted, _Wanted(None, 0, delivery, time.perf_counter_ns())])

    def drop(self, peer: int, lane: int, nbytes: int) -> list[tuple[Delivery, int]]:
        """Drop the next bytes of a lane. Returns what `pull` returns."""
        return self._want(peer, lane, [_Wanted(None, nbytes)])

    def _want(self, peer: int, lane: int, wanted: Sequence[_Wanted]) -> list[tuple[Delivery, int]]:
        with self._lock:
            lanes = self._in.setdefault((peer, lane), _Incoming())
            lanes.wanted.extend(wanted)
            return self._read(peer, lane, lanes)

    def came(self, peer: int, lane: int, portion: Sequence[memoryview]) -> list[tuple[Delivery, int]]:
        """Take bytes that have come. Returns what `pull` returns."""
        with self._lock:
            lanes = self._in.setdefault((peer, lane), _Incoming())
            lanes.here.extend(each for each in portion if each)
            return self._read(peer, lane, lanes)

    def _read(self, peer: int, lane: int, lanes: _Incoming) -> list[tuple[Delivery, int]]:
        read, ended = 0, []
        while lanes.wanted and (lanes.here or not lanes.wanted[0].left):
            wanted = lanes.wanted[0]
            if wanted.left:
                here = lanes.here.popleft()
                count = min(len(here), wanted.left)
                if wanted.into is not None:
                    at = len(wanted.into) - wanted.left
                    wanted.into[at : at + count] = here[:count]
                wanted.left -= count
                read += count
                if count < len(here):
                    lanes.here.appendleft(here[count:])
            if not wanted.left:
                lanes.wanted.popleft()
                if wanted.delivery is not None:
                    ended.append((wanted.delivery, wanted.began))
        if read:
            self._connections.post(peer, Message(MessageKind.ROOM, [lane, read]))
        if not lanes.here and not lanes.wanted:
            del self._in[peer, lane]
        return ended

    def forget(self, peer: int) -> list[Dispatch]:
        """Forget what goes to a peer, and what comes from it. Returns the dispatches."""
        with self._lock:
            for key in [each for each in self._in if each[0] == peer]:
                del self._in[key]
            return self._forget([each for each in self._out if each[0] == peer])

    def forget_gradients(self) -> list[Dispatch]:
        """Forget what goes to all peers, but answers to their requests. Returns the dispatches."""
        with self._lock:
            return self._forget([each for each in self._out if each[1] != ANSWERS])

    def _forget(self, lanes: Sequence[tuple[int, int]]) -> list[Dispatch]:
        return [dispatch for each in lanes for _, dispatch, *_ in self._out.pop(each).ends]
