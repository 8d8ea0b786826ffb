"""Model of how contributions travel, in which all orders of events are tried on small trainings.

The model has what infinity/distributed/contributions.py and ranked_step.py do without bytes and threads, and
the real turns.py. An event is one thing that the training thread of a rank does, or the receipt of the next
message of one rank by another. Every event brings the training further, so that no state comes twice, and
all orders end.
"""

from __future__ import annotations

import marshal
from collections import deque
from typing import Any, NamedTuple

import pytest

from infinity.distributed.turns import Turns

Contribution = tuple[str, int, int, int, int]
"""(key, micro-batch, rank, its number among those of this rank in the step, the room that it takes: 0 for a
further one in a micro-batch).
"""


class Case(NamedTuple):
    """A training and the room that it has."""

    steps: tuple[tuple[tuple[str, ...], ...], ...]
    """Step -> rank -> keys to which it contributes, with "|" where a backward ends. A key begins with the
    number of its owner.
    """
    waiting: int = 1
    """The room for contributions that wait at the rank that made them, unless it is the only one."""
    arriving: int = 1
    """The most contributions for which an owner has asked at a time."""
    deaths: bool = False
    """Whether a rank may die at any time, one at the most."""

    def program(self, rank: int) -> list[tuple[str, ...]]:
        """What a rank's training thread does."""
        found: list[tuple[str, ...]] = []
        for step in self.steps:
            found += [("end",) if key == "|" else ("offer", key) for key in step[rank]]
            found += [("cast",), ("close",), ("drain",), ("cast",), ("agreed",), ("clear",)]
        return found


