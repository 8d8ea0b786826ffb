"""Gradient ring: a ring buffer in device memory through which new gradients leave while the backward goes on.

A gradient's hook copies it into the ring, on the stream that made it, so that autograd's memory is free at
once; then it records an event and returns. A worker thread copies the ring's contents, oldest first, to the
landing, a buffer of the same size in host RAM, and accumulates them from there. Jobs that are next to each
other and ready together are copied at once.

[Note: who waits for the worker]
The worker takes no lock but the ring's own, so any thread may wait for it, also under the runtime's lock. It
does its jobs in order, so bytes are up to date once the last job that changes them is done, known by its
number. If the ring is full, the hook waits for room before it takes the runtime's lock (`await_room`). Only a
gradient larger than the ring waits for part of its room while it has that lock.

[Note: failures] The first error is kept until `renew`. Later jobs are dropped, because the sums that they
would add to may be incomplete; `send` and `settle` raise the error meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.config import round_up
from infinity.cpu_adam import BLOCK
from infinity.errors import ConfigError, InfinityError
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge, Wait
from infinity.tiers.driver import Event
from infinity.tiers.link import User

_SLICE = 0.05
"""Seconds after which a wait checks again, so that signals are handled."""

_IDLE = 1.0
"""Seconds after which a worker without jobs ends, so that it does not keep an unclosed runtime alive."""

Use = Callable[[torch.Tensor], None]
"""Function that the worker calls with a gradient once it is in host RAM: (n,), in the gradient's dtype."""


class Job:
    """A part of a gradient on its way to host RAM."""

    __slots__ = ("dtype", "end", "event", "number", "ready", "start", "use")

    def __init__(self, dtype: torch.dtype, use: Use) -> None:
        self.dtype = dtype
        self.use: Use | None = use
        """The function for the part; None if the part is dropped, or has been used."""
        self.start = self.end = 0
        """The part's bytes [start, end) of the ring."""
        self.number = 0
        self.event: Event | None = None
        self.ready = False
        """Whether the event is recorded, or never will be."""


def placed(nbytes: int, alignment: int, size: int, taken: Sequence[Job] | deque[Job]) -> int | None:
    """The start of `nbytes` free bytes in a ring of `size` bytes; None if there are not that many. Pure.

    taken: the jobs that have room, oldest first, in which order they give it back. No job wraps around the
    ring's end.
    """
    if not taken:
        return 0 if nbytes <= size else None
    first, latest = taken[0].start, taken[-1]
    start = round_up(latest.end, alignment)
    if latest.start < first:
        return start if start + nbytes <= first else None
    if start + nbytes <= size:
        return start
    return 0 if nbytes <= first else None


def fit(sizes: Sequence[int], alignment: int, size: int, taken: Sequence[Job] | deque[Job]) -> bool:
    """Whether jobs of these sizes (bytes) all find room, one after the other. Pure.

    If even an empty ring cannot hold all, only as many of the first ones count as it can hold.
    """
    now, empty = list(taken), list[Job]()
    for nbytes in sizes:
        for jobs, enough in ((empty, True), (now, False)):
            start = placed(nbytes, alignment, size, jobs)
            if start is None:
                return enough
            job = Job(torch.uint8, _nothing)
            job.start, job.end = start, start + nbytes
            jobs.append(job)
    return True


def _nothing(landed: torch.Tensor) -> None:
    return None


