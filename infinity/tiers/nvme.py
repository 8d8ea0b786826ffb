"""The NVMe tier: slab files in one or several directories, read and written as one range of bytes."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from infinity import _tiers
from infinity.aio import Engine, EngineStats, Faults, Future, Volume
from infinity.config import format_size, round_up
from infinity.errors import BudgetError, ConfigError, StorageError
from infinity.system.closing import Closing
from infinity.system.directory import check_directory
from infinity.system.disk_files import DiskFiles
from infinity.system.io_settings import open_engine, tuned_shares
from infinity.tiers.arena import HostArena
from infinity.tiers.path_lock import PathLock
from infinity.tiers.probes import disk_speed
from infinity.tiers.slab import Slab, find_slab, lock_directory
from infinity.tiers.striping import SlabRecord, Striping, VolumeRecord, choose_striping
from infinity.tiers.tier import PAGE_ALIGNMENT, Tier

_PROBE_BYTES = 128 << 20

STRIPE_BYTES = 4 << 20
"""Bytes of a stripe by default. A stripe is as long as an I/O block, so that striping adds no I/O requests.
"""


class NvmeLease:
    """A range of bytes that the NVMe tier has lent; `NvmeTier.lease` makes it.

    The bytes return to the tier at `release`, at the end of a `with` statement, or when the last reference
    to the lease is gone. Their contents are undefined until written. The caller must wait for every read and
    write of a lease before the lease ends: requests in flight do not keep the lease alive, and its bytes may
    be lent again at once.
    """

    def __init__(self, spans: _tiers.SpanAllocator, offset: int, nbytes: int) -> None:
        self.offset = offset
        """Offset of the lease in the tier's range of bytes, a multiple of 4096.

        `NvmeTier.extents` gives the places in the slab files.
        """
        self.nbytes = nbytes
        """Number of bytes in the lease, as asked of `NvmeTier.lease`; not rounded up."""
        self._return = weakref.finalize(self, spans.give_back, offset, nbytes)
        self._return.atexit = False

    @property
    def released(self) -> bool:
        """Whether the bytes have returned to the tier."""
        return not self._return.alive

    def release(self) -> None:
        """Give the bytes back to the tier. A second call does nothing."""
        self._return()

    def __enter__(self) -> NvmeLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NvmeExtent(NamedTuple):
    """A range of bytes in a slab file: the file's path, the byte offset there, and the number of bytes."""

    path: str
    offset: int
    nbytes: int