class Rank:
    """The state of a rank, and what it does."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.turns: Turns[str, Contribution] = Turns(size, str)
        self.at = 0
        """Number of things that the training thread has done."""
        self.epoch = self.ended = self.made = self.forgotten = self.sending = self.waiting = 0
        self.asked: list[Contribution] = []
        self.begun: list[tuple[str, int]] = []
        self.offered = [0] * size
        self.heard = [0] * size
        self.cleared = [0] * size
        self.outgoing: list[Contribution] = []
        self.ready: list[tuple[str, Contribution]] = []
        self.early: list[tuple[int, tuple[Any, ...]]] = []
        self.ballots: list[list[Any]] = []
        """Number of an agreement -> rank -> facts, None if they have not come."""
        self.cast = 0
        self.sums: list[tuple[int, str, Contribution]] = []
        """(epoch, key, contribution), in the order of additions."""
        self.dead = self.failed = False

    def freeze(self) -> dict[str, Any]:
        """The state, of plain Python types."""
        return {**vars(self), "turns": freeze_turns(self.turns)}

    @classmethod
    def thaw(cls, frozen: dict[str, Any]) -> Rank:
        found = cls.__new__(cls)
        vars(found).update(frozen)
        found.turns = thaw_turns(frozen["turns"])
        return found


def freeze_turns(turns: Turns[str, Contribution]) -> tuple[Any, ...]:
    lines = tuple(
        (key, tuple(sorted((at, tuple(each)) for at, each in line.waiting.items())), *place(line))
        for key, line in sorted(turns._lines.items())
    )
    blocked = tuple(sorted((at, tuple(sorted(keys))) for at, keys in turns._blocked.items()))
    return tuple(turns._done), lines, blocked, tuple(sorted(turns._left.items()))


def place(line: Any) -> tuple[Any, ...]:
    return line.micro_batch, line.rank, line.taking


def thaw_turns(frozen: tuple[Any, ...]) -> Turns[str, Contribution]:
    done, lines, blocked, left = frozen
    turns: Turns[str, Contribution] = Turns(len(done), str)
    turns._done = list(done)
    for key, waiting, micro_batch, rank, taking in lines:
        line = turns._lines[key]
        line.waiting = {at: deque(each) for at, each in waiting}
        line.micro_batch, line.rank, line.taking = micro_batch, rank, taking
    for at, keys in blocked:
        turns._blocked[at] = set(keys)
    turns._left.update(dict(left))
    return turns


class World:
    """All ranks, and the messages between them."""

    def __init__(self, case: Case) -> None:
        self.size = len(case.steps[0])
        self.ranks = [Rank(rank, self.size) for rank in range(self.size)]
        self.wires: dict[tuple[int, int], list[tuple[Any, ...]]] = {
            (source, to): [] for source in range(self.size) for to in range(self.size) if source != to
        }

    def key(self) -> bytes:
        """All of the state. Equal states have equal keys."""
        return marshal.dumps(([each.freeze() for each in self.ranks], self.wires), 0)  # 0: without references

    @classmethod
    def of(cls, key: bytes) -> World:
        found = cls.__new__(cls)
        frozen, found.wires = marshal.loads(key)
        found.ranks = [Rank.thaw(each) for each in frozen]
        found.size = len(found.ranks)
        return found

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        for peer in range(self.size) if to is None else [to]:
            if peer != me.rank:
                self.wires[me.rank, peer].append(message)

    # --- the training thread ----------------------------------------------------------------------------

    def may(self, case: Case, me: Rank, what: str) -> bool:
        """Whether the training thread need not wait."""
        if what == "offer":
            room = me.waiting < case.waiting or not me.waiting
            return room and me.forgotten == me.cleared[me.rank]
        if what in ("close", "agreed"):
            come = all(each is not None for each in me.ballots[me.cast - 1])
            return come and (what == "agreed" or self.all_heard(me))
        if what == "drain":
            idle = not (me.asked or me.ready or me.outgoing or me.sending)
            return idle and me.turns.drained(me.ended)
        return True

    def all_heard(self, me: Rank) -> bool:
        facts = me.ballots[me.cast - 1]
        return all(facts[peer][1][me.rank] == me.heard[peer] for peer in range(self.size) if peer != me.rank)

    def do(self, case: Case, me: Rank, what: str, key: str = "") -> None:
        me.at += 1
        if what == "offer":
            self.offer(case, me, key)
        elif what == "end":
            me.ended += 1
            self.post(me, "done", me.epoch, me.ended)
            self.take(me, me.turns.done(me.rank, me.ended))
        elif what == "cast":
            me.cast += 1
            self.ballot(me, me.rank, me.cast, (me.ended, tuple(me.offered)))
            self.post(me, "ballot", me.cast, (me.ended, tuple(me.offered)))
        elif what == "close":
            me.ended = max(ended for ended, _ in me.ballots[me.cast - 1])
            for rank in range(self.size):
                self.take(me, me.turns.done(rank, me.ended))
        elif what == "clear":
            me.cleared[me.rank] += 1
            self.post(me, "cleared", me.cleared[me.rank])
            self.forget(case, me)
        self.go_on(case, me)

    def offer(self, case: Case, me: Rank, key: str) -> None:
        room = int((key, me.ended) not in me.begun)
        me.begun.append((key, me.ended))
        token = key, me.ended, me.rank, me.made, room
        me.made += 1
        me.waiting += room
        owner = int(key[0])
        if owner == me.rank:
            self.take(me, me.turns.offered(key, me.ended, me.rank, token))
        else:
            me.offered[owner] += 1
            me.outgoing.append(token)
            self.post(me, "contribution", me.epoch, token, to=owner)

    # --- the conductor ----------------------------------------------------------------------------------

    def receive(self, case: Case, source: int, me: Rank) -> None:
        what, *fields = message = self.wires[source, me.rank].pop(0)
        if what == "lost":
            me.failed = True  # the bell ends all waits
        elif what == "ballot":
            self.ballot(me, source, *fields)
        elif what == "cleared":
            me.cleared[source] = fields[0]
            self.forget(case, me)
        elif what == "request":
            assert fields[0] in me.outgoing, "a gradient was asked for after it was cleared"
            me.outgoing.remove(fields[0])
            me.sending += 1
            self.post(me, "data", fields[0], to=source)
        elif what == "data":
            self.ranks[source].sending -= 1
            self.ranks[source].waiting -= fields[0][4]
            me.asked.remove(fields[0])
            self.add(me, fields[0])
            self.take(me, me.turns.taken(fields[0][0]))
        elif fields[0] > me.epoch:
            me.early.append((source, message))
        else:
            assert fields[0] == me.epoch
            self.about_gradients(me, source, what, fields[1])
        self.go_on(case, me)

    def about_gradients(self, me: Rank, source: int, what: str, field: Any) -> None:
        if what == "done":
            self.take(me, me.turns.done(source, field))
        else:
            me.heard[source] += 1
            self.take(me, me.turns.offered(field[0], field[1], source, field))

    def ballot(self, me: Rank, source: int, number: int, facts: Any) -> None:
        while len(me.ballots) < number:
            me.ballots.append([None] * self.size)
        me.ballots[number - 1][source] = facts

    def forget(self, case: Case, me: Rank) -> None:
        while me.forgotten < min(me.cleared):
            assert not me.turns.clear() and not me.outgoing and not me.asked
            me.forgotten += 1
            me.epoch += 1
            me.ended = me.made = 0
            me.begun = []
            me.offered, me.heard = [0] * self.size, [0] * self.size
            early, me.early = me.early, []
            for source, (what, epoch, field) in early:
                assert epoch == me.epoch
                self.about_gradients(me, source, what, field)

    def take(self, me: Rank, given: list[tuple[str, Contribution]]) -> None:
        turns = deque(given)
        while turns:
            key, token = turns.popleft()
            if token[2] == me.rank:
                self.add(me, token)
                me.waiting -= token[4]
                turns.extend(me.turns.taken(key))
            else:
                me.ready.append((key, token))

    def add(self, me: Rank, token: Contribution) -> None:
        me.sums.append((me.epoch, token[0], token))

    def go_on(self, case: Case, me: Rank) -> None:
        while me.ready and (len(me.asked) < case.arriving or not me.asked):
            _, token = me.ready.pop(0)
            me.asked.append(token)
            self.post(me, "request", token, to=token[2])

    def die(self, me: Rank) -> None:
        """What it has sent arrives, and then it is known that it is gone."""
        me.dead = True
        self.post(me, "lost")
        for source, to in self.wires:
            if to == me.rank:
                self.wires[source, to].clear()


def events(case: Case, world: World, programs: list[list[tuple[str, ...]]]) -> list[tuple[str, int, int]]:
    """What is to be tried next: (what, rank, source of a message).

    If an event changes nothing on which another one depends, only this one is tried now: the others come
    later, and meet the same.
    """
    found, deaths, alone = [], [], not any(each.dead for each in world.ranks)
    for me in world.ranks:
        going = not me.dead and not me.failed and me.at < len(programs[me.rank])
        if going and case.deaths and alone:
            deaths.append(("die", me.rank, -1))
        if going and world.may(case, me, programs[me.rank][me.at][0]):
            found.append(("train", me.rank, -1))
    for (source, to), waiting in world.wires.items():
        if waiting and not world.ranks[to].dead and not world.ranks[to].failed:
            found.append(("receive", to, source))
    for event in found:
        what, rank, source = event
        me = world.ranks[rank]
        step = programs[rank][me.at] if what == "train" else world.wires[source, rank][0]
        if step[0] in ("ballot", "cleared", "drain", "agreed", "clear"):
            return [event, *deaths]
    # After a death every rank that is left can go on receiving until it hears of it, in whatever order.
    return found + deaths if alone else found[-1:]


def explore(case: Case, kind: type[World] = World) -> tuple[int, list[World]]:
    """Try all orders of events. Returns the number of states, and those in which nothing more may happen."""
    first = kind(case)
    programs = [case.program(rank) for rank in range(first.size)]
    found, ends = {first.key()}, []
    frontier = [first.key()]
    while frontier:
        state = frontier.pop()
        following = events(case, kind.of(state), programs)
        if not following:
            ends.append(kind.of(state))
        for what, rank, source in following:
            world = kind.of(state)
            me = world.ranks[rank]
            if what == "train":
                world.do(case, me, *programs[rank][me.at])
            elif what == "die":
                world.die(me)
            else:
                world.receive(case, source, me)
            reached = world.key()
            if reached not in found:
                found.add(reached)
                frontier.append(reached)
    return len(found), ends


def expected_sums(case: Case, rank: int) -> list[tuple[int, str, Contribution]]:
    """What a rank adds, sorted: by micro-batch, first contributions before further ones, by rank."""
    found = []
    for epoch, step in enumerate(case.steps):
        for source, keys in enumerate(step):
            ended, made, seen = 0, 0, set()
            for key in keys:
                if key == "|":
                    ended += 1
                    continue
                further = (key, ended) in seen
                seen.add((key, ended))
                if int(key[0]) == rank:
                    found.append(
                        (
                            (epoch, key, ended, further, source, made),
                            (key, ended, source, made, int(not further)),
                        )
                    )
                made += 1
    return [(order[0], order[1], token) for order, token in sorted(found)]


CASES = {
    "two ranks, two steps": Case(((("0a", "1a", "|"), ("1a", "0a", "|")),) * 2),
    "two ranks, shared parameters and micro-batches": Case(
        ((("0a", "1a", "0a", "|", "1a", "|"), ("0a", "|", "0a", "1a", "|")),)
    ),
    "two ranks, a backward more": Case(((("0a", "|"), ("0a", "1a", "|", "0a", "1a", "|")),), waiting=4),
    "two ranks, shared parameters alone": Case(
        ((("0a", "0a", "0b", "1b", "1b", "|"), ("0b", "0b", "1b", "|")),)
    ),
    "three ranks": Case(((("1a", "|"), ("|",), ("1a", "|")),)),
    "three ranks, one contributes": Case(((("|",), ("|",), ("1a", "|")),)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_order_ends_with_the_same_sums(name: str) -> None:
    case = CASES[name]
    _, ends = explore(case)
    assert ends
    for world in ends:
        for me in world.ranks:
            assert me.at == len(case.program(me.rank)), "the ranks wait for each other in a circle"
            assert sorted(me.sums, key=lambda each: each[:2]) == expected_sums(case, me.rank)
            assert me.waiting == me.sending == 0


@pytest.mark.parametrize("name", ["two ranks, two steps", "three ranks, one contributes"])
def test_all_that_survive_a_death_end(name: str) -> None:
    case = CASES[name]._replace(deaths=True)
    _, ends = explore(case)
    assert any(me.dead for world in ends for me in world.ranks)
    for world in ends:
        for me in world.ranks:
            assert me.dead or me.failed or me.at == len(case.program(me.rank))


class Silent(World):
    """Ranks that do not say when a backward has ended."""

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        if message[0] != "done":
            super().post(me, *message, to=to)


@pytest.mark.parametrize(
    "case, kind",
    [
        # A backward more on one rank, with no room for its gradients. The runtime's time-out ends this.
        (CASES["two ranks, a backward more"]._replace(waiting=1), World),
        (Case(((("|",), ("|",), ("1a", "1b", "|")),)), Silent),
    ],
)
def test_the_model_notices_ranks_that_wait_for_each_other(case: Case, kind: type[World]) -> None:
    _, ends = explore(case, kind)
    assert any(me.at < len(case.program(me.rank)) for world in ends for me in world.ranks)
