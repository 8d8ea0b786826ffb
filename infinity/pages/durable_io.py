"""Durable I/O: reads and writes of pages whose parts have slots on disk (infinity/pages/parts.py).

A write of a whole part goes to the slot that no commit holds, and the checksums of its blocks are noted if
commits are on.
Before a write to only some bytes of a part, the part is copied to its other slot if a commit holds the slot
with its newest bytes. Bytes that an earlier process has written are compared with their checksums when they
are first read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from infinity.checksum import crc32c, crc32c_blocks
from infinity.config import round_up
from infinity.errors import ConfigError, CorruptState
from infinity.pages.home import Home
from infinity.pages.ledger import Ledger
from infinity.pages.parts import UNKNOWN, Part, Segments, block_count
from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge
from infinity.tiers import PAGE_ALIGNMENT, NvmeTier, aligned_ram
from infinity.tiers.link import Joined, Transfer

_SCRATCH = 1 << 20
"""Bytes of the buffer through which parts are copied and checked. It is in ordinary RAM, outside of the
budget's pools.
"""


class DurableIO:
    """Reads and writes the durable range of one runtime's slabs. Called under the runtime's lock, except for
    `copy_out`, which the thread of a commit calls, too.
    """

    def __init__(self, nvme: NvmeTier, nbytes: int, meter: Meter, ledger: Ledger, *, commits: bool) -> None:
        """nvme: the tier with the slabs, from which nothing was leased yet. nbytes: size of the durable
        range, which begins at byte 0 of the volume. ledger: knows what the pending commit holds. commits:
        whether there are commits.
        """
        self.nvme = nvme
        self.lease = nvme.lease(nbytes)
        assert self.lease.offset == 0
        self.ledger = ledger
        self._meter = meter
        self._commits = commits

    def read(self, home: Home, offset: int, into: torch.Tensor, deadline: float | None) -> Transfer:
        """Begin to read bytes of a home on NVMe. home, offset, into, deadline: as in `Store.read`.

        Waiting for the transfer raises CorruptState if bytes of an earlier process do not have their
        checksums.
        """
        end = offset + into.nbytes
        unchecked: list[tuple[Part, torch.Tensor]] = []
        for part in home.parts.over(offset, end):
            if part.verified:
                continue
            if offset <= part.start and _last(part) <= end:
                low = part.start - offset
                unchecked.append((part, into[low : low + min(part.nbytes, end - part.start)]))
            else:
                self.verify(part)
        transfers = [
            self._read(home, start, position, into[start - offset : stop - offset], deadline)
            for position, start, stop in home.parts.extents(offset, end)
        ]
        if len(transfers) == 1 and not unchecked:
            return transfers[0]
        return Joined(transfers, lambda: self._check(unchecked))

    def write(self, home: Home, offset: int, source: torch.Tensor, *, tentative: bool = False) -> Transfer:
        """Begin to write bytes to a home on NVMe. home, offset, source: as in `Store.write`. tentative: for a
        speculative update, which writes whole parts beside their newest bytes.

        Waits for the end of the pending commit if commits hold both slots of a part. Raises ConfigError for a
        frozen part that a commit holds.
        """
        if tentative:
            return Joined(
                [
                    self._write_beside(part, offset, source)
                    for part in home.parts.over(offset, offset + source.nbytes)
                ]
            )
        end = offset + source.nbytes
        transfers = []
        for part in home.parts.over(offset, end):
            low, high = max(offset, part.start), min(end, part.end)
            piece = source[low - offset : high - offset]
            if (low, high) == (part.start, part.end):
                transfer = self.copy_out(part, piece)
                if self.ledger.wants(part):
                    self.ledger.written(part, transfer)
            else:
                if not part.verified:
                    self.verify(part)  # else its bytes could not be told from those whose checksums follow
                self._make_writable(part)
                _forget(part, low - part.start, high - part.start)
                transfer = self._write(part.offset + low - part.start, piece)
            transfers.append(transfer)
        return transfers[0] if len(transfers) == 1 else Joined(transfers)

    def patched(self, home: Home, offset: int, data: torch.Tensor) -> None:
        """Note the checksums of blocks that several calls of `write` have just written together. Each call
        had only some bytes of a block, so it could not compute the block's checksum.

        data: all bytes that were written, flat uint8. offset: bytes from the start of the page to `data`.
        """
        end = offset + data.nbytes
        for part in home.parts.over(offset, end):
            rows = part.segments
            if not len(rows):
                continue
            index = 0
            for start, nbytes, block in rows.tolist():
                begin, blocks = part.start + start, -(-nbytes // block)
                unknown = (part.checksums[index : index + blocks] == UNKNOWN).any()
                if unknown and offset <= begin and begin + nbytes <= end:
                    inside = data[begin - offset : begin - offset + nbytes]
                    found = crc32c_blocks(inside, np.array([(0, nbytes, block)], dtype=np.int64))
                    part.checksums[index : index + blocks] = found
                index += blocks

    def copy_out(self, part: Part, memory: torch.Tensor) -> Transfer:
        """Begin to write a whole part from host memory to the slot that no commit holds.

        memory: uint8 (part.nbytes,); it must not change until the transfer has ended.
        """
        slot = self._free_slot(part)
        checksums = self._checksums(part, memory)
        transfer = self._write(part.slots[slot], memory)
        part.newest, part.checksums, part.verified = slot, checksums, True
        return transfer

    def _write_beside(self, part: Part, offset: int, source: torch.Tensor) -> Transfer:
        """Begin to write a whole part to a slot without its newest bytes, as its `tentative` bytes."""
        slot, memory = part.slot_beside(), source[part.start - offset :][: part.nbytes]
        assert slot is not None
        part.tentative = slot, self._checksums(part, memory)
        return self._write(part.slots[slot], memory)

    def _checksums(self, part: Part, memory: torch.Tensor) -> npt.NDArray[np.int64]:
        """The checksums of a part's blocks in memory, or UNKNOWN without commits, where nobody needs them."""
        if not self._commits:
            return np.full_like(part.checksums, UNKNOWN)
        return crc32c_blocks(memory, part.segments).astype(np.int64)

    def copy_out_piece(
        self, part: Part, offset: int, memory: torch.Tensor, checksums: npt.NDArray[np.int64]
    ) -> Transfer:
        """Begin to write a range of a part, from byte `offset` of the part on, to the slot that no commit
        holds.

        The ranges of a part are written in order, and `copied_out` follows when all are written. memory: the
        range's bytes, uint8; they must not change until the transfer has ended. checksums: of the part's
        blocks, all 0 before the first range; they are extended by these bytes.
        """
        extend(checksums, part.segments, offset, memory)
        slot = self._free_slot(part)
        return self._write(part.slots[slot] + offset, memory)

    def copied_out(self, part: Part, checksums: npt.NDArray[np.int64]) -> None:
        """Note that `copy_out_piece` has written all ranges of a part, so that the slot has its newest bytes.

        checksums: of the part's blocks.
        """
        part.newest, part.checksums, part.verified = self._free_slot(part), checksums, True

    def bring(self, part: Part, into: torch.Tensor) -> Transfer:
        """Begin to read a whole part from its slot, and return the transfer. into: uint8 (part.nbytes,).

        Waiting for the transfer raises CorruptState if the bytes do not have their checksums.
        """
        transfer = self._read(part.home, part.start, part.offset, into)
        return Joined([transfer], lambda: self._check([(part, into)]))

    def fetch(self, home: Home, offset: int, nbytes: int) -> torch.Tensor:
        """Read bytes of a page from their slots on disk, wherever its home is, and return a copy in ordinary
        RAM: uint8 (nbytes,). offset: from the start of the page.
        """
        low = offset // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        memory = aligned_ram(round_up(offset + nbytes, PAGE_ALIGNMENT) - low)
        for position, start, stop in home.parts.extents(low, low + memory.nbytes):
            self._read(home, start, position, memory[start - low : stop - low]).wait()
        return memory[offset - low : offset - low + nbytes].clone()

    def learn(self, part: Part) -> None:
        """Compute those checksums of a part's newest bytes that are not known yet, by reading the bytes.

        Raises CorruptState if bytes of an earlier process do not have the checksums that are known.
        """
        if (part.checksums[: block_count(part.filled)] == UNKNOWN).any():
            found = self._checksums_on_disk(part)
            if not part.verified:
                self._compare(part, found)
            part.checksums = np.concatenate([found, part.checksums[len(found) :]])

    def verify(self, part: Part) -> None:
        """Read a part's newest bytes and compare their checksums. Raises CorruptState if they differ."""
        self._compare(part, self._checksums_on_disk(part))

    # --- inside -----------------------------------------------------------------------------------------

    def _free_slot(self, part: Part) -> int:
        slot = part.free_slot()
        if slot is None and part.trained:
            self.ledger.wait()
            slot = part.free_slot()
        if slot is None and self.ledger.unknown is not None:
            raise self.ledger.unknown.again()
        if slot is None:
            raise ConfigError(
                "A frozen parameter was edited after a commit, which holds its only place on disk.",
                "Edit it before the first commit, or offload it with requires_grad=True.",
            )
        return slot

    def _make_writable(self, part: Part) -> None:
        """Make sure that no commit holds the slot `newest`: copy the part to its other slot if one does."""
        slot = self._free_slot(part)
        if slot == part.newest:
            return
        part.home.settle(part.start, part.end, writing=True)
        for offset in range(0, part.nbytes, _SCRATCH):
            piece = aligned_ram(min(_SCRATCH, part.nbytes - offset))
            self._read(part.home, part.start + offset, part.offset + offset, piece).wait()
            self._write(part.slots[slot] + offset, piece).wait()
        part.checksums = part.checksums.copy()
        part.newest = slot

    def _check(self, unchecked: Sequence[tuple[Part, torch.Tensor]]) -> None:
        for part, memory in unchecked:
            if not part.verified:
                self._compare(part, crc32c_blocks(memory, part.filled).astype(np.int64))

    def _compare(self, part: Part, found: np.ndarray) -> None:
        known = part.checksums[: len(found)]
        # A commit has no checksums of bytes without values: of moments that an update is only now to begin.
        wrong = np.flatnonzero((found != known) & (known != UNKNOWN))
        if len(wrong):
            name, start = part.named(int(wrong[0]))
            (where,) = self.nvme.extents(self.lease, part.offset + start, 1)
            raise CorruptState(
                f"The bytes of {name} at byte {where.offset} of {where.path} are not those that were "
                f"committed; {len(wrong)} of {len(found)} checksums of its chunk differ.",
                "Look at the drive's SMART data and the kernel log, and load an earlier copy of the run.",
                path=where.path,
                offset=where.offset,
            )
        part.verified = True

    def _checksums_on_disk(self, part: Part) -> np.ndarray:
        part.home.settle(part.start, part.end, writing=False)
        found = np.zeros(block_count(part.filled), dtype=np.int64)
        for offset in range(0, _last(part) - part.start, _SCRATCH):
            piece = aligned_ram(min(_SCRATCH, part.nbytes - offset))
            self._read(part.home, part.start + offset, part.offset + offset, piece).wait()
            extend(found, part.filled, offset, piece)
        return found

    def _read(
        self, home: Home, offset: int, position: int, into: torch.Tensor, deadline: float | None = None
    ) -> Transfer:
        """Begin to fill `into` with the bytes of the volume from byte `position` on.

        home, offset: the home that these bytes belong to, and the byte of it at which they begin, for errors.
        deadline: as in `NvmeTier.read`.
        """
        transfer = self.nvme.read(
            self.lease, into, offset=position, deadline=deadline, describe=home.described(offset)
        )
        self._meter.moved(Edge.NVME_TO_HOST, into.nbytes, transfer)
        return transfer

    def _write(self, position: int, source: torch.Tensor) -> Transfer:
        transfer = self.nvme.write(self.lease, source, offset=position)
        self._meter.moved(Edge.HOST_TO_NVME, source.nbytes, transfer)
        return transfer


