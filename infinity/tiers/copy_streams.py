"""Copy streams: copies between host RAM and a device with memory of its own, and the order among them.

[Note: streams and leases]
A device runs four queues beside each other: compute (the stream current where the trainer calls), two of
copies up (see `Lane`), one of copies down. Each order that matters is made by an event and is a member of
`Order`, which says why. `CopyStreams._wait` and `_ask` are the only places where a queue or the host waits
for an event, or asks whether it has happened. `uses` tells a driver with a checker which bytes compute and
the host use, so that it finds any two uses that no event orders (tests/test_copy_order.py).

A lease knows the pool's count of returns when any of its bytes last came back (`Lease.last_return`). `mark`
records an event on compute together with the pool's count. A copy up into leased bytes waits for the first
mark whose count is at least the lease's, and not for all that compute has queued.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from infinity.tiers.anchor import Anchor, EventTiming
from infinity.tiers.driver import Driver, Event, Stream, cuda_driver, emulation
from infinity.tiers.link import After, CpuLink, DeviceLink, Lane, Transfer, User

_PIECE = 64 << 20
"""Bytes of one piece of a copy up, so that an urgent copy need not wait for a page of 1 GiB. A piece takes
1.3 ms at 50 GB/s, against some 2 us for launching the next one."""


class Order(enum.Enum):
    """Every order between queues that something relies on. Each has a test that removes it."""

    OPENING = "opening"
    """The first copies up come after all that compute had queued when the link was opened: torch's allocator
    hands out memory that kernels of the same stream may still use."""
    ARRIVAL = "arrival"
    """Compute comes after the copy up of the bytes that it uses."""
    LAST_USE = "last use"
    """A copy up into bytes that were lent before comes after compute's last use of them."""
    FOLLOWING = "following"
    """A copy up of an update's result, which overwrites parameters that stay in their place, comes after the
    queued kernels that still use the old ones."""
    LAST_WRITER = "last writer"
    """A copy down comes after the kernels that write the bytes it reads."""
    HOST_WAITS = "host waits"
    """The host reads bytes that came down, or reuses bytes that went up, after it has waited for the copy."""
    HOST_ASKS = "host asks"
    """The host reads or reuses such bytes after it has asked whether the copy is done, instead of waiting."""
    DRAIN = "drain"
    """An update in place in RAM comes after all copies up that read the bytes."""


class EventTransfer:
    """A copy on a stream: done when its event has happened. It keeps both ends' memory alive until then."""

    def __init__(
        self, link: CopyStreams, event: Event, *ends: torch.Tensor, timing: EventTiming | None = None
    ) -> None:
        self.event = event
        self.timing = timing
        self._link = link
        self._ends: tuple[torch.Tensor, ...] = ends

    def done(self) -> bool:
        if self._ends and self._link._ask(Order.HOST_ASKS, self.event):
            self._ends = ()
        return not self._ends

    def wait(self) -> object:
        if self._ends:
            self._link._wait(Order.HOST_WAITS, self.event, None)
            self._ends = ()
        return None


