"""Tests of messages: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.message import (
    INTERNAL,
    LONGEST_FRAME,
    Head,
    Message,
    MessageKind,
    encoded,
    kind_of,
    pack,
    unpack,
)

KEY = bytes(range(32))
HEADS = st.builds(Head, *2 * [st.integers(0, 2**32 - 1)], st.integers(0, 2**64 - 1))
VALUES = st.recursive(
    st.integers() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)

KINDS = st.sampled_from([each for each in MessageKind if each not in INTERNAL])


@given(HEADS, KINDS, st.lists(VALUES), st.sampled_from((0, 600, LONGEST_FRAME)))
def test_messages_are_unpacked_as_they_were_packed(
    head: Head, kind: MessageKind, fields: list, padding: int
) -> None:
    message = Message(kind, [*fields, "é" * padding])
    frames = pack(KEY, head, encoded(message))
    assert max(map(len, frames)) <= LONGEST_FRAME and (len(frames) > 1) == (padding == LONGEST_FRAME)
    assert kind_of(frames[0]) == kind
    assert unpack(KEY, frames) == (head, message)


@given(st.data(), HEADS, KINDS, st.lists(VALUES))
def test_a_message_of_which_a_bit_is_another_is_refused(
    data: st.DataObject, head: Head, kind: MessageKind, fields: list
) -> None:
    (frame,) = pack(KEY, head, encoded(Message(kind, fields)))
    at = data.draw(st.integers(0, 8 * len(frame) - 1))
    other = bytearray(frame)
    other[at // 8] ^= 1 << at % 8
    with pytest.raises(ValueError, match="MAC"):
        unpack(KEY, [bytes(other)])


@given(st.lists(st.binary()))
def test_bytes_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="MAC"):
        unpack(KEY, frames)


def test_a_message_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="MAC"):
        unpack(KEY, pack(KEY[::-1], Head(1, 0, 1), encoded(Message(MessageKind.BYE, []))))


@pytest.mark.parametrize("kind", INTERNAL)
def test_kinds_that_nobody_sends_are_refused(kind: MessageKind) -> None:
    with pytest.raises(ValueError, match=kind.name):
        unpack(KEY, pack(KEY, Head(1, 0, 1), encoded(Message(kind, [1]))))
