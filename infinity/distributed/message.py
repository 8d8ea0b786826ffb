"""Control message: a kind and a few fields that one rank sends to another, and their bytes.

A message is a header of HEADER_BYTES: the kind (1 byte), the length of the fields' text in bytes (4 bytes,
little-endian), and the text, a JSON list in UTF-8. The text that does not fit into the header follows in a
second transfer of exactly the remaining bytes.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

HEADER_BYTES = 256
_HEAD = struct.Struct("<BI")
_ROOM = HEADER_BYTES - _HEAD.size
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().decode


class MessageKind(enum.IntEnum):
    """The kind of a message. Its number is sent."""

    REQUEST = 1
    """Fields: the delivery's number, a `What`, and the bytes that are asked for."""
    DATA = 2
    """Fields: the delivery's number, label, sizes of the pieces in bytes. The pieces follow the message."""
    REFUSAL = 3
    """Fields: the delivery's number, the name of the error's class, its cause, its cure."""
    GRADIENT_SHARD = 4
    """The sender has a gradient shard for the receiver, who owns its piece. Fields: the sender's number of
    zero_grad calls, micro-batch, token, dtype, indices of the unit and the parameter, and offset of the
    gradient in the sender's host arena, or -1.
    """
    BACKWARD_DONE = 5
    """The sender has ended a backward, and offers no more shards of it. Fields: the sender's numbers of
    zero_grad calls and of ended backwards.
    """
    CLEARED = 6
    """The sender has cleared its gradients. Fields: how often so far."""
    BARRIER = 7
    """The sender has come to an agreement. Fields: its number, the name of the call, facts."""
    FAILED = 8
    """The sender cannot go on, or is lost: then the wire puts this message into the inbox. Fields: the
    cause.
    """
    BYE = 9
    """The sender's last message."""
    ARRIVED = 10
    """A delivery has ended. The wire itself puts this message into the inbox; fields: the delivery."""
    SENT = 11
    """A peer has taken a dispatch, or is lost. The wire itself puts this message into the inbox; fields: the
    dispatch.
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
    """The sender has added a gradient shard, which it has read from the receiver's RAM. Fields: the token."""
    REDIRECT = 20
    """Fields: the delivery's number. The sender has no room to relay the bytes, so their owner must be asked;
    or they are its own and at home now, so that the receiver can copy them by itself.
    """


class What(enum.IntEnum):
    """The bytes that a REQUEST asks for."""

    PARAMETERS = 1
    """Bytes of a parameter page that the asked rank owns."""
    STATES = 2
    """Bytes of the asked rank's optimizer page."""
    GRADIENT = 3
    """A shard that the asked rank has offered."""
    SUM = 4
    """The sum of all shards to a piece that the asked rank owns."""
    LOCAL = 6
    """The asked rank's own gradient of a piece, not summed over ranks."""
    INITIAL = 5
    """Values of rank 0's model or optimizer states, while runtimes are made."""
    RELAYED = 7
    """Bytes of a parameter page that a rank on another node owns; the asked rank brings them for its node."""

    @property
    def label(self) -> str:
        """The label under which the wire counts the bytes."""
        return _LABELS[self]


_LABELS = {
    What.PARAMETERS: "parameters",
    What.STATES: "states",
    What.GRADIENT: "gradients",
    What.SUM: "gradients",
    What.LOCAL: "gradients",
    What.INITIAL: "initial values",
    What.RELAYED: "parameters",
}


class Message(NamedTuple):
    """A kind and its fields: integers, floats, strings, None, and lists and dicts of them."""

    kind: MessageKind
    fields: list[Any]


def pack(message: Message) -> tuple[bytearray, bytearray | None]:
    """Return the header, and the rest for a second transfer: None if the header has room for all fields."""
    text = _encode(message.fields).encode()
    header = bytearray(HEADER_BYTES)
    _HEAD.pack_into(header, 0, message.kind, len(text))
    here = text[:_ROOM]
    header[_HEAD.size : _HEAD.size + len(here)] = here
    return header, bytearray(text[_ROOM:]) if len(text) > _ROOM else None


def bytes_behind(header: bytearray) -> int:
    """Return the bytes of the second transfer of a message, read from its header; 0 if there is none."""
    return max(0, int(_HEAD.unpack_from(header)[1]) - _ROOM)


def unpack(header: bytearray, behind: bytearray | None) -> Message:
    """Return the message that came as a header and, if it was long, a second transfer.

    behind: the bytes of the second transfer; None if there was none.
    """
    kind, length = _HEAD.unpack_from(header)
    text = header[_HEAD.size : _HEAD.size + min(length, _ROOM)]
    if behind is not None:
        text += behind
    return Message(MessageKind(kind), _decode(text.decode()))
