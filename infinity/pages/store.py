"""Store: the tiers of one runtime, opened with the sizes of its plan, and transfers between homes and memory.

`read` and `write` move bytes between a home and host memory. A home that is host memory is used in place
instead (`Home.memory`). Bytes that are neither at home nor in the memory where the model computes are in a
pool: `staging` has the chunks that updates and gradients work on, and infinity/optim/scheduler.py gives its
bytes out; `transit` has the pieces of pages that are on their way between disk and device. One transit buffer
is set aside as a bounce buffer for reads and writes of single parameters. A lease returns to its pool when
the last view of its bytes is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from infinity.config import Budget, round_up
from infinity.device_update.kernel_trial import kernels_that_measure
from infinity.device_update.kernels import Kernels
from infinity.errors import InfinityError
from infinity.layout.shards import HomeRange
from infinity.pages.durable_io import DurableIO
from infinity.pages.home import Home, InFlightRequest, Outcome
from infinity.pages.ledger import Ledger
from infinity.pages.parts import Part
from infinity.planning import twin_flow
from infinity.planning.budgets import nvme_budget_for
from infinity.planning.plan import Plan
from infinity.system.disk_files import injected_faults, injected_files
from infinity.telemetry.meter import Meter
from infinity.telemetry.stats import Edge, Wait
from infinity.tiers import PAGE_ALIGNMENT, HostArena, NvmeTier, Pool, Tier, open_device
from infinity.tiers.copy_streams import open_link
from infinity.tiers.device import DeviceTier, MemoryShare, capped, check_room
from infinity.tiers.driver import Event
from infinity.tiers.link import ARRIVED, After, DeviceLink, Joined, Lane, Transfer, User, watcher_of
from infinity.tiers.path_lock import PathLock
from infinity.tiers.striping import VolumeRecord


class ExchangePools(NamedTuple):
    """Pools, all but one in the host arena, for bytes that travel between ranks."""

    outgoing: Pool
    """For bytes of pages that are sent."""
    incoming: Pool
    """For gradients that come."""
    waiting: Pool
    """For this rank's gradients, until the ranks that keep their sums have them."""
    waiting_there: Pool
    """In device memory, for those of them that are added on devices."""


