"""Remote parts: fetches bytes of pages from other ranks, and waits for them without the runtime's lock.

The link between nodes is the slowest one. If every rank asked the owners on other nodes itself, the same
bytes would cross it once for each rank, in forward and in backward. Instead, each rank of a node fetches the
parts of some of these owners (`Share.relay`), keeps them in RAM (`NodeCache`), and gives them to the others.

[Note: a relay holds nobody up]
A key names a step and an edit version, so the bytes kept under it never change. The first request for a key
has them fetched, and later requests find them in RAM or on their way. If there is no room, the asking rank is
sent to the owner itself. So a rank waits for owners alone, as if there were no cache, and
[Note: edits over ranks] in infinity/pages/edits.py holds: no rank waits for room that is taken by ranks that
wait for it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from infinity.distributed.message import MessageKind, What
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.distributed.windows import Stamp, Windows
from infinity.distributed.wire import Wire
from infinity.errors import InfinityError
from infinity.layout.chunks import OwnedRange
from infinity.layout.shards import HomeRange, Share
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import RemotePages
from infinity.tiers import Pool
from infinity.tiers.link import ARRIVED, Transfer


class Wanted(NamedTuple):
    """Identifies bytes of a parameter page, and the step and the edit after which they are wanted."""

    step: int
    """Number of the step after which the bytes are wanted."""
    loads: int
    """Number of copies of runs loaded so far."""
    unit: int
    start: int
    """Bytes from the start of the page."""
    nbytes: int
    version: int
    """Edit version of the page."""

    @property
    def stamp(self) -> Stamp:
        return self.step, self.loads, self.version


def asked(wanted: Wanted, *, copies: bool = False) -> tuple[int, ...]:
    """Return the fields of the message that requests the bytes `wanted` from their owner.

    copies: whether the asking rank copies the bytes by itself, if the owner answers that they are at home.
    """
    return wanted.step, wanted.unit, wanted.start, wanted.nbytes, wanted.version, int(copies)


@dataclass(slots=True, eq=False)
class _Entry:
    """Bytes that the cache keeps, or that are on their way to it."""

    memory: torch.Tensor
    here: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(rank, number of its delivery) of each request of another rank to answer when the bytes have come."""
    landings: list[tuple[Delivery, torch.Tensor]] = field(default_factory=list)
    """(this rank's transfer, memory for a copy of the bytes) to end when the bytes have come."""
    sending: list[Dispatch] = field(default_factory=list)

    def idle(self) -> bool:
        """Whether the bytes are here and nobody uses their memory."""
        self.sending = [each for each in self.sending if not each.done()]
        return self.here and not self.sending


