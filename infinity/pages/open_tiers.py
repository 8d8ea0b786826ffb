"""Open tiers: the tiers of one runtime, opened with the sizes of its plan, and their pools of memory.

The pool `staging` has the chunks that updates and gradients work on; infinity/optim/scheduler.py gives
its bytes out. The pool `transit` has the pieces of pages that are on their way between disk and device. A
lease returns to its pool when the last view of its bytes is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from infinity.aio import Faults, wait_for_dropped
from infinity.config import Budget
from infinity.device_update.kernels import Kernels, UpdateKind, kinds_of
from infinity.formats.moments import DTYPES
from infinity.pages.durable_io import DurableIO
from infinity.pages.home import Home
from infinity.pages.ledger import Ledger
from infinity.planning.plan import Plan
from infinity.system.disk_files import DiskFiles, Observer
from infinity.telemetry.meter import Meter
from infinity.tiers import HostArena, NvmeTier, Pool, Tier, open_device
from infinity.tiers.cap import MemoryShare, capped
from infinity.tiers.copy_streams import open_link
from infinity.tiers.link import CpuLink, DeviceLink
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab_header import SLAB_HEADER_BYTES
from infinity.tiers.volume_record import VolumeRecord

_injection = threading.local()


@contextlib.contextmanager
def injected(faults: Faults, observer: Observer | None = None) -> Iterator[Faults]:
    """For tests: inject errors and delays into the NVMe I/O of runtimes.

    It acts on the runtimes that this thread makes inside the `with` statement, as long as they live. faults:
    says what to inject; it is also yielded. observer: is told of the operations on all other files.
    """
    before = getattr(_injection, "faults", None), getattr(_injection, "observer", None)
    _injection.faults, _injection.observer = faults, observer
    try:
        yield faults
    finally:
        _injection.faults, _injection.observer = before


def injected_files() -> DiskFiles:
    """The operations on files for a runtime that this thread makes now; see `injected`."""
    return DiskFiles(getattr(_injection, "observer", None))


class OpenTiers:
    """The tiers of one runtime and their pools. `release` gives all of them back.

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
        spared: Collection[str] = (),
    ) -> None:
        """plan, budget: give the bytes of every tier and pool, and the directories on NVMe. meter: counts the
        bytes moved and the waits. others: bytes on the device that this process uses outside the budget.
        adopted: the slabs of a commit, which become the slabs of this run; None: new slabs. locks: of
        directories that the caller has locked, which the NVMe tier shares. spared: UUIDs of slabs that stay
        in the directories, whatever their headers say.
        """
        self.plan = plan
        self.meter = meter
        self._opened: list[Home] = []
        with contextlib.ExitStack() as cleanup:
            self.host = cleanup.enter_context(HostArena(plan.arena_bytes, device=plan.device))
            self.device = open_device(plan.device, None if plan.unified else plan.device_bytes, self.host)
            cleanup.callback(self.device.close)
            if plan.device.type == "cuda":
                share = MemoryShare(plan.budgets[Tier.DEVICE], plan.device_bytes)
                cleanup.enter_context(capped(plan.device, share, others=others))
            self.link: DeviceLink = CpuLink() if self.device.shares_host else open_link(plan.device)
            cleanup.callback(self.link.close)
            self._homes = {Tier.HOST: self.host.pool("homes", plan.home_bytes[Tier.HOST])}
            near = plan.home_bytes[Tier.DEVICE] + plan.mirror_bytes
            self._homes[Tier.DEVICE] = self.device.pool("device homes", near)
            self.staging: Pool = self.host.pool("staging", plan.staging_bytes)
            self._transit: Pool = self.host.pool("transit", plan.transit_bytes)
            with self._transit.lease(plan.transit_buffer_bytes) as lease:
                self.bounce: torch.Tensor | None = lease.residency()
            """A transit buffer for reads and writes of single parameters."""
            self.resident: Pool = self.device.pool("resident", plan.resident_bytes)
            self.exchange: tuple[Pool, Pool] | None = None
            """Buffers for bytes that go to other ranks, and for those that come; None with one rank."""
            if plan.exchange_bytes:
                buffers = plan.exchange_bytes - plan.waiting_bytes
                half = buffers // plan.exchange_block_bytes // 2 * plan.exchange_block_bytes
                self.exchange = self.host.pool("outgoing", half), self.host.pool("incoming", buffers - half)
            self.node_cache: Pool | None = None
            """Room for parameters of other nodes that this rank keeps for its node; None if it keeps none."""
            if plan.node_cache_bytes:
                self.node_cache = self.host.pool("node cache", plan.node_cache_bytes)
            self.workspace, self.kernels = self._open_workspace()
            """Memory, uint8 (plan.workspace_bytes,) on the device, and compiled kernels, for updates that
            the device computes. Both are None if the plan has no such updates.
            """
            self.ring, self.landing = self._open_ring()
            """The buffers of the gradient ring, on the device and in host RAM, each uint8
            (plan.ring_bytes,). Both are None if the plan has no ring.
            """
            self.nvme: NvmeTier | None = None
            self.ledger = Ledger()
            """The pending commit, if there is one. It has no parts if commits are off."""
            self.durable: DurableIO | None = None
            """Reads and writes the slots of durable pages; None if commits are off."""
            self.files = injected_files()
            if plan.nvme_bytes:
                self.nvme = cleanup.enter_context(self._open_nvme(budget, adopted, locks, spared))
                self.nvme.register(self.host)
            if plan.commits:
                assert self.nvme is not None
                self.durable = DurableIO(self.nvme, plan.durable_bytes, meter, self.ledger)
            self._cleanup = cleanup.pop_all()

    def release(self) -> None:
        """Close all tiers. The caller has waited for all transfers."""
        self.bounce = None
        for home in self._opened:
            home.memory = None  # the model's Parameters know their homes, and outlive the tiers
        self.workspace = self.kernels = self.ring = self.landing = None
        self._cleanup.close()

    def _open_nvme(
        self,
        budget: Budget,
        adopted: VolumeRecord | None,
        locks: Mapping[Path, PathLock] | None,
        spared: Collection[str],
    ) -> NvmeTier:
        plan = self.plan
        paths: Mapping[str, int] = {os.fspath(path): size for path, size in budget.nvme_bytes.items()}
        if plan.slab_directory is not None:
            # It has no budget, and slabs that are adopted there may be larger than the plan's.
            limit = plan.nvme_bytes + SLAB_HEADER_BYTES if adopted is None else 1 << 62
            paths = {plan.slab_directory: limit}
        return NvmeTier(
            paths,
            plan.nvme_bytes,
            rank=plan.share.rank,
            durable=plan.commits,
            adopt=adopted,
            files=self.files,
            shared=locks,
            spared=spared,
            verify=budget.verify or plan.commits,
            faults=getattr(_injection, "faults", None),
        )

    @property
    def pools(self) -> dict[str, Pool]:
        """All pools of host and device memory, by the pool's name."""
        return {**self.host.pools, **self.device.pools}

    def home(self, tier: Tier, nbytes: int, *, durable: bool = False) -> Home:
        """Lease `nbytes` bytes in a tier, and return them as a new home for a page. The content of the bytes
        is undefined until it is written.

        durable: whether the page has slots in the slabs, of its parts, which the caller sets. A
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
            wait_for_dropped()  # Ctrl-C may have dropped a read that holds a buffer
        if self._transit.largest_free < self.transit_buffer_bytes:
            return None
        with self._transit.lease(self.transit_buffer_bytes) as lease:
            return lease.residency()

    def _open_workspace(self) -> tuple[torch.Tensor | None, Kernels | None]:
        plan = self.plan
        if not plan.workspace_bytes:
            return None, None
        kernels = Kernels(plan.device, _kinds(plan))
        with self.device.pool("workspace", plan.workspace_bytes).lease(plan.workspace_bytes) as lease:
            return lease.residency(), kernels

    def _open_ring(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        nbytes = self.plan.ring_bytes
        if not nbytes or self.link.direct:
            return None, None
        pools = self.device.pool("ring", nbytes), self.host.pool("landing", nbytes)
        with pools[0].lease(nbytes) as ring, pools[1].lease(nbytes) as landing:
            return ring.residency(), landing.residency()


def _kinds(plan: Plan) -> set[UpdateKind]:
    """Return the kinds of kernels that must be compiled for the plan's updates on the device.

    They follow from the plan's optimizer and the dtypes of parameters, gradients and moments.
    """
    assert plan.rule is not None
    moments = DTYPES[plan.rule.states] if plan.rule.moments else torch.float32
    regions = {
        layout.regions[chunk.region].dtype
        for layout in (plan.layout.units[unit] for unit in plan.updated_on_device)
        for chunk in layout.chunks
    }
    found: set[UpdateKind] = set()
    for dtype in regions:
        found |= kinds_of(plan.rule.name, plan.gradient_dtype(dtype), dtype, moments)
    return found
