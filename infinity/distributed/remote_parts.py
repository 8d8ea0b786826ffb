"""Remote parts: asks other ranks for bytes of pages, and waits for them without the runtime's lock.

What ranks on other nodes own is asked of the rank of this node that keeps it (node_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.distributed.message import MessageKind, What
from infinity.distributed.node_cache import NodeCache, Wanted, asked
from infinity.distributed.transfers import Delivery, Dispatch
from infinity.distributed.wire import Wire
from infinity.layout.chunks import Piece
from infinity.layout.shards import HomeRange, Share
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import RemotePages
from infinity.system.lock import RuntimeLock
from infinity.telemetry.meter import Meter
from infinity.tiers.link import Timing, Transfer


class RemoteTransfer:
    """Bytes on their way from another rank: a Transfer whose `wait` gives the runtime's lock up."""

    def __init__(self, delivery: Delivery, lock: RuntimeLock, meter: Meter) -> None:
        self._delivery = delivery
        self._lock = lock
        self._meter = meter

    def done(self) -> bool:
        return self._delivery.done()

    def wait(self) -> object:
        if not self._delivery.done():
            with self._meter.awaiting(self._delivery.label), self._lock.released():
                self._delivery.wait()
        else:
            self._delivery.wait()
        return None

    @property
    def timing(self) -> Timing | None:
        return None


class _RelayedTransfer(RemoteTransfer):
    """Bytes on their way from another rank by a rank of this node, which may have no room for them."""

    def __init__(
        self, delivery: Delivery, lock: RuntimeLock, meter: Meter, ask: Callable[[], Delivery]
    ) -> None:
        """ask: asks the owner of the bytes itself."""
        super().__init__(delivery, lock, meter)
        self._ask = ask

    def done(self) -> bool:
        if self._delivery.redirected:
            self._delivery = self._ask()
        return super().done()

    def wait(self) -> object:
        super().wait()
        if self._delivery.redirected:
            self._delivery = self._ask()
            super().wait()
        return None


class RemoteParts(RemotePages):
    """The parts of pages that several ranks hold."""

    def __init__(self, wire: Wire, lock: RuntimeLock, share: Share, cache: NodeCache | None = None) -> None:
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
        self._lock = lock
        self._share = share
        self.cache = cache

    def fetch(self, owner: int, page: ParameterPage, start: int, into: torch.Tensor) -> Transfer:
        wanted = Wanted(self.step, self._loads, page.index, start, into.nbytes, page.version)
        relay = owner if self.cache is None else self._share.relay(owner)
        if relay != owner and relay == self._share.rank:
            assert self.cache is not None
            landing = self.cache.fetch(owner, wanted, into)
            if landing is not None:
                return RemoteTransfer(landing, self._lock, self._wire.meter)
        elif relay != owner:
            delivery = self._expect(relay, What.RELAYED, page.index, into, owner, *wanted)
            return _RelayedTransfer(
                delivery, self._lock, self._wire.meter, lambda: self._expect_from(owner, wanted, into)
            )
        return RemoteTransfer(self._expect_from(owner, wanted, into), self._lock, self._wire.meter)

    def _expect_from(self, owner: int, wanted: Wanted, into: torch.Tensor) -> Delivery:
        """Ask the owner of bytes of a page for them."""
        return self._expect(owner, What.PARAMETERS, wanted.unit, into, *asked(wanted))

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
            with self._wire.meter.awaiting("parameters"), self._lock.released():
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
        delivery = self._expect(owner, What.STATES, unit, into, self.step, unit, offset, nbytes)
        RemoteTransfer(delivery, self._lock, self._wire.meter).wait()
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
        RemoteTransfer(delivery, self._lock, self._wire.meter).wait()
        return bool(there.item())

    def _expect(self, rank: int, what: What, unit: int, into: torch.Tensor, *fields: int) -> Delivery:
        delivery = self._wire.expect(rank, [into], what.label, unit=unit)
        self._wire.post(rank, MessageKind.REQUEST, delivery.number, what, *fields)
        return delivery