def _last(part: Part) -> int:
    """The end of a part's bytes that have values, as an offset in the page."""
    filled = part.filled
    return part.start + (int((filled[:, 0] + filled[:, 1]).max()) if len(filled) else 0)


def extend(checksums: npt.NDArray[np.int64], segments: Segments, offset: int, memory: torch.Tensor) -> None:
    """Extend checksums of a part's blocks by further bytes of the part.

    checksums: for each block in `segments`, the checksum of its bytes before `offset`; changed in place.
    memory: the bytes of the part from `offset` on.
    """
    first = 0
    for start, nbytes, block in segments.tolist():
        low, high = max(start, offset), min(start + nbytes, offset + memory.nbytes)
        if low < high:
            index, inside = first + (low - start) // block, (low - start) % block
            if inside:
                end = min(high, low - inside + block)
                checksums[index] = crc32c(memory[low - offset : end - offset], int(checksums[index]))
                low, index = end, index + 1
            found = crc32c_blocks(memory, np.array([(low - offset, high - low, block)], dtype=np.int64))
            checksums[index : index + len(found)] = found
        first += -(-nbytes // block)


def _forget(part: Part, start: int, end: int) -> None:
    """Mark the checksums of blocks in bytes [start, end) of a part as unknown."""
    rows = part.segments
    counts = -(-rows[:, 1] // rows[:, 2])
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    block = np.repeat(rows[:, 2], counts)
    low = np.repeat(rows[:, 0], counts) + number * block
    high = np.minimum(low + block, np.repeat(rows[:, 0] + rows[:, 1], counts))
    part.checksums[(low < end) & (start < high)] = UNKNOWN
