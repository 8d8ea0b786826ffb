"""Arrival: the transfer of a parameter page from its home to the memory where the model computes.

[Note: what is due when] The disk takes requests in the order of their deadlines. Reads of a demanded page
have a deadline in the past and go before all queued requests. Pages that are fetched ahead have deadlines in
the order of their use. A write requested at the same moment has a later deadline, because no caller waits for
it. All reads of a page have the page's deadline. A request that is already queued keeps its deadline when the
page becomes more urgent.

[Note: two hops] If the device has memory of its own, a page at home on NVMe takes two hops through transit
buffers: from disk to host, and from host to device. An `Arrival` is the pipeline of these hops. `advance`
moves it on without blocking, so that the second hop of one page overlaps the first hop of the next. On
unified memory, and from a home in host RAM or on the device, there is one hop.

[Note: bytes of others] With several ranks a home may have only this rank's bytes of the page. The other bytes
are pulled from the ranks that own them: directly into the memory where the model computes if the CPU can
write there, or if they are in the memory of a device that this one reaches; else into transit buffers. A wait
for them releases the runtime's lock (infinity/pages/remote.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.layout.shards import HomeRange, Span
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.remote import Leg, PeerTransfer, RemotePages
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers import Lease, Tier
from infinity.tiers.link import ARRIVED, Joined, Lane, Transfer

_OVERDUE = -60.0
"""Seconds from the request of a demanded page to the I/O deadline of its reads: in the past."""
_APART, _MOST = 1e-3, 50
"""_APART: seconds between the deadlines of successive pages that are fetched ahead. _MOST: the most such
intervals; later pages share the last deadline. The product, 0.05 s, is half of the `write_slack` that
infinity.aio.Engine adds to the deadline of a write.
"""


_Leg = tuple[int | None, int, int, int]
"""A range of the page that one request brings, at most one transit buffer long: (owner, at, start, nbytes).

