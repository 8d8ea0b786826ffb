"""Model of how shards travel, in which all orders of events are tried on small trainings.

The model has what infinity/distributed/gradient_shards.py and ranked_step.py do without bytes and threads,
and the real turns.py. An event is one thing that the training thread of a rank does, or the receipt of the
next message of one rank by another. Every event brings the training further, so that no state comes twice,
and all orders end.

[Note: barriers]
Messages of barriers have a queue of their own, and may overtake all other messages. In the model they come
at once. They have no effect before the training thread looks at them, which it may do as late as the orders
have it.
"""

from __future__ import annotations

import marshal
from collections import deque
from typing import Any, NamedTuple

import pytest

from infinity.distributed.turns import ALL, Turns

GradientShard = tuple[str, int, int, int, int]
"""(key, micro-batch, rank, its number among those of this rank in the step, the room that it takes: 0 for a
further one in a micro-batch).
"""


class Case(NamedTuple):
    """A training and the room that it has."""

    steps: tuple[tuple[tuple[str, ...], ...], ...]
    """Step -> rank -> keys to which it contributes, with "|" where a backward ends, and "!" where it enters
    an agreement. The step ends with another agreement. A key begins with the number of its owner.
    """
    waiting: int = 1
    """The room for shards that wait at the rank that made them, unless it is the only one."""
    arriving: int = 1
    """The most shards that an owner reads at a time."""
    deaths: bool = False
    """Whether a rank may die at any time, one at the most."""

    def owns(self, rank: int) -> bool:
        """Whether a rank keeps sums."""
        return any(key[0] == str(rank) for step in self.steps for keys in step for key in keys)

    def program(self, rank: int) -> list[tuple[str, ...]]:
        """What a rank's training thread does."""
        found: list[tuple[str, ...]] = []
        for step in self.steps:
            for key in (*step[rank], "!"):
                if key == "!":
                    found += [("enter",), ("close",), ("drain",), ("come",), ("agreed",)]
                else:
                    found.append(("end",) if key == "|" else ("offer", key))
            found.append(("clear",))
        return found


