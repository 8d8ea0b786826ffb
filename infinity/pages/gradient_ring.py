"""Gradient ring: a ring buffer in device memory through which gradients leave the device during backward.

A gradient's hook copies the gradient into the ring, on the stream that computed the gradient. Then the hook
records an event and returns, so that autograd's memory is free at once. A worker thread copies the ring's
contents, oldest first, to the landing, which is a buffer of the same size in host RAM. From there the
worker adds the gradients to the gradient pages or, if other ranks keep their sums, copies them to where they
wait for these ranks. A large gradient is sent in windows, and each window is one job of the worker. Windows
that lie next to each other in the ring and are ready together are copied together.

[Note: who waits for the worker]
The worker takes no lock but the ring's own, so any thread may wait for the worker, even a thread that holds
the runtime's lock. The worker does its jobs in order, and every job has a number. So the gradients of a
chunk are complete once the last job that adds to the chunk is done. If the ring is full, a hook waits for
room before it takes the runtime's lock (`await_room`). Only for a gradient larger than the ring does the
hook wait for some of the room while it holds that lock.

[Note: failures] The worker's first error is kept, as `failure`, until `renew`. Later jobs are dropped,
because the sums to which they would add may be incomplete. Until `renew`, `send` and `settle` raise the
error.
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
"""Seconds after which a waiting thread checks again, so that signals are handled meanwhile."""

_IDLE = 1.0
"""Seconds after which a worker without jobs ends, so that it does not keep an unclosed runtime alive."""

Use = Callable[[torch.Tensor], None]
"""Function that the worker calls once a window of a gradient is in host RAM.

Its argument is the window, a tensor of shape (n,) in the gradient's dtype.
"""


class RingJob:
    """A window of a gradient on its way through the ring to host RAM: one job of the worker."""

    __slots__ = ("dtype", "end", "event", "number", "ready", "start", "then", "use")

    def __init__(self, dtype: torch.dtype, use: Use, then: Callable[[], object] | None = None) -> None:
        self.dtype = dtype
        self.then = then
        """Function that the worker calls once the job counts as done, also if it failed; None: no function.
        It must not wait.
        """
        self.use: Use | None = use
        """Function that the worker calls with the window in host RAM; None after the call, or if the window
        was dropped.
        """
        self.start = self.end = 0
        """The window lies at bytes [start, end) of the ring, counted from the ring's first byte."""
        self.number = 0
        self.event: Event | None = None
        self.ready = False
        """Whether the worker may take the job: the copy into the ring is queued, with `event` recorded after
        it, or sending the window has failed.
        """


