"""Tests of the node cache: bits and bytes of ranks on several nodes, and what a cache does by itself."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training_ranks
from ranked_cases import Case

from infinity.config import NODE_CACHE_VARIABLE
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.message import MessageKind, What
from infinity.distributed.remote_parts import NodeCache, RemoteParts, Wanted
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.errors import rank_failure
from infinity.layout.shards import Share
from infinity.tiers import HostArena

BITS = (
    Case("decoder", 3, accumulate=2, clip=0.05, home="host", compute="bf16", generates=True),
    Case("frozen", 3, home="host", accumulate=2, declared=True, update="eager"),
    Case("mlp", 2, home="host", states="int8"),
    Case("decoder", 1, together=True),
)


def nodes(count: int, on_each: int, cache: str = "") -> list[Mapping[str, str]]:
    """The environments of ranks on nodes, as torchrun sets them. cache: the most bytes of node caches."""
    return [
        {
            "GROUP_RANK": str(node),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(on_each),
            NODE_CACHE_VARIABLE: cache,
        }
        for node in range(count)
        for rank in range(on_each)
    ]


@pytest.mark.parametrize(
    ("on_each", "cache"),
    [(2, "64KiB"), pytest.param(2, "", marks=pytest.mark.slow), pytest.param(1, "", marks=pytest.mark.slow)],
)
def test_nodes_have_the_bits_of_one_rank(on_each: int, cache: str, tmp_path: Path) -> None:
    """With 64 KiB the cache has room for a part of what it brings, and sends ranks to owners."""
    cases = BITS[::2] if cache else BITS
    training_ranks.check_bits(cases, 2 * on_each, tmp_path, nodes=nodes(2, on_each, cache))


def crossed(cases: list[Case], cache: str, directory: Path) -> list[dict[str, int]]:
    """Train cases on two nodes of two ranks; returns what came to both nodes from the other one in each case,
    by its label.
    """
    cases_of_ranks = training_ranks.launch(
        "bytes_over_the_wire", cases, 4, directory, timeout=200.0, nodes=nodes(2, 2, cache)
    )
    found = []
    for ranks in cases_of_ranks:
        assert all(isinstance(each, dict) for each in ranks), ranks
        between: dict[str, int] = {}
        for rank, each in enumerate(ranks):
            for source, label, nbytes in each["received from"]:
                if source // 2 != rank // 2:
                    between[label] = between.get(label, 0) + nbytes
        found.append(between)
    return found


def test_parameters_come_to_a_node_once_a_step(tmp_path: Path) -> None:
    """Each node has the values of the other one's half of each page once, whatever passes need them. A page
    is fetched ahead after the last step. At stage 2 the values of the first step are there from the start.
    """
    one = Case("even", 3, home="host")
    cases = [one, replace(one, accumulate=2), replace(one, stage=2)]
    pages, page = 6, 65536
    steps = Case().steps
    for case, found in zip(cases, crossed(cases, "", tmp_path), strict=True):
        moments = steps if case.stage == 3 else steps - 1
        assert found["parameters"] == page * (pages * moments + 1), case


def test_a_node_receives_half_of_what_its_ranks_would(tmp_path: Path) -> None:
    cases = [Case("decoder", 3, accumulate=2, home="host", compute="bf16")]
    (kept,), (asked,) = (crossed(cases, cache, tmp_path) for cache in ("", "0"))
    assert kept["gradients"] == asked["gradients"]
    assert sum(kept.values()) <= sum(asked.values()) / 2


def test_a_redirected_rank_asks_the_owner() -> None:
    """Rank 1 asks rank 0 of its node for what rank 2 owns."""
    wire, into = _Wire(), memory()
    remote = RemoteParts(
        wire,  # type: ignore[arg-type]
        Share(1, 4, 3, on_node=2),
        NodeCache(wire, None),  # type: ignore[arg-type]
    )
    page: Any = SimpleNamespace(index=5, version=3)
    transfer = remote.fetch(2, page, 4096, into)
    delivery, _ = wire.expected.get_nowait()
    assert delivery.instead is not None
    delivery.instead(delivery)
    assert not transfer.done()
    wire.bring(4)
    transfer.wait()
    assert bool((into == 4).all())
    assert wire.posted == [
        (0, MessageKind.REQUEST, 7, What.RELAYED, 2, 0, 0, 5, 4096, PAGE, 3),
        (2, MessageKind.REQUEST, 7, What.PARAMETERS, 0, 5, 4096, PAGE, 3, 0),
    ]


# --- a cache by itself ----------------------------------------------------------------------------------

PAGE = 8192


class _Wire:
    """Stands for the wire of rank 0: ranks 0 and 1 are on a node, and rank 2 owns the pages."""

    def __init__(self) -> None:
        self.failure_event = FailureEvent(1.0)
        self.awaiting = nullcontext
        self.posted: list[tuple[Any, ...]] = []
        self.expected: queue.SimpleQueue[tuple[Delivery, torch.Tensor]] = queue.SimpleQueue()
        self.delivered: list[tuple[int, int, torch.Tensor, Dispatch]] = []
        self.refused: list[tuple[int, int]] = []

    def expect(
        self, peer: int, into: list[torch.Tensor], label: str = "", *, unit: int, **options: Any
    ) -> Delivery:
        delivery = Delivery(self.failure_event, peer, 7, "parameters", into=tuple(into), **options)
        self.expected.put((delivery, into[0]))
        return delivery

    def post(self, peer: int, kind: MessageKind, *fields: Any) -> None:
        self.posted.append((peer, kind, *fields))

    def deliver(self, peer: int, number: int, pieces: list[torch.Tensor], *, unit: int) -> Dispatch:
        dispatch = Dispatch(self.failure_event, peer, number, "parameters")
        self.delivered.append((peer, number, pieces[0].clone(), dispatch))
        return dispatch

    def refuse(self, peer: int, number: int, error: Exception) -> None:
        self.refused.append((peer, number))

    def bring(self, value: int) -> None:
        """The owner delivers what it was asked for first: bytes of this value."""
        delivery, memory = self.expected.get_nowait()
        memory.fill_(value)
        delivery.end()


@pytest.fixture
def wire() -> _Wire:
    return _Wire()


@pytest.fixture
def cache(wire: _Wire) -> Any:
    """A cache with room for two pages."""
    with HostArena(2 * PAGE, device=torch.device("cpu")) as arena:
        yield NodeCache(wire, arena.pool("node cache", 2 * PAGE))  # type: ignore[arg-type]


def wanted(unit: int, step: int = 0, version: int = 0) -> Wanted:
    return Wanted(step, 0, unit, 0, PAGE, version)


def memory() -> torch.Tensor:
    return torch.zeros(PAGE, dtype=torch.uint8)


def test_all_who_ask_get_what_came_once(wire: _Wire, cache: NodeCache) -> None:
    mine, again = memory(), memory()
    cache.requested(1, 11, 2, *wanted(5))
    landing = cache.fetch(2, wanted(5), mine)
    cache.requested(3, 12, 2, *wanted(5))
    assert wire.posted == [(2, MessageKind.REQUEST, 7, What.PARAMETERS, 0, 5, 0, PAGE, 0, 0)]
    assert landing is not None and not landing.done() and not wire.delivered
    wire.bring(9)
    landing.wait()
    assert bool((mine == 9).all())
    late = cache.fetch(2, wanted(5), again)
    assert late is not None and late.done() and bool((again == 9).all())
    cache.requested(1, 13, 2, *wanted(5))
    assert [(peer, number) for peer, number, *_ in wire.delivered] == [(1, 11), (3, 12), (1, 13)]
    assert all(bool((sent == 9).all()) for _, _, sent, _ in wire.delivered)
    assert len(wire.posted) == 1


def test_other_steps_and_edits_are_other_bytes(wire: _Wire, cache: NodeCache) -> None:
    for asked in (wanted(5), wanted(5, step=1)):
        cache.fetch(2, asked, memory())
        wire.bring(1)
    cache.fetch(2, wanted(5, step=1, version=1), memory())
    assert [(step, version) for _, _, _, _, step, *_, version, _ in wire.posted] == [(0, 0), (1, 0), (1, 1)]


def test_what_was_used_longest_ago_makes_room(wire: _Wire, cache: NodeCache) -> None:
    for unit in (1, 2):
        cache.fetch(2, wanted(unit), memory())
        wire.bring(unit)
    cache.fetch(2, wanted(1), memory())  # is used again
    cache.fetch(2, wanted(3), memory())
    wire.bring(3)
    for unit in (1, 3):
        found = memory()
        cache.fetch(2, wanted(unit), found)
        assert bool((found == unit).all())
    assert len(wire.posted) == 3


def test_ranks_are_sent_to_the_owner_where_no_room_is_free(wire: _Wire, cache: NodeCache) -> None:
    cache.fetch(2, wanted(1), memory())
    cache.requested(1, 11, 2, *wanted(2))
    assert cache.fetch(2, wanted(3), memory()) is None
    cache.requested(1, 12, 2, *wanted(3))
    assert wire.posted[-1] == (1, MessageKind.REDIRECT, 12)
    wire.bring(1)
    wire.bring(2)
    cache.fetch(2, wanted(4), memory())  # in place of page 1: page 2 is being sent
    wire.bring(4)
    cache.requested(1, 13, 2, *wanted(4))
    assert cache.fetch(2, wanted(5), memory()) is None
    for *_, dispatch in wire.delivered:
        dispatch.end()
    assert cache.fetch(2, wanted(5), memory()) is not None


def test_an_error_reaches_all_who_wait_and_is_not_kept(wire: _Wire, cache: NodeCache) -> None:
    landing = cache.fetch(2, wanted(5), memory())
    cache.requested(1, 11, 2, *wanted(5))
    delivery, _ = wire.expected.get_nowait()
    delivery.end(rank_failure(2, "has closed its runtime"))
    assert wire.refused == [(1, 11)] and landing is not None
    with pytest.raises(type(rank_failure(2, "")), match="Rank 2 has closed its runtime"):
        landing.wait()
    found = memory()
    cache.fetch(2, wanted(5), found)
    wire.bring(3)
    assert bool((found == 3).all()) and len(wire.posted) == 2