class NvmeTier(Closing):
    """The tier on NVMe disks: slab files, one per directory and rank, each with an I/O engine of its own.

    budgets: directory -> the most bytes that its slab file may have. The directories should lie on different
    devices. nbytes: the bytes that leases need in total; the files are preallocated for them. rank: the
    number of this process in the job, which is part of the files' names.

    speeds: bytes per second of each directory, in the order of `budgets`. The tier's bytes are striped over
    the directories in proportion to the speeds, as far as the budgets allow. A directory whose share is zero
    gets no file. By default the shares that `infinity tune` found are used. Without such shares the speeds
    are measured now, which takes about two seconds per directory. stripe_bytes: bytes of a stripe, a multiple
    of 4096.

    backend, depth, block_bytes, faults: arguments of infinity.aio.Engine. By default, the first three are the
    settings that `infinity tune` found for each directory.

    adopt: the record of a tier that was committed. Its slabs, in whichever directories of `budgets` they lie,
    are used as they are: no page is read or moved. `speeds` and `stripe_bytes` have no effect. The slabs grow
    if `nbytes` is more than they hold. All directories are locked.

    files: makes the changes of names and takes the locks on disk. shared: directory without symbolic links ->
    lock of it that the caller holds, for this tier to use. verify: whether reads are compared with what was
    written, as `Engine.open` says. scratch: whether no later process needs the tier. Its files then have no
    names, so that nothing is left after a kill, and cannot be committed.

    A context manager. Closing the tier waits for requests in flight, cancels queued requests and removes the
    files, unless `keep` says that they stay.

    Raises BudgetError where the budgets cannot hold `nbytes`, StorageFull and StorageError as `Slab` does. No
    file is left behind after an error. Adoption raises IncompatibleCheckpoint for a slab that is missing or
    found twice, and otherwise as `Slab.adopt` does; the slabs are then as before.
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
        adopt: VolumeRecord | None = None,
        files: DiskFiles | None = None,
        shared: Mapping[Path, PathLock] | None = None,
        verify: bool = False,
        scratch: bool = False,
    ) -> None:
        if not budgets:
            raise ConfigError("The nvme tier was given no path.", 'Give {"/mnt/nvme0": bytes}.')
        if stripe_bytes <= 0 or stripe_bytes % PAGE_ALIGNMENT:
            raise ConfigError(f"The stripe is {stripe_bytes} bytes.", "Give a positive multiple of 4096.")
        paths = [check_directory(path) for path in budgets]
        limits = [limit // PAGE_ALIGNMENT * PAGE_ALIGNMENT for limit in budgets.values()]
        wanted = round_up(nbytes, PAGE_ALIGNMENT)
        self._files = files = files or DiskFiles()
        self.engines: list[Engine] = []
        self._sync_failure: StorageError | None = None
        self._registered: list[_tiers.Region] = []  # keeps the memory mapped while engines know its address
        self.locks: dict[Path, PathLock] = {}
        """Directory that the tier uses, without symbolic links -> its lock."""
        self.speeds = speeds
        """The relative speeds of the directories of `budgets`; None if slabs were adopted."""
        with ExitStack() as cleanup, ExitStack() as undo:
            if adopt is None:
                if self.speeds is None:
                    self.speeds = _speeds_of([os.fspath(path) for path in paths], limits, wanted)
                self.striping = choose_striping(wanted, limits, self.speeds, stripe_bytes)
                sizes = self.striping.path_bytes(wanted)
                used = [(path, size) for path, size in zip(paths, sizes, strict=True) if size]
                self._lock([path for path, _ in used], rank, shared or {}, cleanup)
                made = (Slab(self.locks[path], size, files=files, scratch=scratch) for path, size in used)
                self.slabs = [cleanup.enter_context(slab) for slab in made]
            else:
                self.striping = adopt.striping
                self._lock(paths, rank, shared or {}, cleanup)
                found = [find_slab(paths, rank, slab.uuid) for slab in adopt.slabs]
                sizes = _grown(adopt, found, dict(zip(paths, limits, strict=True)), wanted)
                self.slabs = []
                for path, each in zip(found, adopt.slabs, strict=True):
                    adopted = Slab.adopt(self.locks[path.parent], each.uuid, each.nbytes, files=files)
                    self.slabs.append(cleanup.enter_context(adopted))
                for slab, size in zip(self.slabs, sizes, strict=True):
                    if size > slab.nbytes:
                        undo.callback(slab.shrink, slab.nbytes)
                        slab.grow(size)
            self._weights = [weight for weight in self.striping.weights if weight]
            striping = Striping(tuple(self._weights), self.striping.stripe_bytes)
            self.budget = striping.volume_bytes([slab.nbytes for slab in self.slabs])
            """Bytes of pages that the slabs hold together."""
            self._spans = _tiers.SpanAllocator(self.budget, PAGE_ALIGNMENT)
            for slab in self.slabs:
                engine = open_engine(
                    slab.directory, backend=backend, depth=depth, block_bytes=block_bytes, faults=faults
                )
                self.engines.append(cleanup.enter_context(engine))
            opened = [
                engine.open(os.fspath(slab.path), verify=verify)
                for engine, slab in zip(self.engines, self.slabs, strict=True)
            ]
            parts = zip(opened, self._weights, strict=True)
            self._volume: Volume | None = Volume(parts, self.striping.stripe_bytes)
            for slab in self.slabs if scratch else ():
                slab.drop_name()
            undo.pop_all()
            self._cleanup = cleanup.pop_all()

    @property
    def record(self) -> VolumeRecord:
        """What a later tier needs to adopt this tier's slabs."""
        return VolumeRecord(
            self.striping.stripe_bytes,
            tuple(
                SlabRecord(slab.uuid, slab.nbytes, weight)
                for slab, weight in zip(self.slabs, self._weights, strict=True)
            ),
        )

    @property
    def keep(self) -> bool:
        """Whether the files stay when the tier is closed: after `commit`, or if it was adopted."""
        return all(slab.keep for slab in self.slabs)

    @property
    def sync_failed(self) -> bool:
        """Whether a sync of the slabs' names has failed, so that it is unknown which names are on disk."""
        return self._sync_failure is not None

    def commit(self) -> None:
        """Give the slabs the names of committed ones, durably, and keep the files from now on.

        Does nothing once this succeeded. Raises StorageError if this fails. A later call then tries again, or
        raises the same error if `sync_failed`.
        """
        if self.keep:
            return
        self._rename(committed=True)
        for slab in self.slabs:
            slab.keep = True

    def uncommit(self) -> None:
        """Undo `commit`, for slabs that no commit needs after all. Their files are removed on close, even if
        this call raises StorageError.
        """
        self.forget()
        self._rename(committed=False)

    def _rename(self, *, committed: bool) -> None:
        if self._sync_failure is not None:
            raise self._sync_failure.again()
        for slab in self.slabs:
            slab.rename(committed=committed)
        try:
            for directory in dict.fromkeys(slab.directory for slab in self.slabs):
                self._files.sync_directory(directory)
        except StorageError as error:
            self._sync_failure = error.again()
            raise

    def check_names(self) -> None:
        """Raise StorageError (ENOENT) if a slab has lost its name, so that no later process would find it."""
        for slab in self.slabs:
            slab.check_name()

    def forget(self) -> None:
        """Remove the files on close although they were committed, because no commit needs them."""
        for slab in self.slabs:
            slab.keep = False

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent, a multiple of 4096. They need not be contiguous."""
        return self._spans.capacity - self._spans.used

    @property
    def stats(self) -> tuple[EngineStats, ...]:
        """Counters of the I/O engine of each slab, in the order of `slabs`."""
        return tuple(engine.stats for engine in self.engines)

    def lease(self, nbytes: int) -> NvmeLease:
        """Borrow `nbytes` contiguous bytes of the tier.

        Raises BudgetError where no free range is that large. The error's `needed` is the least number of
        bytes that the tier would need to have room for the lease now.
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
        self,
        lease: NvmeLease,
        into: torch.Tensor,
        *,
        offset: int = 0,
        deadline: float | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> Future:
        """Start to fill the CPU tensor `into` with the bytes of the lease from byte `offset` on.

        Returns a future. into: contiguous, of any dtype. If its address is a multiple of 4 KiB, as in
        leased memory, the bytes are not copied and do not pass through the page cache. deadline: a
        time.monotonic() time in seconds, by default now; requests with earlier deadlines go first. describe:
        as for `File.read`. Errors of the disk are raised by the future, and CorruptState if the tier is
        verified. This call raises ConfigError for bytes outside the lease, a released lease, a closed tier,
        or a tensor that is not contiguous host memory.
        """
        return self._open_volume().read(into, self._place(lease, offset, into.nbytes), deadline, describe)

    def write(
        self, lease: NvmeLease, source: torch.Tensor, *, offset: int = 0, deadline: float | None = None
    ) -> Future:
        """Start to write the CPU tensor `source` to the lease, from byte `offset` of the lease on.

        Returns a future. The tensor must be contiguous, and must not change until the future is done. The
        bytes are durable only after a later `sync`. A tensor whose address is a multiple of 4 KiB is not
        copied, as in `read`. deadline: as for `read`, but by default later than now, so that reads go first.
        Errors are those of `read`.
        """
        return self._open_volume().write(source, self._place(lease, offset, source.nbytes), deadline)

    def sync(self) -> Future:
        """Start an fdatasync of every slab, which makes durable the writes whose futures are done now.

        Returns a future.
        """
        return self._open_volume().sync()

    def extents(self, lease: NvmeLease, offset: int = 0, nbytes: int | None = None) -> list[NvmeExtent]:
        """Return the ranges of slab files in which bytes of the lease lie, from the first to the last.

        offset, nbytes: the range of the lease; by default all of it.
        """
        nbytes = lease.nbytes - offset if nbytes is None else nbytes
        pieces = self._open_volume().map.extents(self._place(lease, offset, nbytes), nbytes)
        return [
            NvmeExtent(os.fspath(self.slabs[slab].path), offset, nbytes) for slab, offset, nbytes in pieces
        ]

    def register(self, arena: HostArena) -> list[str]:
        """Register the arena's memory with every I/O engine.

        This saves work per request, and pins the memory's pages. Returns one reason for each engine that
        could not register the memory. Such an engine works without registration. The registration ends when
        the tier is closed. Until then the memory stays mapped, even if the arena is closed, because the
        engines know the memory by its address.
        """
        region = arena.region
        self._registered.append(region)
        failed = [
            engine for engine in self.engines if not engine.register_buffer(region.address, region.nbytes)
        ]
        return [engine.facts.registration_failure for engine in failed]

    def close(self) -> None:
        """Wait for requests in flight, cancel queued requests, and remove the files unless `keep` is set.

        A second call does nothing.
        """
        self._cleanup.close()
        self._volume = None  # open descriptors would keep the room of the removed files
        self._registered.clear()

    def _lock(
        self, directories: Iterable[Path], rank: int, shared: Mapping[Path, PathLock], cleanup: ExitStack
    ) -> None:
        """Fill `locks` for these directories, from `shared` or with new locks, which `cleanup` closes."""
        for path in directories:
            if path in shared and path not in self.locks:
                self.locks[path] = shared[path]
            else:  # a directory that was given twice is refused here
                self.locks[path] = cleanup.enter_context(lock_directory(path, rank, self._files))

    def _open_volume(self) -> Volume:
        if self._volume is None:
            raise ConfigError("The nvme tier is closed.", "Use the tier before it is closed.")
        return self._volume

    def _place(self, lease: NvmeLease, offset: int, nbytes: int) -> int:
        if lease.released:
            raise ConfigError("The lease was released.", "Keep a lease until its last read or write is done.")
        if offset < 0 or offset + nbytes > lease.nbytes:
            raise ConfigError(
                f"Bytes {offset} to {offset + nbytes} are outside a lease of {lease.nbytes} bytes.",
                "Ask for a lease that holds the page.",
            )
        return lease.offset + offset


