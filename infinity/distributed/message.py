"""Message: a kind and a few fields that one rank sends to another, as frames of bytes.

The first frame is a head and the fields as JSON. The head has a MAC of all that follows it, the ranks of
sender and receiver, the number of the message among those from the one to the other, and the kind. The MAC's
key is known to the ranks of a runtime alone, so that nothing else is read. Fields that are longer than
LONGEST_FRAME go on in further frames. Behind the first frame of a kind in WITH_BYTES are bytes of a stream
instead.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

LONGEST_FRAME = 512 << 10
"""Bytes."""
IN_DEVICE = -1
"""In the place of a stream's lane: a gradient's bytes are in device memory."""
ANSWERS = -2
"""The lane of answers to requests; see infinity/distributed/streams.py. Lanes of gradients are from 0 on."""
_MAC_BYTES = 16
_HEAD = struct.Struct("<IIQB")
_WAY = struct.Struct("<IIQ")
"""All of the head but the kind, its last byte."""
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode


class MessageKind(enum.IntEnum):
    """The kind of a message. Its number is sent."""

    REQUEST = 1
    """Fields: the delivery's number, a `What`, and the bytes that are asked for."""
    DATA = 2
    """Fields: the delivery's number, sizes of the pieces in bytes, and the stream's lane, in which these
    bytes come. The first of them may be in this message.
    """
    REFUSAL = 3
    """Fields: the delivery's number, the name of the error's class, its cause, its cure."""
    GRADIENT_SHARD = 4
    """The sender has a gradient shard for the receiver, who owns its piece. Fields: the sender's number of
    zero_grad calls, micro-batch, token, dtype, indices of the unit and the parameter, offset of the gradient
    in the sender's host arena, or -1 if its bytes come in a stream, and the stream's lane. The first of these
    bytes may be in this message. If the lane is IN_DEVICE, the offset is one in the sender's device memory.
    """
    BACKWARD_DONE = 5
    """The sender has ended a backward, and offers no more shards of it. Fields: the sender's numbers of
    zero_grad calls and of ended backwards.
    """
    CLEARED = 6
    """The sender has cleared its gradients. Fields: how often so far."""
    BARRIER = 7
    """What the sender knows of an agreement. Fields: its number, and (rank, name of the call, facts) of ranks
    that have come; then None, or [] if the receiver is to answer, or the cause and the cure of an error that
    ends the agreement. They are empty if the sender has left, and comes to no agreement from this number on.
    """
    FAILED = 8
    """A rank cannot go on, or is lost: then the wire puts this message into the inbox. Fields: the rank, and
    the cause without the words "Rank 3".
    """
    BYE = 9
    """The sender's last message."""
    ARRIVED = 10
    """A delivery has ended. The wire itself puts this message into the inbox; fields: the delivery."""
    SENT = 11
    """A peer has taken a dispatch, or is lost. The wire itself puts this message into the inbox; fields: the
    dispatch.
    """

    LANDED = 12
    """Gradients have come from a device to RAM. The rank itself puts this message into the inbox. No fields.
    """

    EXPECTED = 14
    """The sender has announced its shards of a micro-batch. Fields: its number of zero_grad calls, the
    micro-batch, and (unit, index) of each parameter that gets one gradient of the sender.
    """

    LEAVING = 15
    """The sender closes its runtime: it serves others until all do, but takes part in no further step."""

    PAUSED = 16
    """The sender offers no more shards before an agreement's end. Fields: its number of zero_grad calls, and
    the number of the agreement, which it has begun.
    """

    VOTE = 18
    """Fields: the number of the agreement that began a commit, and the error that keeps the sender from
    making its rank commit durable; None if it is durable.
    """

    DRIVE = 19
    """Fields: the number of a commit. The sender's training waits for it, so the receiver completes the
    updates that its own rank commit still needs.
    """
    TAKEN = 21
    """The sender has read a gradient shard in the receiver's RAM or device memory, or never will. Fields: the
    token.
    """
    REDIRECT = 20
    """Fields: the delivery's number. The receiver can copy the bytes from the sender's RAM by itself, or asks
    their owners for those that it does not find there.
    """
    PARTED = 23
    """The sender has read the receiver's BYE. No fields."""
    STREAM = 26
    """Further bytes of a stream. Fields: its lane."""
    ROOM = 27
    """The sender has read bytes of a stream. Fields: its lane, and how many bytes."""
    BEAT = 24
    """The sender lives. No fields."""


