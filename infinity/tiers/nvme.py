"""The NVMe tier: slabs on one or several paths, read and written as one range of bytes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

import torch

from infinity import _tiers
from infinity.aio import EngineStats, Faults, Future, Volume
from infinity.config import format_size, round_up
from infinity.errors import BudgetError, ConfigError
from infinity.system.closing import Closing
from infinity.system.directory import check_directory
from infinity.system.io_settings import open_engine, tuned_shares
from infinity.tiers.arena import HostArena
from infinity.tiers.probes import disk_speed
from infinity.tiers.slab import Slab
from infinity.tiers.striping import choose_striping
from infinity.tiers.tier import PAGE_ALIGNMENT, Tier

_PROBE_BYTES = 128 << 20

STRIPE_BYTES = 4 << 20
"""The default stripe: one I/O block, so that striping adds no requests."""


class NvmeLease:
    """Bytes of the NVMe tier on loan: they return when this object is released, dropped, or its `with` ends.

    The contents are undefined until written. Wait for every read and write of a lease before you let go of
    it: requests in flight do not hold it, and its bytes may be lent again at once.
    """

    def __init__(self, spans: _tiers.SpanAllocator, offset: int, nbytes: int) -> None:
        self.offset = offset
        """Bytes from the start of the tier; a multiple of 4096. `NvmeTier.extents` says in which files."""
        self.nbytes = nbytes
        """Bytes asked for."""
        self._return = weakref.finalize(self, spans.give_back, offset, nbytes)
        self._return.atexit = False

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return not self._return.alive

    def release(self) -> None:
        """Give the bytes back. Calling it again does nothing."""
        self._return()

    def __enter__(self) -> NvmeLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NvmeExtent(NamedTuple):
    """A range of bytes in a slab file."""

    path: str
    offset: int
    nbytes: int


class NvmeTier(Closing):
    """Pages in slab files, one file per path and rank, with an I/O engine per path.

    budgets: the most bytes per directory; each directory should be on a device of its own. nbytes: the bytes
    needed in all, for which the files are preallocated. Several paths are striped in proportion to `speeds`
    (bytes per second of each, in the order of `budgets`; by default as `infinity tune` found, else measured
    now, some two seconds per path), as far as their budgets allow. A path whose share is zero gets no file.

    backend, depth, block_bytes, faults: see infinity.aio.Engine; by default as `infinity tune` found for each
    path. A context manager; closing it waits for what is in flight, cancels what is queued and removes the
    files.

    Raises BudgetError where the budgets cannot hold `nbytes`, StorageFull and StorageError as `Slab` does;
    nothing is left behind then.
    """

    tier = Tier.NVME

    def __init__(
        self,
        budgets: Mapping[str, int],
        nbytes: int,
        *,
        rank: int = 0,
        speeds: Sequence[float] | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        backend: str = "auto",
        depth: int | None = None,
        block_bytes: int | None = None,
        faults: Faults | None = None,
    ) -> None:
        if not budgets:
            raise ConfigError("The nvme tier was given no path.", 'Give {"/mnt/nvme0": bytes}.')
        if stripe_bytes <= 0 or stripe_bytes % PAGE_ALIGNMENT:
            raise ConfigError(f"The stripe is {stripe_bytes} bytes.", "Give a positive multiple of 4096.")
        paths = [os.fspath(check_directory(path)) for path in budgets]
        limits = [limit // PAGE_ALIGNMENT * PAGE_ALIGNMENT for limit in budgets.values()]
        wanted = round_up(nbytes, PAGE_ALIGNMENT)
        if speeds is None:
            speeds = _speeds_of(paths, limits, wanted)
        self.striping = choose_striping(wanted, limits, speeds, stripe_bytes)
        sizes = self.striping.path_bytes(wanted)
        self.budget = sum(sizes)
        """Bytes that the files hold."""
        self._spans = _tiers.SpanAllocator(self.budget, PAGE_ALIGNMENT)
        self._registered: list[_tiers.Region] = []  # their mappings last as long
        with ExitStack() as cleanup:
            self.slabs = [
                cleanup.enter_context(Slab(path, size, rank=rank))
                for path, size in zip(paths, sizes, strict=True)
                if size
            ]
            self.engines = [
                cleanup.enter_context(
                    open_engine(
                        slab.directory, backend=backend, depth=depth, block_bytes=block_bytes, faults=faults
                    )
                )
                for slab in self.slabs
            ]
            files = [
                engine.open(os.fspath(slab.path))
                for engine, slab in zip(self.engines, self.slabs, strict=True)
            ]
            weights = [weight for weight in self.striping.weights if weight]
            self._volume: Volume | None = Volume(zip(files, weights, strict=True), self.striping.stripe_bytes)
            self._cleanup = cleanup.pop_all()

    @property
    def free_bytes(self) -> int:
        """Bytes that are not on loan, in whole 4 KiB blocks; perhaps not in one piece."""
        return self._spans.capacity - self._spans.used

    @property
    def stats(self) -> tuple[EngineStats, ...]:
        """Counters of each path's engine, in the order of `slabs`."""
        return tuple(engine.stats for engine in self.engines)

    def lease(self, nbytes: int) -> NvmeLease:
        """Borrow `nbytes` bytes of the tier.

        Raises BudgetError (`needed`: the smallest tier that would have had the room) where no piece that
        large is free.
        """
        if nbytes < 0:
            raise ConfigError(f"A lease of {nbytes} bytes was asked for.", "Ask for zero bytes or more.")
        offset = self._spans.take(nbytes)
        if offset is None:
            needed = self._spans.capacity_for(nbytes)
            raise BudgetError(
                f"{format_size(nbytes)} do not fit the nvme tier of {format_size(self.budget)}, which has "
                f"{format_size(self._spans.largest_free)} free in one piece.",
                f"Give the nvme tier {format_size(needed)} ({needed} bytes).",
                needed=needed,
            )
        return NvmeLease(self._spans, offset, nbytes)

    def read(
        self, lease: NvmeLease, into: torch.Tensor, *, offset: int = 0, deadline: float | None = None
    ) -> Future:
        """Fill the CPU tensor `into` (contiguous, any dtype) from byte `offset` of the lease.

        No copy and no page cache where the tensor's address is 4 KiB aligned, as leases are. deadline: a
        time.monotonic() time; earlier ones go first. Errors of the device come out of the future. Raises
        ConfigError for bytes outside the lease, a released lease, a closed tier, a tensor that is
        not plain host memory.
        """
        return self._open_volume().read(into, self._place(lease, offset, into.nbytes), deadline)

    def write(
        self, lease: NvmeLease, source: torch.Tensor, *, offset: int = 0, deadline: float | None = None
    ) -> Future:
        """Write the CPU tensor `source` at byte `offset` of the lease; as `read`.

        The tensor must not change until the future is done. Durable only after a later `sync`.
        """
        return self._open_volume().write(source, self._place(lease, offset, source.nbytes), deadline)

    def sync(self) -> Future:
        """Make every write durable whose future is done now (fdatasync of every slab)."""
        return self._open_volume().sync()

    def extents(self, lease: NvmeLease) -> list[NvmeExtent]:
        """The ranges of slab files in which the lease's bytes lie, in order."""
        pieces = self._open_volume().map.extents(lease.offset, lease.nbytes)
        return [
            NvmeExtent(os.fspath(self.slabs[slab].path), offset, nbytes) for slab, offset, nbytes in pieces
        ]

    def register(self, arena: HostArena) -> list[str]:
        """Have every engine register the arena's memory, which saves work per request and pins its pages.

        Returns the reasons of the engines that could not, which work all the same. The registration ends with
        the tier; until then the memory stays mapped, also after the arena is closed, because the engines know
        it by address.
        """
        region = arena.region
        self._registered.append(region)
        failed = [
            engine for engine in self.engines if not engine.register_buffer(region.address, region.nbytes)
        ]
        return [engine.facts.registration_failure for engine in failed]

    def close(self) -> None:
        """Wait for what is in flight, cancel what is queued, remove the files. Again: does nothing."""
        self._cleanup.close()
        self._volume = None  # its descriptors would keep the room of the removed files
        self._registered.clear()

    def _open_volume(self) -> Volume:
        if self._volume is None:
            raise ConfigError("The nvme tier is closed.", "Use it before it is closed.")
        return self._volume

    def _place(self, lease: NvmeLease, offset: int, nbytes: int) -> int:
        if lease.released:
            raise ConfigError("The lease was released.", "Keep it until its last read or write.")
        if offset < 0 or offset + nbytes > lease.nbytes:
            raise ConfigError(
                f"Bytes {offset} to {offset + nbytes} are outside a lease of {lease.nbytes} bytes.",
                "Ask for a lease that holds the page.",
            )
        return lease.offset + offset


def _speeds_of(paths: Sequence[str], limits: Sequence[int], wanted: int) -> Sequence[float]:
    """The speed of each path as `infinity tune` found it, else as measured now; 1.0 where none is needed."""
    if len(paths) == 1 or not 0 < wanted <= sum(limits):
        return [1.0] * len(paths)
    return tuned_shares(paths) or [
        _probe(path, min(limit, wanted)) for path, limit in zip(paths, limits, strict=True)
    ]


def _probe(path: str, limit: int) -> float:
    """Bytes per second of reads and writes mixed, on a file of at most `limit` bytes."""
    return disk_speed(path, nbytes=min(limit, _PROBE_BYTES)).mixed
