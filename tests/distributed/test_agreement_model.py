"""Model of agreements over the tree, in which all orders of events are tried with the real Barrier.

An event is one thing that a rank does: it comes to its next call, has nearly no time left, gives up, is
interrupted, dies or leaves; or it is the arrival of a message.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from infinity.distributed.barrier import Barrier
from infinity.distributed.message import Message
from infinity.errors import InfinityError, RankDivergence


class Case(NamedTuple):
    """Programs of ranks, and what may happen to them."""

    programs: tuple[str, ...]
    """Rank -> its calls, one letter each; "." is to leave, and "!" an agreement to which ranks come anyway.
    """
    nodes: tuple[int, ...] = ()
    """Rank -> its node; (): each rank has its own."""
    late: tuple[int, ...] = ()
    """Ranks whose time may be over."""
    hasty: bool = False
    """Whether a rank may give up before answers have come that are on their way."""
    dies: tuple[int, ...] = ()
    """Ranks of which one may die."""
    interrupted: tuple[int, ...] = ()
    """Ranks of which one may be interrupted in an agreement."""


class Queue(list[Any]):
    """A rank's messages of agreements."""

    def empty(self) -> bool:
        return not self

    def get(self) -> Any:
        return self.pop(0)


class Rank:
    """A rank: its Barrier, and how far it is in its program."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.at = rank, 0
        self.state = "out"
        """Of an agreement; or "in" one, or "asking" in one, or "dead"."""
        self.lost = False
        """Whether it has heard of a death."""
        self.outcomes: list[tuple[str, str]] = []
        """(call, the error's text, or "")."""
        self.wire: Any = SimpleNamespace(
            barriers=Queue(),
            failure=None,
            failure_event=SimpleNamespace(timeout=1.0),
            post=lambda to, _, *fields: [world.post(rank, each, list(fields)) for each in to],
        )
        peers = tuple(each for each in range(world.size) if each != rank)
        ranks: Any = SimpleNamespace(rank=rank, size=world.size, peers=peers, nodes=world.nodes)
        self.barrier = world.kind(ranks, self.wire)

    def freeze(self) -> list[Any]:
        barrier = self.barrier
        come = [[number, sorted(each.items())] for number, each in sorted(barrier._come.items())]
        failure = None if barrier._failure is None else barrier._failure.cause
        ended = sorted(barrier._ended.items())
        asking = [[number, sorted(each)] for number, each in sorted(barrier._asking.items())]
        mine = [come, ended, asking, barrier._last, barrier.number, barrier._told, failure]
        messages = [(source, message.fields) for source, message in self.wire.barriers]
        return [self.at, self.state, self.lost, self.outcomes, messages, mine]

    def thaw(self, frozen: list[Any]) -> None:
        self.at, self.state, self.lost, self.outcomes, messages, mine = frozen
        self.wire.barriers.extend((source, Message(None, fields)) for source, fields in messages)  # type: ignore[arg-type]
        come, ended, asking, self.barrier._last, self.barrier.number, self.barrier._told, failure = mine
        self.barrier._come = {number: dict(each) for number, each in come}
        self.barrier._ended = dict(ended)
        self.barrier._asking = {number: set(each) for number, each in asking}
        self.barrier._failure = None if failure is None else RankDivergence(failure, "")


class World:
    """All ranks, and the messages between them."""

    def __init__(self, case: Case, kind: type[Barrier]) -> None:
        self.case, self.kind = case, kind
        self.size = len(case.programs)
        self.nodes = case.nodes or tuple(range(self.size))
        self.lines: dict[tuple[int, int], list[Any]] = {
            (source, to): [] for source in range(self.size) for to in range(self.size) if source != to
        }
        self.posted = 0
        """Number of messages; no part of the state."""
        self.happened = False
        """Whether a rank has died or was interrupted."""
        self.ranks = [Rank(self, rank) for rank in range(self.size)]

    def freeze(self) -> bytes:
        found = [[each.freeze() for each in self.ranks], list(self.lines.values()), self.happened]
        return marshal.dumps(found, 0)  # 0: without references, so that equal states are equal bytes

    def thawed(self, frozen: bytes) -> World:
        found = World(self.case, self.kind)
        ranks, lines, found.happened = marshal.loads(frozen)
        found.lines = dict(zip(self.lines, lines, strict=True))
        for me, each in zip(found.ranks, ranks, strict=True):
            me.thaw(each)
        return found

    def post(self, source: int, to: int, fields: list[Any]) -> None:
        self.posted += 1
        if self.ranks[to].state != "dead":
            self.lines[source, to].append(marshal.loads(marshal.dumps(fields)))

    def events(self) -> list[tuple[str, int, int]]:
        """What may happen next: (what, rank, source of a message)."""
        found = []
        for me in self.ranks:
            inside = me.state in ("in", "asking")
            if me.state == "out" and me.at < len(self.case.programs[me.rank]):
                found.append(("come", me.rank, -1))
            if me.state == "in" and me.rank in self.case.late:
                found.append(("ask", me.rank, -1))
            if me.state == "asking" and (self.case.hasty or not any(self.lines.values())):
                found.append(("give up", me.rank, -1))
            if inside and me.rank in self.case.interrupted and not self.happened:
                found.append(("interrupt", me.rank, -1))
            if me.state != "dead" and me.rank in self.case.dies and not self.happened:
                found.append(("die", me.rank, -1))
        return found + [("arrive", to, source) for (source, to), each in self.lines.items() if each]

    def do(self, what: str, rank: int, source: int) -> None:
        me = self.ranks[rank]
        call = self.case.programs[rank][me.at : me.at + 1]
        if what == "arrive":
            fields = self.lines[source, rank].pop(0)
            if fields == ["lost"]:
                me.lost = True
            else:
                me.wire.barriers.append((source, Message(None, fields)))  # type: ignore[arg-type]
            if me.state in ("in", "asking"):
                self.attempt(me, call, lambda: self.go_on(me, what, call))
        elif what == "die":
            me.state, self.happened = "dead", True
            for (one, other), line in self.lines.items():
                if other == rank:
                    line.clear()
                elif one == rank:
                    line.append(["lost"])
        elif what == "come" and call == ".":
            me.at += 1
            me.barrier.leave()
        else:
            self.attempt(me, call, lambda: self.go_on(me, what, call))

    def go_on(self, me: Rank, what: str, call: str) -> bool:
        """Go on in an agreement as `Barrier.agree` does. Returns whether it is over."""
        if what == "come":
            me.barrier.check(anyway=call == "!")
            if me.lost:
                raise RankDivergence("lost", "")
            me.barrier._enter(call, me.rank)
            me.state = "in"
        elif what == "ask":
            me.barrier._tell(me.barrier._ranks.peers, [me.rank], [])
            me.state = "asking"
        elif what == "interrupt":
            self.happened = True
            raise me.barrier._end_all(f"Rank {me.rank} was interrupted in {call}.")
        elif what == "give up":
            error = me.barrier._late(me.barrier._come[me.barrier.number])
            accused = self.ranks[int(error.cause.split()[1])]
            assert self.case.hasty or accused.barrier.number < me.barrier.number, "it has come"
            raise error
        if me.barrier._over(call == "!"):
            return True
        if me.lost:
            raise RankDivergence("lost", "")
        return False

    def attempt(self, me: Rank, call: str, go_on: Callable[[], bool]) -> None:
        try:
            if not go_on():
                return
            me.outcomes.append((call, ""))
        except InfinityError as error:
            me.barrier.end(error)
            me.outcomes.append((call, error.cause))
        me.state = "out"
        me.at += 1


def explore(case: Case, kind: type[Barrier] = Barrier) -> list[World]:
    """Try all orders of events. Returns the states in which nothing more may happen."""
    first = World(case, kind)
    found, ends = {first.freeze()}, []
    frontier = list(found)
    while frontier:
        state = frontier.pop()
        world = first.thawed(state)
        following = world.events()
        if not following:
            ends.append(world)
        for event in following:
            world = first.thawed(state)
            world.do(*event)
            reached = world.freeze()
            if reached not in found:
                found.add(reached)
                frontier.append(reached)
    return ends


def outcomes(case: Case, kind: type[Barrier] = Barrier) -> set[tuple[tuple[str, ...], ...]]:
    """All outcomes of all orders: rank -> the error's text of each of its calls, "" for one that succeeds.

    Checks that no rank waits for ever, and that nothing succeeds after an error.
    """
    found = set()
    for world in explore(case, kind):
        for me in world.ranks:
            assert me.state == "dead" or me.at == len(case.programs[me.rank]), "a rank waits for ever"
        told = [[(at, *each) for at, each in enumerate(me.outcomes)] for me in world.ranks]
        failed = [at for each in told for at, _, error in each if error]
        later = [at for each in told for at, call, error in each if not error and call != "!"]
        assert not failed or not later or max(later) <= min(failed), "an agreement succeeds after an error"
        found.add(tuple(tuple(error for _, _, error in each) for each in told))
    return found


@pytest.mark.parametrize(
    ("programs", "nodes"),
    [
        (("ab", "ab"), ()),
        (("ab", "ab", "ab"), ()),
        (("a", "a", "a", "a"), ()),
        (("a", "a", "a", "a"), (0, 0, 1, 1)),
        (("a", "a", "a"), (0, 0, 0)),
    ],
)
def test_all_agree_in_every_order(programs: tuple[str, ...], nodes: tuple[int, ...]) -> None:
    assert outcomes(Case(programs, nodes)) == {tuple(("",) * len(each) for each in programs)}


@pytest.mark.parametrize("nodes", [(0, 1), (0, 1, 2, 3), tuple(range(8)), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)])
def test_an_agreement_takes_two_messages_for_each_rank_but_one(nodes: tuple[int, ...]) -> None:
    world = World(Case(("abc",) * len(nodes), nodes), Barrier)
    while following := world.events():
        world.do(*following[0])
    assert all(each.outcomes == [("a", ""), ("b", ""), ("c", "")] for each in world.ranks)
    assert world.posted == 3 * 2 * (len(nodes) - 1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rank", range(4))
def test_calls_that_differ_are_noticed_without_a_time_out(size: int, rank: int) -> None:
    calls = ["b"] * size
    calls[rank % size] = "c"
    for found in outcomes(Case(tuple(calls))):
        for (text,) in found:
            assert f"ank {rank % size} is in c" in text and " is in b" in text


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_leaves_is_missed_from_its_next_agreement_on(rank: int) -> None:
    programs = ["ab", "ab", "ab"]
    programs[rank] = "a."
    for found in outcomes(Case(tuple(programs))):
        for each, texts in enumerate(found):
            left = f"Rank {rank} closed its runtime while rank {each} was in b."
            assert texts == (("",) if each == rank else ("", left))


@pytest.mark.parametrize("nodes", [(), (0, 0, 0)])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_does_not_come_is_named_on_all_others(rank: int, nodes: tuple[int, ...]) -> None:
    programs = ["b", "b", "b"]
    programs[rank] = ""
    found = outcomes(Case(tuple(programs), nodes, late=(0, 1, 2)))
    assert all(len({texts for texts in each if texts}) == 1 for each in found), "all say the same"
    absent = f"Rank {rank} did not come to b within 1 s: it has agreed to nothing yet."
    assert tuple(() if each == rank else (absent,) for each in range(3)) in found


LATE = [
    *(Case(("ab",) * size, late=(rank,)) for size in (2, 3) for rank in range(size)),
    *(Case(("b",) * 3, nodes, late=(1, 2)) for nodes in ((), (0, 0, 0))),
    Case(("bc", "bc"), late=(0, 1)),
    Case(("ab!.", "ab!."), late=(0, 1)),
    Case(("b",) * 3, late=(2,), hasty=True),
    Case(("b",) * 4, late=(3,)),
]


@pytest.mark.sweep(most=6)
@pytest.mark.parametrize("case", LATE, ids=str)
def test_ranks_that_are_nearly_too_late_end_like_the_others(case: Case) -> None:
    """The model also checks that no rank is named that has come; see `World.go_on`."""
    found = outcomes(case)
    assert len(found) > 1
    texts = {text for each in found for rank in each for text in rank}
    known = ("did not come to", "closed its runtime", "is in !")
    assert all(not text or any(each in text for each in known) for text in texts)


@pytest.mark.parametrize("size", [2, 3])
def test_all_that_survive_a_death_end(size: int) -> None:
    found = outcomes(Case(("ab",) * size, dies=tuple(range(size))))
    assert {text for each in found for rank in each for text in rank} == {"", "lost"}


def test_an_interrupt_in_an_agreement_ends_it_on_all() -> None:
    found = outcomes(Case(("ab",) * 3, interrupted=(0, 1, 2)))
    texts = {text for each in found for rank in each for text in rank}
    assert texts == {"", *(f"Rank {rank} was interrupted in {call}." for rank in range(3) for call in "ab")}


def test_all_close_together_after_an_error() -> None:
    for found in outcomes(Case(("b!", "c!", "b!"))):
        assert all(error and not closing for error, closing in found)


class Downless(Barrier):
    """Ranks that do not tell those below them that all have come."""

    def _tell(self, to: Any, ranks: Any, end: Any = None) -> None:
        super()._tell([] if to is self._place.children else to, ranks, end)


class Early(Barrier):
    """Ranks that tell their parent of themselves alone."""

    def _tell(self, to: Any, ranks: Any, end: Any = None) -> None:
        super()._tell(to, [self._ranks.rank] if to is self._place.parent else ranks, end)


class Near(Barrier):
    """Ranks that tell only their neighbours of an error."""

    def _end_all(self, cause: str, cure: str = "") -> RankDivergence:
        self._tell([*self._place.parent, *self._place.children], [], [cause, cure])
        return RankDivergence(cause, cure)


class Mute(Barrier):
    """Ranks that do not answer."""

    def _read(self) -> None:
        super()._read()
        self._asking.clear()

    def _tell(self, to: Any, ranks: Any, end: Any = None) -> None:
        super()._tell([] if isinstance(to, set) else to, ranks, end)


class Forgetful(Barrier):
    """Ranks that answer only if they have come when they are asked."""

    def _read(self) -> None:
        super()._read()
        self._asking.clear()


class Bye(Barrier):
    """Ranks that leave without telling from which agreement on they are missed."""

    def leave(self) -> None:
        self.number = 0
        super().leave()


class Quiet(Barrier):
    """Ranks that do not tell when an earlier error ends an agreement."""

    def _read(self) -> None:
        super()._read()
        earlier = [each for each in self._ended if each < self.number]
        if earlier and self._come[self.number][self._ranks.rank][0] != "!":
            self._ended[self.number] = self._ended.pop(earlier[0])


FOREVER = "a rank waits for ever"


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (Case(("a", "a")), Downless, FOREVER),
        (Case(("a", "a", "a", "a")), Early, FOREVER),
        (Case(("a", "b", "", "a")), Near, FOREVER),
        (Case(("", "b", "b"), late=(2,)), Near, FOREVER),
        (Case(("b", "b", ""), late=(1,)), Mute, "it has come"),
        (LATE[3], Forgetful, "it has come"),
        (LATE[8], Quiet, "it has come"),
    ],
)
def test_the_model_notices_a_mistake(case: Case, kind: type[Barrier], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        outcomes(case, kind)


def test_the_model_notices_a_rank_that_is_missed_too_early() -> None:
    found = outcomes(Case(("a.", "a", "a", "a")), Bye)
    assert any("closed its runtime" in text for each in found for rank in each for text in rank)
