"""Remote parts: brings bytes of pages from other ranks, and waits for them without the runtime's lock.

The link between nodes is the slowest one. If every rank asked the owners on other nodes itself, the same
bytes would cross it once for each rank, in forward and in backward. Instead, each rank of a node brings the
parts of some of these owners (`Share.relay`) into its RAM (`NodeCache`), where all ranks of the node copy
them.

[Note: a relay holds nobody up]
A stamp names a step and an edit version, so the bytes that were brought with it never change. If they are not
there, a rank asks the relay, once. The relay answers, without bytes, when they have come, or at once if it
has no room. Then the rank looks again, and asks the owners for what it does not find. So a rank waits for
owners alone, as if there were no cache, and [Note: edits over ranks] in infinity/pages/edits.py holds: no
rank waits for room that is taken by ranks that wait for it.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.distributed.message import MessageKind, What
from infinity.distributed.peer_copies import PeerCopy
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.distributed.windows import Stamp, Windows
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError
from infinity.layout.chunks import OwnedRange
from infinity.layout.shards import HomeRange, Share
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import Leg, RemotePages
from infinity.tiers import Pool
from infinity.tiers.driver import Event
from infinity.tiers.link import Joined, Transfer


@dataclass(slots=True, eq=False)
class _Relayed:
    """Other nodes' parts of a page that a cache keeps, or that are on their way to it."""

    stamp: Stamp
    memory: torch.Tensor
    coming: int
    """Number of deliveries that have not ended."""
    failed: bool = False
    waiting: list[Callable[[], object]] = field(default_factory=list)


class NodeCache:
    """Keeps parameters of other nodes in this rank's host arena, where all ranks of its node copy them.

    Any thread may call its methods, which never block.
    """

    def __init__(self, remote: RemoteParts, rank: int, windows: Windows, room: Pool) -> None:
        """room: the pool for the bytes, in the host arena. Nobody else leases from it."""
        self._remote = remote
        self._rank = rank
        self._windows = windows
        self._room = room
        self._pages: dict[int, _Relayed] = {}
        """Unit -> its parts, in the order in which they were brought."""
        self._lock = threading.Lock()
        """Guards the attributes above, and the board's entries of relayed parts."""

    def bring(self, page: ParameterPage, stamp: Stamp, then: Callable[[], object]) -> None:
        """Bring the parts of a page that this rank relays, and call `then` when they have come; at once if
        they are here, if there is no room, or if parts with another stamp are on their way.
        """
        requests: list[list[Leg]] = []
        with self._lock:
            parts = self._pages.get(page.index)
            if parts is None or not (parts.coming or parts.stamp == stamp):
                parts = None  # it keeps the memory
                parts, requests = self._begin(page, stamp)
            if waits := parts is not None and parts.coming > 0 and parts.stamp == stamp:
                parts.waiting.append(then)
        for each in requests:
            self._remote.ask(page, stamp, each, functools.partial(self._arrived, page, parts))
        if not waits:
            then()

    def _begin(self, page: ParameterPage, stamp: Stamp) -> tuple[_Relayed | None, list[list[Leg]]]:
        """Make room for the parts of a page. Returns them and the requests for them, if there is room."""
        owners = [each for each in page.shard.others if page.shard.share.relay(each) == self._rank]
        spans = [span for owner in owners for span in page.shard.others[owner]]
        sizes = [span.nbytes for span in spans]
        for unit in [page.index, *self._pages]:  # then those that were brought longest ago
            if unit in self._pages and not self._pages[unit].coming:
                self._windows.withdraw_relayed(unit)
                del self._pages[unit]
            if self._room.largest_free >= sum(sizes):
                break
        else:
            return None, []
        with self._room.lease(sum(sizes)) as lease:
            memory = lease.residency()
        into = memory.split(sizes)
        requests = self._remote.cut(
            [Leg(span.owner, span.start, each) for span, each in zip(spans, into, strict=True)]
        )
        parts = self._pages[page.index] = _Relayed(stamp, memory, len(requests))
        return parts, requests

    def _arrived(self, page: ParameterPage, parts: _Relayed | None, delivery: Delivery) -> None:
        """Let all copy parts when the last of them has come. Called by the thread that received it."""
        assert parts is not None
        with self._lock:
            parts.coming -= 1
            parts.failed = parts.failed or delivery.failed
            if parts.coming:
                return
            if parts.failed:
                del self._pages[page.index]
            else:
                self._windows.offer_relayed(page, parts.stamp, parts.memory)
            waiting, parts.waiting = parts.waiting, []
        for each in waiting:
            each()