def placed(nbytes: int, alignment: int, size: int, taken: Sequence[RingJob] | deque[RingJob]) -> int | None:
    """Find a range of `nbytes` free bytes in a ring of `size` bytes. Pure.

    Returns the range's start, in bytes from the start of the ring, or None if there is no such range.

    alignment: the start is a multiple of this number of bytes. taken: the jobs that have bytes in the ring,
    oldest first; jobs give their bytes back in this order. No job wraps around the ring's end.
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


def fit(sizes: Sequence[int], alignment: int, size: int, taken: Sequence[RingJob] | deque[RingJob]) -> bool:
    """Whether a ring of `size` bytes has room for new jobs of these sizes, one after the other. Pure.

    sizes, alignment: in bytes. taken: the jobs that have bytes in the ring, oldest first. If even an empty
    ring has no room for all new jobs, the ring only needs room for the first ones, as many as fit in an
    empty ring.
    """
    now, empty = list(taken), list[RingJob]()
    for nbytes in sizes:
        for jobs, enough in ((empty, True), (now, False)):
            start = placed(nbytes, alignment, size, jobs)
            if start is None:
                return enough
            job = RingJob(torch.uint8, _nothing)
            job.start, job.end = start, start + nbytes
            jobs.append(job)
    return True


def _nothing(landed: torch.Tensor) -> None:
    return None


class GradientRing:
    """The gradient ring of one runtime, and its worker thread.

    `send` is called under the runtime's lock. No other method needs that lock.
    """

    def __init__(self, store: Store) -> None:
        """store: the runtime's Store, which has allocated the buffers `ring` and `landing`."""
        assert store.ring is not None and store.landing is not None
        self._store = store
        self._ring: torch.Tensor | None = store.ring
        self._landing: torch.Tensor | None = store.landing
        self._window = store.plan.ring_block_bytes
        self._size = store.ring.nbytes
        self._changed = threading.Condition()
        """Condition that guards the attributes below, but not the attributes of jobs."""
        self._jobs: deque[RingJob] = deque()
        """All jobs that have bytes in the ring, oldest first."""
        self._done = 0
        """Number of jobs that the worker has finished so far."""
        self._failure: InfinityError | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def failure(self) -> InfinityError | None:
        """The error that lost gradients on their way to host RAM, or None; see [Note: failures]."""
        return self._failure

    def windows(self, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield the windows in which a contiguous tensor of `count` elements is sent, each as (start, end):
        the window has the elements [start, end) of the flattened tensor.

        itemsize: bytes of an element. All windows but the last have a multiple of cpu_adam.BLOCK elements.
        """
        step = self._window // itemsize // BLOCK * BLOCK
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def await_room(self, counts: Sequence[int], itemsize: int) -> None:
        """Wait, without the GIL, until `fit` says that the ring has room for the windows of new gradients.

        counts: numbers of elements of the contiguous tensors to be sent, which `windows` cuts. itemsize:
        bytes of an element. The wait also ends if there is a `failure`, which `send` then raises.
        """
        sizes = [(end - start) * itemsize for count in counts for start, end in self.windows(count, itemsize)]
        self._wait(
            lambda: self._failure is not None or fit(sizes, itemsize, self._size, self._jobs), room=True
        )

    def send(self, fresh: torch.Tensor, use: Use, then: Callable[[], object] | None = None) -> int:
        """Copy one window of a new gradient into the ring, and queue a job that brings the window to host
        RAM.

        fresh: the window, (n,), contiguous, in device memory; see `windows`. An empty window brings nothing;
        when it has come, the host knows that all work is done that is queued on the compute stream now. use:
        function that the worker calls with the window once it is in host RAM. then: as for RingJob. Returns
        the job's number, for `arrived`, `wait` and `settle`; jobs are numbered from 1 in the order of `send`.
        Waits for room in the ring, but not for the copy. Raises DeviceError, or the error in `failure` if
        there is one.
        """
        job = RingJob(fresh.dtype, use, then)
        try:
            self._take(job, fresh.nbytes)
            assert self._ring is not None
            link, there = self._store.link, self._ring[job.start : job.end]
            if there.nbytes:
                link.uses(User.COMPUTE, there, writes=True, label="gradient in the ring")
                there.view(fresh.dtype).copy_(fresh)
            job.event = link.record()
        except Exception:
            job.use = None
            raise
        finally:
            job.ready = True
            with self._changed:
                self._changed.notify_all()
        return job.number

    def arrived(self, number: int) -> bool:
        """Whether the worker is done with all jobs up to `number` (as `send` returned it). Never blocks.

        A job that failed or was dropped counts as done.
        """
        return self._done >= number

    def wait(self, number: int | None = None) -> None:
        """Wait, without the GIL, until job `number` (as `send` returned it) is done or has failed.

        None: wait for all jobs. Raises no error of a job; `settle` does.
        """
        self._wait(lambda: not self._jobs if number is None else self._done >= number)

    def settle(self, number: int | None = None) -> None:
        """Wait as `wait` does, then raise the error in `failure`, if there is one. number: as in `wait`."""
        self.wait(number)
        if self._failure is not None:
            raise self._failure.again()

    def renew(self) -> None:
        """Wait until all jobs have ended, and set `failure` back to None.

        Called when the gradients that were sent are not needed any more.
        """
        self.wait()
        self._failure = None

    def close(self) -> None:
        """Drop the jobs that have not begun, wait for the others, and end the worker.

        May be called more than once.
        """
        with self._changed:
            self._closed = True
            worker = self._worker
            self._changed.notify_all()
        while worker is not None and worker.is_alive():
            worker.join(_SLICE)
        self._ring = self._landing = None

    # --- inside -----------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], bool], *, room: bool = False) -> None:
        """Wait until `ready()` is true or the ring is closed. ready: called with `_changed` held. room:
        whether the caller waits for room in the ring, and not for copies.
        """
        with self._changed:
            if ready() or self._closed:
                return
        stalling = self._store.meter.stalling(Edge.DEVICE_TO_HOST, Wait.ROOM if room else Wait.COPY)
        with stalling, self._changed:
            while not (ready() or self._closed):
                self._changed.wait(_SLICE)

    def _take(self, job: RingJob, nbytes: int) -> None:
        """Wait for `nbytes` free bytes of the ring, give them to the job, and queue it. Raises `failure`."""

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
                        self._start_worker()

    def _start_worker(self) -> None:
        """Start the worker. If it cannot start, drop the last queued job, since no thread would do that job,
        and raise the error.
        """
        try:
            threading.Thread(target=self._work, name="infinity-ring", daemon=True).start()
        except Exception:
            self._jobs.pop()
            raise

    def _work(self) -> None:
        """Run the worker thread: bring jobs to host RAM until `_next` says that the worker ends."""
        with self._changed:
            if self._worker is not None:
                return
            self._worker = threading.current_thread()
        while count := self._next():
            self._bring_down(count)
            with self._changed:
                ended = [self._jobs.popleft() for _ in range(count)]
                self._done += count
                self._changed.notify_all()
            for job in ended:
                if job.then is not None:
                    job.then()

    def _next(self) -> int:
        """Wait for a job. Returns the number of jobs to copy together; 0 if the worker is to end."""
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
        """Count the oldest jobs that are ready and lie side by side in the ring. Counting stops before their
        bytes exceed `Plan.ring_block_bytes`, but the first job always counts if it is ready.
        """
        first = end = self._jobs[0].start
        count = 0
        for job in self._jobs:
            if not job.ready or job.start != end or (count and job.end - first > self._window):
                break
            end = job.end
            count += 1
        return count

    def _bring_down(self, count: int) -> None:
        """Copy the oldest `count` jobs to host RAM, and call their functions; see [Note: failures]."""
        jobs = [self._jobs[index] for index in range(count)]
        try:
            if self._failure is None:
                self._use(jobs)
        except InfinityError as error:
            self._failure = error.again()
        except Exception as error:
            self._failure = ConfigError(
                f"A gradient could not be accumulated: {type(error).__name__}: {error}.",
                "Call runtime.optimizer.zero_grad() and repeat the step.",
            )
        finally:
            for job in jobs:
                job.use = job.event = None

    def _use(self, jobs: Sequence[RingJob]) -> None:
        wanted = [job for job in jobs if job.use is not None]
        if not wanted:
            return
        assert self._ring is not None and self._landing is not None
        store, start, end = self._store, wanted[0].start, wanted[-1].end
        here = self._landing[start:end]
        events = [job.event for job in wanted if job.event is not None]
        if here.nbytes:
            transfer = store.link.to_host(here, self._ring[start:end], events)
            store.meter.moved(Edge.DEVICE_TO_HOST, here.nbytes, transfer)
            try:
                transfer.wait()
            except InfinityError:
                with contextlib.suppress(InfinityError):
                    transfer.wait()  # the copy may still be under way, in bytes that other jobs get next
                raise
            store.link.uses(User.HOST, here, writes=False, label="fresh gradient")
        else:
            for event in events:
                store.link.await_event(event)
        for job in wanted:
            if job.use is not None:
                job.use(here[job.start - start : job.end - start].view(job.dtype))
