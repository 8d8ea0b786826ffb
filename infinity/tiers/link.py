"""Link: the protocols of copies between host RAM and a device, and of transfers under way."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from infinity.aio import Future
from infinity.errors import InfinityError
from infinity.tiers.driver import CopiesAround, Event, has_driver

After = Event | Sequence[Event] | None
"""The type of `after` in `DeviceLink.to_host`: one event, several events or None, after which a copy runs."""


class Lane(enum.Enum):
    """The two CUDA streams for copies from the host to the device."""

    PREFETCH = "prefetch"
    """The stream for copies of pages, which usually start long before their pages are used."""
    URGENT = "urgent"
    """The stream for short copies that other work waits for, such as results of updates. It has priority
    over PREFETCH.
    """


class User(enum.Enum):
    """The users of memory other than copies: kernels on the compute stream, and code on the host."""

    COMPUTE = "compute"
    HOST = "host"


class Timing(Protocol):
    """The times at which one transfer began and ended.

    This object does not keep the transfer's memory alive.
    """

    def times(self) -> tuple[int, int] | None:
        """(began, ended) in nanoseconds of time.perf_counter_ns(); None while the transfer is under way."""


class Transfer(Protocol):
    """A copy or an I/O request under way. The caller keeps this object until the transfer is done."""

    def done(self) -> bool:
        """Whether the transfer has ended, successfully or with an error. Never blocks."""

    def wait(self) -> object:
        """Block without the GIL until the transfer has ended.

        Raises the transfer's error (StorageError, DeviceError).
        """

    @property
    def timing(self) -> Timing | None:
        """The times at which the transfer began and ended; None for a copy that was not timed.

        See `DeviceLink.timed`.
        """


class Arrived:
    """A transfer that was over as soon as it was requested. It is its own `timing`.

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


class Joined:
    """Several transfers that are used as one."""

    def __init__(self, transfers: Sequence[Transfer], then: Callable[[], None] | None = None) -> None:
        """then: called once, by the first `wait` for which all transfers have succeeded. If `then` raises an
        InfinityError, the next `wait` calls it again.
        """
        self._transfers = transfers
        self._then = then

    def done(self) -> bool:
        return all([each.done() for each in self._transfers])

    def wait(self) -> object:
        """Wait for all transfers. Then raise the first error, if a transfer failed; else call `then`, whose
        errors are raised.
        """
        failure: InfinityError | None = None
        for each in self._transfers:
            try:
                each.wait()
            except InfinityError as error:
                failure = failure or error.again()
        if failure is not None:
            raise failure.again()  # a variable that holds what is raised keeps the frames alive
        if self._then is not None:
            self._then()
            self._then = None
        return None

    @property
    def timing(self) -> Timing | None:
        """Always None, because the transfers began and ended at different times."""
        return None

    def watcher(self) -> Joined:
        """Return another object for the same transfers, which does not keep their memory alive."""
        return Joined([watcher_of(each) for each in self._transfers])


def watcher_of(transfer: Transfer) -> Transfer:
    """Return a transfer that ends with `transfer` and its error, but does not keep its memory alive.

    transfer: an I/O request, or several of them.
    """
    return transfer.watcher() if isinstance(transfer, (Joined, Future)) else transfer


class JobCopies(Protocol):
    """The copies around jobs of the update threads; see `DeviceLink.around_jobs`."""

    @property
    def hooks(self) -> CopiesAround | None:
        """What the jobs are submitted with; None: nothing."""

    def check(self) -> None:
        """Once the jobs are done, raise DeviceError if a job was not done because what it reads has not come,
        or if a copy could not be queued.
        """

    def begun(self) -> Transfer:
        """Once the jobs are done, return the copies to the device, which may still be under way, as one."""


