"""Tests of the node cache: bits and bytes of ranks on several nodes, and what a cache does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training_ranks
from ranked_cases import Case
from window_stores import CPU, store_of

from infinity.config import NODE_CACHE_VARIABLE
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.message import MessageKind, What
from infinity.distributed.remote_parts import RemoteParts
from infinity.distributed.transfers import Delivery
from infinity.distributed.windows import VARIABLE, Windows
from infinity.errors import rank_failure
from infinity.layout.shards import HomeRange, Share, Span
from infinity.pages.remote import Leg
from infinity.tiers import HostArena
from infinity.tiers.link import Transfer

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


@pytest.mark.slow
def test_nodes_without_windows_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    places = [{**each, VARIABLE: "0"} for each in nodes(2, 2)]
    training_ranks.check_bits(BITS[:2], 4, tmp_path, nodes=places)


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
    cases = [Case("mlp", 3, accumulate=2, home="host", compute="bf16")]
    (kept,), (asked,) = (crossed(cases, cache, tmp_path) for cache in ("", "0"))
    assert kept["gradients"] == asked["gradients"]
    assert sum(kept.values()) <= sum(asked.values()) / 2


# --- a node of two ranks by itself ------------------------------------------------------------------------

PAGE = 8192


class _Wire:
    """Stands for the wire of a rank of node 0, which has ranks 0 and 1. Rank 2 on another node owns pages."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure_event = FailureEvent(1.0)
        self.failure = None
        self.posted: list[tuple[int, MessageKind, Any]] = []
        self.expected: list[Delivery] = []
        self.copies = 0

    def expect(self, peer: int, into: list[torch.Tensor], *, unit: int, **options: Any) -> Delivery:
        number = len(self.expected)
        delivery = Delivery(self.failure_event, peer, number, "parameters", into=tuple(into), **options)
        self.expected.append(delivery)
        return delivery

    def post(self, peer: int, kind: MessageKind, *fields: Any) -> None:
        self.posted.append((peer, kind, fields))

    def redirected(self, peer: int, number: int) -> None:
        delivery = self.expected[number]
        assert delivery.instead is not None
        delivery.instead(delivery)

    def copied(self, *_: Any) -> None:
        self.copies += 1

    def asked(self) -> int:
        """Number of requests to the owner on the other node."""
        return sum(peer == 2 for peer, *_ in self.posted)

    def bring(self, value: int) -> None:
        """The owner delivers bytes of this value to all who have asked it."""
        for delivery in self.expected:
            if delivery.peer == 2 and delivery.into and delivery.instead is None:
                for each in delivery.into:
                    each.fill_(value)
                delivery.end()


