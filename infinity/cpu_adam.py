"""CPU optimizer steps over pages: one fused pass per element, on a thread pool of its own.

A page is a set of flat arrays of one length (gradient, parameter, moments) in which many parameters
lie one after the other. A `Segment` names one parameter's range and its hyper-parameters; one
`Pool.submit` updates a whole page:

    pool = Pool()
    ticket = pool.submit(Update(
        grad=grads, parameter=master, copy=bf16_params, first_moment=m, second_moment=v,
        segments=[Segment(0, 4096, 0), Segment(4096, 512, 1)],
        hypers=[AdamW(lr=3e-4, weight_decay=0.1, step=7), AdamW(lr=3e-4, step=7)],
    ))
    ...                               # the GIL is free meanwhile
    bad = ticket.result().nonfinite   # segments with a non-finite gradient

A non-finite gradient or state makes its element non-finite and stays there; every NaN that is stored is
0x7FC00000. Results are the same bits on every instruction set, with any number of threads, chunk size, offset and
alignment. Jobs of one pool behave as if they ran in the order of submission.

Arrays are contiguous CPU tensors, or `Span`s (an address, a dtype and a count) for memory that no
tensor describes. They must not be touched until the ticket is done; the pool keeps them alive.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from infinity import _cpu_adam
from infinity.errors import ConfigError

BLOCK: int = _cpu_adam.BLOCK
"""Elements per norm block; parameters may be split over segments at multiples of this only."""

DEFAULT_CHUNK: int = _cpu_adam.DEFAULT_CHUNK
"""Elements that a thread takes at a time."""

_R = TypeVar("_R")


def runnable_isas() -> tuple[str, ...]:
    """The instruction sets that were compiled and that this machine runs, best first.

    The last one is always "scalar". A pool takes the first, or what `isa=` or $INFINITY_ISA names.
    """
    return tuple(_cpu_adam.runnable_isas())


def default_cpus() -> tuple[int, ...]:
    """The CPUs on which `Pool()` puts its threads.

    One CPU of each physical core in the affinity mask, no more than the cgroup's CPU quota; from four
    on, one in eight (at least one) is left to the trainer.
    """
    return tuple(_cpu_adam.worker_cpus())


class Span(NamedTuple):
    """Memory that no tensor describes: `count` elements of `dtype` from `address` (bytes).

    `owner` is kept alive until the job that uses the span is done.
    """

    address: int
    dtype: torch.dtype
    count: int
    owner: object = None


Array: TypeAlias = torch.Tensor | Span


class Segment(NamedTuple):
    """Elements [start, start + count) of a page's arrays, and the index of their hyper-parameters."""

    start: int
    count: int
    hyper: int = 0


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 weight decay (arXiv:1412.6980, algorithm 1), as torch.optim.Adam computes it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int
    """1 for the first update: the number of updates after this one."""
    maximize: bool = False

    _decoupled = False

    def _native(self) -> _cpu_adam.AdamHyper:
        return _cpu_adam.AdamHyper(
            self._decoupled, self.lr, *self.betas, self.eps, self.weight_decay, self.step, self.maximize
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), as torch.optim.AdamW."""

    weight_decay: float = 1e-2

    _decoupled = True


@dataclass(frozen=True, kw_only=True)
class SGD:
    """SGD as torch.optim.SGD: uses `first_moment` as the momentum buffer if `momentum` is not 0."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first_step: bool
    """The momentum buffer has no content yet: it becomes the gradient, undamped."""
    maximize: bool = False

    def _native(self) -> _cpu_adam.SgdHyper:
        return _cpu_adam.SgdHyper(
            self.lr,
            self.momentum,
            self.dampening,
            self.weight_decay,
            self.nesterov,
            self.first_step,
            self.maximize,
        )


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Adagrad as torch.optim.Adagrad: `second_moment` is the sum of squares, filled by the caller at
    first with the initial accumulator value."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    step: int
    maximize: bool = False

    def _native(self) -> _cpu_adam.AdagradHyper:
        return _cpu_adam.AdagradHyper(
            self.lr, self.lr_decay, self.eps, self.weight_decay, self.step, self.maximize
        )