owner: the rank that sends the bytes; None: they are read from the home. at: bytes from the start of the home,
or for another rank's bytes from the start of the page. start: bytes from the start of the page.
"""


@dataclass(slots=True)
class _Buffer:
    """A transit buffer, `memory`, that carries bytes [start, start + memory.nbytes) of the page."""

    start: int
    memory: torch.Tensor
    transfer: Transfer
    up: bool = False
    """Whether `transfer` is the copy from host to device; if not, it is the read from disk to host."""


class Arrival:
    def __init__(
        self,
        page: ParameterPage,
        into: Lease | torch.Tensor,
        store: Store,
        remote: RemotePages,
        *,
        ahead: int | None = None,
        pulled: bool = False,
    ) -> None:
        """into: the lease of the device memory for the page, which the arrival keeps, or the memory itself,
        uint8 (page.nbytes,), if the page had it before.

        ahead: for a page that is fetched ahead, the number of fetches that are more urgent; None: the page
        was demanded. pulled: whether bytes that other ranks own are pulled from them by `remote`, because the
        home lacks them or has outdated ones. No transfer begins before `start`.
        """
        self.page = page
        self._deadline = time.monotonic() + (_OVERDUE if ahead is None else min(ahead, _MOST) * _APART)
        self._last_return = 0
        if isinstance(into, Lease):
            self.residency = into.residency()
            self._last_return = into.last_return
            into.release()
        else:
            self.residency = into
        self._store = store
        self._remote = remote
        self._home = page.shard.own if pulled else (HomeRange(0, 0, page.nbytes),)
        """The ranges of the page that are read from the home."""
        self._others = page.shard.others if pulled else {}
        """Rank -> the ranges of the page that are pulled from that rank."""
        self._todo: deque[_Leg] = deque()
        self._buffers: deque[_Buffer] = deque()
        self._peers: deque[tuple[Span, PeerTransfer]] = deque()
        """(range of the page, its copy from another rank's device) of copies that may be under way."""
        self.final: Transfer | None = None
        """The latest transfer into the page's device memory; None before the first."""
        self._failure: InfinityError | None = None
        """The error of a failed transfer, which `finish` raises; None if none has failed."""
        self.local: Transfer | None = None
        """The transfer from the home, if the CPU can use the memory that it fills; else None."""

    def start(self) -> None:
        """Begin the transfers that need no transit buffer, and list the others for `advance`. Called once.
        Raises StorageError if a read cannot be requested.
        """
        page, store = self.page, self._store
        if store.device.shares_host:
            self._read_directly()
        elif page.home.in_place:
            for start, at, nbytes in self._home:
                there = start
                for source in page.home.views(at, nbytes):
                    self._send_up(there, source)
                    there += source.nbytes
        elif page.home.memory is not None:
            for start, at, nbytes in self._home:
                into = self.residency[start : start + nbytes]
                self.final = store.copy_on_device(into, page.home, at, self._last_return)
        else:
            self._todo.extend(self._legs_of_home())
        if not store.device.shares_host:
            for spans in self._others.values():
                for span in spans:
                    self._bring(span)

    @property
    def edge(self) -> Edge:
        """The edge (direction between two tiers) over which the page has to move next."""
        reading = self._todo or any(not each.up for each in self._buffers)
        if reading or (self._store.device.shares_host and self.page.home.tier is Tier.NVME):
            return Edge.NVME_TO_HOST
        return Edge.HOST_TO_DEVICE

    def advance(self, *, block: bool) -> bool:
        """Begin all transfers of the page that can begin now. Returns whether a transit buffer became free.

        Every transit buffer that the disk has filled is copied to the device, and more of the page is read
        into free transit buffers. block: wait until the oldest transit buffer has been filled and copied. If
        a transfer fails, True is returned, and `finish` raises the error.
        """
        try:
            return self._advance(block)
        except InfinityError as error:
            self._failure = error.again()
        self.abandon()
        return True

    def _advance(self, block: bool) -> bool:
        freed = False
        while self._buffers and (block or self._buffers[0].transfer.done()):
            buffer = self._buffers[0]
            if not buffer.up:
                self._copy_up(buffer)
                continue
            buffer.transfer.wait()
            self._buffers.popleft()
            freed, block = True, False
        for buffer in self._buffers:
            if not buffer.up and buffer.transfer.done():
                self._copy_up(buffer)
        while self._peers and (block or self._peers[0][1].done()):
            span, peer = self._peers[0]
            peer.wait()
            block = False
            if not self._peers or self._peers[0][1] is not peer:
                continue  # another thread has seen to it, while this one waited
            self._peers.popleft()
            if not peer.here:
                self._todo.extend(self._legs_of(span))
        while self._todo:
            memory = self._store.try_transit_buffer()
            if memory is None:
                break
            self._read(memory)
        return freed

    def _copy_up(self, buffer: _Buffer) -> None:
        buffer.transfer.wait()
        buffer.transfer, buffer.up = self._send_up(buffer.start, buffer.memory), True

    def waits_for_buffer(self) -> bool:
        """Make the page urgent. Returns whether it still has no transit buffer because none is free.

        The page's later reads get the deadline of a demanded page. If a transit buffer is free, a read into
        it begins.
        """
        self._deadline = min(self._deadline, time.monotonic() + _OVERDUE)
        while self._peers:  # what does not come so takes a buffer
            self.advance(block=True)
        if self._todo and not self._buffers:
            self.advance(block=False)
        return bool(self._todo) and not self._buffers

    def finish(self) -> torch.Tensor:
        """Wait until the model may compute with the page; returns its device memory, uint8 (page.nbytes,).
        Must not be called while `waits_for_buffer` returns True. Raises the error of a failed transfer.
        """
        while self._todo or self._buffers or self._peers:
            self.advance(block=True)
        if self._failure is not None:
            raise self._failure.again()
        if self.final is not None:
            if self._store.device.shares_host:
                self.final.wait()
            self._store.link.fence(self.final)
        return self.residency

    def abandon(self) -> None:
        """Begin no more transfers, and wait until none writes to the page's device memory. Errors of the
        transfers are ignored.
        """
        self._todo.clear()
        transfers = [each.transfer for each in self._buffers]
        with suppress(InfinityError):
            Joined([*transfers, self.final or ARRIVED]).wait()
        self._buffers.clear()
        while self._peers:
            self._peers.popleft()[1].abandon()

    def _read(self, memory: torch.Tensor) -> None:
        owner, at, start, nbytes = self._todo.popleft()
        memory = memory[:nbytes]
        if owner is None:
            transfer = self._store.read(self.page.home, at, memory, deadline=self._deadline)
        else:
            transfer = self._remote.fetch(self.page, [Leg(owner, at, memory)])
        self._buffers.append(_Buffer(start, memory, transfer))

    def _send_up(self, start: int, source: torch.Tensor) -> Transfer:
        into = self.residency[start : start + source.nbytes]
        self.final = self._store.copy_up(into, source, self._last_return, Lane.PREFETCH)
        return self.final

    def _bring(self, span: Span) -> None:
        """Begin to copy another rank's range of the page from its device, if this device reaches it."""
        leg = Leg(span.owner, span.start, self.residency[span.start : span.start + span.nbytes])
        peer = self._remote.bring(self.page, leg, self._copy)
        if peer is None:
            self._todo.extend(self._legs_of(span))
        else:
            self._peers.append((span, peer))

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self._store.link.to_device(into, source, self._last_return, Lane.PREFETCH)

    def _read_directly(self) -> None:
        page, store = self.page, self._store
        reads = [
            store.read(page.home, at, self.residency[start : start + nbytes], deadline=self._deadline)
            for start, at, nbytes in self._home
        ]
        others = [
            Leg(owner, span.start, self.residency[span.start : span.start + span.nbytes])
            for owner, spans in self._others.items()
            for span in spans
        ]
        self.local = _joined(reads)
        self.final = _joined([*reads, self._remote.fetch(page, others)] if others else reads)

    def _legs_of_home(self) -> list[_Leg]:
        most = self._store.transit_buffer_bytes
        return [
            (None, at + done, start + done, min(most, size - done))
            for start, at, size in self._home
            for done in range(0, size, most)
        ]

    def _legs_of(self, span: Span) -> Iterator[_Leg]:
        """The requests that bring another rank's range of the page through transit buffers."""
        most = min(self._store.plan.exchange_block_bytes, self._store.transit_buffer_bytes)
        for done in range(span.start, span.start + span.nbytes, most):
            yield span.owner, done, done, min(most, span.start + span.nbytes - done)


def _joined(transfers: list[Transfer]) -> Transfer:
    return transfers[0] if len(transfers) == 1 else Joined(transfers)
