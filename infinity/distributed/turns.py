"""Turns: the order in which shards of a gradient are added at its owner. Pure.

A sum's bits depend on the order of its terms, so the order must not depend on which rank is quick.
Micro-batch m of rank r counts as number m * N + r of N ranks' micro-batches: for each key (a parameter),
micro-batches come in order, and in each the ranks' first shards in the order of ranks. If a rank
makes several shards for a key in one micro-batch, as for shared parameters, its further shards are added
after the first shards of all ranks, by rank and in their sequence.

A shard that is not there yet may still come, or never, as for an expert that was not used. This is known once
its rank has ended the micro-batch, or earlier if the rank has announced all shards of the micro-batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ALL = 1 << 62
"""A number of backwards that no rank reaches."""

Key = TypeVar("Key", bound=Hashable)
Token = TypeVar("Token")


@dataclass
class _Line(Generic[Token]):
    """The shards of one key that wait for their turn."""

    waiting: dict[tuple[int, int], deque[Token]] = field(default_factory=dict)
    """(micro-batch, rank) -> shards in their sequence; no empty ones."""
    micro_batch: int = 0
    rank: int = 0
    """The rank whose first shard is next; the number of ranks if further shards are next."""
    taking: int | None = None
    """Micro-batch of the shard that is being added, or None."""

    def take(self, micro_batch: int, rank: int) -> Token:
        tokens = self.waiting[micro_batch, rank]
        token = tokens.popleft()
        if not tokens:
            del self.waiting[micro_batch, rank]
        self.taking = micro_batch
        return token


class Turns(Generic[Key, Token]):
    """Gives the shards of each key in their order, one at a time.

    Methods that note an event return the (key, token) pairs to add next. Call `taken` after adding each.
    """

    def __init__(self, ranks: int) -> None:
        """ranks: number of ranks."""
        self._ranks = ranks
        self._begin()

    def _begin(self) -> None:
        self._done = [0] * self._ranks
        self._lines: defaultdict[Key, _Line[Token]] = defaultdict(_Line)
        self._blocked: defaultdict[tuple[int, int], set[Key]] = defaultdict(set)
        """(rank, micro-batch) -> keys that wait until the rank has ended the micro-batch."""
        self._expected: dict[tuple[int, int], Container[Key]] = {}
        """(rank, micro-batch) -> the keys for which the rank makes shards, if it has announced them."""
        self._left: Counter[int] = Counter()
        """Micro-batch -> number of shards not yet added; no zeros."""

    def offered(self, key: Key, micro_batch: int, rank: int, token: Token) -> list[tuple[Key, Token]]:
        """Note that a rank has a shard to add. Shards of one key, micro-batch and rank must be noted in the
        order in which they are to be added.

        micro_batch: number of the micro-batch as the rank counts, from 0 since `clear`.
        """
        assert micro_batch >= self._done[rank], "a rank contributes to a micro-batch that it has ended"
        line = self._lines[key]
        line.waiting.setdefault((micro_batch, rank), deque()).append(token)
        self._left[micro_batch] += 1
        return self._advance([key])

    def expects(self, rank: int, micro_batch: int, keys: Container[Key]) -> list[tuple[Key, Token]]:
        """Note that a rank makes exactly one shard for each of `keys` in a micro-batch, and no shards for
        others. Returns the (key, token) pairs to add next.
        """
        self._expected[rank, micro_batch] = keys
        return self._advance(self._blocked.pop((rank, micro_batch), ()))

    def done(self, rank: int, micro_batches: int) -> list[tuple[Key, Token]]:
        """Note that a rank has ended `micro_batches` backwards since `clear`, and makes no more shards in
        them.

        micro_batches: ALL if the rank makes no more shards until `go_on`. Returns the (key, token) pairs to
        add next.
        """
        self._done[rank] = max(self._done[rank], micro_batches)
        keys: list[Key] = []
        for source, each in [*self._blocked]:
            if source == rank and each < micro_batches:
                keys += self._blocked.pop((source, each))
        return self._advance(keys)

    def go_on(self, micro_batches: int) -> None:
        """Note that each rank has ended exactly `micro_batches` backwards, whatever `done` noted before.

        After this, ranks for which `done` noted ALL may make new shards again.
        """
        self._done = [micro_batches] * self._ranks

    def taken(self, key: Key) -> list[tuple[Key, Token]]:
        """Note that the caller has added the shard of `key` that it was given. Returns the (key, token) pairs
        to add next.
        """
        line = self._lines[key]
        assert line.taking is not None, "nothing of this key is being taken"
        self._left[line.taking] -= 1
        if not self._left[line.taking]:
            del self._left[line.taking]
        line.taking = None
        return self._advance([key])

    def drained(self, micro_batches: int) -> bool:
        """Whether all ranks have ended `micro_batches` backwards, and all their shards are added."""
        return min(self._done) >= micro_batches and all(each >= micro_batches for each in self._left)

    def complete(self, key: Key, micro_batches: int) -> bool:
        """Whether all ranks have ended `micro_batches` backwards, and all their shards to `key` are added."""
        if min(self._done) < micro_batches:
            return False
        line = self._lines.get(key)
        if line is None:
            return True
        left = [micro_batch for micro_batch, _ in line.waiting]
        if line.taking is not None:
            left.append(line.taking)
        return all(each >= micro_batches for each in left)

    def clear(self) -> list[Token]:
        """Begin anew with micro-batch 0. Returns the shards that were never given."""
        dropped = [token for line in self._lines.values() for each in line.waiting.values() for token in each]
        self._begin()
        return dropped

    def _advance(self, keys: Iterable[Key]) -> list[tuple[Key, Token]]:
        found = []
        for key in keys:
            line = self._lines[key]
            place = self._next(key, line)
            if place is not None:
                found.append((key, line.take(*place)))
        return found

    def _next(self, key: Key, line: _Line[Token]) -> tuple[int, int] | None:
        """Move a key's cursor to its next shard, and return the shard's (micro-batch, rank).

        Returns None if there is no shard, one is being added, or the key must wait for a rank.
        """
        while line.waiting and line.taking is None:
            now = line.micro_batch
            if line.rank < self._ranks:
                rank = line.rank
                there = (now, rank) in line.waiting
                if not there and self._may_come(key, rank, now):
                    self._blocked[rank, now].add(key)
                    return None
                line.rank += 1
                if there:
                    return now, rank
                continue
            behind = next((each for each in range(self._ranks) if self._may_come_again(each, now)), None)
            if behind is not None:
                self._blocked[behind, now].add(key)
                return None
            further = [rank for micro_batch, rank in line.waiting if micro_batch == now]
            if further:
                return now, min(further)
            # Micro-batches that all have finished without a shard to this key need no look each.
            line.micro_batch = max(now + 1, min(*self._done, min(line.waiting)[0]))
            line.rank = 0
        return None

    def _may_come(self, key: Key, rank: int, micro_batch: int) -> bool:
        """Whether a rank's first shard for a key, which has not come yet, may still come."""
        if self._done[rank] > micro_batch:
            return False
        expected = self._expected.get((rank, micro_batch))
        return expected is None or key in expected

    def _may_come_again(self, rank: int, micro_batch: int) -> bool:
        """Whether a rank may make further shards for a key in a micro-batch."""
        return self._done[rank] <= micro_batch and (rank, micro_batch) not in self._expected