class NodeCache:
    """Keeps parameters of other nodes in RAM for the ranks of this node.

    Any thread may call its methods, which never block.
    """

    def __init__(self, wire: Wire, room: Pool) -> None:
        """room: the pool for the bytes, in RAM. Nobody else leases from it."""
        self._wire = wire
        self._room = room
        self._entries: OrderedDict[Wanted, _Entry] = OrderedDict()
        """The entries, those used last at the end."""
        self._lock = threading.Lock()
        """Guards the attributes above, and all entries."""

    def fetch(self, owner: int, wanted: Wanted, into: torch.Tensor) -> Delivery | None:
        """Begin to bring bytes into `into`, uint8 (wanted.nbytes,) in RAM. Returns None if the cache has no
        room for them.
        """
        landing = Delivery(
            self._wire.failure_event,
            owner,
            0,
            What.PARAMETERS.label,
            into=(into,),
            awaiting=self._wire.awaiting,
        )
        with self._lock:
            entry, new = self._entry(wanted)
            if entry is None:
                return None
            if not entry.here:
                entry.landings.append((landing, into))
            memory = entry.memory if entry.here else None
        if memory is not None:
            into.copy_(memory)
            landing.end()
        elif new:
            self._bring(owner, wanted, entry)
        return landing

    def requested(self, source: int, number: int, owner: int, *fields: int) -> None:
        """Answer a request of another rank of this node: with bytes of `owner`, once they are here, or with
        REDIRECT if the cache has no room for them.

        source: the rank that asks. number: the number of its delivery. fields: the fields of a `Wanted`,
        which names the bytes.
        """
        wanted = Wanted(*fields)
        with self._lock:
            entry, new = self._entry(wanted)
            if entry is not None:
                if entry.here:
                    self._send(wanted, entry, source, number)
                else:
                    entry.waiting.append((source, number))
        if entry is None:
            self._wire.post(source, MessageKind.REDIRECT, number)
        elif new:
            self._bring(owner, wanted, entry)

    def _entry(self, wanted: Wanted) -> tuple[_Entry | None, bool]:
        """The entry of a key, and whether it is new; (None, False) if there is no room for a new one."""
        entry = self._entries.get(wanted)
        if entry is not None:
            self._entries.move_to_end(wanted)
            return entry, False
        if not self._make_room(wanted.nbytes):
            return None, False
        with self._room.lease(wanted.nbytes) as lease:
            entry = self._entries[wanted] = _Entry(lease.residency())
        return entry, True

    def _make_room(self, nbytes: int) -> bool:
        """Remove entries, those used longest ago first, until there is room. Returns whether there is."""
        if self._room.largest_free >= nbytes:
            return True
        for key in [*self._entries]:  # keys alone, for an entry's memory is free once nothing refers to it
            if self._entries[key].idle():
                del self._entries[key]
                if self._room.largest_free >= nbytes:
                    return True
        return False

    def _bring(self, owner: int, wanted: Wanted, entry: _Entry) -> None:
        told = functools.partial(self._arrived, wanted, entry)
        delivery = self._wire.expect(owner, [entry.memory], unit=wanted.unit, told=told)
        self._wire.post(owner, MessageKind.REQUEST, delivery.number, What.PARAMETERS, *asked(wanted))

    def _arrived(self, wanted: Wanted, entry: _Entry, delivery: Delivery) -> None:
        """Give bytes that have come to all who wait for them. Called by the thread that received them."""
        failure = delivery.failure
        with self._lock:
            entry.here = True
            waiting, entry.waiting = entry.waiting, []
            landings, entry.landings = entry.landings, []
            if failure is not None:
                del self._entries[wanted]
            for source, number in waiting:
                if failure is None:
                    self._send(wanted, entry, source, number)
                else:
                    self._wire.refuse(source, number, failure)
        for landing, into in landings:
            if failure is None:
                into.copy_(entry.memory)
            landing.end(failure)

    def _send(self, wanted: Wanted, entry: _Entry, source: int, number: int) -> None:
        entry.sending.append(self._wire.deliver(source, number, [entry.memory], unit=wanted.unit))


