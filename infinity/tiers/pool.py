"""Pools of leases: ranges of a memory tier whose bytes are lent, and come back.

[Note: a residency is a Storage]
A unit that becomes resident gets a `torch.Storage` of its own over leased bytes (`Lease.residency`). The
Storage's deleter gives the lease back, so the bytes stay taken for as long as any view of the Storage
lives: in an autograd context, in a user's variable, in another thread. No byte is lent twice at the same
time. A view that is kept too long shows as taken bytes of the pool, and never as wrong numbers in a tensor.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError

_CPU_KIND, _CUDA_KIND = 1, 2
"""DLPack's numbers for the device types kDLCPU and kDLCUDA."""


def adopt(address: int, nbytes: int, device: torch.device, owner: object) -> _tiers.Region:
    """Make a region over memory that other code, such as torch, has allocated.

    address: the address of the first byte. nbytes: bytes of the memory. device: where the memory lies, the
    CPU or a CUDA device with its index. owner: an object that keeps the memory allocated. The region keeps
    this object until the region's last user is gone.
    """
    kind = _CUDA_KIND if device.type == "cuda" else _CPU_KIND
    return _tiers.adopt(address, nbytes, device_kind=kind, device_index=device.index or 0, owner=owner)


def tensor_over(memory: _tiers.Region | _tiers.Lease) -> torch.Tensor:
    """Make a uint8 tensor of shape (nbytes,) over the bytes of a region or a lease.

    As long as the tensor's Storage lives, the region is not freed, and the pool gives the lease's bytes to no
    other lease, even if the lease is released meanwhile. Raises ValueError for a lease that was released
    before.
    """
    if torch.is_inference_mode_enabled():  # the tensor may outlive the mode and be saved for backward
        with torch.inference_mode(False):
            return tensor_over(memory)
    tensor: torch.Tensor = from_dlpack(memory.to_dlpack())
    return tensor


atexit.register(_tiers._leave)

_Answer = TypeVar("_Answer")

_LARGEST_REQUEST = 1 << 62
"""The most bytes that are asked of the native pool; a larger request is replaced by this number. The number
is beyond any address space, and far from overflowing 64 bits.
"""


@dataclass(frozen=True)
class PoolCounters:
    """Counters of a pool's leases and requests.

    Bytes are counted in whole granules. A granule is the unit in which the pool lends bytes, such as 4 KiB.
    """

    leased: int
    """Bytes on loan now."""
    peak: int
    """The most bytes that were on loan at one time."""
    leases: int
    """Number of leases that are on loan now."""
    granted: int
    """Number of leases handed out since the pool was made."""
    waits: int
    """Number of requests that had to wait for a lease to return."""
    refused: int
    """Number of requests that ended without a lease."""
    returns: int
    """Number of leases that have come back since the pool was made; see `Lease.last_return`."""


