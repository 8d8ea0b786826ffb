"""Operator timing: the seconds of a step's operations, each recorded without data and timed alone with data.

A rate of matrix products says little about a step: small products, norms, attention and element-wise work
take much of it. So every distinct operation (operator, shapes, strides, dtypes) is run on the device of the
step. An operation that is too large to run alone, must not run alone, or comes after the time limit is
estimated by a roofline (Williams, Waterman, Patterson 2009) at the rates of those that were timed.
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
from torch.utils.flop_counter import flop_registry

from infinity.config import round_up
from infinity.system import machine

TIME_LIMIT = 2.0
"""Seconds that `seconds_of` spends on running operations and making their operands."""

MOST_BYTES = 1 << 30
"""Bytes that operands and results of the runs take at most; a quarter of free memory where that is less."""

_COLD_BYTES = 64 << 20
"""Bytes of memory that runs take operands and results from in order, so that no cache holds them yet: in a
step none does either."""

_ROUNDS = 4
"""Rounds over all operations, at most. The first warms up, and counts only where there is no other."""

_QUEUED_SECONDS = 0.006
_MOST_QUEUED = 20
"""Seconds and number of the runs of one operation that a device with a queue is timed over. The time of a
single run would include the start and the end of the queue."""

_PATTERN = 1 << 16
_ALIGNMENT = 64

_INDEXING = ("embedding", "nll_loss", "gather", "scatter", "index")
_ATTENTION = ("_scaled_dot_product", "_efficient_attention", "_flash_attention")
"""First letters of the operators that run safely with zeros for every integer tensor. Others may read theirs
as pivots, or as a workspace that another operation has filled, and end the process where they are not."""


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor without its data; the stride is in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The description of a dense tensor. Raises RuntimeError for a sparse one."""
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def elements(self) -> int:
        """Elements of memory from the tensor's first to its last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of memory from the tensor's first element to its last, gaps included."""
        return self.elements * self.dtype.itemsize

    @property
    def is_integral(self) -> bool:
        """Whether the elements could be indices. Those of a mask could not."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)


@dataclass(frozen=True)
class Operation:
    """One operator with its arguments. Equal operations take equally long."""

    operator: torch._ops.OpOverload
    leaves: tuple[Any, ...]
    """The leaves of the arguments' tree, in its order, with TensorSpecs in place of tensors."""
    tree: pytree.TreeSpec = field(compare=False)
    flops: int = field(compare=False)
    """Floating-point operations of matrix products, convolutions and attention."""
    result_bytes: int = field(compare=False)
    """Bytes of the results; 0 for a view."""

    @staticmethod
    def of(operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Operation:
        """The operation of one call, whose tensors may be fake."""
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
        """The tensors among the arguments."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results; 0 for a view, which touches neither."""
        return 0 if self.operator.is_view else sum(each.nbytes for each in self.operands) + self.result_bytes

    @property
    def runs_alone(self) -> bool:
        """Whether the operation can be run on made-up operands without harm.

        Only torch's own operators can: others may wait for other ranks, or keep what they are given.
        """
        if self.operator.namespace != "aten":
            return False
        takes_any = self.operator._schema.name.removeprefix("aten::").startswith(_INDEXING + _ATTENTION)
        return takes_any or not any(each.is_integral for each in self.operands)

    def arguments(self, memory: Memory) -> tuple[Any, Any]:
        """Positional and keyword arguments with real tensors."""
        leaves = [memory.tensor(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs


class Memory:
    """Memory that operands are cut out of, one after the other, and from the start again at its end."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator("cpu")
        generator.manual_seed(0)
        # As bfloat16 these are random in [0.01, 0.11); read as any other floating dtype they are normal too.
        some = torch.rand(_PATTERN, generator=generator, dtype=torch.float32, device="cpu")
        some = some.mul_(0.1).add_(0.01).to(device=device, dtype=torch.bfloat16)
        self._pattern = some.view(torch.uint8)
        self.nbytes = round_up(nbytes, self._pattern.numel())
        self._floating = self._pattern.repeat(self.nbytes // self._pattern.numel())
        self._others = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._next = 0
        self._first: int | None = 0
        """The first byte handed out since `renew`; None once the end was reached."""

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor of random floating elements, or of zeros for other dtypes.

        It shares no memory with those handed out before it, as far as `nbytes` bytes go back.
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
        """Fill the memory handed out since the last call again, if an operation has `written` to it."""
        if written:
            every = self._pattern.numel()
            start = 0 if self._first is None else self._first // every
            end = None if self._first is None else -(-self._next // every)
            self._floating.view(-1, every)[start:end] = self._pattern
            self._others.view(-1, every)[start:end] = 0
        self._first = self._next


class Operations(Counter[Operation]):
    """The distinct operations of a step, each with how often it occurs."""

    def record(self, operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count one call. A call that only asks for a tensor's properties is no operation."""
        if operator.namespace != "prim":
            self[Operation.of(operator, args, kwargs, result)] += 1


@dataclass(frozen=True)
class Roofline:
    """The rates that bound an operation that was not timed."""

    flops: float
    """Floating-point operations per second."""
    bytes: float
    """Bytes per second of operands and results."""

    def seconds(self, operation: Operation) -> float:
        """Seconds of one run, by whichever rate takes longer."""
        return max(operation.flops / self.flops, operation.nbytes / self.bytes)

    def learned(self, timed: Mapping[Operation, float], counts: Mapping[Operation, int]) -> Roofline:
        """The roofline with the rates of operations that were timed, where there are any.

        timed: seconds of one run. counts: how often a step has each operation.
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
    """A range of seconds that something takes."""

    least: float
    most: float


def seconds_of(
    operations: Operations, roofline: Roofline, device: torch.device, *, limit: float = TIME_LIMIT
) -> Seconds:
    """Seconds of all operations one after the other on `device`, in the fastest and in the slowest round.

    roofline: its estimates order the operations, the longest first, and its rates stand in for those that the
    timed operations do not give. limit: seconds for all runs; the run that exceeds it is finished. Random
    number generators, gradients and dtypes of the caller stay as they are.
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
    """Seconds of all operations: as one round timed them, or else as the roofline estimates them."""
    learned = roofline.learned(timed, operations)
    return sum(
        count * (timed[operation] if operation in timed else learned.seconds(operation))
        for operation, count in operations.items()
    )


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """A context in which operations leave no trace in the caller's state, and do not depend on it."""
    with contextlib.ExitStack() as inside:
        inside.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        inside.enter_context(torch.no_grad())
        inside.enter_context(torch._C._DisableAutocast())
        if device.type == "cuda":
            inside.enter_context(torch.cuda.device(device))
        yield


def _rounds(order: Sequence[Operation], memory: Memory, end: float) -> list[dict[Operation, float]]:
    """Seconds of one run of each operation, by round. Operations that cannot be run are missing, and in the
    last round also those after `end` (seconds of time.perf_counter()).

    On the CPU each operation comes after a different one, as in a step: the second of two equal ones in a row
    finds its code and the libraries' tables in the caches, and is a tenth faster where it is small.
    """
    kept = _Kept(min(_COLD_BYTES, memory.nbytes // 2))
    queued = memory.device.type == "cuda"
    found: list[dict[Operation, float]] = []
    for _ in range(_ROUNDS):
        found.append({})
        for operation in order:
            if time.perf_counter() >= end:
                return [each for each in found if each]
            # Made-up operands are not good enough for every operator, and a device's memory may be short.
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                once = _run(operation, 1, memory, kept)
                if queued:
                    times = min(_MOST_QUEUED, int(_QUEUED_SECONDS / max(once, 1e-9)))
                    once = once if times < 2 else _run(operation, times, memory, kept) / times
                found[-1][operation] = once
            memory.renew(written=operation.operator._schema.is_mutable)
    return found


class _Kept:
    """The latest results: new ones then get memory that was used before, as in a second step."""

    def __init__(self, most: int) -> None:
        """most: bytes of results that are kept; the latest one is kept in any case."""
        self._most = most
        self._results: deque[tuple[Any, int]] = deque()
        self._nbytes = 0

    def add(self, result: Any, nbytes: int) -> None:
        self._results.append((result, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self._most and len(self._results) > 1:
            self._nbytes -= self._results.popleft()[1]


def _run(operation: Operation, times: int, memory: Memory, kept: _Kept) -> float:
    """Seconds of `times` runs, each on other operands."""
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
