"""The link between host RAM and a device: the interface for copies both ways, and for those under way."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from infinity.tiers.driver import Event, has_driver

After = Event | Sequence[Event] | None
"""The events that a copy down comes after; see `DeviceLink.to_host`."""


class Lane(enum.Enum):
    """The streams for copies up."""

    PREFETCH = "prefetch"
    """Pages, as a rule long before they are used."""
    URGENT = "urgent"
    """Short copies that somebody waits for: results of updates. They have priority over prefetches."""


class User(enum.Enum):
    """Users of bytes other than copies."""

    COMPUTE = "compute"
    HOST = "host"


class Timing(Protocol):
    """The begin and the end of one transfer, without its memory."""

    def times(self) -> tuple[int, int] | None:
        """(began, ended), in nanoseconds of time.perf_counter_ns(); None while under way."""


class Transfer(Protocol):
    """A copy or a request under way. The caller keeps this object until it is done."""

    def done(self) -> bool:
        """Whether all bytes have arrived or failed. Never blocks."""

    def wait(self) -> object:
        """Block without the GIL until done. Raises the transfer's error (StorageError, DeviceError)."""

    @property
    def timing(self) -> Timing | None:
        """The transfer's begin and end; None for a copy on a link that was not `timed`."""


class Arrived:
    """A transfer that ended before its call returned, and its timing.

    began, ended: nanoseconds of time.perf_counter_ns().
    """

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
    """Whether code on the CPU can use the device's memory."""
    checked: bool
    """Whether a checker listens to `uses`."""

    def to_device(
        self, into: torch.Tensor, source: torch.Tensor, last_return: int, lane: Lane = Lane.URGENT
    ) -> Transfer:
        """Copy host bytes to the device. Both tensors are contiguous and have equally many bytes.

        last_return: of the lease over `into`, see [Note: streams and leases] in
        infinity/tiers/copy_streams.py; 0 for bytes that were never lent, or whose last use comes before a
        `follow_compute`.
        """

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        """Copy device bytes to the host. Both tensors are contiguous and have equally many bytes.

        after: events (see `record`) that the copy comes after; None: after all that compute has queued.
        `source` is kept until the copy is done. With events, any thread may call this and wait for the copy.
        """

    def record(self) -> Event | None:
        """The event at which compute has done all that is queued now; None where it has done so already."""

    def mark(self, returns: int) -> None:
        """Note that all use of bytes that came back by the `returns`th return is queued on compute by now."""

    def fence(self, transfer: Transfer) -> None:
        """Order compute's further work after a transfer."""

    def follow_compute(self) -> None:
        """Order later copies up after all that compute has queued."""

    def drain(self) -> None:
        """Wait until no copy is under way, and `follow_compute`."""

    def uses(self, user: User, *memory: torch.Tensor, writes: bool, label: str = "") -> None:
        """Tell a checker that `user`'s next work uses these contiguous bytes. Real devices have none."""

    def timed(self) -> AbstractContextManager[None]:
        """A context in which copies have a timing."""

    def close(self) -> None:
        """Wait until no copy is under way: the memory may go."""


class CpuLink:
    """The link where device and host are both RAM: a copy is done when its call returns."""

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
        """A context that changes nothing: every copy on this link has a timing."""
        yield

    def close(self) -> None:
        return None


def _copied(into: torch.Tensor, source: torch.Tensor) -> Arrived:
    began = time.perf_counter_ns()
    into.copy_(source)
    return Arrived(began, time.perf_counter_ns())


def is_direct(device: torch.device) -> bool:
    """Whether code on the CPU can use the device's memory; `direct` of a link to it."""
    return not has_driver(device)
