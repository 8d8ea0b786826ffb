"""Tests of the tree along which ranks send each other heartbeats."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.liveness import Liveness
from infinity.distributed.tree import neighbours

NODES = st.lists(st.integers(0, 40), min_size=2, max_size=80)


@given(NODES, st.sets(st.integers(0, 79)))
def test_neighbours_are_mutual_few_and_reach_all(nodes: list[int], left: set[int]) -> None:
    there = set(range(len(nodes))) - left or {0}
    tree = {rank: neighbours(rank, nodes, there) for rank in there}
    for rank, found in tree.items():
        assert all(rank in tree[each] for each in found) and rank not in found
        own = sum(nodes[each] == nodes[rank] for each in there) - 1
        assert len(found) == len(set(found)) <= own + math.ceil(math.log2(len(set(nodes)) + 1))
    assert sum(map(len, tree.values())) == 2 * (len(there) - 1), "a tree"
    reached, new = {min(there)}, {min(there)}
    while new:
        new = {each for rank in new for each in tree[rank]} - reached
        reached |= new
    assert reached == there


def test_a_rank_is_missed_after_rounds_of_silence() -> None:
    liveness = Liveness(0, [0, 0, 0], interval=1.0, patience=2.0)
    assert liveness.round() == liveness.round() == []
    liveness.heard(1)
    assert liveness.round() == [2]
    assert liveness.round() == [2]
    liveness.departed(2)
    assert liveness.round() == [1]


def test_who_has_left_is_watched_no_more_and_others_take_its_place() -> None:
    liveness = Liveness(1, [0, 0, 0])
    assert list(liveness.silent) == [0]
    liveness.departed(0)
    assert list(liveness.silent) == [2]
    liveness.departed(2)
    assert liveness.round() == []