class RemoteParts(RemotePages):
    """Fetches the parts of pages that other ranks own, and keeps copies of this rank's parts for them."""

    def __init__(
        self, wire: Wire, share: Share, cache: NodeCache | None = None, windows: Windows | None = None
    ) -> None:
        """cache: keeps parameters of other nodes; None: each rank asks the owners itself. windows: to the RAM
        of ranks of this node; None: these are asked, too.
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
        self.cache = cache
        self._windows = windows

    def fetch(self, owner: int, page: ParameterPage, start: int, into: torch.Tensor) -> Transfer:
        wanted = Wanted(self.step, self._loads, page.index, start, into.nbytes, page.version)
        if self._windows is not None and self._windows.reads(owner) and self._wire.failure is None:
            return self._copy(self._windows, owner, page, wanted, into)  # a dead rank's RAM is still there
        relay = owner if self.cache is None else self._share.relay(owner)
        if relay == owner:
            return self._ask(owner, wanted, into)
        if relay == self._share.rank:
            assert self.cache is not None
            return self.cache.fetch(owner, wanted, into) or self._ask(owner, wanted, into)

        def instead(first: Delivery) -> None:
            self._ask_for(first, owner, wanted, into)

        return self._expect(relay, What.RELAYED, page.index, into, owner, *wanted, instead=instead)

    def _copy(
        self, windows: Windows, owner: int, page: ParameterPage, wanted: Wanted, into: torch.Tensor
    ) -> Transfer:
        """Copy bytes that a rank of this node owns. If they are not at home there, ask the owner, and copy
        them when it answers that they are.
        """

        def copied() -> bool:
            began = time.perf_counter_ns()
            if not windows.copy(owner, page, wanted.stamp, wanted.start, into):
                return False
            self._wire.copied(owner, What.PARAMETERS.label, wanted.unit, into.nbytes, began)
            return True

        def at_home(first: Delivery) -> None:
            try:
                if copied():
                    first.end()
                else:  # the owner has changed them again
                    self._ask_for(first, owner, wanted, into)
            except InfinityError as error:
                first.end(error)

        return ARRIVED if copied() else self._ask(owner, wanted, into, instead=at_home)

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

    def _ask(
        self,
        owner: int,
        wanted: Wanted,
        into: torch.Tensor,
        *,
        instead: Callable[[Delivery], object] | None = None,
        told: Callable[[Delivery], None] | None = None,
    ) -> Delivery:
        """Request the `wanted` bytes of a page from their owner. instead, told: for `Wire.expect`."""
        fields = asked(wanted, copies=instead is not None)
        return self._expect(owner, What.PARAMETERS, wanted.unit, into, *fields, instead=instead, told=told)

    def _ask_for(self, first: Delivery, owner: int, wanted: Wanted, into: torch.Tensor) -> None:
        """Request the `wanted` bytes from their owner for the transfer `first`, which ends with them."""
        self._ask(owner, wanted, into, told=lambda second: first.end(second.failure))

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

    def kept(self, page: ParameterPage, start: int, nbytes: int) -> torch.Tensor | None:
        """Return the copy of bytes of this rank's part that `keep` made for other ranks, or None.

        start: bytes from the start of the page.
        """
        for each, copy in self._kept.get(page.index, ()):
            at = start - each.page_start
            if 0 <= at < each.nbytes:
                return copy[at : at + nbytes]
        return None

    def served(self, source: int, page: ParameterPage, start: int, nbytes: int) -> None:
        """Note that bytes of this rank's part are sent to the rank `source`. Copies that no rank will fetch
        any more are dropped. Ranks that copy the bytes by themselves are not noted.
        """
        if page.index in self._unserved and (source, page.index, start) not in self._served:
            self._served.add((source, page.index, start))
            self._unserved[page.index] -= nbytes
            if not self._unserved[page.index]:
                del self._unserved[page.index]
                self._kept.pop(page.index, None)

    def state(self, unit: int, parameter: int, name: str, wanted: OwnedRange, nbytes: int) -> torch.Tensor:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        owner, *elements = wanted
        fields = [parameter, name, *elements]
        self._expect(owner, What.STATES, unit, into, self.step, unit, *fields).wait()
        return into

    def local_gradient(self, rank: int, unit: int, parameter: int, first: int, into: torch.Tensor) -> bool:
        """Fetch elements [first, first + into.numel()) of a parameter's gradient that the rank `rank` has
        alone, not summed over ranks. Returns False if that rank has none.

        into: where the gradient goes, flat, in the dtype in which gradients are stored.
        """
        there = torch.zeros(1, dtype=torch.uint8, device="cpu")
        delivery = self._wire.expect(rank, [there, into.view(torch.uint8)], "gradients", unit=unit)
        fields = [unit, parameter, first, into.numel()]
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, What.LOCAL, self.step, *fields)
        delivery.wait()
        return bool(there.item())

    def _expect(
        self, rank: int, what: What, unit: int, into: torch.Tensor, *fields: Any, **options: Any
    ) -> Delivery:
        delivery = self._wire.expect(rank, [into], what.label, unit=unit, **options)
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, what, *fields)
        return delivery