Hyper: TypeAlias = Adam | SGD | Adagrad


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step over a page. All arrays are flat and of one length.

    The gradient that the rule sees is (accumulated + grad) * scale. Bytes moved per parameter with
    bf16 gradients: 28 with an fp32 master and a bf16 copy, 26 with a split master.
    """

    grad: Array
    """float32, bfloat16 or float16; read."""
    parameter: Array
    """The float32 master; or, with `remainder`, the bfloat16 high half of a split master."""
    segments: Sequence[Segment]
    hypers: Sequence[Hyper]
    accumulated: Array | None = None
    """float32, added to grad; read."""
    remainder: Array | None = None
    """int16: master bits = (parameter bits << 16) + remainder. Zero it after editing the parameter."""
    copy: Array | None = None
    """Copy of the new fp32 master: float32, bfloat16 (rounded half up, equal to a split master's high
    half) or float16 (to nearest, ties to even); written."""
    first_moment: Array | None = None
    """float32: Adam's mean of gradients, SGD's momentum buffer."""
    second_moment: Array | None = None
    """float32: Adam's mean of squares, Adagrad's sum of squares."""
    scale: float = 1.0
    """Unscaling times clipping, as one factor."""


@dataclass(frozen=True)
class UpdateResult:
    nonfinite: tuple[int, ...]
    """Indices of the segments in which a scaled gradient was not finite (they were updated all the
    same; to skip a step, look at a `Gradient` pass's squares first)."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One pass over gradients: x = grad (+ accumulated), stored to `accumulated` and/or squared.

    Squares are of x * scale (fp32), summed in fp64 over blocks of BLOCK elements counted from each
    segment's start.
    """

    grad: Array
    """float32, bfloat16 or float16; read."""
    segments: Sequence[Segment]
    accumulated: Array | None = None
    """float32."""
    add: bool = True
    """Whether x includes what `accumulated` holds; False for the first of several micro-batches."""
    store: bool = False
    """Whether x becomes the content of `accumulated`."""
    squares: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class GradientResult:
    blocks: tuple[npt.NDArray[np.float64], ...]
    """Per segment, its blocks' sums of squares; empty unless squares were asked for."""

    @property
    def squares(self) -> tuple[float, ...]:
        """Per segment, the sum of squares: finite if and only if every element is."""
        return tuple(sum_in_order(each) for each in self.blocks)


def sum_in_order(sums: npt.NDArray[np.float64], start: float = 0.0) -> float:
    """start + sums[0] + sums[1] + ..., one after the other.

    A parameter's sum of squares is its blocks' sums in order, wherever its segments were computed; so
    sum_in_order(b, sum_in_order(a)) is the total of a parameter split into a and b.
    """
    return _cpu_adam.sum_in_order(sums, start)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Moves bytes as an update of that shape would, computing nothing: the limit for benchmarks.

    Contents of `read_write` (xor of a constant) and `write` arrays are not kept. Arrays of any dtype,
    of one length in elements.
    """

    read: Sequence[Array] = ()
    read_write: Sequence[Array] = ()
    write: Sequence[Array] = ()
    granule: int = 64
    """Elements of one array that are handled before the next array's turn."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        once = sum(_bytes(each) for each in (*self.read, *self.write))
        return once + 2 * sum(_bytes(each) for each in self.read_write)


class Ticket(Generic[_R]):
    """A job on its way. It may be dropped: the job is finished all the same."""

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

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks without the GIL until done (True) or for `timeout` seconds (False).

        Signal handlers run meanwhile; what they raise (KeyboardInterrupt) ends the wait, not the job.
        ConfigError in a forked child if the job was not done at the fork.
        """
        done = self._native.wait(timeout)
        if done:
            self._pool.reap()
        return done

    def result(self, timeout: float | None = None) -> _R:
        """Waits and returns what the job found; TimeoutError if it is not done in time."""
        if not self.wait(timeout):
            raise TimeoutError(f"The job was not done within {timeout} s.")
        return self._result()


class Pool:
    """Pinned threads that run updates, gradient passes and streams; none of them takes the GIL.

    `threads` and `cpus` (CPU numbers; more threads than CPUs share them in turn) override
    `default_cpus()`. `isa` forces an instruction set, `chunk` (elements, a multiple of BLOCK) the unit of
    work; neither changes a bit of any result. ConfigError for values that cannot be used.

    A context manager; `close` finishes what is queued. A pool does not survive a fork: in the child every
    call raises ConfigError.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        cpus: Sequence[int] | None = None,
        isa: str | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads is {threads}.", "Give at least one thread, or None to choose.")
        if chunk < 1 or chunk % BLOCK:
            raise ConfigError(f"chunk is {chunk} elements.", f"Give a positive multiple of {BLOCK}.")
        placed = _placement(threads, cpus)
        self._native = _cpu_adam.Pool(placed, isa or "", chunk)
        _open_pools.add(self)

    @property
    def threads(self) -> int:
        return len(self._native.cpus)

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPU of each thread."""
        return tuple(self._native.cpus)

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def closed(self) -> bool:
        return self._native.closed

    @overload
    def submit(self, work: Update) -> Ticket[UpdateResult]: ...
    @overload
    def submit(self, work: Gradient) -> Ticket[GradientResult]: ...
    @overload
    def submit(self, work: Stream) -> Ticket[None]: ...
    def submit(
        self, work: Update | Gradient | Stream
    ) -> Ticket[UpdateResult] | Ticket[GradientResult] | Ticket[None]:
        """Queues the work and returns at once.

        ConfigError, and nothing touched, for tensors of a wrong dtype, device, length or layout, arrays
        that overlap, segments outside the arrays or overlapping, hyper-parameters out of range, and a
        closed pool.
        """
        if isinstance(work, Update):
            return self._submit_update(work)
        if isinstance(work, Gradient):
            return self._submit_gradient(work)
        if isinstance(work, Stream):
            return self._submit_stream(work)
        raise ConfigError(
            f"A pool cannot run a {type(work).__name__}.", "Submit an Update, a Gradient or a Stream."
        )

    @overload
    def run(self, work: Update) -> UpdateResult: ...
    @overload
    def run(self, work: Gradient) -> GradientResult: ...
    @overload
    def run(self, work: Stream) -> None: ...
    def run(self, work: Update | Gradient | Stream) -> UpdateResult | GradientResult | None:
        """`submit` and `result` in one."""
        return self.submit(work).result()

    def close(self) -> None:
        """Finishes what is queued and ends the threads. Harmless when repeated."""
        self._native.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit_update(self, work: Update) -> Ticket[UpdateResult]:
        page = _Page()
        parameter = torch.float32 if work.remainder is None else torch.bfloat16
        if work.remainder is not None and work.copy is not None:
            raise ConfigError(
                "An update was given both a remainder and a copy.",
                "Leave the copy out: a split master's parameter is its bf16 copy.",
            )
        native = self._native.submit_update(
            grad=page.add("grad", work.grad, *_GRAD_DTYPES),
            grad_dtype=_GRAD_DTYPES[work.grad.dtype],
            format=_parameter_format(work),
            accumulated=page.add("accumulated", work.accumulated, torch.float32),
            parameter=page.add("parameter", work.parameter, parameter),
            remainder=page.add("remainder", work.remainder, torch.int16),
            copy=page.add("copy", work.copy, *_COPY_FORMATS),
            first_moment=page.add("first_moment", work.first_moment, torch.float32),
            second_moment=page.add("second_moment", work.second_moment, torch.float32),
            segments=_segments(work.segments),
            hypers=[each._native() for each in work.hypers],
            scale=work.scale,
            elements=page.elements,
            owners=page.owners,
        )
        return Ticket(native, lambda: UpdateResult(tuple(native.nonfinite())), self._native)

    def _submit_gradient(self, work: Gradient) -> Ticket[GradientResult]:
        page = _Page()
        if work.store and work.accumulated is None:
            raise ConfigError("A gradient pass was told to store, but not where.", "Give `accumulated`.")
        if not (work.store or work.squares):
            raise ConfigError("A gradient pass was given nothing to do.", "Set store, squares or both.")
        native = self._native.submit_gradient(
            grad=page.add("grad", work.grad, *_GRAD_DTYPES),
            grad_dtype=_GRAD_DTYPES[work.grad.dtype],
            accumulated=page.add("accumulated", work.accumulated, torch.float32),
            read_accumulated=work.add and work.accumulated is not None,
            write_accumulated=work.store,
            squares=work.squares,
            segments=_segments(work.segments),
            scale=work.scale,
            elements=page.elements,
            owners=page.owners,
        )
        return Ticket(native, lambda: GradientResult(tuple(native.block_sums())), self._native)

    def _submit_stream(self, work: Stream) -> Ticket[None]:
        page = _Page()
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
            owners=page.owners, elements=page.elements, granule=work.granule, arrays=arrays
        )
        return Ticket(native, lambda: None, self._native)


_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    # Before the interpreter goes: afterwards the tensors' memory would go under running threads.
    for pool in list(_open_pools):
        pool.close()


_GRAD_DTYPES = {
    torch.float32: _cpu_adam.Dtype.F32,
    torch.bfloat16: _cpu_adam.Dtype.BF16,
    torch.float16: _cpu_adam.Dtype.F16,
}
_COPY_FORMATS = {
    torch.float32: _cpu_adam.ParameterFormat.PLAIN_F32,
    torch.bfloat16: _cpu_adam.ParameterFormat.PLAIN_BF16,
    torch.float16: _cpu_adam.ParameterFormat.PLAIN_F16,
}


def _placement(threads: int | None, cpus: Sequence[int] | None) -> list[int]:
    chosen = list(default_cpus() if cpus is None else cpus)
    allowed = _cpu_adam.affinity_cpus()
    unusable = sorted(set(chosen) - set(allowed))
    if unusable or not chosen:
        raise ConfigError(
            f"cpus names {unusable or 'no CPU'}; this process may use {allowed}.",
            "Give CPUs of this process's affinity mask (taskset, cpuset cgroup).",
        )
    return [chosen[i % len(chosen)] for i in range(len(chosen) if threads is None else threads)]


def _parameter_format(work: Update) -> _cpu_adam.ParameterFormat:
    if work.remainder is not None:
        return _cpu_adam.ParameterFormat.SPLIT
    if work.copy is None:
        return _cpu_adam.ParameterFormat.PLAIN
    return _COPY_FORMATS.get(work.copy.dtype, _cpu_adam.ParameterFormat.PLAIN)


def _segments(segments: Sequence[Segment]) -> list[Segment]:
    for index, each in enumerate(segments):
        if min(each) < 0:
            raise ConfigError(
                f"Segment {index} has a negative field: {tuple(each)}.",
                "Give (start, count, hyper), all at least 0.",
            )
    return list(segments)


def _bytes(array: Array) -> int:
    return _count(array) * array.dtype.itemsize


def _count(array: Array) -> int:
    return array.count if isinstance(array, Span) else array.numel()


class _Page:
    """The arrays of one submission: checks each, keeps its owner, and sees that lengths agree."""

    def __init__(self) -> None:
        self.elements = 0
        self.owners: list[object] = []

    def add(self, name: str, array: Array | None, *dtypes: torch.dtype) -> int:
        """The array's address, 0 for None."""
        if array is None:
            return 0
        if isinstance(array, Span):
            address, owner = array.address, array.owner
            if array.address < 0 or array.count < 0:
                raise ConfigError(
                    f"The span '{name}' has address {array.address} and count {array.count}.",
                    "Give an address in bytes and a count in elements, both at least 0.",
                )
        elif isinstance(array, torch.Tensor):
            _check_tensor(name, array)
            address, owner = array.data_ptr(), array
        else:
            raise ConfigError(
                f"'{name}' is a {type(array).__name__}.", "Give a torch.Tensor or an infinity.cpu_adam.Span."
            )
        if array.dtype not in dtypes:
            raise ConfigError(
                f"'{name}' has dtype {array.dtype}.",
                f"Give {' or '.join(str(each) for each in dtypes)}.",
            )
        count = _count(array)
        if self.owners and count != self.elements:
            raise ConfigError(
                f"'{name}' has {count} elements where the arrays before it have {self.elements}.",
                "Give flat arrays of one length.",
            )
        self.elements = count
        self.owners.append(owner)
        return address


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"'{name}' is on {tensor.device}.", "Copy it to the CPU first; this pool updates host memory."
        )
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ConfigError(
            f"'{name}' is not contiguous (shape {tuple(tensor.shape)}).",
            "Give a flat contiguous view of the page.",
        )