class GradientRing:
    """The ring of one runtime and its worker. `send` is called under the runtime's lock, all else without."""

    def __init__(self, store: Store) -> None:
        """store: one with a ring and a landing."""
        assert store.ring is not None and store.landing is not None
        self._store = store
        self._ring: torch.Tensor | None = store.ring
        self._landing: torch.Tensor | None = store.landing
        self._window = store.plan.ring_block_bytes
        self._size = store.ring.nbytes
        self._changed = threading.Condition()
        """Guards the attributes below, but not those of the jobs."""
        self._jobs: deque[Job] = deque()
        """All jobs that have room, oldest first."""
        self._done = 0
        """Number of jobs ever done."""
        self._failure: InfinityError | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def failure(self) -> InfinityError | None:
        """The error that lost gradients on their way, if any; see [Note: failures]."""
        return self._failure

    def windows(self, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """(start, end), in elements, of the parts in which `count` elements are sent.

        All but the last are whole BLOCKs.
        """
        step = self._window // itemsize // BLOCK * BLOCK
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def await_room(self, counts: Sequence[int], itemsize: int) -> None:
        """Wait, without the GIL, until there is room for runs of `counts` elements; see `fit`.

        A failure ends the wait too; `send` raises it.
        """
        sizes = [(end - start) * itemsize for count in counts for start, end in self.windows(count, itemsize)]
        self._wait(
            lambda: self._failure is not None or fit(sizes, itemsize, self._size, self._jobs), room=True
        )

    def send(self, fresh: torch.Tensor, use: Use) -> int:
        """Copy one window of a new gradient, (n,), contiguous, in the device's memory, into the ring.

        use: what the worker does with it once it is in host RAM. Returns the job's number, for `settle`.
        Waits for room, not for the copy. Raises the failure if there is one, and DeviceError.
        """
        job = Job(fresh.dtype, use)
        try:
            self._take(job, fresh.nbytes)
            assert self._ring is not None
            link, there = self._store.link, self._ring[job.start : job.end]
            link.uses(User.COMPUTE, there, writes=True, label="gradient in the ring")
            there.view(fresh.dtype).copy_(fresh)
            job.event = link.record()
        except BaseException:
            job.use = None
            raise
        finally:
            job.ready = True
            with self._changed:
                self._changed.notify_all()
        return job.number

    def arrived(self, number: int) -> bool:
        """Whether the job of this number and all before it are done. Never blocks."""
        return self._done >= number

    def wait(self, number: int | None = None) -> None:
        """Wait, without the GIL, until the job of this number (None: every job) is done or has failed."""
        self._wait(lambda: not self._jobs if number is None else self._done >= number)

    def settle(self, number: int | None = None) -> None:
        """`wait`, and raise the failure if there is one."""
        self.wait(number)
        if self._failure is not None:
            raise self._failure.again()

    def renew(self) -> None:
        """Wait until nothing is under way, and forget the failure: what was sent is not needed any more."""
        self.wait()
        self._failure = None

    def close(self) -> None:
        """Drop jobs that have not begun, wait for the others, and end the worker. May be called again."""
        with self._changed:
            self._closed = True
            worker = self._worker
            self._changed.notify_all()
        while worker is not None and worker.is_alive():
            worker.join(_SLICE)
        self._ring = self._landing = None

    # --- inside -----------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], *, room: bool = False) -> None:
        """Wait until `ready()`, or until closed. room: whether the wait counts as one for room."""
        with self._changed:
            if ready() or self._closed:
                return
        stalling = self._store.meter.stalling(Edge.DEVICE_TO_HOST, Wait.ROOM if room else Wait.COPY)
        with stalling, self._changed:
            while not (ready() or self._closed):
                self._changed.wait(_SLICE)

    def _take(self, job: Job, nbytes: int) -> None:
        """Give a job room, and queue it for the worker. Raises the failure if there is one."""

        def room() -> int | None:
            return placed(nbytes, job.dtype.itemsize, self._size, self._jobs)

        start: int | None = None
        while start is None:
            self._wait(lambda: self._failure is not None or room() is not None, room=True)
            with self._changed:
                if self._failure is not None:
                    raise self._failure.again()
                start = room()
                if start is not None:
                    job.start, job.end = start, start + nbytes
                    job.number = self._done + len(self._jobs) + 1
                    self._jobs.append(job)  # from here on the worker waits until it is ready
                    if self._worker is None:
                        threading.Thread(target=self._work, name="infinity-ring", daemon=True).start()

    def _work(self) -> None:
        """The worker's loop."""
        with self._changed:
            if self._worker is not None:
                return
            self._worker = threading.current_thread()
        while count := self._next():
            self._bring_down(count)
            with self._changed:
                for _ in range(count):
                    self._jobs.popleft()
                self._done += count
                self._changed.notify_all()

    def _next(self) -> int:
        """Wait for jobs; returns how many of the oldest to copy together. 0: the worker ends."""
        with self._changed:
            while not self._closed:
                if self._jobs and self._jobs[0].ready:
                    return self._neighbours()
                if not self._changed.wait(_IDLE) and not self._jobs:
                    break
            for job in self._jobs:
                job.use = None
            self._worker = None
            return 0

    def _neighbours(self) -> int:
        """Number of ready jobs, from the oldest, without a gap between them; at most one window of bytes."""
        first = end = self._jobs[0].start
        count = 0
        for job in self._jobs:
            if not job.ready or job.start != end or (count and job.end - first > self._window):
                break
            end = job.end
            count += 1
        return count

    def _bring_down(self, count: int) -> None:
        """Copy the oldest jobs' bytes to the host and use them. An error becomes the failure."""
        jobs = [self._jobs[index] for index in range(count)]
        try:
            if self._failure is None:
                self._use(jobs)
        except InfinityError as error:
            self._failure = error.again()
        except BaseException as error:
            self._failure = ConfigError(
                f"A gradient could not be accumulated: {type(error).__name__}: {error}.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )
        finally:
            for job in jobs:
                job.use = job.event = None

    def _use(self, jobs: Sequence[Job]) -> None:
        wanted = [job for job in jobs if job.use is not None]
        if not wanted:
            return
        assert self._ring is not None and self._landing is not None
        store, start, end = self._store, wanted[0].start, wanted[-1].end
        here = self._landing[start:end]
        events = [job.event for job in wanted if job.event is not None]
        transfer = store.link.to_host(here, self._ring[start:end], events)
        store.meter.moved(Edge.DEVICE_TO_HOST, here.nbytes, transfer)
        try:
            transfer.wait()
        except InfinityError:
            with contextlib.suppress(InfinityError):
                transfer.wait()  # the copy may still be under way, in bytes that other jobs get next
            raise
        store.link.uses(User.HOST, here, writes=False, label="fresh gradient")
        for job in wanted:
            if job.use is not None:
                job.use(here[job.start - start : job.end - start].view(job.dtype))
