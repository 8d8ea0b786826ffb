"""Residual room: the memory that residual pages leave for, in a runtime and in a step without data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from infinity import _tiers
from infinity.activations import autograd_hooks
from infinity.config import format_size, round_up
from infinity.errors import BudgetError
from infinity.pages.health import Health
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge
from infinity.tiers import PAGE_ALIGNMENT, NvmeTier, Pool
from infinity.tiers.link import ARRIVED, Transfer, User
from infinity.tiers.nvme import NvmeLease


class ResidualRoom:
    """The pool "activations" of host RAM, the scratch slabs, and the link to the device, of one runtime.

    Implements the protocol infinity.activations.residual_pages.Room.
    """

    def __init__(self, store: Store, pool: Pool, scratch: NvmeTier | None, health: Health) -> None:
        """scratch: an NVMe tier whose bytes no commit needs; None: pages do not leave RAM. health: raises an
        error once the runtime is closed.
        """
        self._health = health
        self._store = store
        self._pool = pool
        self._scratch = scratch
        self.device = store.plan.device
        self.in_place = store.device.shares_host
        self.waits = not store.link.direct
        self.has_disk = scratch is not None

    def free(self) -> int:
        return self._pool.nbytes - self._pool.leased

    def lease(self, nbytes: int) -> torch.Tensor | None:
        self._health.check()
        whole = round_up(nbytes, PAGE_ALIGNMENT)  # so that the disk needs no copy
        if self._pool.largest_free < whole:
            return None
        with self._pool.lease(whole) as lease:
            return lease.residency()[:nbytes]

    def down(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        if self.in_place:
            into.copy_(source)
            return ARRIVED
        self._store.link.uses(User.COMPUTE, source, writes=False, label="saved")
        return self._store.copy_down(into, source)

    def let_go(self, transfer: Transfer) -> None:
        self._store.link.let_go(transfer)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def up(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        # Kernels that are queued may use what torch's allocator has given out again.
        return self._store.copy_up(into, source, after=self._store.link.record())

    def write(self, source: torch.Tensor) -> tuple[NvmeLease, Transfer]:
        assert self._scratch is not None
        whole = _whole(source)
        try:
            place = self._scratch.lease(whole.nbytes)
        except BudgetError:
            raise self.shortage(source.nbytes) from None
        self._store.link.uses(User.HOST, whole, writes=False, label="written to scratch")
        transfer = self._scratch.write(place, whole)
        self._store.meter.moved(Edge.HOST_TO_NVME, whole.nbytes, transfer)
        return place, transfer

    def read(self, place: object, into: torch.Tensor) -> Transfer:
        assert self._scratch is not None and isinstance(place, NvmeLease)
        whole = _whole(into)
        self._store.link.uses(User.HOST, whole, writes=True, label="read from scratch")
        transfer = self._scratch.read(place, whole)
        self._store.meter.moved(Edge.NVME_TO_HOST, whole.nbytes, transfer)
        return transfer

    def free_left(self) -> None:
        autograd_hooks.drop_left_tasks()
        # The frames of an exception that passed through an ExitStack form a cycle with the exception.
        gc.collect()

    def shortage(self, nbytes: int) -> BudgetError:
        disk = 0 if self._scratch is None else self._scratch.budget
        return _shortage(nbytes, self._pool.nbytes, disk)


class FakeRoom:
    """The room of a step without data: what fits and what leaves is as in a runtime, and nothing is copied.

    Implements the protocol infinity.activations.residual_pages.Room.
    """

    def __init__(
        self,
        ram_bytes: int,
        disk_bytes: int,
        *,
        device: torch.device,
        in_place: bool,
        waits: bool,
        empty: Callable[[int], torch.Tensor],
        in_ram: Callable[[int], torch.Tensor],
    ) -> None:
        """empty: makes memory where the model computes, uint8. in_ram: makes memory in leased RAM, which
        operations do not allocate.
        """
        self.device = device
        self.in_place, self.waits, self.has_disk = in_place, waits, disk_bytes > 0
        self.empty = empty
        self._in_ram = in_ram
        self._ram = _tiers.SpanAllocator(ram_bytes, PAGE_ALIGNMENT)
        self._disk = _tiers.SpanAllocator(disk_bytes, PAGE_ALIGNMENT)
        self.peak = 0
        """Bytes of RAM up to the end of the last that were lent: more than were lent at one time, if larger
        pages than the free ones followed. So many are enough for the step (csrc/tiers/span_allocator.hpp).
        `disk_peak` are those of disk.
        """
        self.disk_peak = 0
        self.largest = 0
        """Bytes of the largest page that has left."""
        self.short: BudgetError | None = None
        """The error of the first page that found no room; None: there was none."""

    def free(self) -> int:
        return self._ram.capacity - self._ram.used

    def lease(self, nbytes: int) -> torch.Tensor | None:
        whole = round_up(nbytes, PAGE_ALIGNMENT)
        offset = self._ram.take(whole)
        if offset is None:
            return None
        self.peak, self.largest = max(self.peak, offset + whole), max(self.largest, nbytes)
        memory = self._in_ram(nbytes)
        _return_at_end(memory.untyped_storage(), self._ram, offset, whole)
        return memory

    def down(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        return ARRIVED

    def let_go(self, transfer: Transfer) -> None:
        pass

    def up(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        return ARRIVED

    def write(self, source: torch.Tensor) -> tuple[object, Transfer]:
        whole = round_up(source.nbytes, PAGE_ALIGNMENT)
        offset = self._disk.take(whole)
        if offset is None:
            raise self.shortage(source.nbytes)
        self.disk_peak = max(self.disk_peak, offset + whole)
        place = _Place()
        _return_at_end(place, self._disk, offset, whole)
        return place, ARRIVED

    def read(self, place: object, into: torch.Tensor) -> Transfer:
        return ARRIVED

    def free_left(self) -> None:
        pass

    def shortage(self, nbytes: int) -> BudgetError:
        found = _shortage(nbytes, self._ram.capacity, self._disk.capacity)
        self.short = self.short or found
        return found.again()  # an error that was raised keeps frames alive


class _Place:
    """Bytes on the disk of a step without data."""


def _return_at_end(thing: object, spans: _tiers.SpanAllocator, offset: int, nbytes: int) -> None:
    weakref.finalize(thing, spans.give_back, offset, nbytes).atexit = False


def _whole(memory: torch.Tensor) -> torch.Tensor:
    """All bytes of the lease whose first bytes are `memory`."""
    return memory.as_strided((round_up(memory.nbytes, PAGE_ALIGNMENT),), (1,))


def _shortage(nbytes: int, ram: int, disk: int) -> BudgetError:
    there = f"{format_size(ram)} of host RAM" + f" and {format_size(disk)} of disk" * bool(disk)
    return BudgetError(
        f"Saved activations of {format_size(nbytes)} have to leave the memory that computes, and the "
        f"{there} that the plan has for them are full.",
        "Let go of the results of earlier forwards that had no backward. Or give infinity.offload larger "
        "example_inputs, so that the plan has room for such a step, or a smaller batch or shorter sequences"
        + ("." if disk else ", or add an nvme budget, to which activations can go."),
    )
