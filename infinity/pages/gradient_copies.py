"""Gradient copies: gradients on their way from the device to host RAM during backward.

A gradient stays where autograd made it until it has been copied. Its hook records an event after the work
that computes it, and leaves it here in one of two ways:

- `copy` queues the copies from the gradient straight to its place in host RAM. So the first gradient of a
  step goes home if its page is in RAM and has its dtype.
- `send` queues a job of a worker thread. The worker brings the gradient down in blocks, through two landings
  in host RAM: while one block is copied, it adds the one before to the stored gradient. Gradients that wait
  in RAM for other ranks are jobs, too, without a landing.

Every copy runs on the one stream of copies to the host. So whoever has waited for a copy has waited for all
copies that were queued before.

[Note: gradients under way]
Gradients that are kept here take device memory, at most `Plan.leaving_bytes` beside the gradient of the hook
that runs. A hook that has left its gradient here waits for copies until this holds (`await_limit`), after it
has given the runtime's lock up.

[Note: who waits for the worker]
The worker takes no lock but the one in here, so any thread may wait for it, even a thread that holds the
runtime's lock. The worker does its jobs in order, and every job has a number. So the gradients of a chunk are
complete once the last job that adds to the chunk is done, and the last copy to the chunk.

[Note: failures] The first error is kept, as `failure`, until `renew`. Later jobs are dropped, because the
sums to which they would add may be incomplete. Until `renew`, `copy`, `send` and `check` raise the error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from infinity import cpu_adam
from infinity.cpu_adam import BLOCK
from infinity.device_update.table import Stop, fresh_squares_launch
from infinity.errors import ConfigError, InfinityError
from infinity.pages.store import Store
from infinity.telemetry.stats import Edge, Wait
from infinity.tiers.driver import Event
from infinity.tiers.link import ARRIVED, Transfer, User

_SLICE = 0.05
"""Seconds after which a waiting thread checks again, so that signals are handled meanwhile."""

_IDLE = 1.0
"""Seconds after which a worker without jobs ends, so that it does not keep an unclosed runtime alive."""

_LANDINGS = 2
_NOTHING = torch.zeros(0, dtype=torch.uint8, device="cpu")

Use = Callable[[int, torch.Tensor], None]
"""Function that the worker calls once a block of a gradient is in host RAM: (index of the block's first
element in the gradient, the block as a flat tensor).
"""


class GradientCopy:
    """A gradient that is copied straight to its place in host RAM."""

    def __init__(self, copies: GradientCopies, transfer: Transfer, nbytes: int) -> None:
        """nbytes: bytes of device memory that it keeps until it is copied."""
        self.nbytes = nbytes
        self._copies = copies
        self.transfer: Transfer | None = transfer
        """The copy, which ends after all that were queued before; None if it is known to have ended."""

    def done(self) -> bool:
        """Whether the copy is known to have ended. Never blocks. An error is kept as in `wait`."""
        try:
            return self.transfer is None or self.transfer.done()
        except InfinityError as error:
            self._copies.fail(error)
            return False

    def wait(self) -> None:
        """Wait, without the GIL, until the copy has ended. An error becomes `GradientCopies.failure`."""
        if (transfer := self.transfer) is None:
            return
        try:
            transfer.wait()
        except InfinityError as error:
            self._copies.fail(error)
            with contextlib.suppress(InfinityError):
                transfer.wait()  # the copy may still be under way, in bytes that others get next
        self.transfer = None


@dataclass(slots=True, eq=False)
class _Job:
    """A gradient that the worker brings down."""

    fresh: torch.Tensor
    event: Event
    use: Use | None
    """None also after the last call, and if the gradient was dropped."""
    then: Callable[[], object] | None
    """Function that the worker calls once the job counts as done, also if it failed; None: no function. It
    must not wait.
    """
    into: torch.Tensor | None
    """Where the gradient goes, of its shape and dtype; None: to the landings."""
    begun: int = 0
    """Number of elements whose copies have begun."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a job's gradient that is being copied."""

    job: _Job
    start: int
    here: torch.Tensor
    transfer: Transfer | None
    """None if there is nothing to copy, or nothing is copied after a failure."""
    last: bool


