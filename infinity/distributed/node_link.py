"""Node link: measures how many bytes a second a node receives from other nodes, over the wire of training.

At the same time, each rank pulls from a rank of the next node and serves a rank of the previous one. So both
directions of each node's link are in use, as in training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange
from infinity.distributed.transfers import Delivery
from infinity.errors import ConfigError

_BLOCK = 8 << 20
"""Bytes that are asked for at once, two blocks at a time."""
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
    """Measure the links between nodes, for some 3 s and with at most 256 MiB a rank. All ranks call this, and
    get the same result.

    Raises ConfigError if all ranks run on one node, and RankFailure.
    """
    nodes, block = communicator.ranks.nodes, torch.zeros(_BLOCK, dtype=torch.uint8, device="cpu")
    source = _source(nodes, communicator.ranks.rank)
    exchange = Exchange(communicator, "trial bytes", lambda *_: block)

    def ask() -> Delivery:
        return exchange.ask(0, 0, torch.empty_like(block), server=source)

    ask().wait()  # connects
    communicator.agree("the begin of a measurement")
    start, pulled, pending = time.perf_counter(), 0, deque([ask(), ask()])
    while pending:
        pending.popleft().wait()
        pulled += _BLOCK
        if pulled + _BLOCK < _MOST_BYTES and time.perf_counter() - start < _SECONDS:
            pending.append(ask())
    seconds = time.perf_counter() - start
    exchange.end()
    told = communicator.agree("the end of a measurement", bytes=pulled, seconds=seconds)
    by_node = [[told[rank] for rank, each in enumerate(nodes) if each == node] for node in set(nodes)]
    rates = [sum(one["bytes"] for one in node) / max(one["seconds"] for one in node) for node in by_node]
    return NodeLink(min(rates), len(rates), len(nodes))


def _source(nodes: Sequence[int], rank: int) -> int:
    """Return the rank of the next node from which a rank pulls. nodes: rank -> its node, from 0 on."""
    if not any(nodes):
        raise ConfigError(
            "All ranks run on one node, so there is no link between nodes to measure.",
            "Start torchrun on each of several nodes, with --nnodes; or, to tune disks, start one process.",
        )
    following = (nodes[rank] + 1) % (max(nodes) + 1)
    there = [each for each, node in enumerate(nodes) if node == following]
    return there[nodes[:rank].count(nodes[rank]) % len(there)]
