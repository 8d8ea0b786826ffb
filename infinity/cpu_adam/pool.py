"""Thread pool: runs the work of infinity/cpu_adam/work.py as jobs, and returns a ticket for each."""

from __future__ import annotations

import atexit
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import torch

from infinity import _cpu_adam
from infinity.cpu_adam.page import (
    COPY_FORMATS,
    GRAD_DTYPES,
    MOMENT_FORMATS,
    Page,
    moment_dtype,
    parameter_format,
    segment_tuples,
)
from infinity.cpu_adam.placement import place
from infinity.cpu_adam.work import (
    BLOCK,
    CODE_BLOCK,
    AverageStep,
    Gradient,
    GradientResult,
    NativeHyper,
    Stream,
    Update,
    UpdateResult,
)
from infinity.errors import ConfigError
from infinity.system.closing import Closing

if TYPE_CHECKING:
    from infinity._cpu_adam import UpdateForm
    from infinity._driver import CopiesAround

_FIELDS = (
    "grad",
    "accumulated",
    "parameter",
    "remainder",
    "copy",
    "first_moment",
    "second_moment",
    "first_scale",
    "second_scale",
    "average",
)
"""The fields of `Update` that hold arrays, in the order of the native UpdateForm's places."""


def form_of(
    work: Update, memory: Sequence[torch.Tensor], parts: Sequence[tuple[int, int, int, int]]
) -> UpdateForm:
    """Describe what is equal in all updates of arrays like those of `work`, for `ThreadPool.submit_updates`.

    work: its arrays are tensors; its segments and hyper-parameters do not count. memory: the contiguous CPU
    tensors in which the arrays lie. parts: (start, count, index, parameter) of each contiguous part of a
    parameter in the arrays: start, count and index as in `Segment`, and a number of the parameter.
    """
    bounds = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in memory]
    places: list[tuple[int, int] | None] = []
    for field in _FIELDS:
        array = getattr(work, field)
        if array is None:
            places.append(None)
            continue
        start, end = array.data_ptr(), array.data_ptr() + array.nbytes
        index = next(i for i, (first, last) in enumerate(bounds) if first <= start and end <= last)
        places.append((index, start - bounds[index][0]))
    assert isinstance(work.parameter, torch.Tensor)
    return _form(work, work.parameter.numel(), places, parts)


def _form(
    work: Update,
    elements: int,
    places: Sequence[tuple[int, int] | None],
    parts: Sequence[tuple[int, int, int, int]],
) -> UpdateForm:
    return _cpu_adam.UpdateForm(
        elements=elements,
        grad_dtype=GRAD_DTYPES[torch.float32 if work.grad is None else work.grad.dtype],
        format=parameter_format(work),
        moments=MOMENT_FORMATS[moment_dtype(work)],
        places=places,
        parts=parts,
    )


_NO_AVERAGE = AverageStep(False, 0.0)

DEFAULT_CHUNK: int = _cpu_adam.DEFAULT_CHUNK
"""The default number of elements of a job that a thread processes at a time."""

_R = TypeVar("_R")


def runnable_isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, the best first and "scalar" last. A pool uses the
    first, unless its argument `isa` or the environment variable INFINITY_ISA names another.
    """
    return tuple(_cpu_adam.runnable_isas())


class Ticket(Generic[_R]):
    """A handle to wait for a job of a pool. The job is finished even if the caller drops the ticket."""

    def __init__(
        self,
        native: _cpu_adam.UpdateTicket | _cpu_adam.GradientTicket | _cpu_adam.StreamTicket,
        result: Callable[[], _R],
        pool: _cpu_adam.Pool,
    ) -> None:
        self._native = native
        self._result = result
        self._pool = pool

    def done(self) -> bool:
        return self._native.done()

    def times(self) -> tuple[int, int] | None:
        """When the job began and ended, in nanoseconds of time.perf_counter_ns(); None if it is not done."""
        return self._native.times()

    def wait(self, timeout: float | None = None) -> bool:
        """Block without the GIL until the job is done (returns True) or `timeout` seconds pass (False).

        The job goes before all others now, and the calling thread works on it, or on others while it cannot
        begin. So the call may last a little longer than `timeout`. An exception of a signal handler, such as
        KeyboardInterrupt, ends the wait but not the job. Raises ConfigError in a forked child process if the
        job was not done at the time of the fork.
        """
        done = self._native.wait(timeout)
        if done:
            self._pool.reap()
        return done

    def result(self, timeout: float | None = None) -> _R:
        """Wait for the job and return its result. Raises TimeoutError after `timeout` seconds, and the errors
        of `wait`.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"The job was not done within {timeout} s.")
        return self._result()


