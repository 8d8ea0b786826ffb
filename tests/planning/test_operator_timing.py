"""Tests of how the planner predicts a step's compute time by timing each of the step's operations.

Every operation of the step must count in the sum, whether timed or estimated. Timing must not change the
model, its inputs, random numbers or torch's settings.
"""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.config import Precision
from infinity.lm.decoder import Decoder, DecoderConfig
from infinity.planning import operator_timing
from infinity.planning.fake_step import run_fake_step
from infinity.planning.operator_timing import Memory, Operation, Operations, Roofline, TensorSpec, seconds_of

CPU = torch.device("cpu")
ROOFLINE = Roofline(flops=1e9, bytes=1e9)
FP32 = Precision(compute="fp32")
aten = torch.ops.aten


def small_decoder() -> nn.Module:
    return Decoder(DecoderConfig(width=32, layers=2, heads=2, hidden=64))


def small_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (2, 8)), torch.randint(0, 256, (2, 8))


def recorded(model: nn.Module, inputs, *, train: bool = True) -> Operations:
    found = run_fake_step(model, inputs, precision=FP32, device=CPU, train=train)
    assert found.activations is not None
    return found.operations


def call(operator, *args, **kwargs) -> Operation:
    return Operation.of(operator, args, kwargs, operator(*args, **kwargs))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.record(func, args, kwargs or {}, result)
        return result


def test_a_run_without_data_has_the_operations_of_a_real_one() -> None:
    model, inputs = small_decoder(), small_batch()
    without = recorded(model, inputs)
    seen = Seen()
    with seen:
        loss = model(*inputs)
        loss.backward(torch.ones_like(loss))
    differ = {each for each in without | seen.operations if without[each] != seen.operations[each]}
    # A gradient that nobody takes is detached once more, and so are tensors that hooks gave back.
    assert {each.operator for each in differ} <= {aten.detach.default}


def test_equal_calls_are_one_operation_and_others_are_not() -> None:
    found = Operations()
    square, wide = torch.ones(4, 4), torch.ones(4, 8)
    for args in ((square, square), (torch.zeros(4, 4), square), (square, wide), (square.t(), square)):
        found.record(aten.mm.default, args, {}, torch.mm(*args))
    assert sorted(found.values()) == [1, 1, 2]
    assert sum(each.flops * count for each, count in found.items()) == 2 * (3 * 4**3 + 4 * 4 * 8)
    assert len({call(aten.sum.dim_IntList, wide, dims) for dims in ([0], [1], [0, 1])}) == 3


def test_bytes_are_those_of_operands_and_results_and_views_have_none() -> None:
    assert call(aten.mm.default, torch.ones(3, 4), torch.ones(4, 5)).nbytes == 4 * (12 + 20 + 15)
    assert call(aten.cat.default, [torch.ones(2, 3), torch.ones(4, 3)]).nbytes == 2 * 4 * 18
    assert call(aten.t.default, torch.ones(3, 4)).nbytes == 0
    # A broadcast tensor: one element spans all.
    assert TensorSpec.of(torch.ones(1).expand(1000)).nbytes == 4
    assert TensorSpec.of(torch.ones(0, 5)).nbytes == 0


@pytest.fixture
def runs(monkeypatch) -> Counter:
    """Return a Counter: operator -> number of times that `seconds_of` has run it.

    The operators are not really run: each run counts as 1 ms.
    """
    counted: Counter = Counter()

    def timed(operation: Operation, times: int, memory: Memory, kept: Any) -> float:
        counted[operation.operator] += times
        return times * 1e-3

    monkeypatch.setattr(operator_timing, "_run", timed)
    return counted


def test_the_sum_is_of_counts_times_seconds(runs) -> None:
    found = recorded(small_decoder(), small_batch())
    alone = [each for each in found if each.runs_alone]
    assert len(alone) >= 0.95 * len(found)
    assert sum(runs.values()) == 0
    total = seconds_of(found, ROOFLINE, CPU, limit=60.0)
    assert sum(runs.values()) == 4 * len(alone)
    timed = sum(found[each] for each in alone) * 1e-3
    assert timed <= total.least == total.most <= 1.5 * timed


def take(monkeypatch, seconds: dict[Any, list[float]]) -> list[Any]:
    """Replace the runs of operators by fake runs, and return the list to which each run appends its operator.

    seconds: operator -> the seconds that its first, second, third run and so on take.
    """
    takes = {each: iter(found) for each, found in seconds.items()}
    order = []

    def run(operation: Operation, times: int, memory: Memory, kept: Any) -> float:
        assert times == 1
        order.append(operation.operator)
        return next(takes[operation.operator])

    monkeypatch.setattr(operator_timing, "_run", run)
    return order


