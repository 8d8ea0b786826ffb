"""Tests of turns: whatever comes when, each key's shards have one order, and none is lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.distributed.turns import Turns

GradientShard = tuple[str, int, int, int]
"""(key, micro-batch, rank, its number among those of this key, micro-batch and rank)."""


def sorted_order(shards: list[GradientShard]) -> dict[str, list[GradientShard]]:
    """The oracle: by micro-batch, first ones before further ones, by rank, in sequence."""
    found = defaultdict(list)
    for each in sorted(shards, key=lambda each: (each[1], each[3] > 0, each[2], each[3])):
        found[each[0]].append(each)
    return found


class Owner:
    """Takes what it is given to take, one at a time per key, in an order of its own among keys."""

    def __init__(self, ranks: int) -> None:
        self.turns: Turns[str, GradientShard] = Turns(ranks)
        self.taking: dict[str, GradientShard] = {}
        self.order: dict[str, list[GradientShard]] = defaultdict(list)

    def given(self, pairs: list[tuple[str, GradientShard]]) -> None:
        for key, token in pairs:
            assert key not in self.taking and token[0] == key
            self.taking[key] = token
            self.order[key].append(token)

    def take_one(self, chance: Random) -> bool:
        if not self.taking:
            return False
        key = chance.choice(sorted(self.taking))
        del self.taking[key]
        self.given(self.turns.taken(key))
        return True


@st.composite
def programs(draw: st.DrawFn) -> list[list[list[str]]]:
    """Rank -> micro-batch -> keys to which it contributes, in this order."""
    keys = st.lists(st.sampled_from("abc"), max_size=5)
    micro_batches = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 4))
    return [[draw(keys) for _ in range(micro_batches)] for _ in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_every_interleaving_has_the_sorted_order(program: list[list[list[str]]], chance: Random) -> None:
    owner, ranks, micro_batches = Owner(len(program)), len(program), len(program[0])
    events: list[list[GradientShard | int]] = []
    for rank, run in enumerate(program):
        mine: list[GradientShard | int] = []
        for number, keys in enumerate(run):
            seen: Counter[str] = Counter()
            for key in keys:
                mine.append((key, number, rank, seen[key]))
                seen[key] += 1
            mine.append(number + 1)
        events.append(mine)
    every = [each for mine in events for each in mine if isinstance(each, tuple)]
    at = [0] * ranks
    while any(at[rank] < len(events[rank]) for rank in range(ranks)):
        if chance.random() < 0.3 and owner.take_one(chance):
            continue
        rank = chance.choice([rank for rank in range(ranks) if at[rank] < len(events[rank])])
        event = events[rank][at[rank]]
        at[rank] += 1
        if isinstance(event, tuple):
            owner.given(owner.turns.offered(event[0], event[1], event[2], event))
        else:
            owner.given(owner.turns.done(rank, event))
        taken = Counter(each[1] for order in owner.order.values() for each in order)
        taken.subtract(each[1] for each in owner.taking.values())
        for bound in range(micro_batches + 1):
            finished = all(at[each] >= 1 + index_of(events[each], bound) for each in range(ranks))
            all_taken = all(taken[each] == sum(c[1] == each for c in every) for each in range(bound))
            assert owner.turns.drained(bound) == (finished and all_taken)
    while owner.take_one(chance):
        pass
    assert owner.order == sorted_order(every)
    assert owner.turns.drained(micro_batches)
    assert owner.turns.clear() == []


def index_of(events: list[GradientShard | int], done: int) -> int:
    """Where a rank says that it is done with so many; -1 for none."""
    return events.index(done) if done else -1


def test_a_shard_is_given_as_soon_as_its_turn_is_known() -> None:
    turns: Turns[str, str] = Turns(2)
    assert turns.offered("a", 0, 1, "late rank") == [], "rank 0 may still contribute"
    assert turns.done(0, 1) == [("a", "late rank")]
    assert turns.offered("a", 1, 0, "next") == []
    assert turns.taken("a") == [], "rank 1 may contribute to micro-batch 0 again"
    assert turns.done(1, 1) == [("a", "next")]


def test_what_is_cleared_is_given_back_and_counting_begins_anew() -> None:
    turns: Turns[str, str] = Turns(2)
    assert turns.offered("a", 0, 0, "given") == [("a", "given")]
    turns.offered("a", 0, 1, "not given")
    turns.offered("b", 3, 1, "not even near")
    assert turns.clear() == ["not given", "not even near"]
    assert turns.drained(0) and not turns.drained(1)
    assert turns.offered("a", 0, 0, "anew") == [("a", "anew")]


def test_micro_batches_whose_shards_are_known_wait_for_no_end() -> None:
    owner = Owner(2)
    for rank in range(2):
        for micro_batch in range(3):  # rank 1 contributes to "b" in the last one alone
            known = {"a", "b"} if rank == 0 or micro_batch == 2 else {"a"}
            owner.given(owner.turns.expects(rank, micro_batch, known))
    for key in "ab":
        for micro_batch in range(3):
            for rank in (1, 0):
                if key == "a" or rank == 0 or micro_batch == 2:
                    token = (key, micro_batch, rank, 0)
                    owner.given(owner.turns.offered(key, micro_batch, rank, token))
            while owner.take_one(Random(0)):
                pass
    assert owner.order["a"] == [("a", micro_batch, rank, 0) for micro_batch in range(3) for rank in range(2)]
    assert owner.order["b"] == [("b", 0, 0, 0), ("b", 1, 0, 0), ("b", 2, 0, 0), ("b", 2, 1, 0)]
    assert not owner.turns.drained(3)
    for rank in range(2):
        owner.given(owner.turns.done(rank, 3))
    assert owner.turns.drained(3)