class Answer(enum.IntEnum):
    """What a rank that requests bytes of a parameter page expects of their owner."""

    BYTES = 0
    """The bytes."""
    AT_HOME = 1
    """To be told when the bytes are in shared RAM, so that it copies them by itself; the bytes if they are
    not.
    """
    READY = 2
    """To be told when the owner has the bytes. The board says then whether they are in device memory."""


class LaterCopy:
    """A transfer of bytes that a rank of this node lets others copy from its RAM once it has updated them.
    Only a wait asks the owner for them, so that few messages are sent while ranks update their parts. Used
    under the runtime's lock.
    """

    timing = None

    def __init__(
        self, parts: RemoteParts, wire: Wire, page: ParameterPage, stamp: Stamp, legs: Sequence[Leg]
    ) -> None:
        """legs: those of one owner."""
        self._parts, self._wire, self._page, self._stamp, self._legs = parts, wire, page, stamp, legs
        self._answer: Transfer | None = None
        """What the owner was asked; None if it was not."""

    def done(self) -> bool:
        if self._answer is not None:
            return self._answer.done()
        if self._legs and self._wire.failure is None:  # a dead rank's RAM is still there
            self._legs = self._parts.copy(self._legs[0].owner, self._page, self._stamp, self._legs)
        return not self._legs

    def wait(self) -> object:
        if not self.done() and self._answer is None:
            legs, self._legs = self._legs, ()  # they keep memory
            self._answer = self._parts.ask_holder(legs[0].owner, self._page, self._stamp, legs)
        return None if self._answer is None else self._answer.wait()