def test_the_range_is_that_of_the_rounds_after_the_first(monkeypatch) -> None:
    # Each operation has one lucky round, and no step has all lucky rounds at once.
    seconds = {aten.neg.default: [1.0, 2.0, 9.0, 4.0], aten.exp.default: [1.0, 8.0, 4.0, 5.0]}
    order = take(monkeypatch, seconds)
    step = Operations({call(each, torch.ones(10)): 10 for each in seconds})
    assert seconds_of(step, ROOFLINE, CPU, limit=60.0) == (10 * (4.0 + 5.0), 10 * (9.0 + 4.0))
    assert order == 4 * list(seconds)


@pytest.mark.parametrize("limit, counts", [(2.5, 7.0 + 8.0), (3.5, 7.0 + 8.0), (4.5, 5.0 + 6.0)])
def test_a_round_that_was_cut_short_does_not_count_beside_whole_ones(monkeypatch, limit, counts) -> None:
    now = iter(range(100))
    # The clock is looked at once before the first round, and before each turn.
    monkeypatch.setattr(operator_timing.time, "perf_counter", lambda: float(next(now)))
    take(monkeypatch, {aten.neg.default: [7.0, 5.0], aten.exp.default: [8.0, 6.0]})
    step = Operations({call(each, torch.ones(10)): 10 for each in (aten.neg.default, aten.exp.default)})
    assert seconds_of(step, ROOFLINE, CPU, limit=limit) == (10 * counts, 10 * counts)


def test_a_device_with_a_queue_is_timed_over_several_runs(monkeypatch) -> None:
    seen: list[int] = []

    def run(operation: Operation, times: int, memory: Any, kept: Any) -> float:
        seen.append(times)
        return times * 2.0 if operation.operator is aten.exp.default else times * 1e-3

    monkeypatch.setattr(operator_timing, "_run", run)
    monkeypatch.setattr(operator_timing.time, "perf_counter", lambda: 0.0)
    memory: Any = SimpleNamespace(device=torch.device("cuda"), nbytes=1 << 20, renew=lambda written: None)
    short, long = (call(each, torch.ones(10)) for each in (aten.neg.default, aten.exp.default))
    found = operator_timing._rounds([short, long], memory, 1.0)
    assert found == 4 * [{short: 1e-3, long: 2.0}]
    assert seen == 4 * [1, 6, 1]


def test_results_are_kept_up_to_so_many_bytes_and_the_latest_in_any_case() -> None:
    kept = operator_timing._Kept(100)
    results = [torch.ones(1) for _ in range(4)]
    alive = [weakref.ref(each) for each in results]
    for nbytes in (40, 60, 50, 200):
        kept.add(results.pop(0), nbytes)
        if nbytes == 50:
            assert [each() is not None for each in alive] == [False, False, True, True]
    assert [each() is not None for each in alive] == [False, False, False, True]


def test_what_is_not_timed_gets_the_rates_of_what_is(runs) -> None:
    def step(operation: Operation, count: int) -> Operations:
        return Operations({operation: count})

    product = call(aten.mm.default, torch.ones(10, 10), torch.ones(10, 10))
    addition = call(aten.add.Tensor, torch.ones(1000), torch.ones(1000))
    assert seconds_of(step(product, 3), ROOFLINE, CPU, limit=0.0) == pytest.approx([3 * 2000 / 1e9] * 2)
    assert seconds_of(step(addition, 3), ROOFLINE, CPU, limit=0.0) == pytest.approx([3 * 12_000 / 1e9] * 2)
    assert sum(runs.values()) == 0
    # A solve needs pivots, and zeros are none: the solve is not run, but takes as long per byte as the
    # addition.
    factors, pivots = torch.linalg.lu_factor(torch.eye(50))
    solve = call(aten.linalg_lu_solve.default, factors, pivots, torch.ones(50, 1))
    assert not solve.runs_alone
    total = seconds_of(step(addition, 3) + step(solve, 2), ROOFLINE, CPU)
    assert total.least == total.most == pytest.approx(3e-3 + 2 * solve.nbytes / 12_000 * 1e-3)
    assert set(runs) == {aten.add.Tensor}
    learned = ROOFLINE.learned({product: 1e-3}, {product: 5})
    assert learned == Roofline(flops=pytest.approx(2e6), bytes=1e9)