class Store:
    """The open tiers of one runtime, their pools, and the transfers between them. `close` ends all.

    The constructor raises BudgetError, StorageError, StorageFull or ConfigError if a tier cannot be opened,
    and leaves nothing open then.
    """

    def __init__(
        self,
        plan: Plan,
        budget: Budget,
        meter: Meter,
        *,
        others: int = 0,
        adopted: VolumeRecord | None = None,
        locks: Mapping[Path, PathLock] | None = None,
        shared: bool = False,
    ) -> None:
        """plan, budget: give the bytes of every tier and pool, and the directories on NVMe. meter: counts the
        bytes moved and the waits. others: bytes on the device that this process uses outside the budget.
        adopted: the slabs of a commit, which become the slabs of this run; None: new slabs. locks: directory
        -> its lock, for directories that the caller has locked already. shared: whether other processes read
        the host arena.
        """
        self.plan = plan
        self.meter = meter
        self._opened: list[Home] = []
        self._writes: deque[tuple[Home, InFlightRequest]] = deque()
        self.files = injected_files()
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as early:
            self.nvme: NvmeTier | None = None
            if plan.nvme_bytes:
                self.nvme = early.enter_context(self._open_nvme(budget, adopted, locks))
            self.host, self.device = self._open_memory(cleanup, shared=shared)
            if plan.device.type == "cuda":
                share = MemoryShare(plan.budgets[Tier.DEVICE], plan.device_tier_bytes)
                cleanup.enter_context(capped(plan.device, share, others=others))
            self.link = DeviceLink() if self.device.shares_host else open_link(plan.device)
            cleanup.callback(self.link.close)
            self.off = (*self.host.off, *self.link.off)
            """Facilities that this runtime does without, each with the reason, as text for users."""
            near = plan.home_bytes[Tier.DEVICE] + plan.mirror_bytes
            self._homes = {
                Tier.HOST: self.host.pool("homes", plan.home_bytes[Tier.HOST]),
                Tier.DEVICE: self.device.pool("device homes", near),
            }
            self.staging: Pool = self.host.pool("staging", plan.staging_bytes)
            self._second = self.host.pool("second places", plan.second_bytes)
            self._transit: Pool = self.host.pool("transit", plan.transit_bytes)
            self.bounce: torch.Tensor | None = self._transit.lease(plan.transit_buffer_bytes).residency()
            """A transit buffer for reads and writes of single parameters."""
            self.resident: Pool = self.device.pool("resident", plan.resident_bytes)
            self.visiting: Pool = self.device.pool("visiting", plan.visiting_bytes)
            """For the optimizer states of chunks that the device updates and whose home is in host RAM."""
            self.exchange = self._open_exchange()
            """None with one rank."""
            self.node_cache: Pool | None = (
                self.host.pool("node cache", plan.node_cache_bytes) if plan.node_cache_bytes else None
            )
            """Room for parameters of other nodes that this rank keeps for its node; None if it keeps none."""
            self.workspace, self.kernels = self._open_workspace()
            """Memory, uint8 (plan.workspace_bytes,) on the device, for updates that the device computes, and
            compiled kernels for them and for the squares of gradients. The memory is None if the plan has no
            such updates, the kernels if they are not used.
            """
            self.activations, self.scratch = self._open_residual(budget, locks, cleanup)
            """Host RAM and disk for residual pages; each is None if they do not go there."""
            self.landing, self.squares = self._open_landing(), self._open_squares()
            """Host RAM, uint8 (plan.landing_bytes,), to which gradients come from a device with its own
            memory before they are added; and float64 (plan.squares_bytes / 8,), for the sums of squares that
            such a device computes, and in the last 8 bytes for a copy of `DeviceTable.stop`. Each is None if
            the plan has none.
            """
            self.ledger = Ledger()
            """The pending commit, if there is one. It has no parts if commits are off."""
            self.durable: DurableIO | None = None
            """Reads and writes the slots of pages; None if no page has slots."""
            if self.nvme is not None:
                cleanup.push(early.pop_all())
                self.nvme.register(self.host)
            if plan.slab_layout is not None and plan.nvme_bytes:
                assert self.nvme is not None
                self.durable = DurableIO(
                    self.nvme, plan.durable_bytes, meter, self.ledger, commits=plan.commits
                )
            self._cleanup = cleanup.pop_all()

    def release(self) -> None:
        """Close all tiers. The caller has waited for all transfers."""
        self.bounce = None
        for home in self._opened:
            home.memory = home.second = None  # the model's Parameters know homes, and outlive the tiers
        self.workspace = self.kernels = self.landing = self.squares = None
        self._cleanup.close()

    def _open_memory(self, cleanup: contextlib.ExitStack, *, shared: bool) -> tuple[HostArena, DeviceTier]:
        """Open the tiers in memory, which `cleanup` closes. shared: as in the constructor."""
        plan = self.plan
        check_room(plan.device, plan.device_tier_bytes)  # RAM is page-locked next, which can take a minute
        host = cleanup.enter_context(HostArena(plan.arena_bytes, device=plan.device, shared=shared))
        device = open_device(plan.device, None if plan.unified else plan.device_tier_bytes, host)
        cleanup.callback(device.close)
        return host, device

    def _open_nvme(
        self, budget: Budget, adopted: VolumeRecord | None, locks: Mapping[Path, PathLock] | None
    ) -> NvmeTier:
        plan = self.plan
        paths: Mapping[str, int] = {os.fspath(path): size for path, size in budget.nvme_bytes.items()}
        if plan.residuals.disk and len(paths) > 1 and adopted is None:
            # Slabs of pages take whole stripes of what they are given, and scratch comes after them.
            scratch, total = nvme_budget_for(plan.residuals.disk, len(paths)), sum(paths.values())
            paths = {path: size - -(-scratch * size // total) for path, size in paths.items()}
        if plan.slab_directory is not None:
            # It has no budget, and slabs that are adopted there may be larger than the plan's.
            limit = plan.nvme_bytes if adopted is None else 1 << 62
            paths = {plan.slab_directory: limit}
        return NvmeTier(
            paths,
            plan.nvme_bytes,
            rank=plan.share.rank,
            adopt=adopted,
            files=self.files,
            shared=locks,
            verify=budget.verify or plan.commits,
            faults=injected_faults(),
        )

    @property
    def pools(self) -> dict[str, Pool]:
        """All pools of host and device memory, by the pool's name."""
        return {**self.host.pools, **self.device.pools}

    def home(self, tier: Tier, nbytes: int, *, durable: bool = False) -> Home:
        """Lease `nbytes` bytes in a tier, and return them as a new home for a page. The content of the bytes
        is undefined until it is written.

        durable: whether the page's parts have slots in the slabs; the caller then sets `Home.parts`. A
        durable home on NVMe leases nothing, because its bytes are in these slots. Raises BudgetError if the
        tier is full.
        """
        if tier is Tier.NVME and durable:
            assert self.durable is not None
            return Home(tier, nbytes, None, False, self.durable.lease)
        if tier is Tier.NVME:
            assert self.nvme is not None
            return Home(tier, nbytes, None, False, self.nvme.lease(nbytes))
        with self._homes[tier].lease(nbytes) as lease:
            memory = lease.residency()
        home = Home(tier, nbytes, memory, tier is Tier.HOST or self.device.shares_host)
        self._opened.append(home)
        return home

    def pair_up(self, home: Home, ranges: Sequence[tuple[int, int]]) -> None:
        """Give ranges (start, bytes) of a home in host RAM a second slot; see [Note: slots in RAM]."""
        if ranges:
            with self._second.lease(sum(nbytes for _, nbytes in ranges)) as lease:
                home.pair_up(lease.residency(), ranges)

    @property
    def transit_buffer_bytes(self) -> int:
        """Bytes of one transit buffer, through which pages pass between disk and device."""
        return self.plan.transit_buffer_bytes

    def try_transit_buffer(self) -> torch.Tensor | None:
        """Lease a transit buffer, and return it: uint8 (transit_buffer_bytes,) in host RAM. None if none is
        free now.

        The buffer returns to its pool when the last view of it is gone.
        """
        if self._transit.largest_free < self.transit_buffer_bytes:
            return None
        with self._transit.lease(self.transit_buffer_bytes) as lease:
            return lease.residency()

    def _open_exchange(self) -> ExchangePools | None:
        plan = self.plan
        if not plan.exchange_bytes:
            return None
        buffers = plan.exchange_bytes - plan.waiting_bytes
        half = buffers // plan.exchange_block_bytes // 2 * plan.exchange_block_bytes
        return ExchangePools(
            outgoing=self.host.pool("outgoing", half),
            incoming=self.host.pool("incoming", buffers - half),
            waiting=self.host.pool("waiting gradients", plan.waiting_bytes),
            waiting_there=self.device.pool("waiting gradients there", plan.waiting_there_bytes),
        )

    def _open_workspace(self) -> tuple[torch.Tensor | None, Kernels | None]:
        plan = self.plan
        if not plan.workspace_bytes:
            if plan.visiting_units:
                return None, Kernels(plan.device, plan.update_kinds)
            measures = plan.squares_bytes and not (self.link.direct or plan.no_updates_there)
            usable = measures and twin_flow.has_kernels(plan.device)
            return None, kernels_that_measure(plan.device) if usable else None
        kernels = Kernels(plan.device, plan.update_kinds)
        with self.device.pool("workspace", plan.workspace_bytes).lease(plan.workspace_bytes) as lease:
            return lease.residency(), kernels

    def _open_residual(
        self, budget: Budget, locks: Mapping[Path, PathLock] | None, cleanup: contextlib.ExitStack
    ) -> tuple[Pool | None, NvmeTier | None]:
        """Open the room for residual pages. cleanup: closes what is on disk. locks: see the constructor."""
        room, scratch = self.plan.residuals.room, None
        if room is None:
            return None, None
        if room.disk:
            locks = {**(locks or {}), **(self.nvme.locks if self.nvme is not None else {})}
            taken = Counter({slab.directory: slab.nbytes for slab in self.nvme.slabs} if self.nvme else {})
            scratch = NvmeTier(
                {path: max(0, size - taken[Path(path)]) for path, size in budget.nvme_bytes.items()},
                room.disk,
                rank=self.plan.share.rank,
                speeds=None if self.nvme is None else self.nvme.speeds,
                files=self.files,
                shared=locks,
                verify=budget.verify,
                faults=injected_faults(),
                scratch=True,
            )
            cleanup.callback(scratch.close)
            scratch.register(self.host)
        return self.host.pool("activations", room.ram), scratch

    def _open_landing(self) -> torch.Tensor | None:
        nbytes = self.plan.landing_bytes
        if not nbytes or self.link.direct:
            return None
        with self.host.pool("landing", nbytes).lease(nbytes) as lease:
            return lease.residency()

    def _open_squares(self) -> torch.Tensor | None:
        nbytes = self.plan.squares_bytes
        if not nbytes or self.link.direct:
            return None
        with self.host.pool("squares", nbytes).lease(nbytes) as lease:
            return lease.residency().view(torch.float64)

    def mirror(self, home: Home) -> torch.Tensor:
        """Copy a home in host RAM to new device memory, and return that memory, uint8 (nbytes,)."""
        with self._homes[Tier.DEVICE].lease(home.nbytes) as lease:
            memory = lease.residency()
        self.copy_up(memory, home.view(0, home.nbytes)).wait()  # the home may get bytes of other ranks next
        return memory

    def read(self, home: Home, offset: int, into: torch.Tensor, *, deadline: float | None = None) -> Transfer:
        """Begin to read bytes of a home into host memory, and return the transfer.

        offset: bytes from the home's start. into: contiguous uint8 host memory; its size is the number of
        bytes to read. deadline: time.monotonic() seconds, by default now; the disk serves requests with
        earlier deadlines first. Waits for writes in flight to the same bytes. Raises the error of a write
        that has lost the home. The transfer raises CorruptState if the disk has other bytes than were
        written, unless `Budget.verify` is off.
        """
        home.settle(offset, offset + into.nbytes, writing=False)
        if home.nvme_lease is not None:
            assert self.nvme is not None
            self.link.uses(User.HOST, into, writes=True, label="read")
            if durable := self._durable(home):
                transfer = durable.read(home, offset, into, deadline)
            else:
                transfer = self.nvme.read(
                    home.nvme_lease, into, offset=offset, deadline=deadline, describe=home.described(offset)
                )
                self.meter.moved(Edge.NVME_TO_HOST, into.nbytes, transfer)
            # A watcher: the home lists requests that have ended, and must not keep their memory.
            request = InFlightRequest(offset, offset + into.nbytes, False, watcher_of(transfer))
            home.in_flight.append(request)
        elif home.in_place:
            self.link.uses(User.HOST, into, writes=True, label="copied from home")
            for there, here in _side_by_side(home, offset, into):
                self.link.uses(User.HOST, there, writes=False, label="copied from home")
                here.copy_(there)
            transfer = ARRIVED
        else:
            after = [event for event in (self.link.record(), home.written) if event is not None]
            transfer = self.copy_down(into, home.view(offset, into.nbytes), after)
        return transfer

    def write(
        self,
        home: Home,
        offset: int,
        source: torch.Tensor,
        lost: Callable[[InfinityError], None] | None = None,
        *,
        spare: bool = False,
        outcome: Outcome | None = None,
    ) -> None:
        """Begin to write host memory to a home.

        Only writes to NVMe are still in flight when this call returns. If one fails, a later
        `finish_oldest_write`, `poll` or `settle`, or the next use of these bytes of the home, raises the
        error. offset: bytes from the home's start. source: contiguous uint8; it must not change until the
        write has ended. spare: whether the caller keeps a copy of the bytes. If it does not, a failed write
        loses the home: later uses of the home raise the error too. lost: function that is called with the
        error when the home is lost. outcome: the speculative update whose results these are, or None. They go
        beside the newest bytes of whole parts, which stay the home's bytes until `Part.confirm`; the home is
        on NVMe and its parts have slots.
        """
        transfer = self._begin_write(home, offset, source, lost, spare=spare, outcome=outcome)
        if home.nvme_lease is None:
            transfer.wait()  # else the lease of `source` might return while a copy to the device is under way

    def write_now(self, home: Home, offset: int, source: torch.Tensor, *, spare: bool = False) -> None:
        """Write host memory to a home and wait until it is written. Parameters: as in `write`.

        Raises StorageError if the write fails. Later calls do not raise the error again.
        """
        transfer = self._begin_write(home, offset, source, None, spare=spare)
        if home.nvme_lease is None:
            transfer.wait()
        else:
            self._finish_write(self._writes[-1])

    def _begin_write(
        self,
        home: Home,
        offset: int,
        source: torch.Tensor,
        lost: Callable[[InfinityError], None] | None,
        *,
        spare: bool,
        outcome: Outcome | None = None,
    ) -> Transfer:
        home.settle(offset, offset + source.nbytes, writing=True)
        self.link.uses(User.HOST, source, writes=False, label="written home")
        durable = self._durable(home)
        if home.nvme_lease is not None:
            assert self.nvme is not None
            transfer: Transfer
            if durable:
                transfer = durable.write(home, offset, source, tentative=outcome is not None)
            else:
                transfer = self.nvme.write(home.nvme_lease, source, offset=offset)
                self.meter.moved(Edge.HOST_TO_NVME, source.nbytes, transfer)
            request = InFlightRequest(offset, offset + source.nbytes, True, transfer, lost, spare, outcome)
            home.in_flight.append(request)
            self._writes.append((home, request))
            return transfer
        if home.in_place and durable:
            self.ledger.settle(home.parts.over(offset, offset + source.nbytes))
        home.withdraw(offset, offset + source.nbytes)
        if home.in_place:
            for there, here in _side_by_side(home, offset, source):
                self.link.uses(User.HOST, there, writes=True, label="written home")
                there.copy_(here)
            return ARRIVED
        if home.computed:
            self.link.follow_compute()
        return self.copy_up(home.view(offset, source.nbytes), source)

    def copy_up(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        last_return: int = 0,
        lane: Lane = Lane.URGENT,
        after: Event | None = None,
    ) -> Transfer:
        """Begin to copy host memory to device memory, and return the transfer.

        into: leased device memory. source: as many bytes of host memory. last_return: `Lease.last_return` of
        the lease of `into`. From this the link finds the kernels that used the same bytes before, and the
        copy waits for them; see `DeviceLink.to_device`, also for after. lane: which of the link's streams
        makes the copy.
        """
        started = time.perf_counter()
        transfer = self.link.to_device(into, source, last_return, lane, after)
        self.meter.copied(Edge.HOST_TO_DEVICE, source.nbytes, transfer, time.perf_counter() - started)
        return transfer

    def copy_from_device(self, into: torch.Tensor, source: torch.Tensor, after: Event | None) -> Transfer:
        """As `copy_up`, from memory of this device or of another one, whose writers the host has awaited."""
        return self.link.to_device(into, source, 0, after=after)

    def copy_on_device(self, into: torch.Tensor, home: Home, offset: int, last_return: int) -> Transfer:
        """Begin to copy bytes of a home in device memory to other device memory, and return the transfer.

        into, last_return: as for `copy_up`. offset: bytes from the home's start.
        """
        source = home.view(offset, into.nbytes)
        return self.link.to_device(into, source, last_return, Lane.PREFETCH, home.written)

    def copy_down(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        """Begin to copy device memory to host memory, and return the transfer.

        into: host memory. source: as many bytes of device memory. after: events (from
        `link.record`) for which the copy waits. By default the copy waits for all work that is queued on the
        compute stream at this call.
        """
        started = time.perf_counter()
        transfer = self.link.to_host(into, source, after)
        self.meter.copied(Edge.DEVICE_TO_HOST, source.nbytes, transfer, time.perf_counter() - started)
        return transfer

    def copy_all_down(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Begin several copies (into, source) of `copy_down` by one call, and return them as one transfer,
        which the caller keeps until it is done.
        """
        started = time.perf_counter()
        transfer = self.link.all_to_host(pairs)
        nbytes = sum([source.nbytes for _, source in pairs])
        self.meter.copied(Edge.DEVICE_TO_HOST, nbytes, transfer, time.perf_counter() - started)
        return transfer

    def copied_to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """Return `memory` itself if the CPU can use it, else a copy of it in ordinary RAM.

        memory: contiguous memory of the device. The copy is made after all work that is queued on the
        compute stream, and the call waits for the copy.
        """
        if self.link.direct:
            return memory
        self.link.uses(User.COMPUTE, memory, writes=True, label="edit")
        here = torch.empty(memory.shape, dtype=memory.dtype, device="cpu")
        self.copy_down(here, memory).wait()
        return here

    def patch(self, home: Home, offset: int, source: torch.Tensor) -> None:
        """Overwrite bytes of a home from byte `offset` of the home on, and wait until they are written.

        offset: need not be aligned. source: flat CPU tensor of any dtype, with the new bytes.
        """
        data = source.view(torch.uint8)
        for start, end in self._windows(offset, data.nbytes):
            piece = self._bounce_buffer(end - start)
            first, last = max(start, offset), min(end, offset + data.nbytes)
            if (first, last) != (start, end):
                self.read(home, start, piece).wait()
            piece[first - start : last - start].copy_(data[first - offset : last - offset])
            self.write_now(home, start, piece)
        if home.nvme_lease is not None and (durable := self._durable(home)):
            durable.patched(home, offset, data)

    def fetch(self, home: Home, offset: int, nbytes: int) -> torch.Tensor:
        """Read `nbytes` bytes of a home from byte `offset` of the home on, and return a copy in ordinary RAM.

        The copy is uint8 (nbytes,). Neither offset nor nbytes need be aligned.
        """
        copy = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for start, end in self._windows(offset, nbytes):
            piece = self._bounce_buffer(end - start)
            first, last = max(start, offset), min(end, offset + nbytes)
            self.read(home, start, piece).wait()
            self.link.uses(User.HOST, piece, writes=False, label="fetched")
            copy[first - offset : last - offset].copy_(piece[first - start : last - start])
        return copy

    def bring(self, home: Home, into: torch.Tensor, ranges: Iterable[HomeRange]) -> None:
        """Copy ranges of a parameter page from its home to memory where the model computes, and wait until
        they are there.

        into: leased memory, uint8 (bytes of the page,), that is not the home's own. The copy waits for all
        work that is queued on the compute stream.
        """
        self.link.follow_compute()
        for page_start, home_start, nbytes in ranges:
            for start, end in self._windows(home_start, nbytes):
                piece = self._bounce_buffer(end - start)
                self.read(home, start, piece).wait()
                self.copy_up(into[page_start:][start - home_start : end - home_start], piece).wait()

    def _durable(self, home: Home) -> DurableIO | None:
        """The object that reads and writes the slots of a home's page; None if the page has no slots."""
        return self.durable if home.parts else None

    def _bounce_buffer(self, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` bytes of the bounce buffer; `nbytes` is at most transit_buffer_bytes."""
        assert self.bounce is not None
        return self.bounce[:nbytes]

    def copy_to_disk(self, part: Part) -> None:
        """Copy a part at home in device memory to the slot on disk that no commit holds, and wait until it
        is there. Raises StorageError.

        The bytes go through the bounce buffer: one half is written while the other is filled.
        """
        assert self.durable is not None
        half = self.transit_buffer_bytes // 2 // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        buffer = self._bounce_buffer(2 * half)
        transfers: list[Transfer] = [ARRIVED, ARRIVED]
        checksums = np.zeros_like(part.checksums)
        try:
            for number, offset in enumerate(range(0, part.nbytes, half)):
                turn = number % 2
                transfers[turn].wait()
                piece = buffer[turn * half :][: min(half, part.nbytes - offset)]
                transfers[turn] = self.copy_down(piece, part.home.view(part.start + offset, piece.nbytes))
                transfers[turn].wait()
                self.link.uses(User.HOST, piece, writes=False, label="committed")
                transfers[turn] = self.durable.copy_out_piece(part, offset, piece, checksums)
        finally:
            Joined(transfers).wait()
        self.durable.copied_out(part, checksums)

    def settle_for_user(self, home: Home) -> None:
        """Wait until no flush and no write of the pending commit reads the memory of a page, so that user
        code may change the page there.
        """
        self.ledger.settle(home.parts)
        for request in [each for each in home.in_flight if each.writes]:
            home.finish(request)

    def writes_under_way(self) -> list[Transfer]:
        """The writes to durable homes on NVMe that have not been waited for."""
        return [watcher_of(request.transfer) for home, request in self._writes if home.parts]

    def finish_oldest_write(self) -> bool:
        """Wait for the oldest write in flight, and raise its error if it fails.

        Returns True, or False if no write is in flight.
        """
        if not self._writes:
            return False
        with self.meter.stalling(Edge.HOST_TO_NVME, Wait.ROOM):
            self._finish_write(self._writes[0])
        return True

    def poll(self) -> None:
        """Remove finished writes from the list of writes in flight, oldest first, without waiting.

        Raises the error of the first write that failed.
        """
        while self._writes and self._writes[0][1].transfer.done():
            self._finish_write(self._writes[0])

    def settle(self) -> None:
        """Wait until all writes in flight have ended. Then raise the first error, if any write failed."""
        failure: InfinityError | None = None
        while self._writes:
            try:
                self._finish_write(self._writes[0])
            except InfinityError as error:
                failure = failure or error.again()
        if failure is not None:
            raise failure.again()  # a variable that holds what is raised keeps the frames alive

    def close(self) -> None:
        """Wait for all writes in flight, ignoring their errors, and release all tiers."""
        try:
            with contextlib.suppress(InfinityError):
                self.settle()
        finally:  # closing the tiers waits for what is in flight, too
            self.release()

    def _finish_write(self, write: tuple[Home, InFlightRequest]) -> None:
        home, request = write
        try:
            home.finish(request)
        finally:
            self._writes.remove(write)

    def _windows(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, end) of a home that together cover [offset, offset + nbytes). Each consists of
        whole 4 KiB blocks and fits in the bounce buffer.
        """
        start = offset // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        end = round_up(offset + nbytes, PAGE_ALIGNMENT)
        while start < end:
            upto = min(end, start + self.transit_buffer_bytes)
            yield start, upto
            start = upto


def _side_by_side(
    home: Home, offset: int, memory: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the newest bytes of a home from `offset` on, each piece with the bytes of `memory` for it."""
    there = home.views(offset, memory.nbytes)
    return zip(there, memory.split([each.nbytes for each in there]), strict=True)