class Node:
    """Ranks 0 and 1. Rank 0 relays what rank 2 owns of pages: PAGE bytes each. It has room for two."""

    def __init__(self) -> None:
        self.wires = [_Wire(rank) for rank in range(2)]
        arenas = [HostArena(2 * PAGE, shared=True) for _ in range(2)]
        windows = [Windows(rank, range(2)) for rank in range(2)]
        said = [each.tell() for each in windows]
        for rank, each in enumerate(windows):
            each.open({1 - rank: said[1 - rank]})
        for rank, each in enumerate(windows):
            each.meet([1 - rank])
        told = {rank: each.tell_memory(store_of(arenas[rank]), []) for rank, each in enumerate(windows)}
        self.ranks = []
        for rank, each in enumerate(windows):
            each.read_memory(told, CPU)
            share, room = Share(rank, 4, 3, on_node=2), arenas[rank].pool("node cache", 2 * PAGE)
            wire: Any = self.wires[rank]
            self.ranks.append(RemoteParts(wire, share, PAGE // 2, each, room))

    def page(self, rank: int, unit: int = 5, version: int = 0) -> Any:
        """A page as a rank of the node knows it."""
        own, spans = (HomeRange(rank * PAGE, 0, PAGE),), (Span(2, 2 * PAGE, PAGE, 0),)
        share = Share(rank, 4, 3, on_node=2)
        shard = SimpleNamespace(own=own, others={2: spans}, share=share)
        return SimpleNamespace(index=unit, version=version, shard=shard)

    def fetch(self, rank: int, unit: int = 5, version: int = 0) -> tuple[Transfer, torch.Tensor]:
        """Have a rank fetch what rank 2 owns of a page. Rank 0 hears at once that it is to relay it."""
        into = torch.zeros(PAGE, dtype=torch.uint8)
        wire = self.wires[rank]
        before = len(wire.posted)
        transfer = self.ranks[rank].fetch(self.page(rank, unit, version), [Leg(2, 2 * PAGE, into)])
        for peer, _, (number, what, *fields) in wire.posted[before:]:
            if what == What.RELAYED:
                assert peer == 0
                step, there, loads, edits = fields
                self.ranks[0].relay(rank, number, self.page(0, there), (step, loads, edits))
        return transfer, into

    def answer(self) -> None:
        """Rank 1 hears what rank 0 has answered."""
        for peer, kind, (number, *_) in self.wires[0].posted:
            if (
                peer == 1
                and kind is MessageKind.REDIRECT
                and self.wires[1].expected[number].instead is not None
            ):
                self.wires[1].redirected(0, number)


@pytest.fixture
def node() -> Node:
    return Node()


def came(fetched: tuple[Transfer, torch.Tensor], value: int) -> bool:
    transfer, into = fetched
    transfer.wait()
    return bool((into == value).all())


def test_all_who_ask_copy_what_came_once(node: Node) -> None:
    """The relay asks for the bytes in two requests, each as long as may be."""
    early, mine = node.fetch(1), node.fetch(0)
    assert not early[0].done() and not mine[0].done()
    node.wires[0].bring(9)
    assert came(mine, 9) and not early[0].done()
    node.answer()
    assert came(early, 9)
    assert came(node.fetch(1), 9) and came(node.fetch(0), 9)
    assert [each.asked() for each in node.wires] == [2, 0]
    assert [each.copies for each in node.wires] == [0, 2], "what a rank relays itself has been counted before"


def test_other_steps_and_edits_are_other_bytes(node: Node) -> None:
    for value, (step, version) in enumerate([(0, 0), (1, 0), (1, 1)]):
        for each in node.ranks:
            each.step = step
        fetched = node.fetch(0, version=version)
        node.wires[0].bring(value)
        assert came(fetched, value) and came(node.fetch(1, version=version), value)
    assert node.wires[0].asked() == 3 * 2


def test_what_was_brought_longest_ago_makes_room(node: Node) -> None:
    for unit in (1, 2, 3):
        node.fetch(0, unit)
        node.wires[0].bring(unit)
    assert came(node.fetch(1, 2), 2) and came(node.fetch(1, 3), 3)
    assert not node.fetch(1, 1)[0].done() and node.wires[0].asked() == 4 * 2


def test_ranks_ask_the_owner_if_the_relay_has_no_room(node: Node) -> None:
    for unit in (1, 2):
        node.fetch(0, unit)
    mine, other = node.fetch(0, 3), node.fetch(1, 3)
    assert node.wires[0].asked() == 3 * 2 and node.wires[1].asked() == 0
    node.answer()
    assert node.wires[1].asked() == 2
    for wire in node.wires:
        wire.bring(4)
    assert came(mine, 4) and came(other, 4)
    node.fetch(0, 3)
    node.wires[0].bring(5)
    assert came(node.fetch(1, 3), 5), "there is room now"


def test_a_rank_asks_the_owner_if_its_copy_is_overtaken(node: Node) -> None:
    fetched = node.fetch(1, 1)
    node.wires[0].bring(1)
    for unit in (2, 3):  # in place of page 1
        node.fetch(0, unit)
        node.wires[0].bring(unit)
    node.answer()
    assert not fetched[0].done() and node.wires[1].asked() == 2
    node.wires[1].bring(7)
    assert came(fetched, 7)


def test_an_error_reaches_all_who_wait_and_is_not_kept(node: Node) -> None:
    mine, other = node.fetch(0), node.fetch(1)
    lost = rank_failure(2, "has closed its runtime")
    for wire in node.wires:
        for delivery in wire.expected:
            if delivery.peer == 2 and delivery.instead is None:
                delivery.end(lost)
        node.answer()
    for wire in node.wires:  # who then ask the owner
        for delivery in wire.expected:
            delivery.end(lost)
    for transfer, _ in (mine, other):
        with pytest.raises(type(lost), match="Rank 2 has closed its runtime"):
            transfer.wait()
    fetched = node.fetch(0)
    node.wires[0].bring(3)
    assert came(fetched, 3)