def test_operators_of_others_are_never_run() -> None:
    with torch.library._scoped_library("infinity_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        ran: list[int] = []

        def twice(x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            return 2 * x

        library.impl("twice", twice, "CompositeExplicitAutograd")
        operation = call(torch.ops.infinity_test.twice.default, torch.ones(1000))
        assert not operation.runs_alone and ran == [1]
        assert seconds_of(Operations({operation: 1}), ROOFLINE, CPU) == pytest.approx([8e-6] * 2)
        assert ran == [1]


def test_an_operation_that_fails_alone_is_estimated() -> None:
    # Made-up matrices are not positive definite, so the decomposition fails.
    operation = call(aten.linalg_cholesky.default, torch.eye(64))
    found = Operations({operation: 2})
    assert operation.runs_alone
    assert seconds_of(found, ROOFLINE, CPU) == pytest.approx([2 * operation.nbytes / 1e9] * 2)


def test_large_operations_are_estimated_within_the_bound_of_memory(monkeypatch, runs) -> None:
    sizes: list[int] = []
    create = Memory.__init__

    def created(self: Memory, nbytes: int, device: torch.device) -> None:
        sizes.append(nbytes)
        create(self, nbytes, device)

    monkeypatch.setattr(Memory, "__init__", created)
    monkeypatch.setattr(operator_timing, "_COLD_BYTES", 1 << 16)
    monkeypatch.setattr(operator_timing, "MOST_BYTES", 6 << 20)
    fits = call(aten.neg.default, torch.ones(1 << 17))
    large = call(aten.neg.default, torch.ones((1 << 17) + 1))
    total = seconds_of(Operations({fits: 1, large: 1}), ROOFLINE, CPU)
    assert runs == {aten.neg.default: 4}
    assert total.least == total.most == pytest.approx(1e-3 * (1 + large.nbytes / fits.nbytes))
    # The memory is made of floating bytes, of zeros, and of results that are kept.
    assert [2 * nbytes + fits.nbytes for nbytes in sizes] == [5 << 20]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_operands_are_normal_numbers_in_every_dtype(dtype) -> None:
    memory = Memory(1 << 20, CPU)
    spec = TensorSpec((100, 7), (1, 100), dtype, CPU)
    first, second = memory.tensor(spec), memory.tensor(spec)
    assert (first.shape, first.stride(), first.dtype) == ((100, 7), (1, 100), dtype)
    assert first.data_ptr() + spec.nbytes <= second.data_ptr()
    values = torch.view_as_real(first) if first.is_complex() else first
    assert bool((values.abs() >= torch.finfo(dtype).tiny).all()) and bool((values.abs() < 2).all())
    assert len(values.unique()) > 50
    assert not memory.tensor(TensorSpec((100,), (1,), torch.int64, CPU)).any()


@pytest.mark.parametrize("handed_out", [1, 3, 40])
def test_what_an_operation_writes_the_next_one_does_not_find(handed_out) -> None:
    memory, fresh = Memory(1 << 20, CPU), Memory(1 << 20, CPU)
    spec, index = TensorSpec((30_000,), (1,), torch.float32, CPU), TensorSpec((9,), (1,), torch.int64, CPU)
    memory.tensor(spec)
    memory.renew(written=False)
    for _ in range(handed_out):
        memory.tensor(spec).fill_(torch.inf)
        memory.tensor(index).fill_(-1)
    memory.renew(written=True)
    for _ in range(40):
        assert memory.tensor(spec).sum() < 30_000
        assert not memory.tensor(index).any()
    assert torch.equal(memory._floating, fresh._floating)


def test_timing_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(16, 4))
    inputs = torch.ones(8, 16)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    random, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = recorded(model, (inputs,))
            assert aten.native_dropout.default in {each.operator for each in found} or any(
                "bernoulli" in each.operator.name() for each in found
            )
            assert seconds_of(found, ROOFLINE, CPU).least > 0
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(dtype)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert inputs.eq(1).all()
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    assert all(each.grad is None for each in model.parameters())


def test_without_autograd_only_the_forward_is_there() -> None:
    model, inputs = small_decoder(), small_batch()
    forward = recorded(model, inputs, train=False)
    assert 0 < sum(forward.values()) < sum(recorded(model, inputs).values()) / 2


def test_saved_tensors_share_the_storages_of_what_the_forward_made() -> None:
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(5))), torch.ones(16, 16, requires_grad=True)
    found = run_fake_step(model, (x,), precision=FP32, device=CPU, train=True)
    # Five results, the last one's gradient, and the two gradients between which a backward passes on.
    assert 5 * 1024 <= found.activations <= 8 * 1024
