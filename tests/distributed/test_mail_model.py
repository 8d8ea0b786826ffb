"""Model of a rank that sends messages to another one's mailbox, in which all orders of events are tried.

It has what infinity/distributed/mailbox.py, connections.py and service_thread.py do without bytes: a sender
writes a message and then looks who sleeps. On the other rank the training thread computes, looks, or listens
(sleeps until a message comes), and another thread watches whether it looks at all. Each access to shared
memory is an event of its own. No message may be left while all who could read it sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

MESSAGES = 2


class State(NamedTuple):
    written: int = 0
    read: int = 0
    sender: str = "write"
    """What the sender does next: "write", "look for listener", "look for thread", or "done"."""
    flags: tuple[int, int] = (0, 0)
    """Whether the thread that watches sleeps, and whether a listener does, as the sender sees it."""
    pipes: tuple[int, int] = (0, 0)
    """Whether bytes are in their pipes."""
    thread: str = "check"
    """What the thread that watches does next: "check", "read", "sleep", or "timer";
    "say late" in a mistaken one.
    """
    looks: int = 0
    """Whether another thread has looked since the last check."""
    training: str = "compute"
    """What the training thread does next: "compute", "look", "listen", "attend", "sleep", "leave", or "away":
    it computes for ever, without a look.
    """
    waits: int = 0
    """Times that the training thread has waited."""


class Model:
    """The events of a sender, and of two threads of the receiver."""

    flag_first = timer = True

    def sender(self, state: State) -> Iterator[State]:
        what = state.sender
        if what == "write" and state.written < MESSAGES:
            yield state._replace(written=state.written + 1, sender="look for listener")
        elif what == "look for listener":
            if state.flags[1]:
                yield state._replace(pipes=(state.pipes[0], 1), sender="write")
            else:
                yield state._replace(sender="look for thread")
        elif what == "look for thread":
            yield state._replace(pipes=(state.pipes[0] or state.flags[0], state.pipes[1]), sender="write")

    def thread(self, state: State) -> Iterator[State]:
        what = state.thread
        if what == "check" and state.looks:
            here = state._replace(looks=0, flags=(0, state.flags[1]))
            yield here._replace(thread="timer" if self.timer else "sleep")
        elif what == "check":
            flags = (1, state.flags[1]) if self.flag_first else state.flags
            yield state._replace(flags=flags, thread="read")
        elif what == "read":
            yield state._replace(read=state.written, thread="sleep" if state.flags[0] else "say late")
        elif what == "say late":
            yield state._replace(flags=(1, state.flags[1]), thread="sleep")
        elif what == "timer" or state.pipes[0]:
            yield state._replace(pipes=(0, state.pipes[1]), thread="check")

    def training(self, state: State) -> Iterator[State]:
        what = state.training
        if what == "compute":
            yield state._replace(training="look")
            yield state._replace(training="away")
            if not state.waits:
                yield state._replace(training="listen", waits=1)
        elif what == "look":
            yield state._replace(read=state.written, looks=1, training="compute")
        elif what == "listen":
            yield state._replace(flags=(state.flags[0], 1), training="attend")
        elif what == "attend":
            yield state._replace(read=state.written, looks=1, training="sleep")
        elif what == "sleep":
            if state.pipes[1]:
                yield state._replace(pipes=(state.pipes[0], 0), training="listen")
            if state.read == MESSAGES:  # what it waits for has come
                yield state._replace(flags=(state.flags[0], 0), training="leave")
        elif what == "leave":
            yield state._replace(read=state.written, looks=1, training="away")


class Interrupted(Model):
    """A listener that leaves at any time, as at a time-out."""

    def training(self, state: State) -> Iterator[State]:
        yield from super().training(state)
        if state.training == "sleep":
            yield state._replace(flags=(state.flags[0], 0), training="leave")


def check(model: Model) -> int:
    """Try all orders of events. Returns the number of states."""
    found, frontier = {State()}, [State()]
    while frontier:
        state = frontier.pop()
        following = [*model.sender(state), *model.thread(state), *model.training(state)]
        assert following or state.read == MESSAGES, "a message is left"
        for each in following:
            if each not in found:
                found.add(each)
                frontier.append(each)
    return len(found)


@pytest.mark.parametrize("kind", [Model, Interrupted])
def test_no_message_is_left_in_any_order(kind: type[Model]) -> None:
    assert check(kind()) > 100


class LooksBeforeItSleeps(Model):
    """A thread that says that it sleeps when it has looked."""

    flag_first = False


class HasNoTimer(Model):
    """A thread that sleeps after others have looked, and does not say so."""

    timer = False


@pytest.mark.parametrize("kind", [LooksBeforeItSleeps, HasNoTimer])
def test_the_model_notices_a_mistake(kind: type[Model]) -> None:
    with pytest.raises(AssertionError, match="a message is left"):
        check(kind())


class Full(NamedTuple):
    """A sender whose ring has room for one message."""

    left: int = MESSAGES
    """Messages for which there was no room."""
    ring: int = 0
    flag: int = 0
    """Whether the sender's thread says that it waits for room."""
    pipe: int = 0
    thread: str = "say"
    """What the sender's thread does next: "say", "flush" or "sleep"; "say late" in a mistaken one."""
    reader: str = "read"
    """What the reader does next: "read" or "look"."""


class Room:
    """The events of the sender's thread and of the reader."""

    say_first = looks = True

    def thread(self, state: Full) -> Iterator[Full]:
        if state.thread in ("say", "say late"):
            flag = int(state.left > 0)
            yield state._replace(flag=flag, thread="flush" if state.thread == "say" else "sleep")
        elif state.thread == "flush":
            sent = min(state.left, 1 - state.ring)
            following = "sleep" if self.say_first else "say late"
            yield state._replace(left=state.left - sent, ring=state.ring + sent, thread=following)
        elif state.pipe:
            yield state._replace(pipe=0, thread="say" if self.say_first else "flush")

    def reader(self, state: Full) -> Iterator[Full]:
        if state.reader == "look":
            yield state._replace(pipe=state.pipe or state.flag, reader="read")
        elif state.ring:
            yield state._replace(ring=0, reader="look" if self.looks else "read")


def check_room(model: Room) -> None:
    first = Full(thread="say" if model.say_first else "flush")
    found, frontier = {first}, [first]
    while frontier:
        state = frontier.pop()
        following = [*model.thread(state), *model.reader(state)]
        assert following or not state.left, "a message is left"
        for each in following:
            if each not in found:
                found.add(each)
                frontier.append(each)


def test_room_is_noticed_in_any_order() -> None:
    check_room(Room())


@pytest.mark.parametrize("mistake", ["say_first", "looks"])
def test_the_model_notices_a_sender_that_is_not_told_of_room(mistake: str) -> None:
    model = Room()
    setattr(model, mistake, False)
    with pytest.raises(AssertionError, match="a message is left"):
        check_room(model)
