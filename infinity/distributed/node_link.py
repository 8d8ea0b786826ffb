"""Node link: measures how many bytes a second a node receives from other nodes, over the wire of training.

At the same time, each rank pulls from a rank of the next node and serves a rank of the previous one. So both
directions of each node's link are in use, as in training.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange
from infinity.errors import ConfigError

_LABEL = "trial bytes"
_BLOCK = 8 << 20
"""Bytes that are asked for at once."""
_AT_ONCE = 2
"""Blocks that a rank has requested at a time, so that the link is busy while a request is on its way."""
_MOST_BYTES = 256 << 20
_SECONDS = 3.0
"""A rank requests no more blocks after _MOST_BYTES bytes or _SECONDS seconds."""


@dataclass(frozen=True)
class NodeLink:
    """The measured rate of the links between nodes."""

    rate: float
    """Bytes per second that the slowest node received."""
    nodes: int
    ranks: int
    """Number of ranks on all nodes."""


def measure_node_link(communicator: Communicator) -> NodeLink:
    """Measure the links between nodes, for some 3 s and with at most 256 MiB a rank. All ranks call this,
    after `Communicator.find_place`, and get the same result.

    Raises ConfigError if all ranks run on one node, and RankFailure.
    """
    heard = communicator.agree("a measurement of the network", node=communicator.place.node)
    sources = _sources({rank: said["node"] for rank, said in heard.items()})
    nbytes, seconds = _pull(communicator, sources)
    told = communicator.agree("the end of a measurement", bytes=nbytes, seconds=seconds)
    by_node = defaultdict(list)
    for rank, said in told.items():
        by_node[heard[rank]["node"]].append((said["bytes"], said["seconds"]))
    rates = [sum(size for size, _ in found) / max(took for _, took in found) for found in by_node.values()]
    return NodeLink(min(rates), len(by_node), len(heard))


def _sources(nodes: Mapping[int, int]) -> dict[int, int]:
    """Choose for each rank a rank of the next node to pull from. nodes: rank -> its node."""
    ranks = defaultdict(list)
    for rank, node in sorted(nodes.items()):
        ranks[node].append(rank)
    if len(ranks) < 2:
        raise ConfigError(
            "All ranks run on one node, so there is no link between nodes to measure.",
            "Start torchrun on each of several nodes, with --nnodes; or, to tune disks, start one process.",
        )
    order = sorted(ranks)
    found = {}
    for node, following in zip(order, [*order[1:], order[0]], strict=True):
        for place, rank in enumerate(ranks[node]):
            found[rank] = ranks[following][place % len(ranks[following])]
    return found


def _pull(communicator: Communicator, sources: Mapping[int, int]) -> tuple[int, float]:
    """Pull from this rank's source while all ranks pull from theirs. Returns the bytes pulled, and the
    seconds that this took. sources: rank -> the rank that it pulls from.
    """
    source = sources[communicator.ranks.rank]
    block = torch.zeros(_BLOCK, dtype=torch.uint8, device="cpu")
    rooms = [torch.empty(_BLOCK, dtype=torch.uint8, device="cpu") for _ in range(_AT_ONCE)]
    exchange = Exchange(communicator, _LABEL, lambda *_: block)
    for room in rooms:
        exchange.take(0, 0, room, server=source)
    communicator.agree("the begin of a measurement")
    start = time.perf_counter()
    pending = deque((room, exchange.ask(0, 0, room, server=source)) for room in rooms)
    received, asked = 0, _BLOCK * len(rooms)
    while pending:
        room, delivery = pending.popleft()
        delivery.wait()
        received += _BLOCK
        if asked < _MOST_BYTES and time.perf_counter() - start < _SECONDS:
            pending.append((room, exchange.ask(0, 0, room, server=source)))
            asked += _BLOCK
    seconds = time.perf_counter() - start
    exchange.end()
    return received, seconds