class CopiesAfterJobs:
    """The copies of what jobs have written, on a link where copies end with their call."""

    hooks = None

    def __init__(
        self, link: DeviceLink, into: torch.Tensor | None, ups: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        self._link = link
        self._into = into
        self._ups = ups

    def check(self) -> None:
        pass

    def begun(self) -> Transfer:
        copy: Transfer = ARRIVED
        if self._into is not None:
            for start, source in self._ups:
                copy = self._link.to_device(self._into[start : start + source.nbytes], source, 0)
        return copy


class DeviceLink:
    """Copies between host RAM and a device. In this class both are RAM, and a copy ends with its call.

    `CopyStreams` extends this class for devices with memory of their own. All methods except `to_host` are
    called under the runtime's lock.
    """

    direct = True
    """Whether code on the CPU can access the device's memory."""
    off: Sequence[str] = ()
    """Facilities of the driver that the link does without, each with the reason, as text for users."""
    checked = False
    """Whether the driver checks the order of memory accesses, as the driver of the tests does.

    `uses` reports accesses to this checker.
    """

    def to_device(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        last_return: int,
        lane: Lane = Lane.URGENT,
        after: Event | None = None,
    ) -> Transfer:
        """Begin to copy host bytes to the device, and return the copy, which may still be under way.

        Both tensors are contiguous and have the same number of bytes. into: device memory. source: host
        memory. last_return: `Lease.last_return` of the lease over `into`. It tells the link which kernels the
        copy must wait for; see [Note: streams and leases] in infinity/tiers/copy_streams.py. Give 0 for bytes
        that were never leased, and for bytes whose last use was queued before the latest `follow_compute`.
        lane: the stream on which the copy runs. after: a further event for which it waits: after kernels that
        have used `into`, or written `source` if that is device memory, too.
        """
        return _copied(into, source)

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        """Begin to copy device bytes to the host, and return the copy, which may still be under way.

        Both tensors are contiguous and have the same number of bytes. into: host memory. source: device
        memory, kept alive until the copy is done. after: the events (see `record`) after which the copy runs.
        None means after all work that the compute stream has queued. With events, any thread may call this
        method and wait for the copy.
        """
        return _copied(into, source)

    def all_to_host(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: After = None
    ) -> Transfer:
        """Begin several copies (into, source) of `to_host`, and return them as one transfer.

        The caller keeps the transfer until it is done, and thereby the memory.
        """
        copy: Transfer = ARRIVED
        for into, source in pairs:
            copy = self.to_host(into, source, after)
        return copy

    def around_jobs(
        self,
        downs: Sequence[Transfer | None],
        into: torch.Tensor | None,
        ups: Sequence[tuple[int, torch.Tensor]],
        after: Event | None,
        *,
        uses: Sequence[Iterable[tuple[torch.Tensor, bool]]] = (),
    ) -> JobCopies:
        """Describe the copies around jobs of the update threads, which take care of them by themselves.

        downs: for each job, a copy of `to_host` before which it must not begin; None: it need not wait. into:
        device memory, uint8; None: nothing is copied to it. ups: for each job, the start in `into` to which
        its last thread begins to copy, on `Lane.URGENT`, and what it copies: host memory, uint8. after: an
        event after which these copies run: kernels have used `into` by then. uses: for each job, host memory
        that it uses and whether it is written, for the checker; needed only if the link is `checked`.
        """
        return CopiesAfterJobs(self, into, ups)

    def record(self) -> Event | None:
        """Record an event that happens when the compute stream has done all work queued so far.

        Returns None on a link where this work is always done already.
        """
        return None

    def stamp(self) -> Event | None:
        """Record an event that happens when the copies to the host that are queued so far are done, and that
        gives the time since an earlier one (`Event.milliseconds_since`). Returns None as `record` does.
        """
        return None

    def happened(self, event: Event) -> bool:
        """Return, without waiting, whether the work before an event of `record` is done. If so, the host and
        other processes may use the bytes that it has written.
        """
        return event.done()

    def await_event(self, event: Event) -> None:
        """Wait until `happened`. Any thread may call this method."""

    def mark(self, returns: int) -> None:
        """Record an event on the compute stream, after all kernels that use bytes whose leases have been
        returned. A later `to_device` into such bytes waits for the event.

        returns: how many leases have been returned to the pool so far (`Pool.returns`). Every kernel that
        uses the bytes of these leases must be queued by now; see [Note: streams and leases] in
        infinity/tiers/copy_streams.py.
        """

    def fence(self, transfer: Transfer) -> None:
        """Make all later work on the compute stream wait for a transfer."""

    def let_go(self, transfer: Transfer) -> None:
        """As `fence`, and let the transfer and the link keep its memory no longer.

        Compute may use device memory of the transfer for something else then. The caller keeps host memory
        until the transfer is done, unless all that uses the memory next comes after the copy anyway.
        """

    def follow_compute(self) -> None:
        """Make all later copies to the device wait for the work that the compute stream has queued so far."""

    def drain(self) -> None:
        """Wait until no copy is under way, then call `follow_compute`."""

    def uses(self, user: User, *memory: torch.Tensor, writes: bool, label: str = "") -> None:
        """Tell the checker of the order of memory accesses that the next work of `user` uses these bytes.

        memory: contiguous tensors. writes: whether the work writes the bytes. label: a name of the work for
        the checker's messages. Does nothing where `checked` is False, as on real devices.
        """

    def timed(self) -> AbstractContextManager[None]:
        """A context in which copies record their times, so that `Transfer.timing` is not None."""
        return nullcontext()

    def close(self) -> None:
        """Wait until no copy is under way. The memory may be freed afterwards."""


def _copied(into: torch.Tensor, source: torch.Tensor) -> Arrived:
    began = time.perf_counter_ns()
    into.copy_(source)
    return Arrived(began, time.perf_counter_ns())


def is_direct(device: torch.device) -> bool:
    """Whether code on the CPU can access the device's memory.

    A link to the device has this value as `direct`.
    """
    return not has_driver(device)
