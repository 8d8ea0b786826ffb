"""Streams: bytes that a rank sends to another one unasked, and that wait there until they are read.

[Note: bytes that come unasked]
Bytes of one lane are read in the order in which they were sent; lanes do not wait for each other. The
receiver keeps what it has not read where the library has put it, and says how much it has read (ROOM). The
sender has at most UNREAD bytes of a lane under way that are not read, so this is the most that a receiver
keeps for a lane, however slow it is. Messages and payloads do not wait behind a stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinity.distributed.connections import PORTION, UNREAD, Connections, bytes_of
from infinity.distributed.message import Message, MessageKind
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

    def portion(self, view: memoryview) -> memoryview:
        """Return the first bytes of `view`, as many as may be sent now in one message."""
        return view[: min(PORTION, UNREAD - (self.sent - self.read))]


@dataclass(slots=True)
class _Wanted:
    into: memoryview | None
    """None: the bytes are dropped."""
    left: int
    delivery: Delivery | None
    began: int


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
        self, dispatch: Dispatch, lane: int, message: Message, memory: torch.Tensor, *, apart: bool
    ) -> None:
        """Send a message, whose last field is the lane, and bytes behind it, which must not change before the
        dispatch is done.

        memory: contiguous, in RAM. apart: whether the message goes by itself, as messages to ranks of this
        node may go another way.
        """
        peer, view = dispatch.peer, bytes_of(memory)
        with self._lock:
            out = self._out.setdefault((peer, lane), _Outgoing())
            out.pushed += len(view)
            out.ends.append((out.pushed, dispatch, len(view), time.perf_counter_ns()))
            if apart:
                self._connections.post(peer, message)
            else:
                first = view[:0] if out.left else out.portion(view)
                self._connections.post_with(peer, message, [first])
                out.sent += len(first)
                view = view[len(first) :]
            out.left.extend([view] * bool(view))
            self._send(peer, lane, out)

    def has_read(self, peer: int, lane: int, nbytes: int) -> list[tuple[Dispatch, int, int]]:
        """Note that a peer has read bytes. Returns (dispatch, bytes, when they were pushed) of what it has
        read to the end.
        """
        ended = []
        with self._lock:
            out = self._out.get((peer, lane))
            if out is None:  # this rank has closed its streams
                return []
            out.read += nbytes
            while out.ends and out.ends[0][0] <= out.read:
                ended.append(out.ends.popleft()[1:])
            self._send(peer, lane, out)
            if not out.ends:
                del self._out[peer, lane]
        return ended

    def _send(self, peer: int, lane: int, out: _Outgoing) -> None:
        while out.left and (portion := out.portion(out.left[0])):
            self._connections.post_with(peer, Message(MessageKind.STREAM, [lane]), [portion])
            out.sent += len(portion)
            out.left[0] = out.left[0][len(portion) :]
            if not out.left[0]:
                out.left.popleft()

    def pull(
        self,
        peer: int,
        lane: int,
        nbytes: int,
        delivery: Delivery | None = None,
        into: torch.Tensor | None = None,
    ) -> list[tuple[Delivery, int]]:
        """Read the next `nbytes` bytes of a lane into uint8 memory, for a delivery, or drop them. Returns
        (delivery, when it began) of all that has been read to its end by now.
        """
        view = None if into is None else bytes_of(into)
        with self._lock:
            lanes = self._in.setdefault((peer, lane), _Incoming())
            lanes.wanted.append(_Wanted(view, nbytes, delivery, time.perf_counter_ns()))
            return self._read(peer, lane, lanes)

    def came(self, peer: int, lane: int, portions: Sequence[memoryview]) -> list[tuple[Delivery, int]]:
        """Take bytes that have come. Returns what `pull` returns."""
        with self._lock:
            lanes = self._in.setdefault((peer, lane), _Incoming())
            lanes.here.extend(each for each in portions if each)
            return self._read(peer, lane, lanes)

    def _read(self, peer: int, lane: int, lanes: _Incoming) -> list[tuple[Delivery, int]]:
        read, ended = 0, []
        while lanes.here and lanes.wanted:
            here, wanted = lanes.here.popleft(), lanes.wanted[0]
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

    def forget(self, peer: int | None = None) -> list[Dispatch]:
        """Forget what goes to a peer or to all, and what comes from it. Returns the dispatches."""
        with self._lock:
            gone = [key for key in self._out if peer in (None, key[0])]
            dropped = [dispatch for key in gone for _, dispatch, *_ in self._out.pop(key).ends]
            for key in [each for each in self._in if peer in (None, each[0])]:
                del self._in[key]
        return dropped