class RemoteParts(RemotePages):
    """Brings the parts of pages that other ranks own, and keeps copies of this rank's parts for them."""

    def __init__(
        self,
        wire: Wire,
        share: Share,
        block_bytes: int,
        windows: Windows | None = None,
        room: Pool | None = None,
    ) -> None:
        """block_bytes: the most bytes that are requested at once. windows: to the RAM of ranks of this node;
        None: these are asked, too. room: the pool of a `NodeCache`; None: each rank asks the owners itself.
        """
        self.step = 0
        self._loads = 0
        """Number of copies of runs loaded so far."""
        self._unserved: dict[int, int] = {}
        """Unit -> bytes of this rank's part that other ranks have not fetched since the last step."""
        self._served: set[tuple[int, int, int]] = set()
        """(rank, unit, first byte) of each range fetched since then; a second fetch does not count."""
        self._kept: dict[int, list[tuple[HomeRange, torch.Tensor]]] = {}
        """Unit -> (range of the page, copy of its bytes after the last step) of this rank's part."""
        self._sending: dict[int, list[Dispatch]] = {}
        """Unit -> sends under way of bytes straight from the model's memory; user edits wait for them."""
        self._wire = wire
        self._share = share
        self._block_bytes = block_bytes
        self._windows = windows
        self._cache: NodeCache | None = None
        if room is not None:
            assert windows is not None, "the ranks of a node have agreed on their caches"
            self._cache = NodeCache(self, share.rank, windows, room)

    def fetch(self, page: ParameterPage, legs: Sequence[Leg]) -> Transfer:
        stamp, windows = (self.step, self._loads, page.version), self._windows
        found: list[Transfer] = []
        by_holder = defaultdict[int, list[Leg]](list)
        for leg in legs:
            by_holder[leg.owner if self._cache is None else self._share.relay(leg.owner)].append(leg)
        for holder, theirs in by_holder.items():
            unit = page.index if holder == theirs[0].owner else None
            if windows is None or not windows.reads(holder, unit) or self._wire.failure is not None:
                found += [self.ask(page, stamp, each) for each in self.cut(theirs)]
            elif left := self.copy(holder, page, stamp, theirs):
                if unit is not None and windows.has_offered(holder, unit):
                    found.append(LaterCopy(self, self._wire, page, stamp, left))
                else:
                    found.append(self.ask_holder(holder, page, stamp, left))
        return Joined(found)

    def copy(self, holder: int, page: ParameterPage, stamp: Stamp, legs: Sequence[Leg]) -> list[Leg]:
        """Copy bytes from the RAM of a rank of this node. Returns the legs that could not be copied."""
        assert self._windows is not None
        left = []
        for leg in legs:
            began = time.perf_counter_ns()
            if not self._windows.copy(holder, page, stamp, leg):
                left.append(leg)
            elif holder != self._share.rank:
                self._wire.copied(holder, What.PARAMETERS.label, page.index, leg.into.nbytes, began)
        return left

    def ask_holder(self, holder: int, page: ParameterPage, stamp: Stamp, legs: Sequence[Leg]) -> Delivery:
        """Ask a rank of this node for bytes which it owns or relays. Once it has answered that they are
        there, copy them. Their owners are asked for what then is not there, or not any more.
        """

        def look_again(first: Delivery) -> None:
            left = self.copy(holder, page, stamp, legs)
            first.follow(Joined([self.ask(page, stamp, each) for each in self.cut(left)]))

        owner, into = legs[0].owner, [each.into for each in legs]
        source = owner if holder == self._share.rank else holder
        first = self._wire.expect(source, into, unit=page.index, instead=look_again)
        if holder == owner:
            self._request(first, page, stamp, legs, Answer.AT_HOME)
        elif holder != self._share.rank:
            step, *rest = stamp
            wanted = [step, page.index, *rest]
            self._wire.post(holder, MessageKind.REQUEST, first.number, What.RELAYED, *wanted)
        else:
            assert self._cache is not None
            self._cache.bring(page, stamp, functools.partial(self._wire.redirected, source, first.number))
        return first

    def relay(self, source: int, number: int, page: ParameterPage, stamp: Stamp) -> None:
        """Have the parts of a page that this rank relays come, and then have another rank of the node look
        for them. number: of its delivery. Never blocks.
        """

        def answer() -> None:
            with suppress(InfinityError):  # the wire is closed, which the asking rank has heard
                self._wire.post(source, MessageKind.REDIRECT, number)

        assert self._cache is not None, "all ranks of a node have agreed on their caches"
        with suppress(InfinityError):
            self._cache.bring(page, stamp, answer)

    def cut(self, legs: Sequence[Leg]) -> list[list[Leg]]:
        """Cut bytes into as few requests as can be: each has at most `block_bytes` bytes of one owner.

        legs: those of one owner one after the other.
        """
        found, room = list[list[Leg]](), 0
        for owner, start, into in legs:
            for at in range(0, into.nbytes, self._block_bytes):
                piece = into[at : at + self._block_bytes]
                if not found or found[-1][0].owner != owner or piece.nbytes > room:
                    found.append([])
                    room = self._block_bytes
                found[-1].append(Leg(owner, start + at, piece))
                room -= piece.nbytes
        return found

    def ask(
        self,
        page: ParameterPage,
        stamp: Stamp,
        legs: Sequence[Leg],
        told: Callable[[Delivery], None] | None = None,
    ) -> Delivery:
        """Request bytes from their owner, who sends them. legs: one of the lists that `cut` returns. told:
        for `Wire.expect`.
        """
        into = [each.into for each in legs]
        delivery = self._wire.expect(legs[0].owner, into, unit=page.index, told=told)
        self._request(delivery, page, stamp, legs)
        return delivery

    def _request(
        self,
        delivery: Delivery,
        page: ParameterPage,
        stamp: Stamp,
        legs: Sequence[Leg],
        answer: Answer = Answer.BYTES,
    ) -> None:
        """Send a request to the owner of all `legs`. answer: what it is expected to answer."""
        step, _, version = stamp
        ranges = [[each.start, each.into.nbytes] for each in legs]
        fields = [step, page.index, version, answer, ranges]
        self._wire.post(legs[0].owner, MessageKind.REQUEST, delivery.number, What.PARAMETERS, *fields)

    def bring(
        self, page: ParameterPage, leg: Leg, copy: Callable[[torch.Tensor, torch.Tensor], Transfer]
    ) -> PeerCopy | None:
        if self._windows is None or not self._windows.reaches(leg.owner, page.index):
            return None
        stamp = self.step, self._loads, page.version

        def ask() -> Delivery:
            delivery = self._wire.expect(leg.owner, [], unit=page.index, instead=Delivery.end)
            self._request(delivery, page, stamp, [leg], Answer.READY)
            return delivery

        return PeerCopy(self._wire, self._windows, page, stamp, leg, copy=copy, ask=ask)

    def written(self, page: ParameterPage) -> Sequence[Event]:
        """The events after which `offer` can let other ranks copy a page at home in device memory."""
        return () if self._windows is None else self._windows.written(page)

    def offer(self, page: ParameterPage, *, at_home: bool = True) -> bool:
        """Let ranks of this node copy this rank's part of a page by themselves, if they can. Returns whether
        they can.

        at_home: whether the page's home has the values after the last step, no update of it is under way, and
        no user code may change it. If not, nothing is allowed that is not allowed already.
        """
        if self._windows is None:
            return False
        stamp = self.step, self._loads, page.home_version
        return self._windows.offers(page, stamp) or (at_home and self._windows.offer(page, stamp))

    def replaced(self) -> None:
        self._loads += 1
        self.published(())  # what was kept for other ranks is of the run before

    def published(self, pages: Sequence[ParameterPage]) -> None:
        """Note that a step updates these pages, so that other ranks will fetch this rank's parts of them."""
        self._kept.clear()
        self._served.clear()
        others = len(self._wire.peers)
        self._unserved = {page.index: others * sum(each.nbytes for each in page.shard.own) for page in pages}

    def keep(self, page: ParameterPage) -> None:
        if self._unserved.get(page.index) and page.index not in self._kept:
            self._kept[page.index] = [
                (each, page.home.view(each.home_start, each.nbytes).cpu().clone()) for each in page.shard.own
            ]

        sending = self._sending.pop(page.index, ())
        if sending:
            with self._wire.awaiting("parameters"):
                for each in sending:
                    each.wait()

    def sends(self, page: ParameterPage, dispatch: Dispatch) -> None:
        """Note that `dispatch` sends bytes straight from a permanent page's home, so that `keep` waits for
        the dispatch.
        """
        unfinished = [each for each in self._sending.get(page.index, ()) if not each.done()]
        self._sending[page.index] = [*unfinished, dispatch]

    def kept(self, page: ParameterPage, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return the copies of ranges of this rank's part that `keep` made for other ranks; none if it made
        none.

        ranges: (bytes from the start of the page, bytes).
        """
        return [
            copy[start - each.page_start :][:nbytes]
            for start, nbytes in ranges
            for each, copy in self._kept.get(page.index, ())
            if 0 <= start - each.page_start < each.nbytes
        ]

    def served(self, source: int, page: ParameterPage, ranges: Sequence[tuple[int, int]]) -> None:
        """Note that ranges of this rank's part are sent to the rank `source`. Copies that no rank will fetch
        any more are dropped. Ranks that copy the bytes by themselves are not noted.
        """
        for start, nbytes in ranges:
            if page.index in self._unserved and (source, page.index, start) not in self._served:
                self._served.add((source, page.index, start))
                self._unserved[page.index] -= nbytes
                if not self._unserved[page.index]:
                    del self._unserved[page.index]
                    self._kept.pop(page.index, None)

    def state(self, unit: int, parameter: int, name: str, wanted: OwnedRange, nbytes: int) -> torch.Tensor:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        owner, *elements = wanted
        self._pull(owner, What.STATES, [into], unit, parameter, name, *elements)
        return into

    def local_gradient(self, rank: int, unit: int, parameter: int, first: int, into: torch.Tensor) -> bool:
        """Fetch elements [first, first + into.numel()) of a parameter's gradient that the rank `rank` has
        alone, not summed over ranks. Returns False if that rank has none.

        into: where the gradient goes, flat, in the dtype in which gradients are stored.
        """
        there = torch.zeros(1, dtype=torch.uint8, device="cpu")
        both = [there, into.view(torch.uint8)]
        self._pull(rank, What.LOCAL, both, unit, parameter, first, into.numel())
        return bool(there.item())

    def _pull(self, rank: int, what: What, into: Sequence[torch.Tensor], unit: int, *fields: Any) -> None:
        delivery = self._wire.expect(rank, into, what.label, unit=unit)
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, what, self.step, unit, *fields)
        delivery.wait()
