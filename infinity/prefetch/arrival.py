"""Arrival: the transfer of a parameter page from its home to the memory where the model computes.

[Note: what is due when]
The disk takes requests by deadline. A demanded page gets a deadline in the past: its reads go before all that
is queued, also before pages that were fetched ahead long ago. Pages that are fetched ahead have deadlines in
the order of their use, earlier than those of writes of the same moment, which no caller waits for. All pieces
of a page have its deadline, whenever they are requested. Requests that are queued already keep theirs.

[Note: two hops]
If the device has memory of its own, a page at home on NVMe comes through transit buffers: disk to host,
host to device. An `Arrival` is that pipeline. `advance` moves it on without blocking, so the second hop
of one page overlaps the first of the next whenever the engine is called. On unified memory, and from
homes in host RAM, there is one hop.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.pages.parameter_page import ParameterPage
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers import Lease, Tier
from infinity.tiers.link import Lane, Transfer

_OVERDUE = -60.0
"""Deadline of a demanded page, in seconds from now."""
_APART, _MOST = 1e-3, 50
"""Seconds between the deadlines of pages that are fetched ahead, and the most such intervals. Together they
are less than half of the time that infinity.aio.Engine gives writes."""


@dataclass(slots=True)
class _Buffer:
    """Page bytes [start, start + memory.nbytes) under way."""

    start: int
    memory: torch.Tensor
    transfer: Transfer
    up: bool = False
    """Whether the transfer is the second hop."""


class Arrival:
    """A parameter page on its way from its home to leased device bytes."""

    def __init__(self, page: ParameterPage, lease: Lease, store: Store, *, ahead: int | None = None) -> None:
        """ahead: number of fetches that are more urgent, for a page that is fetched ahead; None: a demand."""
        self.page = page
        self._deadline = time.monotonic() + (_OVERDUE if ahead is None else min(ahead, _MOST) * _APART)
        self.residency = lease.residency()
        self._last_return = lease.last_return
        lease.release()
        self._store = store
        self._todo = deque(range(0, page.nbytes, store.transit_buffer_bytes))
        self._buffers: deque[_Buffer] = deque()
        self.final: Transfer | None = None
        """The last transfer into the residency."""
        self._failure: InfinityError | None = None
        """The error of a failed transfer, which `finish` raises."""
        if store.device.shares_host:
            self._todo.clear()
            self.final = store.read(page.home, 0, self.residency, deadline=self._deadline)
        elif page.home.in_place:
            self._todo.clear()
            self._send_up(0, page.home.view(0, page.nbytes))

    @property
    def edge(self) -> Edge:
        """The edge (pair of tiers) that the page waits for now."""
        reading = self._todo or any(not each.up for each in self._buffers)
        if reading or (self._store.device.shares_host and self.page.home.tier is Tier.NVME):
            return Edge.NVME_TO_HOST
        return Edge.HOST_TO_DEVICE

    def advance(self, *, block: bool) -> bool:
        """Move the page's buffers to their next hop; with `block`, wait for one. Returns whether transit came
        free."""
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
            buffer.transfer.wait()
            if buffer.up:
                self._buffers.popleft()
                freed = True
                block = False
            else:
                buffer.transfer = self._send_up(buffer.start, buffer.memory)
                buffer.up = True
        for buffer in self._buffers:
            if not buffer.up and buffer.transfer.done():
                buffer.transfer.wait()
                buffer.transfer = self._send_up(buffer.start, buffer.memory)
                buffer.up = True
        while self._todo:
            memory = self._store.try_transit_buffer()
            if memory is None:
                break
            self._read(memory)
        return freed

    @property
    def stuck(self) -> bool:
        """Whether the page needs a transit buffer, has none under way, and none is free now.

        Reading this makes the page as urgent as a demanded one.
        """
        self._deadline = min(self._deadline, time.monotonic() + _OVERDUE)
        if self._todo and not self._buffers:
            self.advance(block=False)
        return bool(self._todo) and not self._buffers

    def finish(self) -> torch.Tensor:
        """Wait until compute may use the page; returns the residency. Not while `stuck`.

        Raises StorageError.
        """
        while self._todo or self._buffers:
            self.advance(block=True)
        if self._failure is not None:
            raise self._failure.again()
        if self.final is not None:
            if self._store.device.shares_host:
                self.final.wait()
            self._store.link.fence(self.final)
        return self.residency

    def abandon(self) -> None:
        """Drop what has not begun, and wait until nothing writes to the bytes. Failures are ignored."""
        self._todo.clear()
        transfers = [each.transfer for each in self._buffers]
        for transfer in (*transfers, *([self.final] if self.final is not None else [])):
            try:
                transfer.wait()
            except InfinityError:
                continue  # these bytes will not be read
        self._buffers.clear()

    def _read(self, memory: torch.Tensor) -> None:
        start = self._todo.popleft()
        memory = memory[: min(memory.nbytes, self.page.nbytes - start)]
        transfer = self._store.read(self.page.home, start, memory, deadline=self._deadline)
        self._buffers.append(_Buffer(start, memory, transfer))

    def _send_up(self, start: int, source: torch.Tensor) -> Transfer:
        into = self.residency[start : start + source.nbytes]
        self.final = self._store.copy_up(into, source, self._last_return, Lane.PREFETCH)
        return self.final
