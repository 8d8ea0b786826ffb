"""A model of torch's CUDA caching allocator without CUDA: segments, best fit, splitting, merging.

Sizes are rounded up to 512 bytes. Small requests, of at most 1 MiB, and large requests have separate
segments. The smallest free block that is large enough is taken. The rest of the block is split off if it
has at least 512 bytes (in a segment for small requests) or more than 1 MiB (in a segment for large
requests). Free neighbours merge. If a new segment would exceed the limit, segments without a block in use
are given back first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(eq=False)
class Block:
    start: int
    nbytes: int
    free: bool = False


@dataclass(eq=False)
class Segment:
    nbytes: int
    small: bool
    blocks: list[Block] = field(default_factory=list)


class OutOfMemory(Exception):
    """Raised where torch would raise its error for a device without enough memory."""


class CachingAllocator:
    """An allocator whose segments, `reserved` bytes in all, never exceed `limit` bytes.

    `allocate` returns (segment, block), which are the arguments of `release`.
    """

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit = limit
        self.segments: list[Segment] = []
        self.live = 0
        self.peak_live = 0
        self.peak_reserved = 0

    @property
    def reserved(self) -> int:
        return sum(each.nbytes for each in self.segments)

    def allocate(self, nbytes: int) -> tuple[Segment, Block]:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= _MIB
        candidates = [
            (block.nbytes, index, block)
            for index, segment in enumerate(self.segments)
            if segment.small == small
            for block in segment.blocks
            if block.free and block.nbytes >= size
        ]
        if candidates:
            _, index, block = min(candidates, key=lambda each: each[:2])
            segment = self.segments[index]
        else:
            segment = self._grow(
                2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else _round(size), small
            )
            block = segment.blocks[0]
        left = block.nbytes - size
        if left >= 512 if small else left > _MIB:
            rest = Block(block.start + size, left, free=True)
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
            block.nbytes = size
        block.free = False
        self.live += block.nbytes
        self.peak_live = max(self.peak_live, self.live)
        return segment, block

    def release(self, segment: Segment, block: Block) -> None:
        self.live -= block.nbytes
        block.free = True
        at = segment.blocks.index(block)
        for left in (at, at - 1):
            if 0 <= left < len(segment.blocks) - 1:
                one, other = segment.blocks[left], segment.blocks[left + 1]
                if one.free and other.free:
                    one.nbytes += other.nbytes
                    del segment.blocks[left + 1]

    def _grow(self, nbytes: int, small: bool) -> Segment:
        if self.reserved + nbytes > self.limit:
            self.segments = [each for each in self.segments if any(not b.free for b in each.blocks)]
        if self.reserved + nbytes > self.limit:
            raise OutOfMemory(f"{nbytes} bytes beside {self.reserved} of {self.limit}")
        segment = Segment(nbytes, small, [Block(0, nbytes, free=True)])
        self.segments.append(segment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return segment


def _round(size: int) -> int:
    return -(-size // (2 * _MIB)) * 2 * _MIB
