"""The link between host RAM and a device: what copies both ways are asked of, and what they answer."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from infinity.tiers.driver import Event, has_driver

After = Event | Sequence[Event] | None
"""What a copy down comes after: see `DeviceLink.to_host`."""


class Lane(enum.Enum):
    """The streams up."""

    PREFETCH = "prefetch"
    """Pages, long before they are used as a rule."""
    URGENT = "urgent"
    """What is short and awaited: outcomes of updates. It has the higher priority and passes prefetches."""


class User(enum.Enum):
    """Whoever uses bytes besides copies."""

    COMPUTE = "compute"
    HOST = "host"


class Timing(Protocol):
    """When one transfer began and ended. It holds nothing of the transfer's memory."""

    def times(self) -> tuple[int, int] | None:
        """(began, ended), in nanoseconds of time.perf_counter_ns(); None while under way."""


class Transfer(Protocol):
    """Bytes under way. Whoever asked keeps it until it is done."""

    def done(self) -> bool:
        """Whether all bytes have arrived or failed. Never blocks."""

    def wait(self) -> object:
        """Block without the GIL until done. Raises the transfer's error (StorageError, DeviceError)."""

    @property
    def timing(self) -> Timing | None:
        """When it began and ended; None of a copy on a link that was not `timed`."""


class Arrived:
    """A transfer that ended before its call returned, from `began` to `ended`, and its timing."""

    def __init__(self, began: int = 0, ended: int = 0) -> None:
        self._times = (began, ended)

    @property
    def timing(self) -> Timing:
        return self

    def times(self) -> tuple[int, int]:
        return self._times

    def done(self) -> bool:
        return True

    def wait(self) -> object:
        return None


ARRIVED = Arrived()


class DeviceLink(Protocol):
    """Copies between host RAM and a device. Called under the runtime's lock, but for `to_host`."""

    direct: bool
    """Whether code on the CPU can use what is on the device."""
    checked: bool
    """Whether a checker listens to `uses`."""

    def to_device(
        self, into: torch.Tensor, source: torch.Tensor, last_return: int, lane: Lane = Lane.URGENT
    ) -> Transfer:
        """Copy host bytes up. Both contiguous, of equal bytes. `last_return`: of the lease over `into`, see
        [Note: streams and leases] in infinity/tiers/copy_streams.py; 0 for bytes that were never lent, or
        where `follow_compute` covers their last use."""

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        """Copy device bytes down, as they are after the events (see `record`), or without one as compute will
        have left them by all that is queued. Both contiguous, of equal bytes; `source` is kept until then.

        With events, any thread may call it, and wait for the transfer."""

    def record(self) -> Event | None:
        """The moment when compute has come to what is queued now; None where it has already."""

    def mark(self, returns: int) -> None:
        """Note that compute has by now queued all use of bytes returned up to the pool's `returns`th."""

    def fence(self, transfer: Transfer) -> None:
        """Order compute's further work after a transfer."""

    def follow_compute(self) -> None:
        """Order later copies up after all that compute has queued."""

    def drain(self) -> None:
        """Wait until no copy is under way, and `follow_compute`."""

    def uses(self, user: User, *memory: torch.Tensor, writes: bool, label: str = "") -> None:
        """Tell a checker that `user`'s next work uses these contiguous bytes. Nothing on a real device."""

    def timed(self) -> AbstractContextManager[None]:
        """Copies issued inside have a timing."""

    def close(self) -> None:
        """Wait until no copy is under way: the memory may go."""


class CpuLink:
    """Device and host are both RAM: a copy is a copy, done when it returns."""

    direct = True
    checked = False

    def to_device(
        self, into: torch.Tensor, source: torch.Tensor, last_return: int, lane: Lane = Lane.URGENT
    ) -> Transfer:
        return _copied(into, source)

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        return _copied(into, source)

    def record(self) -> Event | None:
        return None

    def mark(self, returns: int) -> None:
        return None

    def fence(self, transfer: Transfer) -> None:
        return None

    def follow_compute(self) -> None:
        return None

    def drain(self) -> None:
        return None

    def uses(self, user: User, *memory: torch.Tensor, writes: bool, label: str = "") -> None:
        return None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """All copies have a timing here."""
        yield

    def close(self) -> None:
        return None


def _copied(into: torch.Tensor, source: torch.Tensor) -> Arrived:
    began = time.perf_counter_ns()
    into.copy_(source)
    return Arrived(began, time.perf_counter_ns())


def is_direct(device: torch.device) -> bool:
    """What `direct` will be of the link to a device."""
    return not has_driver(device)
