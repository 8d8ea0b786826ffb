"""Tests of streams: two ends in one process, between which a test carries what they send."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infinity.distributed.connections import PORTION, UNREAD
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.message import Message, MessageKind
from infinity.distributed.streams import Streams
from infinity.distributed.transfers import Delivery, Dispatch

SENDER, RECEIVER = 0, 1


class End:
    """A rank's streams, and stands for its connections."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: deque[tuple[Message, list[memoryview]]] = deque()
        connections: Any = self
        self.streams = Streams(connections)

    def post(self, to: int, message: Message, portion: Sequence[memoryview] = ()) -> None:
        assert to == 1 - self.rank
        self.sent.append((message, [memoryview(bytes(each)) for each in portion]))


class Pair:
    """A sender and a receiver."""

    def __init__(self) -> None:
        self.sender, self.receiver = End(SENDER), End(RECEIVER)
        self.event = FailureEvent(1.0)
        self.kept = 0
        """Bytes that have come to the receiver, and of which the sender has not heard that they are read."""
        self.read: list[int] = []
        """Numbers of the deliveries that have ended."""

    def push(self, lane: int, *memory: torch.Tensor) -> Dispatch:
        dispatch = Dispatch(self.event, RECEIVER, 0, "gradients")
        message = Message(MessageKind.GRADIENT_SHARD, ["shard", lane])
        for ended, *_ in self.sender.streams.push(dispatch, message, [each.numpy().data for each in memory]):
            ended.end()
        return dispatch

    def pull(self, lane: int, into: torch.Tensor, number: int = 0) -> None:
        delivery = Delivery(self.event, SENDER, number, "gradients", into=(into,))
        self.ended(self.receiver.streams.pull(SENDER, lane, [into.numpy().data], delivery))

    def ended(self, found: list[tuple[Delivery, int]]) -> None:
        self.read += [each.number for each, _ in found]

    def carry(self) -> bool:
        """Carry one message to the receiver. Returns whether there was one."""
        if not self.sender.sent:
            return False
        message, portions = self.sender.sent.popleft()
        self.kept += sum(map(len, portions))
        self.ended(self.receiver.streams.came(SENDER, message.fields[-1], portions))
        return True

    def answer(self) -> bool:
        """Carry one message to the sender."""
        if not self.receiver.sent:
            return False
        (kind, (lane, nbytes)), _ = self.receiver.sent.popleft()
        assert kind is MessageKind.ROOM
        self.kept -= nbytes
        for dispatch, size, _ in self.sender.streams.has_read(RECEIVER, lane, nbytes):
            assert size
            dispatch.end()
        return True


def filled(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_come_in_the_order_of_their_lane_and_in_a_bounded_place(seed: int) -> None:
    """Whatever comes first: messages, answers, or reads of any sizes."""
    choose, pair, lanes = random.Random(seed), Pair(), 2
    sizes = [choose.choice([1, 1000, PORTION, PORTION + 1, UNREAD, 3 * UNREAD]) for _ in range(8)]
    sent = [[filled(nbytes) for nbytes in sizes[lane::lanes]] for lane in range(lanes)]
    wanted = [torch.cat(each) for each in sent]
    found = [torch.zeros_like(each) for each in wanted]
    todo = [(lane, each) for lane in range(lanes) for each in sent[lane]]
    dispatches, at = [], [0] * lanes
    while pair.kept or todo or any(each < len(whole) for each, whole in zip(at, wanted, strict=True)):
        act = choose.randrange(4)
        if act == 0 and todo:
            lane, memory = todo.pop(0)
            dispatches.append(pair.push(lane, *memory.split(choose.choice([PORTION, 4 * UNREAD]))))
        elif act == 1:
            lane = choose.randrange(lanes)
            into = found[lane][at[lane] :][: choose.choice([100, PORTION, UNREAD])]
            at[lane] += len(into)
            if len(into):
                pair.pull(lane, into)
        elif act == 2:
            pair.carry()
        else:
            pair.answer()
        assert pair.kept <= lanes * UNREAD
    while pair.carry() or pair.answer():
        pass
    assert all(each.done() for each in dispatches)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_small_gradient_is_in_the_message_that_offers_it() -> None:
    pair = Pair()
    pair.push(4, filled(100))
    ((message, portions),) = pair.sender.sent
    assert message.kind is MessageKind.GRADIENT_SHARD and sum(map(len, portions)) == 100


def test_pieces_share_a_message() -> None:
    pair = Pair()
    pair.push(4, filled(1), filled(100))
    assert [[len(each) for each in portions] for _, portions in pair.sender.sent] == [[1, 100]]


def test_no_bytes_are_read_at_once() -> None:
    pair = Pair()
    assert pair.push(4, filled(0)).done()
    pair.carry()
    pair.pull(4, filled(0), number=2)
    assert pair.read == [2] and not pair.answer()


def test_a_lane_that_is_not_read_holds_no_other_up() -> None:
    pair, into = Pair(), torch.zeros(100, dtype=torch.uint8)
    pair.push(0, filled(3 * UNREAD))
    pair.push(1, filled(100).fill_(5))
    while pair.carry():
        pass
    assert pair.kept == UNREAD + 100
    pair.pull(1, into, number=3)
    assert pair.read == [3] and bool((into == 5).all())


def test_bytes_can_be_dropped_before_they_come() -> None:
    pair, into = Pair(), torch.zeros(10, dtype=torch.uint8)
    pair.receiver.streams.drop(SENDER, 0, 2 * UNREAD)
    first, last = pair.push(0, filled(2 * UNREAD)), pair.push(0, filled(10).fill_(7))
    pair.pull(0, into)
    while pair.carry() or pair.answer():
        pass
    assert first.done() and last.done() and bool((into == 7).all())


def test_what_goes_to_a_lost_peer_is_forgotten() -> None:
    pair = Pair()
    dispatch = pair.push(0, filled(10))
    assert pair.sender.streams.forget(RECEIVER) == [dispatch]
    assert pair.sender.streams.has_read(RECEIVER, 0, 10) == []