class Tickets:
    """A handle to wait for updates that were submitted together; see `ThreadPool.submit_updates`."""

    def __init__(self, native: _cpu_adam.UpdateTickets, pool: _cpu_adam.Pool) -> None:
        self._native = native
        self._pool = pool

    def done(self) -> bool:
        return self._native.done()

    def wait(self) -> None:
        """Wait for all updates, one after the other, as `Ticket.wait` does for each."""
        self._native.wait()
        self._pool.reap()

    @property
    def each(self) -> Sequence[_cpu_adam.UpdateTicket]:
        """A handle of each update, with its `times` as in `Ticket`, and its number of `elements`."""
        return self._native.each


class ThreadPool(Closing):
    """A pool of pinned threads that run the jobs of infinity/cpu_adam/work.py without taking the GIL.

    threads: the number of threads; None: one for each CPU. cpus: the numbers of the CPUs; None:
    `default_cpus()`. With more threads than CPUs, several share a CPU. isa: an instruction set; None: that of
    the environment variable INFINITY_ISA, or else the first of `runnable_isas()`. chunk: the number of
    elements that a thread processes at a time, a multiple of `infinity.cpu_adam.BLOCK`. Neither `isa` nor
    `chunk` changes a bit of any result.

    openmp: whether a thread that waits for a job computes the job itself, with the OpenMP threads that torch
    uses in that thread. These are often awake while the pool's threads sleep. If the pool has more threads
    than OpenMP, the pool's threads compute the job all the same. Raises ConfigError for values that cannot be
    used.

    The pool is a context manager, and `close` finishes all queued jobs. In a forked child process every call
    raises ConfigError.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        cpus: Sequence[int] | None = None,
        isa: str | None = None,
        chunk: int = DEFAULT_CHUNK,
        openmp: bool = False,
    ) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads is {threads}.", "Give at least one thread, or None to choose.")
        if chunk < 1 or chunk % BLOCK:
            raise ConfigError(f"chunk is {chunk} elements.", f"Give a positive multiple of {BLOCK}.")
        placed = place(threads, cpus)
        self._native = _cpu_adam.Pool(placed, isa or "", chunk, openmp)
        _open_pools.add(self)

    @property
    def threads(self) -> int:
        return len(self._native.cpus)

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPU to which each thread is pinned."""
        return tuple(self._native.cpus)

    @property
    def isa(self) -> str:
        return self._native.isa

    @overload
    def submit(self, work: Update, *, awaited: bool = False) -> Ticket[UpdateResult]: ...
    @overload
    def submit(self, work: Gradient, *, awaited: bool = False) -> Ticket[GradientResult]: ...
    @overload
    def submit(self, work: Stream, *, awaited: bool = False) -> Ticket[None]: ...
    def submit(
        self, work: Update | Gradient | Stream, *, awaited: bool = False
    ) -> Ticket[UpdateResult] | Ticket[GradientResult] | Ticket[None]:
        """Queue the work as a job, and return a ticket at once.

        awaited: whether the caller will wait for the job next. The calling thread then takes part in the job
        when it waits, as in `run`, and the pool's threads may be left asleep until then.

        Raises ConfigError, before any array of `work` is changed, if an array has a wrong dtype, device,
        length or layout, if arrays overlap, if segments overlap or lie outside the arrays, if a
        hyper-parameter is out of range, or if the pool is closed.
        """
        if isinstance(work, Update):
            return self._submit_update(work, awaited)
        if isinstance(work, Gradient):
            return self._submit_gradient(work, awaited)
        if isinstance(work, Stream):
            return self._submit_stream(work, awaited)
        raise ConfigError(
            f"A pool cannot run a {type(work).__name__}.", "Submit an Update, a Gradient or a Stream."
        )

    def submit_updates(
        self,
        forms: Sequence[UpdateForm],
        memory: Sequence[Sequence[int]],
        chosen: Sequence[tuple[int, int, int]],
        hypers: Sequence[NativeHyper],
        *,
        scale: float,
        average_step: AverageStep | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        owners: object,
        awaited: bool = False,
        priority: int = 0,
        hooks: CopiesAround | None = None,
    ) -> Tickets:
        """Queue several updates, one job each, without checking their arrays; returns at once.

        forms: of each update, made by `form_of`. memory: for each update, the addresses of the tensors that
        `form_of` was given, or of others of the same sizes. chosen: (number of a parameter, index into
        `hypers` or AVERAGED, seed) of each parameter that is updated; the parts of others do not change.
        hypers: made by `Hyper.native`. scale, average_step: as in `Update`. owners: an object that keeps the
        memory alive; it is kept during the jobs. awaited: as in `submit`. priority: updates with a larger
        number begin first; gradients begin before all updates.

        outputs: addresses like `memory` of other tensors, to which the results are written past the caches;
        None: the updates change their arrays. Elements outside the chosen parts are not written. The gradient
        and the average have no other arrays.

        hooks: for each update the copy for which it waits, and the one that its last thread begins. If the
        former fails, the update is not computed, and its job counts as done; `CopiesAround.check` raises the
        error. The copies for which updates wait should end in the order of submission, because the threads
        ask for the first one only.

        Raises ConfigError, before any update is queued, if the pool is closed, or if a hyper-parameter or a
        part is out of range.
        """
        native = self._native.submit_updates(
            forms=forms,
            memory=memory,
            chosen=chosen,
            hypers=hypers,
            scale=scale,
            average_step=average_step or _NO_AVERAGE,
            outputs=outputs,
            owners=owners,
            awaited=awaited,
            priority=priority,
            hooks=hooks,
        )
        return Tickets(native, self._native)

    @overload
    def run(self, work: Update) -> UpdateResult: ...
    @overload
    def run(self, work: Gradient) -> GradientResult: ...
    @overload
    def run(self, work: Stream) -> None: ...
    def run(self, work: Update | Gradient | Stream) -> UpdateResult | GradientResult | None:
        """Submit the work, wait for the job and return its result. The calling thread takes part, and does a
        small job alone.

        If the pool was made with `openmp`, and the calling thread has at least as many OpenMP threads as the
        pool has threads, they do any larger job. In both cases no thread of the pool is woken.
        """
        return self.submit(work, awaited=True).result()

    def close(self) -> None:
        self._native.close()

    def _submit_update(self, work: Update, awaited: bool) -> Ticket[UpdateResult]:
        page = Page()
        parameter = torch.float32 if work.remainder is None else torch.bfloat16
        if work.remainder is not None and work.copy is not None:
            raise ConfigError(
                "An update was given both a remainder and a copy.",
                "Leave the copy out: a split master's parameter is its bf16 copy.",
            )
        moment = moment_dtype(work)
        if moment != torch.uint8 and (work.first_scale is not None or work.second_scale is not None):
            raise ConfigError(
                f"An update with moments of {moment} was given scales.",
                "Leave the scales out: only int8 codes have scales.",
            )
        addresses = [
            page.add("grad", work.grad, *GRAD_DTYPES),
            page.add("accumulated", work.accumulated, torch.float32),
            page.add("parameter", work.parameter, parameter),
            page.add("remainder", work.remainder, torch.int16),
            page.add("copy", work.copy, *COPY_FORMATS),
            page.add("first_moment", work.first_moment, moment),
            page.add("second_moment", work.second_moment, moment),
            page.add("first_scale", work.first_scale, torch.uint8, per=CODE_BLOCK),
            page.add("second_scale", work.second_scale, torch.uint8, per=CODE_BLOCK),
            page.add("average", work.average, torch.float32),
        ]
        segments = segment_tuples(work.segments)
        (ticket,) = self.submit_updates(
            [
                _form(
                    work,
                    page.elements,
                    [(index, 0) if each else None for index, each in enumerate(addresses)],
                    [(start, count, index, i) for i, (start, count, _, index, _) in enumerate(segments)],
                )
            ],
            [addresses],
            [(i, hyper, seed) for i, (_, _, hyper, _, seed) in enumerate(segments)],
            [each.native() for each in work.hypers],
            scale=work.scale,
            average_step=work.average_step,
            owners=page.owners,
            awaited=awaited,
        ).each
        return Ticket(ticket, lambda: UpdateResult(tuple(ticket.nonfinite())), self._native)

    def _submit_gradient(self, work: Gradient, awaited: bool) -> Ticket[GradientResult]:
        page = Page()
        if work.store and work.accumulated is None:
            raise ConfigError("A gradient pass has store=True, but no `accumulated`.", "Give `accumulated`.")
        if not (work.store or work.squares or work.copy is not None):
            raise ConfigError("A gradient pass has nothing to do.", "Set store, squares or copy.")
        native = self._native.submit_gradient(
            grad=page.add("grad", work.grad, *GRAD_DTYPES),
            grad_dtype=GRAD_DTYPES[work.grad.dtype],
            accumulated=page.add("accumulated", work.accumulated, torch.float32),
            copy=page.add("copy", work.copy, work.grad.dtype),
            read_accumulated=work.add and work.accumulated is not None,
            write_accumulated=work.store,
            squares=work.squares,
            segments=segment_tuples(work.segments),
            scale=work.scale,
            elements=page.elements,
            owners=page.owners,
            awaited=awaited,
        )
        return Ticket(native, lambda: GradientResult(tuple(native.block_sums())), self._native)

    def _submit_stream(self, work: Stream, awaited: bool) -> Ticket[None]:
        page = Page()
        groups = (
            (work.read, _cpu_adam.Access.READ),
            (work.read_write, _cpu_adam.Access.READ_WRITE),
            (work.write, _cpu_adam.Access.WRITE),
        )
        arrays = [
            (page.add("stream", each, each.dtype), each.dtype.itemsize, access)
            for group, access in groups
            for each in group
        ]
        if work.granule < 1:
            raise ConfigError(f"granule is {work.granule} elements.", "Give at least 1.")
        native = self._native.submit_stream(
            owners=page.owners,
            elements=page.elements,
            granule=work.granule,
            arrays=arrays,
            awaited=awaited,
        )
        return Ticket(native, lambda: None, self._native)


_open_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    # The memory of tensors is freed at the end of the interpreter. No thread may use it after that.
    for pool in list(_open_pools):
        pool.close()


_ELEMENTS = 16 << 20


def stream_speed(*, repeats: int = 5) -> float:
    """Measure the bytes per second, reads plus writes, that a default `ThreadPool` moves in place: the median
    of `repeats` passes over two fp32 arrays of 0.13 GB in total. It is below the bandwidth in the memory's
    data sheet.
    """
    arrays = [torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(2)]
    with ThreadPool() as pool:
        work = Stream(read_write=arrays)
        pool.run(work)
        return statistics.median(_rate(pool, work) for _ in range(repeats))


def _rate(pool: ThreadPool, work: Stream) -> float:
    start = time.perf_counter()
    pool.run(work)
    return work.bytes_moved / (time.perf_counter() - start)
