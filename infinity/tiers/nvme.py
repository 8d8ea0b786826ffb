"""The NVMe tier: slabs on one or several paths, read and written as one range of bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from infinity import _tiers
from infinity.aio import Engine, Faults, Future, Stats, Volume
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.profile import disk_speed
from infinity.tiers.arena import HostArena
from infinity.tiers.slab import Slab
from infinity.tiers.striping import path_bytes, stripe_weights
from infinity.tiers.tier import PAGE_ALIGNMENT, Tier

STRIPE_BYTES = 4 << 20
"""The default stripe: one I/O block, so that striping adds no requests."""


class Extent:
    """Bytes of the NVMe tier on loan: a context manager that returns them at its end.

    The contents are undefined until written. Wait for every read and write of an extent before you release
    it: requests in flight do not hold it, and its bytes may be handed out again at once.
    """

    __slots__ = ("_spans", "nbytes", "offset")

    def __init__(self, spans: _tiers.SpanAllocator, offset: int, nbytes: int) -> None:
        self._spans: _tiers.SpanAllocator | None = spans
        self.offset = offset
        """Bytes from the start of the tier; a multiple of 4096. `NvmeTier.places` says in which file."""
        self.nbytes = nbytes
        """Bytes asked for."""

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._spans is None

    def release(self) -> None:
        """Give the bytes back. Calling it again does nothing."""
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.give_back(self.offset, self.nbytes)

    def __enter__(self) -> Extent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NvmeTier:
    """Pages in slab files, one file per path and rank, with an I/O engine per path.

    budgets: the most bytes per directory; each directory should be on a device of its own. nbytes: what is
    needed in all, which is what the files are preallocated for. Several paths are striped in proportion to
    `speeds` (bytes per second of each, in the order of `budgets`; by default measured now, two seconds per
    path), as far as their budgets allow. A path whose share comes out as nothing gets no file.

    backend, depth, block_bytes, faults: see infinity.aio.Engine. A context manager; closing it waits for what
    is in flight, cancels what is queued and removes the files. Extents are managed from one thread.

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
        depth: int = 32,
        block_bytes: int = 4 << 20,
        faults: Faults | None = None,
    ) -> None:
        if not budgets:
            raise ConfigError("The nvme tier was given no path.", 'Give {"/mnt/nvme0": bytes}.')
        if stripe_bytes <= 0 or stripe_bytes % PAGE_ALIGNMENT:
            raise ConfigError(f"The stripe is {stripe_bytes} bytes.", "Give a positive multiple of 4096.")
        paths, limits = list(budgets), [budgets[path] // PAGE_ALIGNMENT * PAGE_ALIGNMENT for path in budgets]
        if speeds is None:
            speeds = [disk_speed(path).mixed for path in paths] if len(paths) > 1 else [1.0]
        wanted = -(-nbytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        weights = stripe_weights(wanted, limits, speeds, stripe_bytes)
        sizes = path_bytes(wanted, weights, stripe_bytes)
        self.budget = sum(sizes)
        self._spans = _tiers.SpanAllocator(self.budget, PAGE_ALIGNMENT)
        with ExitStack() as cleanup:
            self.slabs = [
                cleanup.enter_context(Slab(path, size, rank=rank))
                for path, size in zip(paths, sizes, strict=True)
                if size
            ]
            self.engines = [
                cleanup.enter_context(
                    Engine(
                        slab.directory, backend=backend, depth=depth, block_bytes=block_bytes, faults=faults
                    )
                )
                for slab in self.slabs
            ]
            files = [
                engine.open(os.fspath(slab.path))
                for engine, slab in zip(self.engines, self.slabs, strict=True)
            ]
            self._volume = Volume(zip(files, filter(None, weights), strict=True), stripe_bytes)
            self._cleanup = cleanup.pop_all()

    @property
    def free_bytes(self) -> int:
        """Bytes that belong to no extent, in whole 4 KiB blocks; perhaps not in one piece."""
        return self._spans.capacity - self._spans.used

    @property
    def stats(self) -> tuple[Stats, ...]:
        """What each path's engine has done, in the order of `slabs`."""
        return tuple(engine.stats for engine in self.engines)

    def extent(self, nbytes: int) -> Extent:
        """Borrow `nbytes` bytes of the tier. Raises BudgetError where no piece that large is free."""
        if nbytes < 0:
            raise ConfigError(f"An extent of {nbytes} bytes was asked for.", "Ask for zero bytes or more.")
        offset = self._spans.take(nbytes)
        if offset is None:
            needed = self._spans.used + -(-nbytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
            raise BudgetError(
                f"{format_size(nbytes)} do not fit the nvme tier of {format_size(self.budget)}, which has "
                f"{format_size(self._spans.largest_free)} free in one piece.",
                f"Give the nvme tier {format_size(needed)} ({needed} bytes).",
                needed=needed,
            )
        return Extent(self._spans, offset, nbytes)

    def read(
        self, extent: Extent, into: torch.Tensor, *, offset: int = 0, deadline: float | None = None
    ) -> Future:
        """Fill the CPU tensor `into` (contiguous, any dtype) from byte `offset` of the extent.

        No copy and no page cache where the tensor's address is 4 KiB aligned, as leases are. deadline: a
        time.monotonic() time; earlier ones go first. Errors of the device come out of the future. Raises
        ConfigError for bytes outside the extent, a released extent, a tensor that is not plain host memory.
        """
        return self._volume.read(into, self._place(extent, offset, into.nbytes), deadline)

    def write(
        self, extent: Extent, source: torch.Tensor, *, offset: int = 0, deadline: float | None = None
    ) -> Future:
        """Write the CPU tensor `source` at byte `offset` of the extent; as `read`.

        The tensor must not change until the future is done. Durable only after a later `sync`.
        """
        return self._volume.write(source, self._place(extent, offset, source.nbytes), deadline)

    def sync(self) -> Future:
        """Make every write durable whose future is done now (fdatasync of every slab)."""
        return self._volume.sync()

    def places(self, extent: Extent) -> list[tuple[str, int, int]]:
        """Where the extent's bytes lie: (file, offset in it, bytes), in order."""
        pieces = self._volume.map.extents(extent.offset, extent.nbytes)
        return [(os.fspath(self.slabs[slab].path), offset, nbytes) for slab, offset, nbytes in pieces]

    def register(self, arena: HostArena) -> list[str]:
        """Have every engine register the arena's memory, which saves work per request and pins its pages.

        Returns the reasons of the engines that could not, which work all the same.
        """
        region = arena.region
        failed = [
            engine for engine in self.engines if not engine.register_buffer(region.address, region.nbytes)
        ]
        return [engine.facts.registration_failure for engine in failed]

    def close(self) -> None:
        """Wait for what is in flight, cancel what is queued, remove the files. Again: does nothing."""
        self._cleanup.close()

    def __enter__(self) -> NvmeTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, extent: Extent, offset: int, nbytes: int) -> int:
        if extent.released:
            raise ConfigError("The extent was released.", "Keep it until its last read or write.")
        if offset < 0 or offset + nbytes > extent.nbytes:
            raise ConfigError(
                f"Bytes {offset} to {offset + nbytes} are outside an extent of {extent.nbytes} bytes.",
                "Ask for an extent that holds the page.",
            )
        return extent.offset + offset
