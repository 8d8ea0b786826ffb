"""Tree of the ranks: which ranks send each other heartbeats, and by which ranks they hear of each other.

A node's ranks are children of its leader, the lowest of them. Leaders, in their order, are a binomial tree:
the parent of the leader at place p is the one at the place p without its lowest bit. So a rank has at most
log2(nodes) + 1 neighbours beside those of its own node, and is at most log2(nodes) + 1 messages away from the
root, which is the lowest rank. A parent's number is lower than its children's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place in the tree."""

    parent: list[int]
    """Empty for the root."""
    children: list[int]
    below: set[int]
    """The rank itself, and all ranks whose way to the root leads through it."""


def place(rank: int, nodes: Sequence[object]) -> Place:
    """Return the place of a rank in the tree of all ranks. nodes: rank -> its node."""
    tree = _parents(nodes, range(len(nodes)))
    below = {rank}
    for each in sorted(tree):  # parents come before their children
        if tree[each] in below:
            below.add(each)
    parent = [tree[rank]] if rank in tree else []
    return Place(parent, [each for each, above in tree.items() if above == rank], below)


def neighbours(rank: int, nodes: Sequence[object], there: Iterable[int]) -> list[int]:
    """Return parent and children of `rank` in the tree of the ranks `there`, which are in any order.

    nodes: rank -> its node.
    """
    pairs = _parents(nodes, there).items()
    return [each for pair in pairs if rank in pair for each in pair if each != rank]


def _parents(nodes: Sequence[object], there: Iterable[int]) -> dict[int, int]:
    """Return rank -> parent of all ranks `there` but the root."""
    found, leaders = {}, dict[object, int]()
    for rank in sorted(there):
        leader = leaders.setdefault(nodes[rank], rank)
        if leader != rank:
            found[rank] = leader
    places = list(leaders.values())
    return found | {rank: places[at & (at - 1)] for at, rank in enumerate(places) if at}
