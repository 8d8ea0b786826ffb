"""Durable I/O on real slabs with a record of all bytes: what each page has, and what each commit holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from durable_pages import DurablePage, durable_pages
from torch import nn

from infinity.checksum import crc32c
from infinity.errors import ConfigError, InfinityError
from infinity.pages.durable_io import DurableIO
from infinity.pages.home import InFlightRequest
from infinity.pages.ledger import Commit, Ledger
from infinity.pages.parts import Part, block_count
from infinity.telemetry.meter import Meter
from infinity.tiers import NvmeTier, Tier, aligned_ram
from infinity.tiers.link import Transfer

FAILURE = ConfigError("A cause.", "A cure.")


class Holding(NamedTuple):
    """What a commit holds of a part."""

    slot: int
    data: bytes
    checksums: np.ndarray
    """Those of all blocks that have values."""
    begun: bool


class Rig:
    """A tier with the pages of one small model, and all bytes of pages and of what commits hold.

    Two pages on NVMe have three chunks and a frozen region, and two pages in RAM have one chunk.
    """

    def __init__(self, directory: Path) -> None:
        model = nn.Sequential(nn.Linear(90, 200), nn.Linear(20, 30))
        model[0].bias.requires_grad_(False)
        made = durable_pages(model, chunk=8192, unit_bytes=36600)
        assert [len(unit.chunks) for unit in made.layout.units] == [3, 1]
        self.tier = NvmeTier({os.fspath(directory): 8 << 20}, made.images.nbytes)
        self.io = DurableIO(self.tier, made.images.nbytes, Meter(), Ledger(), commits=True)
        self.pages = made.all
        self.on_disk = [made.parameters[0], made.states[0]]
        self.in_ram = [made.parameters[1], made.states[1]]
        for page in self.on_disk:
            page.home.nvme_lease = self.io.lease
        for page in self.in_ram:
            page.home.tier, page.home.in_place = Tier.HOST, True
            page.home.memory = aligned_ram(page.home.nbytes).zero_()
        self.newest = [bytearray(page.home.nbytes) for page in self.pages]
        """The newest bytes of each page."""
        self.chunks: dict[tuple[int, int], list[Part]] = {}
        for units in (made.parameters, made.states):
            for unit, page in enumerate(units):
                for part in page.parts:
                    if part.chunk_index is not None:
                        self.chunks.setdefault((unit, part.chunk_index), []).append(part)
        self.io.ledger.set_parts(self.chunks)
        self.parts = [(page, part) for page in self.pages for part in page.parts]
        self.frozen = [part for _, part in self.parts if not part.trained]
        assert len(self.frozen) == 1
        self.writes: list[tuple[DurablePage, InFlightRequest]] = []
        self.pending: Commit | None = None
        self.taken: dict[Part, Holding] = {}
        """What the pending commit has to hold, as far as updates have brought it; no slots yet."""
        self.durable: dict[Part, Holding] = {}
        for seed, page in enumerate(self.pages):  # so that no two slots have the same bytes by chance
            self.write(page, 0, content(seed, page.home.nbytes))

    def bytes_of(self, page: DurablePage) -> bytearray:
        return next(each for at, each in zip(self.pages, self.newest, strict=True) if at is page)

    def page_of(self, part: Part) -> DurablePage:
        return next(page for page, each in self.parts if each is part)

    def known(self, part: Part) -> bytes:
        return bytes(self.bytes_of(self.page_of(part))[part.start : part.end])

    def write(self, page: DurablePage, start: int, data: bytes) -> Transfer | None:
        """Do what `Store.write` does, after the end of a commit that stands in the way.

        Returns None for a page in RAM.
        """
        end = start + len(data)
        for part in page.parts.over(start, end):
            if part.home.nvme_lease is not None and part.trained and part.free_slot() is None:
                self.end(None)
        page.home.settle(start, end, writing=True)
        source = memory_of(data)
        if page.home.in_place:
            while any(part in pending_flushes(self.io) for part in page.parts.over(start, end)):
                self.flush()
            page.home.view(start, len(data)).copy_(source)
            transfer = None
        else:
            transfer = self.io.write(page.home, start, source)
            request = InFlightRequest(start, end, True, transfer)
            page.home.in_flight.append(request)
            self.writes.append((page, request))
        self.bytes_of(page)[start:end] = data
        return transfer

    def read(self, page: DurablePage, start: int, nbytes: int) -> bytes:
        """Do what `Store.read` does for bytes from `start`, a multiple of 4096, and wait for them."""
        page.home.settle(start, start + nbytes, writing=False)
        if page.home.in_place:
            return page.home.view(start, nbytes).numpy().tobytes()
        into = aligned_ram(nbytes)
        self.io.read(page.home, start, into, None).wait()
        return into.numpy().tobytes()

    def begin(self, outstanding: set[tuple[int, int]]) -> None:
        """Do what `Committer.save` does."""
        self.end(None)
        ready = [part for chunk, parts in self.chunks.items() if chunk not in outstanding for part in parts]
        for part in (*ready, *self.frozen):
            if part.home.nvme_lease is not None:
                self.io.learn(part)
        self.pending = Commit(1, lambda _: None)
        writes = [request.transfer for _, request in self.writes]
        self.io.ledger.begin(self.pending, outstanding, self.frozen, writes)
        self.taken = {}
        for part in (*ready, *self.frozen):
            self.take(part)

    def take(self, part: Part) -> None:
        filled = checksums_of(part, self.known(part))[: block_count(part.filled)]
        self.taken[part] = Holding(-1, self.known(part), filled, part.begun)

    def flush(self) -> None:
        part = self.io.ledger.next_flush(block=False)
        if part is not None:
            self.io.copy_out(part, part.home.view(part.start, part.nbytes)).wait()
            self.io.ledger.flushed(part)

    def end(self, failure: InfinityError | None) -> None:
        """End the pending commit as its thread does. Without a failure, all that it waits for has come."""
        pending = self.pending
        if pending is None:
            return
        while failure is None and pending.to_flush:
            self.flush()
        if pending.awaited:
            failure = FAILURE
        for write in pending.writes:
            write.wait()
        if failure is None:
            assert set(pending.held) == set(self.taken) == {part for _, part in self.parts}
            self.durable = {}
            for part, (slot, checksums, begun) in pending.held.items():
                taken = self.taken[part]
                assert begun == taken.begun
                assert np.array_equal(checksums[: len(taken.checksums)], taken.checksums)
                self.durable[part] = taken._replace(slot=slot)
        self.io.ledger.end(pending, failure)
        self.pending = None
        for _, part in self.parts:
            durable = self.durable[part].slot if part in self.durable else None
            assert (part.durable, part.pending) == (durable, None)

    def bytes_on_disk(self, part: Part, slot: int) -> bytes:
        memory = aligned_ram(part.nbytes)
        self.tier.read(self.io.lease, memory, offset=part.slots[slot]).result()
        return memory.numpy().tobytes()

    def close(self) -> None:
        self.end(FAILURE)
        self.tier.close()


def content(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def memory_of(data: bytes) -> torch.Tensor:
    memory = aligned_ram(len(data))
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return memory


def pending_flushes(io: DurableIO) -> set[Part]:
    pending = io.ledger.pending
    return set() if pending is None else pending.unflushed


def checksums_of(part: Part, data: bytes) -> np.ndarray:
    """The checksums of a part with these bytes, block by block."""
    return np.array(
        [
            crc32c(data[at : min(at + size, start + nbytes)])
            for start, nbytes, size in part.segments.tolist()
            for at in range(start, start + nbytes, size)
        ],
        dtype=np.int64,
    )