class CopyStreams:
    """The link over PCIe or NVLink: streams for copies beside the trainer's, through a driver."""

    direct = False

    def __init__(self, driver: Driver, compute: Callable[[], Stream]) -> None:
        """compute: gives the stream on which the calling thread's kernels are queued."""
        self._driver = driver
        self.checked = driver.checked
        self._compute = compute
        self._up = {Lane.PREFETCH: driver.stream(), Lane.URGENT: driver.stream(priority=1)}
        self._down = driver.stream()
        self._marks: deque[tuple[int, Event]] = deque()
        """Marks that compute is not known to have reached: the pool's count of returns, and an event."""
        self._over = 0
        """The pool's count of returns at the last mark that compute is known to have reached."""
        self._under_way: deque[EventTransfer] = deque()
        """Copies down, oldest first. They keep the memory that they read: torch's allocator may own it, as it
        owns a fresh gradient's, and would hand it out again."""
        self._queueing_down = threading.Lock()
        """Guards `_under_way`: more than one thread asks for copies down."""
        self._idle: Stream | None = None
        """The stream for anchors; None while copies are not timed."""
        self._anchor: Anchor | None = None
        self._let_copies_up_wait(Order.OPENING)

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams for copies, by name."""
        return {**{f"up ({lane.value})": stream for lane, stream in self._up.items()}, "down": self._down}

    def to_device(
        self, into: torch.Tensor, source: torch.Tensor, last_return: int, lane: Lane = Lane.URGENT
    ) -> Transfer:
        stream = self._up[lane]
        if last_return > self._over:
            self._wait(Order.LAST_USE, self._last_use(last_return), stream)
        return self._copy(stream, into, source, _PIECE)

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        events = self.record() if after is None else after
        for event in events if isinstance(events, Sequence) else (events,):
            self._wait(Order.LAST_WRITER, event, self._down)
        transfer = self._copy(self._down, into, source, 0)
        with self._queueing_down:
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            self._under_way.append(transfer)
        return transfer

    def record(self) -> Event:
        return self._compute().record()

    def mark(self, returns: int) -> None:
        if returns == (self._marks[-1][0] if self._marks else self._over):
            return
        self._marks.append((returns, self.record()))
        while self._marks and self._ask(Order.LAST_USE, self._marks[0][1]):
            self._over, _ = self._marks.popleft()

    def fence(self, transfer: Transfer) -> None:
        if isinstance(transfer, EventTransfer):
            self._wait(Order.ARRIVAL, transfer.event, self._compute())

    def follow_compute(self) -> None:
        self._let_copies_up_wait(Order.FOLLOWING)

    def drain(self) -> None:
        self._wait_for_copies(Order.DRAIN)
        self.follow_compute()

    def uses(self, user: User, *memory: torch.Tensor, writes: bool, label: str = "") -> None:
        if not self.checked:
            return
        touched = self._compute().touched if user is User.COMPUTE else self._driver.touched_by_host
        for each in memory:
            touched(each.data_ptr(), each.nbytes, writes=writes, label=label)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context in which each copy records two more events, from which its timing follows."""
        self._idle = self._driver.stream()
        try:
            yield
        finally:
            self._idle = self._anchor = None

    def close(self) -> None:
        self._wait_for_copies(Order.DRAIN)
        self._under_way.clear()
        self._marks.clear()

    def _wait(self, order: Order, event: Event, waiter: Stream | None) -> None:
        """Make a stream, or the host (None), wait for an event."""
        if waiter is None:
            event.synchronize()
        else:
            waiter.wait(event)

    def _ask(self, order: Order, event: Event) -> bool:
        """Whether an event has happened. If so, all that the host does next comes after it."""
        return event.done()

    def _let_copies_up_wait(self, order: Order) -> None:
        event = self.record()
        for stream in self._up.values():
            self._wait(order, event, stream)

    def _wait_for_copies(self, order: Order) -> None:
        for stream in (*self._up.values(), self._down):
            self._wait(order, stream.record(), None)

    def _last_use(self, last_return: int) -> Event:
        """The event after which compute no longer uses bytes of the pool's `last_return`th return."""
        marked = next((event for returns, event in self._marks if returns >= last_return), None)
        return self.record() if marked is None else marked

    def _copy(self, stream: Stream, into: torch.Tensor, source: torch.Tensor, piece: int) -> EventTransfer:
        assert into.nbytes == source.nbytes and into.is_contiguous() and source.is_contiguous()
        anchor = self._anchor_now()
        began = None if anchor is None else stream.record(timing=True)
        event = stream.transfer(
            into.data_ptr(), source.data_ptr(), into.nbytes, piece=piece, timing=anchor is not None
        )
        if anchor is None or began is None:
            return EventTransfer(self, event, into, source)
        return EventTransfer(self, event, into, source, timing=EventTiming(anchor, began, event))

    def _anchor_now(self) -> Anchor | None:
        """A recent anchor; None where copies are not timed. Another thread may end the timing meanwhile."""
        idle, anchor = self._idle, self._anchor
        if idle is None:
            return None
        if anchor is None or anchor.old:
            self._anchor = anchor = Anchor(idle)
        return anchor


class _Current:
    """The stream that torch's kernels are queued on where this is called."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._known: dict[int, Stream] = {}

    def __call__(self) -> Stream:
        handle = torch.cuda.current_stream(self._device).cuda_stream
        found = self._known.get(handle)
        if found is None:
            found = self._known[handle] = self._driver.foreign(handle)
        return found


def open_link(device: torch.device) -> DeviceLink:
    """The link to `device`: a CUDA device, or the CPU with a device tier in RAM.

    Raises DeviceError where the driver refuses.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        driver = cuda_driver(index)
        return CopyStreams(driver, _Current(driver, torch.device("cuda", index)))
    found = emulation()
    return CpuLink() if found is None else CopyStreams(found.driver, lambda: found.compute)