class Lease:
    """Bytes on loan from a pool. A context manager that gives the bytes back at its end.

    A lease does not know about streams. Work that was queued under an earlier lease of the same bytes (a
    kernel, or a copy with non_blocking=True) may still use the bytes. The holder of the lease must order
    its first write after that work. `last_return` helps to find that work.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _tiers.Lease) -> None:
        self._native = native

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of the pool's granule.

        For device memory, a device address.
        """
        return self._native.address

    @property
    def offset(self) -> int:
        """Bytes from the start of the tier's region to the lease's first byte."""
        return self._native.offset

    @property
    def nbytes(self) -> int:
        """Number of bytes in the lease, as requested."""
        return self._native.nbytes

    @property
    def last_return(self) -> int:
        """The number of the latest return of a lease of any of these bytes; 0 if none was leased before.

        The pool numbers the returns of leases 1, 2, 3, ... If free ranges were merged, the number is the
        latest of the merged range. Kernels that use the bytes under earlier leases were queued on the compute
        stream before `Pool.returns` reached this number. So an event that is recorded on this stream after
        that moment happens after these kernels.
        """
        return self._native.last_return

    def residency(self) -> torch.Tensor:
        """Make a uint8 tensor of shape (nbytes,) over the bytes, in a new Storage that keeps them on loan.

        The bytes return to the pool once this lease is released and all Storages made from it are gone.
        Raises ValueError after `release`.
        """
        return tensor_over(self._native)

    def release(self) -> None:
        """Release this object's hold on the bytes. A second call does nothing.

        The bytes return to the pool once all tensors made by `residency` are gone too.
        """
        self._native.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pool:
    """A contiguous range of `nbytes` bytes that is lent out in leases, never more than the range holds.

    Thread-safe. A pool is made by a tier's `pool` method. A lease gets the smallest free range that is
    large enough, and adjacent free ranges are merged. A pool whose leases all have one size therefore never
    fragments.
    """

    def __init__(self, name: str, native: _tiers.Pool) -> None:
        self.name = name
        self._native = native

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, a multiple of the granule."""
        return self._native.capacity

    @property
    def largest_free(self) -> int:
        """Bytes of the largest lease that would be granted now."""
        return self._asked(lambda: self._native.largest_free)

    @property
    def leased(self) -> int:
        """Bytes on loan now, counted in whole granules."""
        return self._asked(lambda: self._native.leased)

    @property
    def returns(self) -> int:
        """Number of leases that have come back since the pool was made; see `Lease.last_return`."""
        return self._asked(lambda: self._native.returns)

    @property
    def counters(self) -> PoolCounters:
        """A snapshot of all counters of the pool."""
        return self._asked(lambda: PoolCounters(**self._native.counters()))

    def lease(self, nbytes: int, *, timeout: float = 0.0) -> Lease:
        """Borrow `nbytes` bytes. Waits up to `timeout` seconds for other leases to return.

        Waiting requests are served in the order in which they came. The contents of the bytes are what
        their last holder left.

        Raises BudgetError where the bytes do not become free in time, and at once where the pool can never
        hold them. The error's `needed` is the least size of the whole pool, in bytes, with which the lease
        would have been granted now, or None where other requests were already waiting. Raises ConfigError
        for a negative size, a closed pool, or a process forked from the pool's process.
        """
        if nbytes < 0:
            raise ConfigError(f"A lease of {nbytes} bytes was asked for.", "Ask for zero bytes or more.")
        granted = self._asked(lambda: self._native.lease(min(nbytes, _LARGEST_REQUEST), timeout))
        if isinstance(granted, _tiers.Lease):
            return Lease(granted)
        if granted.reason == _tiers.Reason.CLOSED:
            raise ConfigError(f"The pool {self.name!r} is closed.", "Lease before the tier is closed.")
        cause = f"{format_size(nbytes)} were asked of the pool {self.name!r} of {format_size(self.nbytes)}, "
        if granted.reason == _tiers.Reason.QUEUED:
            raise BudgetError(
                cause + "and others were waiting before.", "Give a timeout, so that the request has its turn."
            )
        raise BudgetError(
            cause + f"of which {format_size(self.largest_free)} are free in one piece.",
            f"Release tensors that alias its pages, or give the pool {format_size(granted.needed)} "
            f"({granted.needed} bytes).",
            needed=granted.needed,
        )

    def close(self) -> None:
        """Grant no further lease. Leases that are out stay valid until they are released.

        Does nothing in a forked child.
        """
        if not self.forked:
            self._native.close()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that made the pool.

        In a forked process the pool's bytes are not mapped.
        """
        return self._native.forked

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        """Call `question`, which asks the native pool something, and return its answer.

        Raises ConfigError in a process forked from the pool's process.
        """
        try:
            return question()
        except ChildProcessError as error:
            raise ConfigError(
                f"The pool {self.name!r} belongs to the process that this one was forked from.",
                "Use the pool there, or start this process with the spawn method.",
            ) from error
