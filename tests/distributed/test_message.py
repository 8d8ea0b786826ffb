"""Tests of control messages: what is packed is unpacked, in a header alone or with more behind it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.message import HEADER_BYTES, Message, MessageKind, bytes_behind, pack, unpack

VALUES = st.recursive(
    st.integers() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.sampled_from(MessageKind), st.lists(VALUES), st.integers(0, 600))
def test_messages_are_unpacked_as_they_were_packed(kind: MessageKind, fields: list, padding: int) -> None:
    message = Message(kind, [*fields, "é" * padding])
    header, behind = pack(message)
    assert len(header) == HEADER_BYTES
    assert bytes_behind(header) == (0 if behind is None else len(behind))
    assert unpack(header, behind) == message


def test_the_header_is_used_to_its_last_byte() -> None:
    room = HEADER_BYTES - 5 - len('[""]')
    assert pack(Message(MessageKind.BARRIER, ["x" * room]))[1] is None
    assert pack(Message(MessageKind.BARRIER, ["x" * (room + 1)]))[1] == b"]"
