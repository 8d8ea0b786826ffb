"""The gradient ring: device memory through which fresh gradients leave, while the backward goes on.

The hook of a gradient copies it into the ring, on the stream that made it, so that autograd's memory is free
at once; it records an event and returns. A worker brings down what the ring has, oldest first, into a landing
of the same shape in host RAM, and does what is to be done with it there. Neighbours that are there together
come down in one copy.

[Note: who waits for the worker]
The worker takes no lock but the ring's own, so anybody may wait for it, also under the runtime's lock. It
does its jobs in their order: the number of the last one that changes some bytes says when they are right.
Where the ring is full, the hook waits for room before it takes the runtime's lock (`await_room`); what does
not fit the ring as a whole waits for the rest of its room with it.

[Note: failures] The first error is kept until `renew`: jobs behind it are dropped, for what they would add to
may be half done. Whoever sends or settles meanwhile gets it raised.
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
"""Seconds between two looks of a wait, each of which lets signals in."""

_IDLE = 1.0
"""Seconds after which a worker without jobs ends: a runtime that nobody closed is not kept by its thread."""

Use = Callable[[torch.Tensor], None]
"""What is done with a gradient that has come down: called on the worker with host bytes, (n,)."""


class Job:
    """A part of a gradient on its way."""

    __slots__ = ("dtype", "end", "event", "number", "ready", "start", "use")

    def __init__(self, dtype: torch.dtype, use: Use) -> None:
        self.dtype = dtype
        self.use: Use | None = use
        """None once nothing is to be done with it."""
        self.start = self.end = 0
        """The bytes of the ring that it has."""
        self.number = 0
        self.event: Event | None = None
        self.ready = False
        """Whether it has an event, or never will."""


def placed(nbytes: int, alignment: int, size: int, taken: Sequence[Job] | deque[Job]) -> int | None:
    """Where in a ring of `size` bytes so many find room; None where they do not. Pure.

    taken: who has room, oldest first; it is given back in that order. None goes over the ring's end.
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
    """Whether all of these find room, one after the other, or as many of the first ones as an empty ring has
    room for. Pure."""
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
    """The ring of one runtime and its worker. Sent to under the runtime's lock; all else from any thread."""

    def __init__(self, store: Store) -> None:
        """The store has a ring and a landing."""
        assert store.ring is not None and store.landing is not None
        self._store = store
        self._ring: torch.Tensor | None = store.ring
        self._landing: torch.Tensor | None = store.landing
        self._window = store.plan.ring_block_bytes
        self._size = store.ring.nbytes
        self._changed = threading.Condition()
        """Guards all that follows, but for the jobs' own."""
        self._jobs: deque[Job] = deque()
        """All that have room."""
        self._done = 0
        """Jobs ever done."""
        self._failure: InfinityError | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def failure(self) -> InfinityError | None:
        """What lost gradients on their way; see the note."""
        return self._failure

    def windows(self, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """(start, end), in elements, of the parts in which `count` elements are sent: whole BLOCKs, but for
        the last."""
        step = self._window // itemsize // BLOCK * BLOCK
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def await_room(self, counts: Sequence[int], itemsize: int) -> None:
        """Wait, without the GIL, until there is room for runs of so many elements: see `Spans.fit`.

        Also where there is a failure, which `send` raises.
        """
        sizes = [(end - start) * itemsize for count in counts for start, end in self.windows(count, itemsize)]
        self._wait(
            lambda: self._failure is not None or fit(sizes, itemsize, self._size, self._jobs), room=True
        )

    def send(self, fresh: torch.Tensor, use: Use) -> int:
        """Take one window of a fresh gradient, (n,), contiguous, where the model computes, and return.

        use: what the worker does with it once it is in host RAM. Returns the job's number, for `settle`.
        Waits for room. Raises the failure if there is one, and DeviceError.
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
        """Whether the job of this number is done, and all before it. Never blocks."""
        return self._done >= number

    def wait(self, number: int | None = None) -> None:
        """Wait, without the GIL, until the job of this number (None: every job) is done, well or not."""
        self._wait(lambda: not self._jobs if number is None else self._done >= number)

    def settle(self, number: int | None = None) -> None:
        """`wait`, and raise the failure if there is one."""
        self.wait(number)
        if self._failure is not None:
            raise self._failure.again()

    def renew(self) -> None:
        """What was sent counts for nothing any more: wait until nothing is under way, and forget failures."""
        self.wait()
        self._failure = None

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and end the worker. Again: does nothing."""
        with self._changed:
            self._closed = True
            worker = self._worker
            self._changed.notify_all()
        while worker is not None and worker.is_alive():
            worker.join(_SLICE)
        self._ring = self._landing = None

    # --- inside -----------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], *, room: bool = False) -> None:
        """room: whether what is waited for is room, for the counters."""
        with self._changed:
            if ready() or self._closed:
                return
        stalling = self._store.meter.stalling(Edge.DEVICE_TO_HOST, Wait.ROOM if room else Wait.COPY)
        with stalling, self._changed:
            while not (ready() or self._closed):
                self._changed.wait(_SLICE)

    def _take(self, job: Job, nbytes: int) -> None:
        """Give a job room, and have the worker see it. Raises the failure if there is one."""

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
        """The worker's life."""
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
        """Wait for jobs; how many of the oldest come down together. 0: the worker ends."""
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
        """The jobs that follow each other without a gap, no more than a block of bytes."""
        first = end = self._jobs[0].start
        count = 0
        for job in self._jobs:
            if not job.ready or job.start != end or (count and job.end - first > self._window):
                break
            end = job.end
            count += 1
        return count

    def _bring_down(self, count: int) -> None:
        """Copy the oldest jobs' bytes down and use them; what goes wrong is kept, nothing of theirs is."""
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
                transfer.wait()  # the copy may be under way all the same, in bytes that others get next
            raise
        store.link.uses(User.HOST, here, writes=False, label="fresh gradient")
        for job in wanted:
            if job.use is not None:
                job.use(here[job.start - start : job.end - start].view(job.dtype))