class Rank:
    """The state of a rank, and what it does."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.turns: Turns[str, GradientShard] = Turns(size)
        self.at = 0
        """Number of things that the training thread has done."""
        self.epoch = self.ended = self.made = self.forgotten = self.sending = self.waiting = 0
        self.asked: list[GradientShard] = []
        self.begun: list[tuple[str, int]] = []
        self.offered = [0] * size
        self.heard = [0] * size
        self.cleared = [0] * size
        self.outgoing: list[GradientShard] = []
        self.ready: list[tuple[str, GradientShard]] = []
        self.lanes: dict[tuple[int, int], list[GradientShard]] = {}
        """(rank, lane of its stream) -> shards in it that are not being read; no empty ones."""
        self.early: list[tuple[int, tuple[Any, ...]]] = []
        self.barriers: list[list[Any]] = []
        """Number of an agreement -> rank -> facts, None if they have not come."""
        self.come = self.paused = self.closed = 0
        """Numbers of barriers that it has come to, and of agreements that it has entered, and ended."""
        self.sums: list[tuple[int, str, GradientShard]] = []
        """(epoch, key, shard), in the order of additions."""
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


def freeze_turns(turns: Turns[str, GradientShard]) -> tuple[Any, ...]:
    lines = tuple(
        (key, tuple(sorted((at, tuple(each)) for at, each in line.waiting.items())), *place(line))
        for key, line in sorted(turns._lines.items())
    )
    blocked = tuple(sorted((at, tuple(sorted(keys))) for at, keys in turns._blocked.items()))
    return tuple(turns._done), lines, blocked, tuple(sorted(turns._left.items()))


def place(line: Any) -> tuple[Any, ...]:
    return line.micro_batch, line.rank, line.taking


def thaw_turns(frozen: tuple[Any, ...]) -> Turns[str, GradientShard]:
    done, lines, blocked, left = frozen
    turns: Turns[str, GradientShard] = Turns(len(done))
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
            return (me.waiting < case.waiting or not me.waiting) and self.all_cleared(me)
        if what == "end":  # a backward begins with a wait for this
            return self.all_cleared(me)
        if what in ("close", "agreed"):
            come = all(each is not None for each in me.barriers[me.come - 1])
            return come and (what == "agreed" or (self.all_cleared(me) and self.all_heard(me)))
        if what == "drain":
            idle = not (me.asked or me.ready or me.outgoing or me.sending)
            return idle and me.turns.drained(me.ended)
        return True

    def all_cleared(self, me: Rank) -> bool:
        return me.forgotten == me.cleared[me.rank]

    def all_heard(self, me: Rank) -> bool:
        facts = me.barriers[me.come - 1]
        return all(facts[peer][1][me.rank] == me.heard[peer] for peer in range(self.size) if peer != me.rank)

    def do(self, case: Case, me: Rank, what: str, key: str = "") -> None:
        me.at += 1
        if what == "offer":
            self.offer(case, me, key)
        elif what == "end":
            me.ended += 1
            self.post(me, "done", me.epoch, me.ended)
            self.take(me, me.turns.done(me.rank, me.ended))
        elif what == "enter":
            me.paused += 1
            self.post(me, "paused", me.cleared[me.rank], me.paused)
            self.take(me, me.turns.done(me.rank, ALL))
            self.vote(me, self.facts(me))
        elif what == "come":
            self.vote(me, ())
        elif what == "close":
            me.ended = max(ended for ended, _ in me.barriers[me.come - 1])
            for rank in range(self.size):
                self.take(me, me.turns.done(rank, ALL))
        elif what == "drain":
            me.turns.go_on(me.ended)
            me.closed += 1
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
            self.post(me, "shard", me.epoch, token, to=owner)

    def facts(self, me: Rank) -> tuple[int, tuple[int, ...]]:
        """What a rank has contributed since it cleared its gradients: (backwards, offers to each rank)."""
        if not self.all_cleared(me):  # its counters are still those of the former gradients
            return 0, (0,) * self.size
        return me.ended, tuple(me.offered)

    def vote(self, me: Rank, facts: Any) -> None:
        """Come to a barrier; see [Note: barriers]."""
        me.come += 1
        for each in self.ranks:
            while len(each.barriers) < me.come:
                each.barriers.append([None] * self.size)
            each.barriers[me.come - 1][me.rank] = facts

    # --- the service thread -----------------------------------------------------------------------------

    def receive(self, case: Case, source: int, me: Rank) -> None:
        what, *fields = message = self.wires[source, me.rank].pop(0)
        if what == "lost":
            me.failed = True  # the failure event ends all waits
        elif what == "cleared":
            me.cleared[source] = fields[0]
            self.forget(case, me)
        elif what == "room":
            assert fields[0] in me.outgoing, "a gradient was read after it was cleared"
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
            assert fields[0] == me.epoch, "a message is about gradients that are cleared"
            self.about_gradients(me, source, what, fields[1])
        self.go_on(case, me)

    def about_gradients(self, me: Rank, source: int, what: str, field: Any) -> None:
        if what == "done":
            self.take(me, me.turns.done(source, field))
        elif what == "paused":
            if field > me.closed:  # else the agreement has ended meanwhile
                self.take(me, me.turns.done(source, ALL))
        else:
            me.heard[source] += 1
            self.stream(me, source, field)
            self.take(me, me.turns.offered(field[0], field[1], source, field))

    def stream(self, me: Rank, source: int, token: GradientShard) -> None:
        """Note that the bytes of a shard follow those that are in its lane already."""
        me.lanes.setdefault((source, self.lane(token)), []).append(token)

    def lane(self, token: GradientShard) -> int:
        _, micro_batch, _, _, room = token
        return 2 * micro_batch + (not room)

    def forget(self, case: Case, me: Rank) -> None:
        while me.forgotten < min(me.cleared):
            assert not me.turns.clear() and not me.outgoing and not me.asked
            me.forgotten += 1
            me.epoch += 1
            me.ended = me.made = 0
            me.begun = []
            me.offered, me.heard = [0] * self.size, [0] * self.size
            self.pause_again(me)
            early, me.early = me.early, []
            for source, (what, epoch, field) in early:
                assert epoch == me.epoch
                self.about_gradients(me, source, what, field)

    def pause_again(self, me: Rank) -> None:
        """A rank may enter the agreement of a step before others clear the gradients of the last one."""
        if me.paused > me.closed:
            self.take(me, me.turns.done(me.rank, ALL))

    def take(self, me: Rank, given: list[tuple[str, GradientShard]]) -> None:
        turns = deque(given)
        while turns:
            key, token = turns.popleft()
            if token[2] == me.rank:
                self.add(me, token)
                me.waiting -= token[4]
                turns.extend(me.turns.taken(key))
            else:
                me.ready.append((key, token))

    def add(self, me: Rank, token: GradientShard) -> None:
        me.sums.append((me.epoch, token[0], token))

    def go_on(self, case: Case, me: Rank) -> None:
        """Read shards whose turn has come: the bytes come when their rank hears that there is room."""
        while len(me.asked) < case.arriving or not me.asked:
            first = [each[0] for each in me.lanes.values()]
            at = next((at for at, (_, token) in enumerate(me.ready) if token in first), None)
            if at is None:
                return
            _, token = me.ready.pop(at)
            lane = token[2], self.lane(token)
            me.lanes[lane].pop(0)
            if not me.lanes[lane]:
                del me.lanes[lane]
            me.asked.append(token)
            self.post(me, "room", token, to=token[2])

    def die(self, me: Rank) -> None:
        """What it has sent arrives, and then it is known that it is gone."""
        me.dead = True
        self.post(me, "lost")
        for source, to in self.wires:
            if to == me.rank:
                self.wires[source, to].clear()


class Lending(World):
    """Ranks of one node: an owner adds a shard from shared memory of the rank that made it."""

    def stream(self, me: Rank, source: int, token: GradientShard) -> None:
        pass

    def take(self, me: Rank, given: list[tuple[str, GradientShard]]) -> None:
        turns = deque(given)
        while turns:
            key, token = turns.popleft()
            self.add(me, token)
            if token[2] == me.rank:
                me.waiting -= token[4]
            else:
                self.post(me, "taken", token, to=token[2])
            turns.extend(me.turns.taken(key))

    def receive(self, case: Case, source: int, me: Rank) -> None:
        what, *fields = self.wires[source, me.rank][0]
        if what != "taken":
            super().receive(case, source, me)
            return
        del self.wires[source, me.rank][0]
        me.outgoing.remove(fields[0])
        me.waiting -= fields[0][4]
        self.go_on(case, me)


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
        if step[0] in ("drain", "come", "agreed", "clear"):
            return [event, *deaths]
        # What a rank says as it enters an agreement could depend on whether all have cleared gradients.
        if step[0] == "cleared" and programs[rank][me.at : me.at + 1] != [("enter",)]:
            return [event, *deaths]
        # Only a rank that keeps sums has use for what others do not contribute.
        if step[0] in ("done", "paused") and not case.owns(rank):
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


def expected_sums(case: Case, rank: int) -> list[tuple[int, str, GradientShard]]:
    """What a rank adds, sorted: by micro-batch, first shards before further ones, by rank."""
    found = []
    for epoch, step in enumerate(case.steps):
        ended, made = 0, [0] * len(step)
        for parts in zip(*(between_agreements(keys) for keys in step), strict=True):
            for source, keys in enumerate(parts):
                now, seen = ended, set()
                for key in keys:
                    if key == "|":
                        now += 1
                        continue
                    further = (key, now) in seen
                    seen.add((key, now))
                    if int(key[0]) == rank:
                        token = key, now, source, made[source], int(not further)
                        found.append(((epoch, key, now, further, source, made[source]), token))
                    made[source] += 1
            ended += max(keys.count("|") for keys in parts)
    return [(order[0], order[1], token) for order, token in sorted(found)]


def between_agreements(keys: tuple[str, ...]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for key in keys:
        if key == "!":
            found.append([])
        else:
            found[-1].append(key)
    return found


CASES = {
    "two ranks, two steps": Case(((("0a", "1a", "|"), ("1a", "0a", "|")),) * 2),
    "two ranks, shared parameters and micro-batches": Case(
        ((("0a", "1a", "0a", "|", "1a", "|"), ("0a", "|", "0a", "1a", "|")),)
    ),
    "two ranks, a backward more": Case(((("0a", "|"), ("0a", "1a", "|", "0a", "1a", "|")),), waiting=4),
    "two ranks, a backward more, without room": Case(((("0a", "|"), ("0a", "1a", "|", "1a", "0a", "|")),)),
    "two ranks, one is idle in the second step": Case(
        ((("0a", "1a", "|"), ("1a", "|")), ((), ("1a", "0a", "1b", "|")))
    ),
    "two ranks, a step without zero_grad": Case(
        ((("1a", "|", "!", "1a", "|"), ("0a", "|", "0a", "|", "!", "1a", "0a", "|")),)
    ),
    "two ranks, clipping": Case(((("1a", "|", "!"), ("0a", "|", "0a", "|", "!")), (("1a", "|"), ()))),
    "two ranks, shared parameters alone": Case(
        ((("0a", "0a", "0b", "1b", "1b", "|"), ("0b", "0b", "1b", "|")),)
    ),
    "two ranks, a shared parameter before others": Case(
        ((("1a", "1a", "1b", "1c", "|"), ("1a", "1b", "1c", "|")),)
    ),
    "three ranks": Case(((("1a", "|"), ("|",), ("1a", "|")),)),
    "three ranks, one contributes": Case(((("|",), ("|",), ("1a", "|")),)),
    "three ranks, one is idle": Case((((), ("|",), ("1a", "1b", "|")),)),
}


def check(case: Case, kind: type[World] = World) -> None:
    """Check that all orders of events end with the same sums."""
    _, ends = explore(case, kind)
    assert ends
    for world in ends:
        for me in world.ranks:
            assert me.at == len(case.program(me.rank)), "the ranks wait for each other in a circle"
            assert sorted(me.sums, key=lambda each: each[:2]) == expected_sums(case, me.rank)
            assert me.waiting == me.sending == 0


EACH_WAY = pytest.mark.parametrize("kind", [World, Lending])
"""Shards go to their owners by messages, or lie in shared memory."""


@EACH_WAY
@pytest.mark.parametrize("name", CASES)
def test_every_order_ends_with_the_same_sums(name: str, kind: type[World]) -> None:
    check(CASES[name], kind)


@EACH_WAY
@pytest.mark.parametrize(
    "name",
    [
        "two ranks, two steps",
        "two ranks, a backward more, without room",
        "two ranks, one is idle in the second step",
        "three ranks, one contributes",
    ],
)
def test_all_that_survive_a_death_end(name: str, kind: type[World]) -> None:
    case = CASES[name]._replace(deaths=True)
    _, ends = explore(case, kind)
    assert any(me.dead for world in ends for me in world.ranks)
    for world in ends:
        for me in world.ranks:
            assert me.dead or me.failed or me.at == len(case.program(me.rank))


class GivesNothingBack(Lending):
    """Owners that do not say when they have added a shard."""

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        if message[0] != "taken":
            super().post(me, *message, to=to)


class Silent(World):
    """Ranks that do not say when a backward has ended."""

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        if message[0] != "done":
            super().post(me, *message, to=to)


class OneLane(World):
    """Ranks whose further shards are in one lane with the first ones."""

    def lane(self, token: GradientShard) -> int:
        return 0


class Unpaused(World):
    """Ranks that do not say when they enter an agreement."""

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        if message[0] != "paused":
            super().post(me, *message, to=to)


class PausedTooEarly(World):
    """Ranks that enter an agreement of gradients that others have yet to clear, and do not say so."""

    def post(self, me: Rank, *message: Any, to: int | None = None) -> None:
        if message[0] == "paused":
            message = "paused", me.epoch, me.paused
        super().post(me, *message, to=to)


class PausedForever(World):
    """Ranks that take what another one has said before an agreement for true after it."""

    def about_gradients(self, me: Rank, source: int, what: str, field: Any) -> None:
        super().about_gradients(me, source, what, me.closed + 1 if what == "paused" else field)


class PausedOnce(World):
    """Ranks that forget with their gradients that they contribute no more."""

    def pause_again(self, me: Rank) -> None:
        pass


class FormerNumbers(World):
    """Ranks that enter an agreement with the numbers of gradients that they have cleared."""

    def facts(self, me: Rank) -> tuple[int, tuple[int, ...]]:
        return me.ended, tuple(me.offered)


CIRCLE = "the ranks wait for each other in a circle"


@pytest.mark.parametrize(
    "case, kind, text",
    [
        (Case(((("|", "1a", "1b", "|"), ("|",)),)), Silent, CIRCLE),
        (CASES["two ranks, a backward more, without room"], Unpaused, CIRCLE),
        (CASES["three ranks, one is idle"], Unpaused, CIRCLE),
        (CASES["three ranks, one contributes"], GivesNothingBack, CIRCLE),
        (CASES["two ranks, a shared parameter before others"], OneLane, CIRCLE),
        (CASES["two ranks, one is idle in the second step"], PausedTooEarly, "cleared"),
        (CASES["two ranks, one is idle in the second step"], PausedOnce, CIRCLE),
        (CASES["two ranks, one is idle in the second step"], FormerNumbers, CIRCLE),
        (
            CASES["two ranks, a step without zero_grad"],
            PausedForever,
            "a rank contributes to a micro-batch that it has ended",
        ),
    ],
)
def test_the_model_notices_a_mistake(case: Case, kind: type[World], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check(case, kind)
