"""Pools of leases: how bytes of a memory tier are borrowed, and how they come back.

[Note: a residency is a Storage]
A unit that becomes resident gets a `torch.Storage` of its own over leased bytes (`Lease.residency`). The
Storage's deleter gives the lease back, so the bytes stay taken for as long as any view of them lives: in an
autograd context, in a user's variable, in another thread. Nothing is ever handed out twice, whoever forgot
to let go, and what is held too long shows as taken bytes of the pool, never as garbage in a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError


@dataclass(frozen=True)
class PoolCounters:
    """What a pool has done. Bytes are in whole granules."""

    leased: int
    """Bytes out now."""
    peak: int
    """The most bytes that were out at one time."""
    leases: int
    """Leases out now."""
    granted: int
    """Leases ever handed out."""
    waits: int
    """Requests that waited for another lease to return."""
    refused: int
    """Requests that ended without a lease."""


class Lease:
    """Bytes on loan from a pool: a context manager that returns them at its end.

    With CUDA memory a lease is stream-ordered as torch's own allocations are: work queued before the
    release may still use the bytes, so the next holder's first write must be ordered after that work.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _tiers.Lease) -> None:
        self._native = native

    @property
    def address(self) -> int:
        """Address of the first byte (on the device, for device memory); a multiple of the pool's granule."""
        return self._native.address

    @property
    def offset(self) -> int:
        """Bytes from the start of the tier's region."""
        return self._native.offset

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._native.nbytes

    @property
    def released(self) -> bool:
        """Whether `release` was called; storages made before may still hold the bytes."""
        return self._native.released

    def residency(self) -> torch.Tensor:
        """A uint8 tensor of shape (nbytes,) over the bytes, in a Storage of its own that shares the lease.

        The bytes return to the pool once this handle is released and every such Storage is gone.
        Raises ValueError after `release`.
        """
        tensor: torch.Tensor = from_dlpack(self._native.to_dlpack())
        return tensor

    def release(self) -> None:
        """Give up this handle's share. Calling it again does nothing."""
        self._native.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pool:
    """A hard budget of `nbytes` in one piece, lent out in leases. Made by a tier's `pool`; thread-safe.

    Best fit with neighbours merged: a pool whose leases all have one size never fragments.
    """

    def __init__(self, name: str, native: _tiers.Pool) -> None:
        self.name = name
        self._native = native

    @property
    def nbytes(self) -> int:
        """The budget in bytes: whole granules."""
        return self._native.capacity

    @property
    def granule(self) -> int:
        """Bytes that every lease's address is a multiple of, and its size is rounded up to."""
        return self._native.granule

    @property
    def largest_free(self) -> int:
        """The largest lease, in bytes, that would be granted now."""
        return self._native.largest_free

    @property
    def counters(self) -> PoolCounters:
        """Figures of now."""
        return PoolCounters(**self._native.counters())

    def lease(self, nbytes: int, *, timeout: float = 0.0) -> Lease:
        """Borrow `nbytes` bytes, waiting up to `timeout` seconds for others to return theirs.

        Requests that wait are served in their order. The contents are whatever the last holder left.
        Raises BudgetError (`needed`: the pool size that would do) where the bytes do not come free in
        time, at once where they never can, and ConfigError once the pool is closed.
        """
        if nbytes < 0:
            raise ConfigError(f"A lease of {nbytes} bytes was asked for.", "Ask for zero bytes or more.")
        native = self._native.lease(nbytes, timeout)
        if native is not None:
            return Lease(native)
        if self._native.closed:
            raise ConfigError(f"The pool {self.name!r} is closed.", "Lease before the tier is closed.")
        counters = self.counters
        needed = counters.leased + -(-max(nbytes, 1) // self.granule) * self.granule
        if nbytes > self.nbytes:
            needed = -(-nbytes // self.granule) * self.granule
        raise BudgetError(
            f"{format_size(nbytes)} were asked of the pool {self.name!r}: of {format_size(self.nbytes)}, "
            f"{format_size(counters.leased)} are lent, {format_size(self.largest_free)} free in one piece.",
            f"Let go of tensors that alias its pages, or give it {format_size(needed)} ({needed} bytes).",
            needed=needed,
        )

    def close(self) -> None:
        """Grant no further lease. Those out stay valid until they are let go."""
        self._native.close()
