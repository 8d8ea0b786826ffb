"""Pools of leases: how bytes of a memory tier are borrowed, and how they come back.

[Note: a residency is a Storage]
A unit that becomes resident gets a `torch.Storage` of its own over leased bytes (`Lease.residency`). The
Storage's deleter gives the lease back, so the bytes stay taken for as long as any view of them lives: in an
autograd context, in a user's variable, in another thread. No byte is ever lent twice at a time. A view that
is kept too long shows as taken bytes of the pool, never as garbage in a tensor.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import torch

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.tiers.region import tensor_over

atexit.register(_tiers._leave)

_Answer = TypeVar("_Answer")

_LARGEST_REQUEST = 1 << 62
"""Bytes beyond any address space, and far from the overflow of 64 bits; larger requests count as this."""


@dataclass(frozen=True)
class PoolCounters:
    """Counts of a pool's leases and requests. Bytes are in whole granules."""

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
    returns: int
    """Leases that have come back, ever; see `Lease.last_return`."""


class Lease:
    """Bytes on loan from a pool: a context manager that returns them at its end.

    A lease knows nothing of streams. Work that was queued before the lease came back (a kernel, a copy with
    non_blocking=True from or to pinned host memory) may still use the bytes, so the next holder orders its
    first write after that work: `last_return` says when the bytes came back.
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
    def last_return(self) -> int:
        """The pool's count of returns when any of these bytes last came back; 0 if they never were lent.

        An event recorded on the device when `PoolCounters.returns` was at least this covers all earlier
        use of the bytes.
        """
        return self._native.last_return

    def residency(self) -> torch.Tensor:
        """A uint8 tensor of shape (nbytes,) over the bytes, in a Storage of its own that shares the lease.

        The bytes return to the pool once this handle is released and every such Storage is gone.
        Raises ValueError after `release`.
        """
        return tensor_over(self._native)

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

    A lease gets the smallest free range that holds it, and free neighbours are merged: a pool whose leases
    all have one size never fragments.
    """

    def __init__(self, name: str, native: _tiers.Pool) -> None:
        self.name = name
        self._native = native

    @property
    def nbytes(self) -> int:
        """The budget in bytes: whole granules."""
        return self._native.capacity

    @property
    def largest_free(self) -> int:
        """The largest lease, in bytes, that would be granted now."""
        return self._asked(lambda: self._native.largest_free)

    @property
    def leased(self) -> int:
        """Bytes out now; see `PoolCounters`."""
        return self._asked(lambda: self._native.leased)

    @property
    def returns(self) -> int:
        """Leases that have come back, ever; see `Lease.last_return`."""
        return self._asked(lambda: self._native.returns)

    @property
    def counters(self) -> PoolCounters:
        """All counters as they are now."""
        return self._asked(lambda: PoolCounters(**self._native.counters()))

    def lease(self, nbytes: int, *, timeout: float = 0.0) -> Lease:
        """Borrow `nbytes` bytes, waiting up to `timeout` seconds for others to return theirs.

        Requests that wait are served in their order. The contents are whatever the last holder left.
        Raises BudgetError (`needed`: the smallest pool that would have had the room) where the bytes do not
        come free in time, at once where they never can; ConfigError for a negative size, a closed pool, or
        a process forked from the pool's.
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
            f"Let go of tensors that alias its pages, or give it {format_size(granted.needed)} "
            f"({granted.needed} bytes).",
            needed=granted.needed,
        )

    def close(self) -> None:
        """Grant no further lease. Those out stay valid until they are let go. In a forked child: nothing."""
        if not self.forked:
            self._native.close()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the pool: its bytes are not mapped here."""
        return self._native.forked

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        """The native pool's answer. Raises ConfigError in a process forked from the pool's."""
        try:
            return question()
        except ChildProcessError as error:
            raise ConfigError(
                f"The pool {self.name!r} belongs to the process that this one was forked from.",
                "Use it there, or start this process with the spawn method.",
            ) from error
