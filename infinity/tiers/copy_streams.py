"""Copy streams: copies between host RAM and a device of its own memory, and who must wait for whom.

[Note: streams and leases]
Queues work beside each other on a device: compute (the stream current where the trainer calls), two of
copies up (see `Lane`), one of copies down. Each order that matters is made by an event and is a member of
`Order`, which says why: `CopyStreams._wait` and `_ask` are the only places where anybody waits or looks
whether he has to. What runs on compute, and what the host does with the bytes, is told by `uses`, so that
a driver with a checker finds any two uses that no event orders (tests/test_copy_order.py).

A lease knows the pool's count of returns when any of its bytes last came back (`Lease.last_return`). `mark`
records an event on compute together with that count, so that a copy up waits for the first mark made at or
after it, and not for all that compute has queued.
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
"""Bytes of a copy up at the most, so that an urgent one passes a page of 1 GiB: 1.3 ms at 50 GB/s, in which
launching the next piece (some 2 us) costs nothing."""


class Order(enum.Enum):
    """Every order between queues that something relies on. Each has a test that removes it."""

    OPENING = "opening"
    """The first copies up come after all that compute had queued when the link was opened: torch's allocator
    hands out memory that kernels of the same stream may still use."""
    ARRIVAL = "arrival"
    """Compute comes after the copy up of what it uses."""
    LAST_USE = "last use"
    """A copy up into bytes that were lent before comes after compute's last use of them."""
    FOLLOWING = "following"
    """A copy up over bytes that stay where they are, an update's outcome, comes after the kernels that are
    queued and still use what was there."""
    LAST_WRITER = "last writer"
    """A copy down comes after the kernels that write what it reads."""
    HOST_WAITS = "host waits"
    """The host reads what came down, and reuses what went up, after the copy."""
    HOST_ASKS = "host asks"
    """The same, where the host has looked whether the copy is done, and done something else until then."""
    DRAIN = "drain"
    """What rests in RAM is updated in place after the copies up that read it, whoever waits for these."""


class EventTransfer:
    """A copy on a stream: done when its event is. Keeps both ends alive until then."""

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
    """PCIe or NVLink: streams for copies beside the trainer's, by a driver's calls."""

    direct = False

    def __init__(self, driver: Driver, compute: Callable[[], Stream]) -> None:
        """compute: the stream on which the calling thread's kernels are queued."""
        self._driver = driver
        self.checked = driver.checked
        self._compute = compute
        self._up = {Lane.PREFETCH: driver.stream(), Lane.URGENT: driver.stream(priority=1)}
        self._down = driver.stream()
        self._marks: deque[tuple[int, Event]] = deque()
        """That compute has not come to, as far as is known."""
        self._over = 0
        """Bytes that came back up to this return of the pool: compute was seen to be done with them."""
        self._under_way: deque[EventTransfer] = deque()
        """Copies down, oldest first: torch's allocator may own what they read (a fresh gradient), and would
        hand it out again if nobody kept it."""
        self._queueing_down = threading.Lock()
        """Guards them: more than one thread asks for copies down."""
        self._idle: Stream | None = None
        """For anchors, while copies are timed."""
        self._anchor: Anchor | None = None
        self._let_copies_up_wait(Order.OPENING)

    @property
    def streams(self) -> dict[str, Stream]:
        """By name."""
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
        """Two events more for each copy, which others are spared."""
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
        """Have a stream, or the host (None), come after an event."""
        if waiter is None:
            event.synchronize()
        else:
            waiter.wait(event)

    def _ask(self, order: Order, event: Event) -> bool:
        """Whether an event has happened: what the host does next then comes after it."""
        return event.done()

    def _let_copies_up_wait(self, order: Order) -> None:
        event = self.record()
        for stream in self._up.values():
            self._wait(order, event, stream)

    def _wait_for_copies(self, order: Order) -> None:
        for stream in (*self._up.values(), self._down):
            self._wait(order, stream.record(), None)

    def _last_use(self, last_return: int) -> Event:
        """When compute is done with bytes that came back as the pool's `last_return`th."""
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
        """A recent one, where copies are timed. Another thread may end that meanwhile."""
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
    """The link to `device`, which is a CUDA device, or the CPU with memory of its own in RAM.

    Raises DeviceError where the driver refuses.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        driver = cuda_driver(index)
        return CopyStreams(driver, _Current(driver, torch.device("cuda", index)))
    found = emulation()
    return CpuLink() if found is None else CopyStreams(found.driver, lambda: found.compute)
