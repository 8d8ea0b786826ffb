"""Peer line: the threads that send to one other rank over gloo, and receive from it.

[Note: threads of a line] Gloo reports an operation's end only to a thread that waits in it, and a peer's
death only in operations with this peer. So each peer has four threads: in neither direction do messages and
payloads wait for each other, and a thread that receives waits for nothing but its peer, so that ranks cannot
block each other in a circle. Messages to one peer arrive in the order in which they were posted.

[Note: a line is never idle] An operation of gloo begins when both sides have told each other of it, which
takes a round trip. So some receives of messages are always posted ahead, and some sends begin before the
first has ended. Each direction has a connection of its own (`Ranks`): gloo's answers do not queue behind the
bytes of payloads.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from infinity.distributed.mesh import FOREVER, Ranks
from infinity.distributed.message import HEADER_BYTES, Message, MessageKind, bytes_behind, pack, unpack
from infinity.distributed.transfers import Dispatch
from infinity.errors import InfinityError, rank_failure

HEADER, BEHIND, PAYLOAD = 1, 2, 3
"""Tags of gloo, so that no transfer can be taken for one of another purpose."""
_MESSAGES_AT_ONCE = 16
"""The most messages under way at a time: several for each payload."""
_PAYLOADS_AT_ONCE = 4


class Parcel(NamedTuple):
    """A message to a peer, and the payload that follows it, if any."""

    message: Message
    pieces: tuple[torch.Tensor, ...] = ()
    dispatch: Dispatch | None = None


@dataclass(slots=True)
class _Sending:
    """A parcel that is being sent."""

    dispatch: Dispatch | None
    nbytes: int
    """Bytes of the payload."""
    began: int
    """When the parcel was given to gloo, in nanoseconds of time.perf_counter_ns()."""
    works: list[Any] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    failure: InfinityError | None = None


@dataclass(slots=True)
class _Arriving:
    """A payload that is being received, with its message; for BYE there is no payload."""

    message: Message
    began: int = 0
    """When the payload's memory was given to gloo, in nanoseconds of time.perf_counter_ns()."""
    memory: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