class What(enum.IntEnum):
    """The bytes that a REQUEST asks for."""

    PARAMETERS = 1
    """Bytes of a parameter page that the asked rank owns."""
    STATES = 2
    """Bytes of the asked rank's optimizer page."""
    SUM = 4
    """The sum of all shards to a piece that the asked rank owns."""
    LOCAL = 6
    """The asked rank's own gradient of a piece, not summed over ranks."""
    INITIAL = 5
    """Values of rank 0's model or optimizer states, while runtimes are made."""
    RELAYED = 7
    """Other nodes' parts of a parameter page, which the asked rank brings for its node. Nothing is sent."""

    @property
    def label(self) -> str:
        """The label under which the wire counts the bytes."""
        return _LABELS[self]


_LABELS = {
    What.PARAMETERS: "parameters",
    What.STATES: "states",
    What.SUM: "gradients",
    What.LOCAL: "gradients",
    What.INITIAL: "initial values",
}


INTERNAL = (MessageKind.ARRIVED, MessageKind.SENT, MessageKind.LANDED)
"""Kinds of messages that a rank puts into its inbox itself, and that nobody sends."""
WITH_BYTES = (MessageKind.DATA, MessageKind.STREAM, MessageKind.GRADIENT_SHARD)
"""Kinds of messages behind whose first frame are bytes of a stream."""


class Message(NamedTuple):
    """A kind and its fields: integers, floats, strings, None, and lists and dicts of them."""

    kind: MessageKind
    fields: list[Any]


class Head(NamedTuple):
    """Who sent a message, to whom, and its number among the sender's messages to the receiver, from 1 on."""

    source: int
    to: int
    number: int


def encoded(message: Message) -> bytes:
    """Return the bytes of a message that are the same for all receivers: its kind and its fields."""
    return bytes([message.kind]) + _encode(message.fields).encode()


def decoded(message: bytes) -> Message:
    """Return the message of which `encoded` returned the bytes. Raises ValueError for other bytes, and for
    kinds that a rank puts into its inbox itself.
    """
    kind = MessageKind(message[0] if message else 0)
    if kind in INTERNAL:
        raise ValueError(f"{kind.name} is sent to nobody")
    return Message(kind, _decode(message[1:].decode()))


def pack(key: bytes, head: Head, message: bytes) -> list[bytes]:
    """Return the frames of a message but for those of a stream. key: of the MAC, 16 to 64 bytes. message:
    what `encoded` returned.
    """
    body = _WAY.pack(*head) + message
    body = _mac(key, body) + body
    return [body[at : at + LONGEST_FRAME] for at in range(0, len(body), LONGEST_FRAME)]


def kind_of(frame: bytes) -> int:
    """Return the number of the kind that a message's first frame names; 0 if the frame is too short."""
    place = _MAC_BYTES + _HEAD.size - 1
    return frame[place] if len(frame) > place else 0


def unpack(key: bytes, frames: Sequence[bytes]) -> tuple[Head, Message]:
    """Return the head and the message that were packed. Raises ValueError for frames that were not made with
    this key.
    """
    body = b"".join(frames)
    mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise ValueError("The MAC is wrong")
    return Head(*_WAY.unpack_from(body)), decoded(body[_WAY.size :])


def _mac(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_MAC_BYTES).digest()