class GradientCopies:
    """All gradients of one runtime that are on their way to host RAM, and the worker thread."""

    def __init__(self, store: Store, threads: cpu_adam.ThreadPool) -> None:
        """store: the runtime's Store, which has allocated the landings. threads: the pool that measures
        gradients which no kernel of the device has measured.
        """
        assert store.landing is not None
        self._store = store
        self._threads = threads
        self._landings: Sequence[torch.Tensor] = store.landing.chunk(_LANDINGS)
        self._limit = store.plan.leaving_bytes
        self._changed = threading.Condition()
        """Condition that guards the attributes below, but not the attributes of copies and jobs."""
        self._copies: deque[GradientCopy] = deque()
        """Gradients that `copy` has queued and that are not known to be copied, oldest first."""
        self._jobs: deque[_Job] = deque()
        """All jobs that are not done, oldest first."""
        self._unbegun: deque[_Job] = deque()
        """Those of which some elements are not being copied yet."""
        self._kept = 0
        """Bytes of device memory that the gradients of `_copies` and `_jobs` take."""
        self._done = 0
        """Number of jobs that the worker has finished so far."""
        self._failure: InfinityError | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def failure(self) -> InfinityError | None:
        """The error that lost gradients on their way to host RAM, or None; see [Note: failures]."""
        return self._failure

    def check(self) -> None:
        """Raise the error in `failure`, if there is one."""
        if self._failure is not None:
            raise self._failure.again()

    def fail(self, error: InfinityError) -> None:
        """Keep an error as `failure`, unless there is one."""
        if self._failure is None:
            self._failure = error.again()

    # --- called by hooks, under the runtime's lock --------------------------------------------------------

    def copy(
        self,
        fresh: torch.Tensor,
        places: Sequence[tuple[int, torch.Tensor]],
        squares: torch.Tensor | None,
        stop: Stop | None = None,
    ) -> GradientCopy:
        """Queue the copies of a new gradient straight to its places in host RAM.

        fresh: the gradient, (n,), contiguous, in device memory. places: (index of the first element, flat
        tensor of the gradient's dtype in host RAM) of each range of elements. squares: float64 in host RAM
        that gets the sum of squares of each block of BLOCK elements, or None: they are not computed. stop:
        used only if they are; None: no word is written. Raises DeviceError, and the error in `failure`.
        """
        self.check()
        link = self._store.link
        if link.checked and fresh.nbytes:
            link.uses(User.COMPUTE, fresh, writes=True, label="fresh gradient")
        pairs = [(place, fresh[start : start + place.numel()]) for start, place in places if place.nbytes]
        if squares is not None and squares.numel():
            there = torch.empty(squares.shape, dtype=squares.dtype, device=fresh.device)
            assert self._store.kernels is not None
            launch = fresh_squares_launch(fresh, there, stop)
            self._store.kernels.launch("infinity_fresh_squares", there.numel(), launch.tobytes())
            if link.checked:
                words = [] if stop is None else [stop.word]
                link.uses(User.COMPUTE, there, *words, writes=True, label="sums of squares")
            pairs.append((squares, there))
        transfer = self._store.copy_all_down(pairs) if pairs else ARRIVED
        copy = GradientCopy(self, transfer, sum([source.nbytes for _, source in pairs]))
        with self._changed:
            self._copies.append(copy)
            self._kept += copy.nbytes
        return copy

    def measures(self) -> bool:
        """Whether the device computes sums of squares of gradients that it gives to `copy`."""
        return self._store.kernels is not None

    def send(
        self,
        fresh: torch.Tensor,
        use: Use | None,
        *,
        into: torch.Tensor | None = None,
        then: Callable[[], object] | None = None,
    ) -> int:
        """Queue a job that brings a new gradient to host RAM.

        fresh: the gradient, (n,), contiguous, in device memory. An empty one brings nothing; when it has
        come, the host knows that all work is done that is queued on the compute stream now. use: function
        that the worker calls with each block in host RAM, in order; None: no function. into: host RAM of the
        same shape and dtype, to which the gradient is copied as one block; None: the landings. then: function
        that the worker calls once the job counts as done, also if it failed; it must not wait. Returns the
        job's number, for `arrived` and `wait`; jobs are numbered from 1 in the order of `send`. Raises
        DeviceError, or the error in `failure` if there is one.
        """
        self.check()
        link = self._store.link
        if fresh.nbytes:
            link.uses(User.COMPUTE, fresh, writes=True, label="fresh gradient")
        event = link.record()
        assert event is not None
        job = _Job(fresh, event, use, then, into)
        with self._changed:
            if self._worker is None:
                self._start_worker()
            self._jobs.append(job)
            self._unbegun.append(job)
            self._kept += fresh.nbytes
            self._changed.notify_all()
            return self._done + len(self._jobs)

    # --- waits, by any thread, with or without the runtime's lock -----------------------------------------

    def await_limit(self) -> None:
        """Wait, without the GIL, until gradients under way take at most `Plan.leaving_bytes`; see [Note:
        gradients under way]. Raises no error of a copy.
        """
        while True:
            with self._changed:
                self._forget_copied()
                if self._kept <= self._limit or self._closed:
                    return
                copy = self._copies[0] if self._copies else None
                number = self._done + 1
            if copy is None:
                self._wait(number, Wait.ROOM)
            else:
                with self._store.meter.stalling(Edge.DEVICE_TO_HOST, Wait.ROOM):
                    copy.wait()

    def arrived(self, number: int) -> bool:
        """Whether the worker is done with all jobs up to `number` (as `send` returned it). Never blocks.

        A job that failed or was dropped counts as done.
        """
        return self._done >= number

    def wait(self, number: int | None = None) -> None:
        """Wait, without the GIL, until all jobs up to `number` (as `send` returned it) are done or have
        failed. None: wait for all jobs and copies. Raises no error of a job; `check` does.
        """
        if number is None:
            self._await_copies()
            with self._changed:
                number = self._done + len(self._jobs)
        self._wait(number, Wait.COPY)

    def renew(self) -> None:
        """Wait until all jobs and copies have ended, and set `failure` back to None.

        Called when the gradients under way are not needed any more.
        """
        self.wait()
        self._failure = None

    def close(self) -> None:
        """Drop the jobs that have not begun, wait for the others and for all copies, and end the worker.

        May be called more than once.
        """
        with self._changed:
            self._closed = True
            worker = self._worker
            self._changed.notify_all()
        while worker is not None and worker.is_alive():
            worker.join(_SLICE)
        self._await_copies()
        self._jobs.clear()
        self._unbegun.clear()
        self._landings = ()

    # --- sums of squares that no kernel has computed ------------------------------------------------------

    def measure(self, stored: torch.Tensor) -> npt.NDArray[np.float64]:
        """The sum of squares of each block of BLOCK elements of a stored gradient, flat in host RAM."""
        self._store.link.uses(User.HOST, stored, writes=False, label="measured gradient")
        whole = [cpu_adam.Segment(0, stored.numel())]
        work = cpu_adam.Gradient(grad=stored, squares=True, segments=whole)
        return self._threads.submit(work).result().blocks[0]

    # --- inside -------------------------------------------------------------------------------------------

    def _forget_copied(self) -> None:
        """Forget the oldest copies that have ended. Called with `_changed` held."""
        while self._copies and self._copies[0].done():
            self._kept -= self._copies.popleft().nbytes

    def _await_copies(self) -> None:
        while True:
            with self._changed:
                self._forget_copied()
                if not self._copies:
                    return
                copy = self._copies[-1]
            with self._store.meter.stalling(Edge.DEVICE_TO_HOST, Wait.COPY):
                copy.wait()

    def _wait(self, number: int, why: Wait) -> None:
        """Wait until all jobs up to `number` are done, or the worker has been told to end."""
        if self._done >= number or self._closed:
            return
        with self._store.meter.stalling(Edge.DEVICE_TO_HOST, why), self._changed:
            while not (self._done >= number or self._closed):
                self._changed.wait(_SLICE)

    def _start_worker(self) -> None:
        """Start the worker. Called with `_changed` held. Raises RuntimeError if it cannot start."""
        worker = threading.Thread(target=self._work, name="infinity-gradients", daemon=True)
        worker.start()
        self._worker = worker

    def _work(self) -> None:
        """Run the worker thread: while one block is copied, use the one before."""
        landings = itertools.cycle(self._landings)
        blocks: deque[_Block] = deque()
        while True:
            while len(blocks) < _LANDINGS and (job := self._next(wait=not blocks)) is not None:
                blocks.append(self._begin(job, landings))
            if not blocks:
                return
            self._finish(blocks.popleft())

    def _next(self, *, wait: bool) -> _Job | None:
        """The job whose next block is copied next. None if there is no job and either `wait` is False or the
        worker is to end.
        """
        with self._changed:
            while not self._closed:
                if self._unbegun:
                    return self._unbegun[0]
                if not wait:
                    return None
                if not self._changed.wait(_IDLE) and not self._unbegun:
                    break
            if wait:
                for job in self._jobs:
                    job.use = None
                self._worker = None
            return None

    def _begin(self, job: _Job, landings: Iterator[torch.Tensor]) -> _Block:
        """Begin to copy the next block of a job, unless there was a failure."""
        count, start = job.fresh.numel(), job.begun
        if job.into is None and count:
            landing = next(landings)
            most = landing.nbytes // job.fresh.dtype.itemsize // BLOCK * BLOCK
            end = min(count, start + most)
            here = landing[: (end - start) * job.fresh.dtype.itemsize].view(job.fresh.dtype)
        else:
            end, here = count, job.fresh if job.into is None else job.into
        transfer: Transfer | None = None
        if self._failure is None and end > start:
            try:
                after = () if start else job.event
                transfer = self._store.link.to_host(here, job.fresh[start:end], after)
                self._store.meter.moved(Edge.DEVICE_TO_HOST, here.nbytes, transfer)
            except InfinityError as error:
                self.fail(error)
        job.begun = end
        if end == count:
            with self._changed:
                self._unbegun.popleft()
        return _Block(job, start, here, transfer, last=end == count)

    def _finish(self, block: _Block) -> None:
        """Wait for a block, call the job's function, and end the job after its last block."""
        job = block.job
        try:
            self._await(block)
            if self._failure is None and job.use is not None:
                job.use(block.start, block.here)
        except InfinityError as error:
            self.fail(error)
        except Exception as error:
            self.fail(
                ConfigError(
                    f"A gradient could not be accumulated: {type(error).__name__}: {error}.",
                    "Call runtime.optimizer.zero_grad() and repeat the step.",
                )
            )
        if block.last:
            nbytes, job.fresh, job.into, job.use = job.fresh.nbytes, _NOTHING, None, None
            with self._changed:
                self._jobs.popleft()
                self._kept -= nbytes
                self._done += 1
                self._changed.notify_all()
            if job.then is not None:
                job.then()

    def _await(self, block: _Block) -> None:
        if block.transfer is not None:
            try:
                block.transfer.wait()
            except InfinityError:
                with contextlib.suppress(InfinityError):
                    block.transfer.wait()  # the copy may still be under way, in bytes that others get next
                raise
            self._store.link.uses(User.HOST, block.here, writes=False, label="fresh gradient")
        elif self._failure is None:
            self._store.link.await_event(block.job.event)
