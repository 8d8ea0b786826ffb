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

from collections import deque
from typing import Protocol

import torch


class Transfer(Protocol):
    """Bytes under way. Whoever asked keeps it until it is done."""

    def done(self) -> bool:
        """Whether all bytes have arrived or failed. Never blocks."""

    def wait(self) -> object:
        """Block without the GIL until done. Raises the transfer's error (StorageError)."""


class Arrived:
    """A transfer that ended before its call returned."""

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
        into.copy_(source)
        return ARRIVED

    def to_host(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy device bytes down, as compute will have left them."""
        into.copy_(source)
        return ARRIVED

    def mark(self, returns: int) -> None:
        """Note that compute has by now queued all use of bytes returned up to the pool's `returns`th."""

    def fence(self, transfer: Transfer) -> None:
        """Order compute's further work after a transfer."""

    def drain(self) -> None:
        """Wait until no copy is under way, and order later ones up after all that compute has queued."""


class EventTransfer:
    """A copy on a stream: done when its event is. Keeps both ends alive until then."""

    def __init__(self, event: torch.cuda.Event, *ends: torch.Tensor) -> None:
        self.event = event
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
        self._up.wait_stream(torch.cuda.current_stream(device))

    def to_device(self, into: torch.Tensor, source: torch.Tensor, last_return: int) -> Transfer:
        """Copy host bytes up. `last_return`: of the lease over `into`; see the note."""
        with torch.cuda.device(self.device):
            self._await_last_use(last_return)
            with torch.cuda.stream(self._up):
                into.copy_(source, non_blocking=True)
            return EventTransfer(self._up.record_event(), into, source)

    def to_host(self, into: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Copy device bytes down, as compute will have left them."""
        with torch.cuda.device(self.device):
            self._down.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._down):
                into.copy_(source, non_blocking=True)
            source.record_stream(self._down)  # torch's allocator may own it (a fresh gradient)
            return EventTransfer(self._down.record_event(), into, source)

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

    def drain(self) -> None:
        """Wait until no copy is under way, and order later ones up after all that compute has queued."""
        self._up.synchronize()
        self._down.synchronize()
        self._up.wait_stream(torch.cuda.current_stream(self.device))

    def _await_last_use(self, last_return: int) -> None:
        if not last_return:
            return
        for returns, event in self._marks:
            if returns >= last_return:
                self._up.wait_event(event)
                return
        self._up.wait_stream(torch.cuda.current_stream(self.device))


DeviceLink = CpuLink | CudaLink


def open_link(device: torch.device) -> DeviceLink:
    """The link to `device`, which is the CPU or a CUDA device."""
    return CudaLink(device) if device.type == "cuda" else CpuLink()
