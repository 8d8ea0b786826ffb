"""Control message: a kind and a few fields that one rank sends to another, and their bytes.

A message is a header of HEADER_BYTES: the kind (1 byte), the length of the fields' text in bytes (4 bytes,
little-endian), and the text, a JSON list in UTF-8. Text for which the header has no room goes on in a second
transfer that has exactly the bytes that are left.
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
    """What a message says. The number is what is sent."""

    REQUEST = 1
    """Fields: the delivery's number, then what is asked for."""
    DATA = 2
    """Fields: the delivery's number, label, sizes of the pieces in bytes. The pieces follow the message."""
    REFUSAL = 3
    """Fields: the delivery's number, the name of the error's class, its cause, its cure."""
    GRADIENT_SHARD = 4
    """A gradient's shard to a part that the receiver owns is ready to be fetched."""
    BACKWARD_DONE = 5
    """The sender has finished a backward: what it has not contributed by now does not come."""
    CLEARED = 6
    """The sender has dropped its gradients."""
    BARRIER = 7
    """Fields: the agreement's number, the call that casts the barrier, facts."""
    FAILED = 8
    """The sender is lost. The wire itself puts this message into the inbox; fields: the cause."""
    BYE = 9
    """The sender's last message."""
    ARRIVED = 10
    """A delivery has ended. The wire itself puts this message into the inbox; fields: the delivery."""
    SENT = 11
    """A peer has taken a dispatch, or is lost. The wire itself puts this message into the inbox; fields: the
    dispatch.
    """

    EXPECTED = 14
    """Fields: the sender's number of zero_grad calls, a micro-batch, and (unit, index) of each parameter to
    which the sender contributes in it, once.
    """

    LEAVING = 15
    """The sender closes its runtime: it serves until all do, but contributes to no further step."""

    PAUSED = 16
    """Fields: the sender's number of zero_grad calls, and the number of an agreement that it has begun. It
    contributes no more before the agreement's end.
    """

    VOTE = 18
    """Fields: the number of the agreement by which a commit was begun, and why the sender cannot make its
    part of the commit; None if it has.
    """

    DRIVE = 19
    """Fields: the number of a commit. The sender waits for it, so the receiver completes what it lacks."""
    REDIRECT = 20
    """Fields: the delivery's number. The sender has no room to relay it, so the owner is to be asked."""


class What(enum.IntEnum):
    """What a REQUEST asks for."""

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
    """The header, and what goes on behind it: None if the header has room for all fields."""
    text = _encode(message.fields).encode()
    header = bytearray(HEADER_BYTES)
    _HEAD.pack_into(header, 0, message.kind, len(text))
    here = text[:_ROOM]
    header[_HEAD.size : _HEAD.size + len(here)] = here
    return header, bytearray(text[_ROOM:]) if len(text) > _ROOM else None


def bytes_behind(header: bytearray) -> int:
    """Number of bytes that follow in a second transfer."""
    return max(0, int(_HEAD.unpack_from(header)[1]) - _ROOM)


def unpack(header: bytearray, behind: bytearray | None) -> Message:
    """The message; behind: what the second transfer brought, or None if there was none."""
    kind, length = _HEAD.unpack_from(header)
    text = header[_HEAD.size : _HEAD.size + min(length, _ROOM)]
    if behind is not None:
        text += behind
    return Message(MessageKind(kind), _decode(text.decode()))