class Ends(Protocol):
    """Callbacks from a line to its wire, each called by one of the line's threads.

    began: when the transfer of a payload began, in nanoseconds of time.perf_counter_ns(). It ended just now.
    """

    def sent(self, dispatch: Dispatch | None, nbytes: int, began: int, failure: InfinityError | None) -> None:
        """Take note that the peer has taken a parcel, or that it could not be sent because of `failure`.

        The line no longer refers to the memory of the parcel. nbytes: of the parcel's payload.
        """

    def room_for(self, peer: int, number: int, sizes: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
        """Return memory for a payload, one tensor of each of `sizes` in bytes; None: drop the payload."""

    def arrived(self, peer: int, number: int, label: str, sizes: list[int], began: int) -> None:
        """A payload has arrived. Nothing in the line refers to its memory any more."""

    def heard(self, peer: int, message: Message) -> None:
        """Called when a message of a kind other than DATA has come. BYE comes after all payloads."""

    def lost(self, peer: int, what: str) -> None:
        """The connection to the peer broke. what: the error's text after "Rank 3"."""


class PeerLine:
    """Sends all messages and payloads of this rank to one peer, and receives the peer's."""

    def __init__(self, ranks: Ranks, peer: int, ends: Ends) -> None:
        self._ranks = ranks
        self._peer = peer
        self._ends = ends
        self._messages: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._payloads: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._arriving: queue.SimpleQueue[_Arriving | None] = queue.SimpleQueue()
        """The payloads in the order of their messages, then BYE; None: the peer is lost."""
        self._posting = threading.Lock()
        """Held while the transfers of one parcel are begun, so that no others come between."""
        bodies: dict[str, Callable[[], None]] = {
            "to": self._send_messages,
            "payloads to": self._send_payloads,
            "from": self._receive_messages,
            "payloads from": self._receive_payloads,
        }
        self.threads = [
            threading.Thread(target=body, name=f"infinity {name} rank {peer}", daemon=True)
            for name, body in bodies.items()
        ]

    def start(self) -> None:
        for each in self.threads:
            each.start()

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel. Never blocks."""
        (self._messages if parcel.dispatch is None else self._payloads).put(parcel)

    def close(self) -> None:
        """Queue BYE behind all other parcels. Nothing may be put afterwards."""
        self._messages.put(None)
        self._payloads.put(None)

    # --- sending ------------------------------------------------------------------------------------------

    def _send_messages(self) -> None:
        self._send_all(self._messages, _MESSAGES_AT_ONCE)

    def _send_payloads(self) -> None:
        self._send_all(self._payloads, _PAYLOADS_AT_ONCE)
        self.threads[0].join()  # BYE comes behind all messages, too
        self._end(self._post(Parcel(Message(MessageKind.BYE, []))))

    def _send_all(self, outbox: queue.SimpleQueue[Parcel | None], most: int) -> None:
        """Send parcels until None comes, at most `most` of them at a time."""
        begun: deque[_Sending] = deque()
        more = True
        while more or begun:
            while more and len(begun) < most:
                try:
                    parcel = outbox.get(block=not begun)
                except queue.Empty:
                    break
                if parcel is None:
                    more = False
                else:
                    begun.append(self._post(parcel))
                del parcel  # no variable here keeps memory of the last payload alive
            if begun:
                self._end(begun.popleft())

    def _post(self, parcel: Parcel) -> _Sending:
        header, behind = pack(parcel.message)
        parts = [(_bytes(header), HEADER)]
        if behind is not None:
            parts.append((_bytes(behind), BEHIND))
        parts += [(each, PAYLOAD) for each in parcel.pieces if each.nbytes]
        nbytes = sum(each.nbytes for each in parcel.pieces)
        sending = _Sending(parcel.dispatch, nbytes, time.perf_counter_ns())
        sending.memory = [each for each, _ in parts]
        try:
            with self._posting:
                for each, tag in parts:
                    sending.works.append(self._ranks.send(each, self._peer, tag))
        except RuntimeError as error:
            sending.failure = self._refused(error)
        return sending

    def _end(self, sending: _Sending) -> None:
        """Wait until the peer has taken a parcel."""
        try:
            for work in sending.works:
                work.wait(FOREVER)
        except RuntimeError as error:
            sending.failure = self._refused(error)
            del error
        work = None
        sending.works.clear()
        sending.memory.clear()
        self._ends.sent(sending.dispatch, sending.nbytes, sending.began, sending.failure)

    def _refused(self, error: RuntimeError) -> InfinityError:
        # Whether the peer has left or is lost is known to the thread that receives from it.
        return rank_failure(self._peer, f"took no bytes any more ({_line(error)})")

    # --- receiving ----------------------------------------------------------------------------------------

    def _receive_messages(self) -> None:
        try:
            rooms = deque(self._expect() for _ in range(_MESSAGES_AT_ONCE))
            while self._receive_next(rooms):
                pass  # no variable here keeps memory of the last payload alive
        except Exception as error:  # whatever it is, nothing more can be heard from this peer
            self._lose(error)
            self._arriving.put(None)

    def _expect(self) -> tuple[bytearray, Any]:
        room = bytearray(HEADER_BYTES)
        return room, self._ranks.receive(_bytes(room), self._peer, HEADER)

    def _receive_next(self, rooms: deque[tuple[bytearray, Any]]) -> bool:
        header, work = rooms.popleft()
        work.wait(FOREVER)
        behind = None
        if more := bytes_behind(header):
            behind = bytearray(more)
            self._ranks.receive(_bytes(behind), self._peer, BEHIND).wait(FOREVER)
        message = unpack(header, behind)
        if message.kind is MessageKind.BYE:
            self._arriving.put(_Arriving(message))
            return False
        rooms.append(self._expect())
        if message.kind is MessageKind.DATA:
            self._arriving.put(self._begin(message))
        else:
            self._ends.heard(self._peer, message)
        return True

    def _begin(self, message: Message) -> _Arriving:
        number, _, sizes = message.fields
        into = self._ends.room_for(self._peer, number, sizes)
        if into is None:
            into = tuple(torch.empty(size, dtype=torch.uint8) for size in sizes)
        began = time.perf_counter_ns()
        works = [self._ranks.receive(each, self._peer, PAYLOAD) for each in into if each.nbytes]
        return _Arriving(message, began, list(into), works)

    def _receive_payloads(self) -> None:
        try:
            while self._payload_arrived():
                pass
        except Exception as error:
            self._lose(error)

    def _payload_arrived(self) -> bool:
        arriving = self._arriving.get()
        if arriving is None:
            return False
        for work in arriving.works:
            work.wait(FOREVER)
        work, message = None, arriving.message
        # The thread that put it here may still have it, but none may have the memory of a payload that ended.
        arriving.works.clear()
        arriving.memory.clear()
        if message.kind is MessageKind.BYE:
            self._ends.heard(self._peer, message)
            return False
        number, label, sizes = message.fields
        self._ends.arrived(self._peer, number, label, sizes, arriving.began)
        return True

    def _lose(self, error: Exception) -> None:
        self._ends.lost(self._peer, f"is gone: the connection to it broke ({_line(error)})")


def _bytes(buffer: bytearray) -> torch.Tensor:
    """Return a tensor over the buffer's own memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _line(error: Exception) -> str:
    """Return the error's class and the first sentence of its text, without the source location that gloo puts
    before the text.
    """
    text = (str(error).splitlines() or [""])[0]
    text = re.sub(r"^\[\S+:\d+\] ", "", text).split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {text}"
