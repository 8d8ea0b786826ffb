"""Remote parts: asks other ranks for bytes of pages, and waits for them without the runtime's lock.

What ranks on other nodes own is asked of the rank of this node that keeps it (`NodeCache`).

The link between nodes is the slowest one. Where the ranks of a node each asked the owners, the same bytes
would cross it for every rank, and in forward and backward. Instead each rank of the node brings the
parts of some owners (`Share.relay`), keeps them in RAM, and gives them to the others, and to itself.

[Note: a relay holds nobody up]
A key names a step and an edit version, so that whatever is kept under it never changes. The first rank that
asks has the bytes brought, for its own place in the program, and later ones find them there or on their way.
If there is no room, the asking rank is sent to the owner itself. So a rank waits for an owner alone, as if
there was no cache, and [Note: edits over ranks] in infinity/pages/edits.py holds: nobody waits
for room that is taken by those who wait for him.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from infinity.distributed.message import MessageKind, What
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.distributed.wire import Wire
from infinity.layout.chunks import Piece
from infinity.layout.shards import HomeRange, Share
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import RemotePages
from infinity.tiers import Pool
from infinity.tiers.link import Transfer


class Wanted(NamedTuple):
    """Bytes of a parameter page, at one moment of the training."""

    step: int
    """Number of the step after which they are wanted."""
    loads: int
    """Number of copies of runs that had been loaded by then."""
    unit: int
    start: int
    """Bytes from the start of the page."""
    nbytes: int
    version: int
    """Edit version of the page."""


def asked(wanted: Wanted) -> tuple[int, ...]:
    """The fields of the request for the bytes to the rank that owns them."""
    return wanted.step, wanted.unit, wanted.start, wanted.nbytes, wanted.version


@dataclass(slots=True, eq=False)
class _Entry:
    """Bytes that are kept, or on their way."""

    memory: torch.Tensor
    here: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(rank, number of its delivery) of those who get the bytes when these have come."""
    landings: list[tuple[Delivery, torch.Tensor]] = field(default_factory=list)
    """(what this rank waits for, memory for a copy of the bytes) for when these have come."""
    sending: list[Dispatch] = field(default_factory=list)

    def idle(self) -> bool:
        """Whether nobody uses the memory."""
        self.sending = [each for each in self.sending if not each.done()]
        return self.here and not self.sending


class NodeCache:
    """What this rank keeps for its node. Methods may be called by any thread, and never block."""

    def __init__(self, wire: Wire, room: Pool) -> None:
        """room: the pool for the bytes, in RAM. Nobody else leases from it."""
        self._wire = wire
        self._room = room
        self._entries: OrderedDict[Wanted, _Entry] = OrderedDict()
        """By key, those used last at the end."""
        self._lock = threading.Lock()
        """Guards the attributes above, and all entries."""

    def fetch(self, owner: int, wanted: Wanted, into: torch.Tensor) -> Delivery | None:
        """Begin to bring bytes to this rank: `into`, uint8 (wanted.nbytes,) in RAM. None: there is no room
        for them.
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
        """Give bytes to another rank of this node. fields: those of `Wanted`."""
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
        """Forget what was used longest ago until there is room. Returns whether there is."""
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
    """The parts of pages that several ranks hold."""

    def __init__(self, wire: Wire, share: Share, cache: NodeCache | None = None) -> None:
        """share: this rank's. cache: keeps what ranks of other nodes own; None: each rank asks the owners."""
        self.step = 0
        self._loads = 0
        """Number of copies of runs that were loaded."""
        self._unserved: dict[int, int] = {}
        """Unit -> bytes of this rank's part that other ranks have not fetched since the last step."""
        self._served: set[tuple[int, int, int]] = set()
        """(rank, unit, first byte) of what other ranks have fetched since then, which may come again."""
        self._kept: dict[int, list[tuple[HomeRange, torch.Tensor]]] = {}
        """Unit -> (range of the page, copy of its bytes after the last step) of this rank's part."""
        self._sending: dict[int, list[Dispatch]] = {}
        """Unit -> what is sent to other ranks straight from memory where user code may change the page."""
        self._wire = wire
        self._share = share
        self.cache = cache

    def fetch(self, owner: int, page: ParameterPage, start: int, into: torch.Tensor) -> Transfer:
        wanted = Wanted(self.step, self._loads, page.index, start, into.nbytes, page.version)
        relay = owner if self.cache is None else self._share.relay(owner)
        if relay == owner:
            return self._ask(owner, wanted, into)
        if relay == self._share.rank:
            assert self.cache is not None
            return self.cache.fetch(owner, wanted, into) or self._ask(owner, wanted, into)

        def instead(first: Delivery) -> None:
            self._ask(owner, wanted, into, told=lambda second: first.end(second.failure))

        return self._expect(relay, What.RELAYED, page.index, into, owner, *wanted, instead=instead)

    def _ask(self, owner: int, wanted: Wanted, into: torch.Tensor, **options: Any) -> Delivery:
        """Ask the owner of bytes of a page for them."""
        return self._expect(owner, What.PARAMETERS, wanted.unit, into, *asked(wanted), **options)

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
        """Note that bytes of a permanent page are sent straight from its home, for which `keep` waits."""
        unfinished = [each for each in self._sending.get(page.index, ()) if not each.done()]
        self._sending[page.index] = [*unfinished, dispatch]

    def kept(self, source: int, page: ParameterPage, start: int, nbytes: int) -> torch.Tensor | None:
        """The copy of bytes of this rank's part that was kept for other ranks; None if there is none.

        source: the rank that fetches these bytes now. start: bytes from the start of the page.
        """
        found = None
        for each, copy in self._kept.get(page.index, ()):
            at = start - each.page_start
            if 0 <= at < each.nbytes:
                found = copy[at : at + nbytes]
        if page.index in self._unserved and (source, page.index, start) not in self._served:
            self._served.add((source, page.index, start))
            self._unserved[page.index] -= nbytes
            if not self._unserved[page.index]:
                del self._unserved[page.index]
                self._kept.pop(page.index, None)
        return found

    def state(self, owner: int, unit: int, offset: int, nbytes: int) -> torch.Tensor:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._expect(owner, What.STATES, unit, into, self.step, unit, offset, nbytes).wait()
        return into

    def local_gradient(
        self, rank: int, unit: int, chunk_index: int, piece: Piece, into: torch.Tensor
    ) -> bool:
        """Bring a rank's own gradient of a piece, not summed over ranks. Returns False if it has none.

        into: (piece.count,), in the dtype in which gradients are stored.
        """
        there = torch.zeros(1, dtype=torch.uint8, device="cpu")
        delivery = self._wire.expect(rank, [there, into.view(torch.uint8)], "gradients", unit=unit)
        fields = [unit, chunk_index, piece.parameter, piece.start, piece.offset, piece.count]
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, What.LOCAL, self.step, *fields)
        delivery.wait()
        return bool(there.item())

    def _expect(
        self, rank: int, what: What, unit: int, into: torch.Tensor, *fields: int, **options: Any
    ) -> Delivery:
        delivery = self._wire.expect(rank, [into], what.label, unit=unit, **options)
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, what, *fields)
        return delivery
