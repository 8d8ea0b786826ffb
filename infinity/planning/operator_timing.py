"""Operator timing: estimates the seconds of a step's operations by running each distinct operation alone.

The operations are recorded from a step without data (infinity/planning/fake_step.py). The rate of matrix
products alone says little about a step, because small products, norms, attention and element-wise work take
much of the time. So every distinct operation (operator, shapes, strides, dtypes) is run on the device of
the step. An operation is not run if it is too large, if running it alone could do harm, or if the time
limit is over. Its seconds are then estimated by a roofline model (Williams, Waterman, Patterson 2009), at
the rates of the operations that were run.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from infinity.config import round_up
from infinity.system import machine

TIME_LIMIT = 2.0
"""The default time limit of `seconds_of`: seconds for running operations and for making their operands."""

MOST_BYTES = 1 << 30
"""The most bytes that operands and results of timed operations take together. The limit is a quarter of the
free memory of the device (of RAM for the CPU) if that quarter is less.
"""

_COLD_BYTES = 64 << 20
"""Bytes of the `Memory` from which runs take their operands, if no operation needs more. Also the most bytes
of results that `_Kept` holds. Each run takes the bytes behind those of the run before. When the same bytes
are taken again, they have left every cache of the processor, as in a real step.
"""

_ROUNDS = 4
"""The most rounds. In each round every operation is run and timed. The first round is a warm-up; it counts
only if no other round ran all operations.
"""

_QUEUED_SECONDS = 0.006
_MOST_QUEUED = 20
"""On a CUDA device, which queues operations, several runs of one operation are timed together, because the
time of a single run would include the start and the end of the queue. _MOST_QUEUED is the most runs that
are timed together, and _QUEUED_SECONDS the most seconds that they may take together.
"""

_PATTERN = 1 << 16
_ALIGNMENT = 64

_INDEXING = ("embedding", "nll_loss", "gather", "scatter", "index")
_ATTENTION = ("_scaled_dot_product", "_efficient_attention", "_flash_attention")
"""Prefixes of the names of attention operators. Operators with these prefixes, or with those in _INDEXING,
run safely if every integer tensor is filled with zeros. Other operators may read an integer tensor as
pivots, or as a workspace that another operation has filled; with wrong contents they can end the process.
"""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape, strides (in elements), dtype and device, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The TensorSpec of a strided tensor. Raises RuntimeError for a sparse tensor."""
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def elements(self) -> int:
        """Number of elements of memory from the tensor's first element to its last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of memory from the tensor's first element to its last, gaps included."""
        return self.elements * self.dtype.itemsize

    @property
    def is_integral(self) -> bool:
        """Whether the dtype is an integer dtype, so that the elements may be indices. False for bool."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)


@dataclass(frozen=True)
class Operation:
    """A call of an operator: the operator and its arguments, with a TensorSpec in place of each tensor.
    Calls that compare equal are taken to last equally long.
    """

    operator: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    """The arguments, flattened by torch's pytree, with a TensorSpec in place of each tensor."""
    tree: pytree.TreeSpec = field(compare=False)
    flops: int = field(compare=False)
    """Floating-point operations that the operator performs. Only matrix products, convolutions and
    attention are counted; other operators have 0.
    """
    result_bytes: int = field(compare=False)
    """Bytes of the results; 0 if the operator returns a view."""

    @staticmethod
    def of(operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Operation:
        """Make the Operation for a call of `operator` that returned `result`. The tensors among the
        arguments and results may be fake tensors.
        """
        from torch.utils.flop_counter import flop_registry  # imports Triton, where there is one

        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        count = flop_registry.get(operator.overloadpacket)
        results = (each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
        return Operation(
            operator,
            tuple(TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            tree,
            count(*args, **kwargs, out_val=result) if count else 0,
            0 if operator.is_view else sum(TensorSpec.of(each).nbytes for each in results),
        )

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors among the arguments."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results together; 0 for a view, which neither reads nor writes memory."""
        return 0 if self.operator.is_view else sum(each.nbytes for each in self.operands) + self.result_bytes

    @property
    def runs_alone(self) -> bool:
        """Whether the operation can be run alone, on made-up operands, without harm.

        False for operators outside of torch's namespace "aten", because they may wait for other ranks or
        keep their arguments. False also for operators that take integer tensors and are not known to work
        with zeros.
        """
        if self.operator.namespace != "aten":
            return False
        takes_any = self.operator._schema.name.removeprefix("aten::").startswith(_INDEXING + _ATTENTION)
        return takes_any or not any(each.is_integral for each in self.operands)

    def arguments(self, memory: Memory) -> tuple[Any, Any]:
        """Return the positional and keyword arguments for one run. Their tensors are taken from `memory`."""
        leaves = [memory.tensor(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs


class Memory:
    """Memory from which the tensors among operations' arguments are taken one after the other. When the end
    is reached, tensors are taken from the beginning again.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator("cpu")
        generator.manual_seed(0)
        # Read as bfloat16, the elements are random in [0.01, 0.11). Read as any other floating dtype, they
        # are normal numbers too.
        some = torch.rand(_PATTERN, generator=generator, dtype=torch.float32, device="cpu")
        some = some.mul_(0.1).add_(0.01).to(device=device, dtype=torch.bfloat16)
        self._pattern = some.view(torch.uint8)
        self.nbytes = round_up(nbytes, self._pattern.numel())
        self._floating = self._pattern.repeat(self.nbytes // self._pattern.numel())
        self._others = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._next = 0
        self._first: int | None = 0
        """Offset in bytes, from the start of the memory, of the first tensor taken since the last `renew`.
        None if the end was reached since then, so that tensors may have been taken from anywhere.
        """

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Take memory for a tensor as `spec` describes it, and return the tensor. Its elements are random
        if its dtype is floating or complex, else zeros.

        The tensor shares no memory with tensors that were taken shortly before. The same memory is taken
        again only after about `self.nbytes` further bytes have been taken.
        """
        if self._next + spec.nbytes > self.nbytes:
            self._next, self._first = 0, None
        floating = spec.dtype.is_floating_point or spec.dtype.is_complex
        source = self._floating if floating else self._others
        memory = source[self._next : self._next + spec.nbytes]
        self._next += round_up(spec.nbytes, _ALIGNMENT)
        here = memory.view(spec.dtype).as_strided(spec.shape, spec.stride)
        return here if spec.device == self.device else here.to(spec.device)

    def renew(self, *, written: bool) -> None:
        """Restore the contents of the memory that tensors have taken since the last call of `renew`.

        written: whether an operation may have written to this memory. If not, there is nothing to restore.
        """
        if written:
            every = self._pattern.numel()
            start = 0 if self._first is None else self._first // every
            end = None if self._first is None else -(-self._next // every)
            self._floating.view(-1, every)[start:end] = self._pattern
            self._others.view(-1, every)[start:end] = 0
        self._first = self._next


class Operations(Counter[Operation]):
    """The distinct operations of a step, with the number of times that the step runs each operation."""

    def record(self, operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count one call of an operator. Calls that only ask for a tensor's properties are not counted."""
        if operator.namespace != "prim":
            self[Operation.of(operator, args, kwargs, result)] += 1


@dataclass(frozen=True)
class Roofline:
    """The two rates from which the seconds of an operation are estimated if the operation was not run."""

    flops: float
    """Floating-point operations per second."""
    bytes: float
    """Bytes per second of operands and results."""

    def seconds(self, operation: Operation) -> float:
        """The estimated seconds of one run of an operation: the time for its arithmetic or the time for its
        memory accesses, whichever is longer.
        """
        return max(operation.flops / self.flops, operation.nbytes / self.bytes)

    def learned(self, timed: Mapping[Operation, float], counts: Mapping[Operation, int]) -> Roofline:
        """Return a roofline with the rates that timed operations have reached: `flops` from operations
        whose `flops` are above 0, `bytes` from all others. A rate stays as it is if no such operation was
        timed.

        timed: seconds of one run of each timed operation. counts: number of times that a step runs each
        operation.
        """
        products = [each for each in timed if each.flops]
        others = [each for each in timed if each.nbytes and not each.flops]

        def rate(amounts: list[tuple[int, Operation]], default: float) -> float:
            took = sum(timed[each] * counts[each] for _, each in amounts)
            return sum(amount * counts[each] for amount, each in amounts) / took if took else default

        return Roofline(
            flops=rate([(each.flops, each) for each in products], self.flops),
            bytes=rate([(each.nbytes, each) for each in others], self.bytes),
        )


class Seconds(NamedTuple):
    """A range of seconds, from `least` to `most`."""

    least: float
    most: float


def seconds_of(
    operations: Operations, roofline: Roofline, device: torch.device, *, limit: float = TIME_LIMIT
) -> Seconds:
    """Measure the seconds of all operations of a step, run one after the other on `device`.

    Each distinct operation is run in several rounds. `least` and `most` of the result are the seconds of a
    step by the times of the fastest and of the slowest round. roofline: estimates the seconds of operations
    that are not run. The operations with the largest estimates run first, and the rates of timed operations
    replace the roofline's rates where possible. limit: seconds for all rounds together; a run that has
    begun is finished. The caller's random number generators, gradient mode and autocast settings do not
    change.
    """
    order = sorted(operations, key=lambda each: -roofline.seconds(each) * operations[each])
    room = _room(device)
    order = [each for each in order if each.runs_alone and each.nbytes <= room // 6]
    end = time.perf_counter() + limit
    with isolated(device):
        cold = min(_COLD_BYTES, room // 6)
        memory = Memory(max([cold, *(2 * each.nbytes for each in order)]), device)
        rounds = _rounds(order, memory, end)
    whole = [each for each in rounds if len(each) == len(rounds[0])]
    totals = [_total(operations, timed, roofline) for timed in whole[1:] or whole or [{}]]
    return Seconds(min(totals), max(totals))


def _total(operations: Operations, timed: Mapping[Operation, float], roofline: Roofline) -> float:
    """Seconds of all operations of a step. Operations that are not in `timed` are estimated by the
    roofline.

    timed: seconds of one run of each operation that one round has timed.
    """
    learned = roofline.learned(timed, operations)
    return sum(
        count * (timed[operation] if operation in timed else learned.seconds(operation))
        for operation, count in operations.items()
    )


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """A context manager within which operations can be run. Inside, autograd and autocast are off and
    `device` is the current device; at the end the states of the random number generators are restored.
    """
    with contextlib.ExitStack() as inside:
        inside.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        inside.enter_context(torch.no_grad())
        inside.enter_context(torch._C._DisableAutocast())
        if device.type == "cuda":
            inside.enter_context(torch.cuda.device(device))
        yield


def _rounds(order: Sequence[Operation], memory: Memory, end: float) -> list[dict[Operation, float]]:
    """Run all operations in several rounds. Returns one dict for each round: the seconds of one run, by
    operation.

    Operations that fail are missing in the result. order: the operations, in the order in which each round
    runs them. memory: the source of their operands. end: the time at which to stop, in seconds of
    time.perf_counter(). Operations that the last round does not reach before `end` are missing from that
    round.

    On the CPU different operations follow one another, as in a step. If one operation ran twice in a row,
    the second run would find its code and the libraries' tables in the caches; a small operation is then a
    tenth faster.
    """
    kept = _Kept(min(_COLD_BYTES, memory.nbytes // 2))
    queued = memory.device.type == "cuda"
    found: list[dict[Operation, float]] = []
    for _ in range(_ROUNDS):
        found.append({})
        for operation in order:
            if time.perf_counter() >= end:
                return [each for each in found if each]
            # Some operators fail on made-up operands, and a device's memory may be short.
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                once = _run(operation, 1, memory, kept)
                if queued:
                    times = min(_MOST_QUEUED, int(_QUEUED_SECONDS / max(once, 1e-9)))
                    once = once if times < 2 else _run(operation, times, memory, kept) / times
                found[-1][operation] = once
            memory.renew(written=operation.operator._schema.is_mutable)
    return found


class _Kept:
    """A queue that holds the latest results of operations. A result that leaves the queue frees its memory,
    and the allocator uses this memory again for a new result, as in every step after the first.
    """

    def __init__(self, most: int) -> None:
        """most: the most bytes of results to hold. The latest result is held even if it is larger."""
        self._most = most
        self._results: deque[tuple[Any, int]] = deque()
        self._nbytes = 0

    def add(self, result: Any, nbytes: int) -> None:
        self._results.append((result, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self._most and len(self._results) > 1:
            self._nbytes -= self._results.popleft()[1]


def _run(operation: Operation, times: int, memory: Memory, kept: _Kept) -> float:
    """Run an operation `times` times, and return the seconds of all runs together. Each run takes operands
    of its own from `memory`. The results are added to `kept`.
    """
    arguments = [operation.arguments(memory) for _ in range(times)]
    _finish(memory.device)
    start = time.perf_counter()
    for args, kwargs in arguments:
        kept.add(operation.operator(*args, **kwargs), operation.result_bytes)
    _finish(memory.device)
    return time.perf_counter() - start


def _room(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.memory().usable
    return min(MOST_BYTES, free // 4)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
