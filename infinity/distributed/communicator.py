"""Communicator: what connects one rank with the others, from before its runtime is made to its end."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from infinity.distributed.ballots import Ballots, check_same
from infinity.distributed.bell import Bell
from infinity.distributed.commit_votes import CommitVotes
from infinity.distributed.liveness import Liveness
from infinity.distributed.mesh import Ranks
from infinity.distributed.message import MessageKind
from infinity.distributed.node_cache import NodeCache
from infinity.distributed.remote_parts import RemoteParts
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError, RankFailure, rank_failure
from infinity.layout.shards import Share
from infinity.system import launcher, machine
from infinity.system.closing import Closing
from infinity.system.launcher import RankLocation
from infinity.system.lock import RuntimeLock
from infinity.telemetry.meter import Meter
from infinity.tiers import Pool

_T = TypeVar("_T")
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""The communicators of this process's runtimes that are open."""


class Communicator(Closing):
    """The wire to the other ranks, the watch over them, agreements with them, and the runtime's lock."""

    def __init__(self, mesh: DeviceMesh | None, stage: int, *, cuda: bool) -> None:
        """Meet the other ranks. mesh: 1-D; None: all ranks. stage: of ZeRO. cuda: whether models compute on
        CUDA devices. Raises ConfigError, RankDivergence and RankFailure.
        """
        self.ranks = Ranks.of(mesh, cuda=cuda)
        self.place = RankLocation(0, 0, 1)
        """Where this rank runs, once `find_place` was called."""
        self.met = 0
        """When `find_place` was called, by rank 0's time.time_ns(): equal on all ranks."""
        self.share = Share(self.ranks.rank, self.ranks.size, stage)
        self.bell = Bell()
        self.lock = RuntimeLock()
        self.meter = Meter()
        """The runtime's: bytes cross between ranks before that is made."""
        self.wire = Wire(self.ranks, self.bell, self.meter)
        self.liveness = Liveness(self.ranks, self.bell)
        self.ballots = Ballots(self.ranks, self.wire, self.lock.released)
        self._closed = False
        self._alone = False
        """Whether this rank has left without having waited for the others."""
        _open.add(self)
        atexit.register(self._end)
        launcher.record_at_exit()

    def agree(self, call: str, **facts: Any) -> dict[int, dict[str, Any]]:
        """Tell all ranks `facts`, and return what each rank has told in the same call: rank -> facts."""
        return self.ballots.agree(call, facts)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, so that none waits for it, and it for none."""
        if self._closed or isinstance(error, RankFailure):  # the others have heard of the rank that failed
            return
        text = str(error) if isinstance(error, InfinityError) else f"{type(error).__name__}: {error}"
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {text.rstrip('.')}"
        self.wire.declare(what)
        self.liveness.declare(rank_failure(self.ranks.rank, what))

    def leave(self) -> None:
        """Wait until all ranks close their runtimes, so that they are served until then. Errors are ignored:
        a rank that fails or does something else is not waited for, nor, after the time-out, one that closes
        another runtime first: it waits for this rank there.
        """
        if self.bell.failure is None:
            try:
                for peer in self.ranks.peers:
                    self.wire.post(peer, MessageKind.LEAVING)
                self.ballots.agree("close()", {}, patient=lambda: not self._awaited_elsewhere(), anyway=True)
            except InfinityError:
                self._alone = True

    def _awaited_elsewhere(self) -> bool:
        """Whether a rank closes another runtime of this process, and waits there."""
        return any(each.wire.leaving for each in tuple(_open) if each is not self)

    def _end(self) -> None:
        """Leave the other ranks as the process ends with an open runtime, by an error or without one."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.leave()
        else:
            self.fail(error)
        self.close()

    def remote_parts(self, room: Pool | None) -> RemoteParts:
        """What brings the parts of pages that other ranks own. room: in which parts from other nodes are kept
        for the ranks of this one; None: none are.
        """
        cache = None if room is None else NodeCache(self.wire, room)
        return RemoteParts(self.wire, self.lock, self.share, cache)

    def commit_votes(self) -> CommitVotes:
        """What makes commits together with the other ranks."""
        return CommitVotes(self.ranks, self.wire, self.ballots)

    def same(self, call: str, **facts: Any) -> None:
        """Check that `facts`, by name, are equal on all ranks. Raises RankDivergence if one is not."""
        check_same(
            call,
            self.agree(call, **facts),
            facts,
            "Start all ranks with the same program, model, optimizer and versions.",
        )

    def find_place(self) -> None:
        """Set `place`, and the number of ranks of a node in `share`, from the environment, or else from what
        all ranks tell of their machines; and set `met`. All ranks call this.
        """
        given = launcher.location()
        node = None if given is None else given.node
        heard = self.agree("offload()", machine=machine.identity(), node=node, clock=time.time_ns())
        self.met = heard[0]["clock"]
        told = [heard[rank] for rank in range(self.ranks.size)]
        key = "machine" if any(each["node"] is None for each in told) else "node"
        nodes = [each[key] for each in told]
        mine = nodes[self.ranks.rank]
        found = RankLocation(
            list(dict.fromkeys(nodes)).index(mine), nodes[: self.ranks.rank].count(mine), nodes.count(mine)
        )
        self.place = given or found
        self.share = replace(self.share, on_node=_on_each(nodes))

    def node_share(self, items: Sequence[_T]) -> Sequence[_T]:
        """The part of `items`, such as CPUs, that belongs to this rank of its node: at least one item."""
        _, place, count = self.place
        return items[len(items) * place // count : len(items) * (place + 1) // count] or items[:1]

    def close(self) -> None:
        """Leave the other ranks. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        atexit.unregister(self._end)
        orderly = self.bell.failure is None
        ended = self.wire.close(patience=1.0 if self._alone else 10.0)
        if not self.liveness.close():
            self.ranks.hang_up(store_alone=True)
            self.liveness.close()
        if not ended:
            self.ranks.hang_up()
            self.wire.close()
        self.ranks.close(orderly=orderly and self.bell.failure is None)


def _on_each(nodes: Sequence[object]) -> int:
    """The number of ranks on each node, or 0; see `Share.on_node`. nodes: the name of each rank's node."""
    count = nodes.count(nodes[0])
    several = len(nodes) > count and len(nodes) % count == 0
    starts = range(0, len(nodes), count)
    alike = several and all(len(set(nodes[at : at + count])) == 1 for at in starts)
    return count if alike and len({nodes[at] for at in starts}) == len(starts) else 0
