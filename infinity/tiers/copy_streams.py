"""Copy streams: copies to and from a device with memory of its own, and the order in which they run.

[Note: streams and leases]
A device runs four queues beside each other: compute (the stream that is current where the trainer calls),
two queues for copies up to the device (see `Lane`), and one queue for copies down to the host. Every order
between queues that matters is enforced by an event. Each such order is a member of `Order`, whose docstring
gives the reason. `CopyStreams._wait` and `_ask` are the only places where a queue or the host waits for an
event, or asks whether an event has happened. The update threads do so, too, for events from `_awaited`.
`CopyStreams.uses` tells a driver with a checker which bytes
compute and the host use, so that the checker finds any two uses that no event orders
(tests/test_copy_order.py).

Compute may still use device bytes whose lease was returned: the lease returns when the host drops its last
view of the bytes, and by then the kernels that use them are queued, but not done. A copy up into bytes that
are leased anew must wait for these kernels, but not for all that compute has queued since. Two numbers tell
how far to wait. The pool numbers the returns of leases (1, 2, 3, ...), and a new lease knows the number of
the latest return of any of its bytes (`Lease.last_return`). From time to time the method `mark` records an
event on compute, and stores it with the number of returns so far. When this event happens, compute is done
with the bytes of all leases returned up to then. A copy up waits for the event of the first mark whose
number is at least `last_return`.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from infinity.errors import DeviceError
from infinity.tiers.driver import CopiesAround, Driver, Event, Stream, cuda_driver, emulation
from infinity.tiers.link import ARRIVED, After, DeviceLink, Lane, Transfer, User

_ANCHORED_NS = 10_000_000_000
"""Nanoseconds after which an anchor is replaced by a new anchor. CUDA gives the time between two events in
milliseconds as a float32, which after ten seconds is still precise to about one microsecond.
"""


class Anchor:
    """A moment at which the device recorded an event, with its time by time.perf_counter_ns(), `at`."""

    def __init__(self, idle: Stream) -> None:
        """Record an event on `idle` now, wait for it, and note the time.

        idle: a CUDA stream without work, so that the device records the event at once.
        """
        self._event = idle.record(timing=True)
        self._event.synchronize()
        self.at = time.perf_counter_ns()

    @property
    def old(self) -> bool:
        """Whether this anchor was made more than ten seconds ago. `time_of` is then too imprecise, and a
        new Anchor should take its place.
        """
        return time.perf_counter_ns() - self.at > _ANCHORED_NS

    def time_of(self, event: Event) -> int:
        """The time at which `event` happened, in nanoseconds of time.perf_counter_ns().

        event: an event with timing that was recorded after the anchor and has happened.
        """
        return self.at + round(event.milliseconds_since(self._event) * 1e6)


@dataclass(frozen=True)
class EventTiming:
    """The times at which a copy began and ended, from two events around the copy on its CUDA stream.

    Implements the protocol infinity.tiers.link.Timing.
    """

    anchor: Anchor
    began: Event
    ended: Event

    def times(self) -> tuple[int, int] | None:
        if not self.ended.done():
            return None
        return self.anchor.time_of(self.began), self.anchor.time_of(self.ended)


_PIECE = 64 << 20
"""Bytes of the pieces that a copy to the device is cut into, so that an urgent copy need not wait for a
whole page of 1 GiB. A piece takes 1.3 ms at 50 GB/s, and launching the next piece takes about 2 us.
"""


class Order(enum.Enum):
    """Every order between streams, or between a stream and the host, that other code relies on.

    A test leaves out each order in turn, and checks that the missing order is noticed.
    """

    OPENING = "opening"
    """The first copies to the device come after all work that the compute stream had queued when the link
    was opened. Without this order, a copy could overwrite memory that earlier kernels still use, because
    torch's allocator hands out freed memory again before the kernels of its stream are done.
    """
    ARRIVAL = "arrival"
    """A kernel comes after the copies to the device that bring the bytes which the kernel uses."""
    LAST_USE = "last use"
    """A copy to the device into bytes that were leased before comes after the last kernel that uses the bytes
    under an earlier lease. So does one into a buffer that is used again. A copy on the device also comes
    after the kernels that write what it reads.
    """
    FOLLOWING = "following"
    """A copy to the device that overwrites parameters in place with the result of an update comes after all
    queued kernels that still use the old parameters.
    """
    LAST_WRITER = "last writer"
    """A copy to the host comes after the kernels that write the bytes which the copy reads."""
    HOST_WAITS = "host waits"
    """The host waits for a copy before it reads bytes that came from the device, or reuses bytes that went
    to the device.
    """
    HOST_ASKS = "host asks"
    """The host asks, without blocking, whether a copy is done. Only if it is, the host reads bytes that came
    from the device, or reuses bytes that went to the device.
    """
    OFFER = "offer"
    """The host knows that the kernels are done which write a page or a gradient, before it lets other
    processes copy the bytes from the device's memory.
    """
    DRAIN = "drain"
    """An update in place in RAM comes after all copies to the device that read the bytes which the update
    changes.
    """


class EventTransfer:
    """A copy on a CUDA stream. It is done when the event that was recorded after it has happened.

    This object keeps the source and the target of the copy alive until `done` or `wait` has found it done, or
    until `forget`.
    """

    def __init__(
        self, link: CopyStreams, event: Event, *ends: torch.Tensor, timing: EventTiming | None = None
    ) -> None:
        self.event = event
        self.timing = timing
        self._link = link
        self._ends: tuple[torch.Tensor, ...] = ends
        self._over = False

    def done(self) -> bool:
        if not self._over and self._link._ask(Order.HOST_ASKS, self.event):
            self._over, self._ends = True, ()
        return self._over

    def wait(self) -> object:
        if not self._over:
            self._link._wait(Order.HOST_WAITS, self.event, None)
            self._over, self._ends = True, ()
        return None

    def forget(self) -> None:
        """Keep source and target no longer."""
        self._ends = ()


class CopiesAroundJobs:
    """The copies around jobs of the update threads.

    Implements the protocol infinity.tiers.link.JobCopies.
    """

    def __init__(
        self, link: CopyStreams, hooks: CopiesAround, *ends: torch.Tensor, anchor: Anchor | None
    ) -> None:
        """ends: target and sources of the copies to the device; none: nothing is copied."""
        self.hooks = hooks
        self._link = link
        self._ends = ends
        self._anchor = anchor

    def check(self) -> None:
        try:
            self.hooks.check()
        except DeviceError:
            with suppress(DeviceError):
                self._link._wait_for_copies(Order.HOST_WAITS)  # some may be under way that no event ends
            raise

    def begun(self) -> Transfer:
        began, ended = self.hooks.events()
        if ended is None:
            return ARRIVED
        timing = None
        if self._anchor is not None and began is not None:
            timing = EventTiming(self._anchor, began, ended)
        return EventTransfer(self._link, ended, *self._ends, timing=timing)


class CopyStreams(DeviceLink):
    """The link to a device over PCIe or NVLink.

    Copies run on streams of their own, concurrently with the compute stream of the trainer.
    """

    direct = False

    def __init__(self, driver: Driver, compute: Callable[[], Stream]) -> None:
        """Make the streams for copies, and let their first copies wait for work already queued on compute.

        driver: the device's driver. compute: returns the stream for the calling thread's kernels.
        """
        self._driver = driver
        self.checked = driver.checked
        self._compute = compute
        self._up = {Lane.PREFETCH: driver.stream()}
        try:
            self._up[Lane.URGENT] = driver.stream(priority=1)
        except DeviceError as error:
            self._up[Lane.URGENT] = driver.stream()
            self.off = [f"priorities of streams ({error.call}: {error.name}; urgent copies share the link)"]
        self._down = driver.stream()
        self._marks: deque[tuple[int, Event]] = deque()
        """(number, event) of each mark that the compute stream is not known to have reached, oldest first.

        The number says how many leases had been returned to the pool of resident pages when `mark` recorded
        the event; see [Note: streams and leases].
        """
        self._over = 0
        """The pool's count of returned leases at the latest mark that compute has reached; 0 before.

        A mark is an event on the compute stream, recorded by the method `mark`. Compute no longer uses bytes
        whose lease came back before that mark, so a copy into them need not wait for compute.
        """
        self._under_way: deque[EventTransfer] = deque()
        """Copies to the host that may be under way, oldest first, kept here so that their sources stay alive.

        A source may be memory of torch's allocator, such as a fresh gradient's. If it were freed, torch could
        give the memory to another tensor before the copy has read it, unless compute waits for it (`let_go`).
        """
        self._queueing_down = threading.Lock()
        """Guards `_under_way`, because several threads start copies to the host."""
        self._idle: Stream | None = None
        """A stream without work, on which each `Anchor` is recorded: an event whose time by the host's clock
        is known. None while copies are not timed.
        """
        self._anchor: Anchor | None = None
        self._let_copies_up_wait(Order.OPENING)

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams for copies by name: "up (prefetch)", "up (urgent)" and "down".

        Streams with "up" copy to the device, the stream "down" copies to the host.
        """
        return {**{f"up ({lane.value})": stream for lane, stream in self._up.items()}, "down": self._down}

    def to_device(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        last_return: int,
        lane: Lane = Lane.URGENT,
        after: Event | None = None,
    ) -> Transfer:
        stream = self._up[lane]
        if after is not None:
            self._wait(Order.LAST_USE, after, stream)
        if last_return > self._over:
            self._wait(Order.LAST_USE, self._last_use(last_return), stream)
        return self._copy(stream, [(into, source)], _PIECE)

    def to_host(self, into: torch.Tensor, source: torch.Tensor, after: After = None) -> Transfer:
        transfer = self.all_to_host([(into, source)], after)
        self._keep(transfer)
        return transfer

    def all_to_host(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: After = None
    ) -> EventTransfer:
        events = self.record() if after is None else after
        for event in events if isinstance(events, Sequence) else (events,):
            self._wait(Order.LAST_WRITER, event, self._down)
        try:
            return self._copy(self._down, pairs, 0)
        except DeviceError:  # the first copies may be under way
            self._keep(EventTransfer(self, self._down.record(), *[source for _, source in pairs]))
            raise

    def _keep(self, transfer: EventTransfer) -> None:
        """Keep the memory of a copy to the host alive until it is done."""
        with self._queueing_down:
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            self._under_way.append(transfer)

    def around_jobs(
        self,
        downs: Sequence[Transfer | None],
        into: torch.Tensor | None,
        ups: Sequence[tuple[int, torch.Tensor]],
        after: Event | None,
        *,
        uses: Sequence[Iterable[tuple[torch.Tensor, bool]]] = (),
    ) -> CopiesAroundJobs:
        come: dict[Transfer | None, Event | None] = {
            each: self._awaited(Order.HOST_ASKS, each.event)
            for each in {*downs}
            if isinstance(each, EventTransfer)
        }
        anchor, up = None, None
        ends: tuple[torch.Tensor, ...] = ()
        if into is not None:
            assert into.is_contiguous() and into.dtype == torch.uint8
            begin, nbytes = into.data_ptr(), into.nbytes
            places = [(begin + start, each.data_ptr(), each.nbytes) for start, each in ups]
            assert max([start + each.nbytes for start, each in ups]) <= nbytes
            anchor, ends = self._anchor_now(), (into, *[each for _, each in ups])
            after = None if after is None else self._awaited(Order.FOLLOWING, after)
            up = (self._up[Lane.URGENT], after, places, _PIECE, anchor is not None)
        used = [[(each.data_ptr(), each.nbytes, writes) for each, writes in of_job] for of_job in uses]
        hooks = CopiesAround(self._driver, [come.get(each) for each in downs], up, used, "update")
        return CopiesAroundJobs(self, hooks, *ends, anchor=anchor)

    def record(self) -> Event:
        return self._compute().record()

    def stamp(self) -> Event:
        return self._down.record(timing=True)

    def happened(self, event: Event) -> bool:
        return self._ask(Order.OFFER, event)

    def await_event(self, event: Event) -> None:
        self._wait(Order.OFFER, event, None)

    def mark(self, returns: int) -> None:
        if returns == (self._marks[-1][0] if self._marks else self._over):
            return
        self._marks.append((returns, self.record()))
        while self._marks and self._ask(Order.LAST_USE, self._marks[0][1]):
            self._over, _ = self._marks.popleft()

    def fence(self, transfer: Transfer) -> None:
        if isinstance(transfer, EventTransfer):
            try:
                self._wait(Order.ARRIVAL, transfer.event, self._compute())
            except DeviceError:  # the next use may count on the order
                transfer.wait()
                raise

    def let_go(self, transfer: Transfer) -> None:
        self.fence(transfer)
        if isinstance(transfer, EventTransfer):
            transfer.forget()

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
        """A context in which each copy is timed, by two events around the copy on its CUDA stream.

        `timing.times()` of the copy's EventTransfer gives the times at which the copy began and ended.
        """
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
        """Make `waiter`, a stream, or None for the host, wait for an event.

        order: the reason for the wait; tests leave out all waits with one reason.
        """
        if waiter is None:
            event.synchronize()
        else:
            waiter.wait(event)

    def _ask(self, order: Order, event: Event) -> bool:
        """Return, without waiting, whether all work queued before an event is done. If so, the host may use
        the bytes of this work.

        order: the reason for the question. Only a test uses it, to leave out the questions with one reason.
        """
        return event.done()

    def _awaited(self, order: Order, event: Event) -> Event | None:
        """Return `event`, for which native code waits. order: the reason; a test has None returned."""
        return event

    def _let_copies_up_wait(self, order: Order) -> None:
        event = self.record()
        for stream in self._up.values():
            self._wait(order, event, stream)

    def _wait_for_copies(self, order: Order) -> None:
        for stream in (*self._up.values(), self._down):
            self._wait(order, stream.record(), None)

    def _last_use(self, last_return: int) -> Event:
        """Return an event after which no kernel uses the bytes of the first `last_return` leases that came
        back.

        This is the event of the first mark whose number is at least `last_return`. If there is no such mark,
        an event is recorded on the compute stream now.
        """
        marked = next((event for returns, event in self._marks if returns >= last_return), None)
        return self.record() if marked is None else marked

    def _copy(
        self, stream: Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], piece: int
    ) -> EventTransfer:
        """Queue copies (into, source), and record the event after them. piece: as in `Stream.copy`."""
        anchor, ends = self._anchor_now(), list[torch.Tensor]()
        began = None if anchor is None else stream.record(timing=True)
        for into, source in pairs:
            assert into.nbytes == source.nbytes and into.is_contiguous() and source.is_contiguous()
            stream.copy(into.data_ptr(), source.data_ptr(), into.nbytes, piece=piece)
            ends += (into, source)
        event = stream.record(timing=anchor is not None)
        if anchor is None or began is None:
            return EventTransfer(self, event, *ends)
        return EventTransfer(self, event, *ends, timing=EventTiming(anchor, began, event))

    def _anchor_now(self) -> Anchor | None:
        """Return an `Anchor` that is at most ten seconds old, made now if needed. None outside of `timed`.

        Reads `_idle` and `_anchor` only once, because another thread may end the context `timed` meanwhile.
        """
        idle, anchor = self._idle, self._anchor
        if idle is None:
            return None
        if anchor is None or anchor.old:
            self._anchor = anchor = Anchor(idle)
        return anchor


def open_link(device: torch.device) -> DeviceLink:
    """Open the link to `device`: CopyStreams for CUDA and inside `driver.emulated`, else DeviceLink.

    Raises DeviceError if a call of the device's driver fails, and the errors of `cuda_driver`.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        driver = cuda_driver(index)
        stream = functools.cache(driver.foreign)
        return CopyStreams(driver, lambda: stream(torch.cuda.current_stream(index).cuda_stream))
    found = emulation()
    return DeviceLink() if found is None else CopyStreams(found.driver, lambda: found.compute)