def _grown(record: VolumeRecord, paths: list[Path], limits: Mapping[Path, int], wanted: int) -> list[int]:
    """Return, for each slab of a committed volume, the bytes that it needs so that the volume holds `wanted`
    bytes. No slab gets smaller than it is.

    paths: the files of the slabs. limits: the budget of each directory in bytes. Raises BudgetError if the
    slabs in a directory would exceed its budget, and ConfigError if `wanted` is not positive.
    """
    if wanted <= 0:
        raise ConfigError(f"An nvme tier of {wanted} bytes was asked for.", "Ask for at least one page.")
    sizes = record.striping.path_bytes(wanted)
    sizes = [max(slab.nbytes, size) for slab, size in zip(record.slabs, sizes, strict=True)]
    needed: Counter[Path] = Counter()
    for path, size in zip(paths, sizes, strict=True):
        needed[path.parent] += size
    for directory, size in needed.items():
        if size > limits[directory]:
            raise BudgetError(
                f"The commit's slabs in {directory} need {format_size(size)}, and the nvme budget there is "
                f"{format_size(limits[directory])}.",
                f"Give {directory} {size} bytes.",
                needed=size,
                tier="nvme",
            )
    return sizes


def _speeds_of(paths: Sequence[str], limits: Sequence[int], wanted: int) -> Sequence[float]:
    """Return the relative speeds of the directories `paths`, and measure them if they were not tuned.

    The speeds are the shares that `infinity tune` found, or else measured bytes per second. limits: the
    budget of each directory in bytes. wanted: bytes needed in all. All speeds are 1.0 where they do not
    matter: for one directory, and where the budgets cannot hold `wanted` bytes.
    """
    if len(paths) == 1 or not 0 < wanted <= sum(limits):
        return [1.0] * len(paths)
    return tuned_shares(paths) or [
        _probe(path, min(limit, wanted)) for path, limit in zip(paths, limits, strict=True)
    ]


def _probe(path: str, limit: int) -> float:
    """Measure the bytes per second of mixed reads and writes in the directory `path`.

    limit: the most bytes of the test file.
    """
    return disk_speed(path, nbytes=min(limit, _PROBE_BYTES)).mixed
