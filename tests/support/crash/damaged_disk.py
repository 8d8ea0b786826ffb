"""Damaged disk: bytes of the slabs of a live runtime that are changed behind its back, and who reads them."""

from __future__ import annotations

import ctypes
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infinity.aio import Future
from infinity.tiers import NvmeTier

PAGE = 4096
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # of fallocate(2)


class Place(NamedTuple):
    """4096 bytes of a slab: the slab's path, and the offset in its file."""

    path: str
    offset: int


class Disk:
    """The slabs of a live runtime. Notes which bytes the runtime reads and writes."""

    def __init__(self, tier: NvmeTier, chance: random.Random, patch: pytest.MonkeyPatch) -> None:
        """tier: the runtime's. chance: draws what is damaged. patch: undoes what this object patches."""
        self.tier, self.chance = tier, chance
        self.first: dict[Place, str] = {}
        """Place -> "read" or "write": what was first done there since `watch`."""
        self._futures: list[Future] = []
        self._old: dict[str, bytes] = {}
        for kind in ("read", "write"):
            patch.setattr(tier, kind, self._noted(kind, getattr(tier, kind)))

    def _noted(self, kind: str, real: Any) -> Any:
        def noted(lease: Any, memory: Any, *, offset: int = 0, **options: Any) -> Future:
            extents = self.tier._open_volume().map.extents(lease.offset + offset, memory.nbytes)
            for slab, start, nbytes in extents:
                path = os.fspath(self.tier.slabs[slab].path)
                for page in range(start // PAGE, -(-(start + nbytes) // PAGE)):
                    self.first.setdefault(Place(path, page * PAGE), kind)
            future: Future = real(lease, memory, offset=offset, **options)
            self._futures.append(future.watcher())
            return future

        return noted

    def settle(self) -> None:
        """Wait until no request is in flight."""
        while not all([each.done() for each in self._futures]):
            time.sleep(0.0005)
        self._futures.clear()

    def remember(self) -> None:
        """Keep a copy of all slabs, from which "stale" and "torn" take old bytes."""
        self.settle()
        self._old = {os.fspath(slab.path): Path(slab.path).read_bytes() for slab in self.tier.slabs}

    def damage(self, kind: str) -> tuple[Place, bytes]:
        """Change 4096 bytes that are not all zero; returns where they are, and what they were.

        kind: "flip" (one bit), "zero", "punch" (a hole in the file), "stale" (the bytes of `remember`), or
        "torn" (those in the second half).
        """
        self.settle()
        while True:
            slab = self.chance.choice(self.tier.slabs)
            place = Place(os.fspath(slab.path), self.chance.randrange(slab.nbytes // PAGE) * PAGE)
            before = read_at(place)
            after = self._changed(kind, place, before)
            if after != before and any(before):
                break
        if kind == "punch":
            punch(place)
        else:
            write_at(place, after)
        assert read_at(place) == after != before
        self.first.clear()
        return place, before

    def _changed(self, kind: str, place: Place, before: bytes) -> bytes:
        if kind == "flip":
            position, bit = self.chance.randrange(PAGE), 1 << self.chance.randrange(8)
            return before[:position] + bytes([before[position] ^ bit]) + before[position + 1 :]
        if kind in ("stale", "torn"):
            old = self._old[place.path][place.offset : place.offset + PAGE]
            return old if kind == "stale" else before[: PAGE // 2] + old[PAGE // 2 :]
        return bytes(PAGE)


def read_at(place: Place) -> bytes:
    descriptor = os.open(place.path, os.O_RDONLY)
    try:
        return os.pread(descriptor, PAGE, place.offset)
    finally:
        os.close(descriptor)


def write_at(place: Place, content: bytes) -> None:
    descriptor = os.open(place.path, os.O_WRONLY)
    try:
        assert os.pwrite(descriptor, content, place.offset) == len(content)
    finally:
        os.close(descriptor)


def punch(place: Place) -> None:
    """Punch a hole of 4096 bytes into a file, or write zeros where the file system has no holes."""
    descriptor = os.open(place.path, os.O_WRONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mode, offset, nbytes = _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(place.offset), ctypes.c_long(PAGE)
        if libc.fallocate(descriptor, mode, offset, nbytes) != 0:
            os.pwrite(descriptor, bytes(PAGE), place.offset)
    finally:
        os.close(descriptor)
