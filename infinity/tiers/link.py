"""The link between host RAM and a device of its own memory: copies both ways, and who must wait for whom.

[Note: streams and leases]
Three queues work beside each other on a CUDA device: compute (the stream current where the trainer calls),
copies up, copies down. Each order that matters is made by an event, never by a pause of the host:

- the first copies up after all that compute had queued when the link was opened: torch's allocator hands out
  memory that kernels of the same stream may still use.
- compute after a copy up: `fence` makes the current stream wait for the copy's event.
- a copy up into bytes that kernels may still read: a lease knows the pool's count of returns when any of
  its bytes last came back (`Lease.last_return`); `mark` records an event on compute together with that
  count, so the copy waits for the first mark made at or after it, and not for all that compute has queued.
- a copy down of what kernels wrote: it waits for the event of compute's queue as it was when asked for.
- host memory that a copy reads or writes: the transfer keeps it alive and is `done` when its event is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

_ANCHORED_NS = 10_000_000_000
"""CUDA measures from event to event in float32 milliseconds: after ten seconds still to a microsecond."""


class Timing(Protocol):
    """When one transfer began and ended. It holds nothing of the transfer's memory."""

    def times(self) -> tuple[int, int] | None:
        """(began, ended), in nanoseconds of time.perf_counter_ns(); None while under way."""


class Transfer(Protocol):
    """Bytes under way. Whoever asked keeps it until it is done."""

    def done(self) -> bool:
        """Whether all bytes have arrived or failed. Never blocks."""

    def wait(self) -> object:
        """Block without the GIL until done. Raises the transfer's error (StorageError)."""

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


class CpuLink:
    """Device and host are both RAM: a copy is a copy, done when it returns."""

    direct = True
    """Whether code on the CPU can use what is on the device."""

    def to_device(self, into: torch.Tensor, source: torch.Tensor, last_return: int) -> Transfer:
        """Copy host bytes up. `last_return`: of the lease over `into`; see the note."""
        return _copied(into, source)

    def to_host(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy device bytes down, as compute will have left them."""
        return _copied(into, source)

    def mark(self, returns: int) -> None:
        """Note that compute has by now queued all use of bytes returned up to the pool's `returns`th."""

    def fence(self, transfer: Transfer) -> None:
        """Order compute's further work after a transfer."""

    def follow_compute(self) -> None:
        """Order later copies up after all that compute has queued."""

    def drain(self) -> None:
        """Wait until no copy is under way, and `follow_compute`."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Copies issued inside have a timing. Here all have."""
        yield


def _copied(into: torch.Tensor, source: torch.Tensor) -> Arrived:
    began = time.perf_counter_ns()
    into.copy_(source)
    return Arrived(began, time.perf_counter_ns())


class _Anchor:
    """A moment that is known in the host's time and in the device's."""

    def __init__(self, idle: torch.cuda.Stream) -> None:
        """idle: a stream with nothing on it, so that the event happens when it is recorded."""
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(idle)
        self._event.synchronize()
        self.at = time.perf_counter_ns()

    def time_of(self, event: torch.cuda.Event) -> int:
        """When an event happened that was recorded later, in nanoseconds of time.perf_counter_ns()."""
        milliseconds: float = self._event.elapsed_time(event)
        return self.at + round(milliseconds * 1e6)


@dataclass(frozen=True)
class EventTiming:
    """The events around a copy, as the stream came to them."""

    anchor: _Anchor
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def times(self) -> tuple[int, int] | None:
        if not self.ended.query():
            return None
        return self.anchor.time_of(self.began), self.anchor.time_of(self.ended)


class EventTransfer:
    """A copy on a stream: done when its event is. Keeps both ends alive until then."""

    def __init__(
        self, event: torch.cuda.Event, *ends: torch.Tensor, timing: EventTiming | None = None
    ) -> None:
        self.event = event
        self.timing = timing
        self._ends: tuple[torch.Tensor, ...] = ends

    def done(self) -> bool:
        if self._ends and self.event.query():
            self._ends = ()
        return not self._ends

    def wait(self) -> object:
        self.event.synchronize()
        self._ends = ()
        return None


class CudaLink:
    """PCIe or NVLink: one stream up, one down, beside the trainer's."""

    direct = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque()
        self._idle: torch.cuda.Stream | None = None
        """For anchors, while copies are timed."""
        self._anchor: _Anchor | None = None
        self._up.wait_stream(torch.cuda.current_stream(device))

    def to_device(self, into: torch.Tensor, source: torch.Tensor, last_return: int) -> Transfer:
        """Copy host bytes up. `last_return`: of the lease over `into`; see the note."""
        with torch.cuda.device(self.device):
            self._await_last_use(last_return)
            return self._copy(self._up, into, source)

    def to_host(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy device bytes down, as compute will have left them."""
        with torch.cuda.device(self.device):
            self._down.wait_stream(torch.cuda.current_stream())
            transfer = self._copy(self._down, into, source)
            source.record_stream(self._down)  # torch's allocator may own it (a fresh gradient)
            return transfer

    def mark(self, returns: int) -> None:
        """Note that compute has by now queued all use of bytes returned up to the pool's `returns`th."""
        if self._marks and self._marks[-1][0] == returns:
            return
        with torch.cuda.device(self.device):
            self._marks.append((returns, torch.cuda.current_stream().record_event()))
        while len(self._marks) > 1 and self._marks[0][1].query():
            # What is done orders nothing any more, but a later mark must stay to answer for its returns.
            self._marks.popleft()

    def fence(self, transfer: Transfer) -> None:
        """Order compute's further work after a transfer."""
        if isinstance(transfer, EventTransfer):
            torch.cuda.current_stream(self.device).wait_event(transfer.event)

    def follow_compute(self) -> None:
        """Order later copies up after all that compute has queued."""
        self._up.wait_stream(torch.cuda.current_stream(self.device))

    def drain(self) -> None:
        """Wait until no copy is under way, and `follow_compute`."""
        self._up.synchronize()
        self._down.synchronize()
        self.follow_compute()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Copies issued inside have a timing: two events more each, which others are spared."""
        self._idle = torch.cuda.Stream(self.device)
        try:
            yield
        finally:
            self._idle = self._anchor = None

    def _copy(self, stream: torch.cuda.Stream, into: torch.Tensor, source: torch.Tensor) -> EventTransfer:
        anchor = self._anchor_now()
        began = None if anchor is None else _event_on(stream)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        if anchor is None or began is None:
            return EventTransfer(stream.record_event(), into, source)
        ended = _event_on(stream)
        return EventTransfer(ended, into, source, timing=EventTiming(anchor, began, ended))

    def _anchor_now(self) -> _Anchor | None:
        """A recent one, where copies are timed."""
        if self._idle is None:
            return None
        if self._anchor is None or time.perf_counter_ns() - self._anchor.at > _ANCHORED_NS:
            self._anchor = _Anchor(self._idle)
        return self._anchor

    def _await_last_use(self, last_return: int) -> None:
        if not last_return:
            return
        for returns, event in self._marks:
            if returns >= last_return:
                self._up.wait_event(event)
                return
        self._up.wait_stream(torch.cuda.current_stream(self.device))


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


DeviceLink = CpuLink | CudaLink


def open_link(device: torch.device) -> DeviceLink:
    """The link to `device`, which is the CPU or a CUDA device."""
    return CudaLink(device) if device.type == "cuda" else CpuLink()
