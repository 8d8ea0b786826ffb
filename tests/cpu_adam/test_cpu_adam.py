"""Tests of optimizer updates and gradient sums on the CPU, for every format and every optimizer rule.

All formats must agree with plain fp32. The bits of an element must not depend on the instruction set, the
threads or how the work is cut into parts. Sums of squares must follow their definition bit for bit. Accuracy
against an fp64 oracle is in test_accuracy.py; the thread pool and bad input are in test_pool.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cpu_adam_cases import (
    RULES,
    clones,
    floats,
    join,
    padded,
    quiet,
    round_half_up,
    same_bits,
    split,
    states,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.cpu_adam import (
    BLOCK,
    CODE_BLOCK,
    SGD,
    AdamW,
    Gradient,
    Segment,
    ThreadPool,
    Update,
    form_of,
    runnable_isas,
)


@pytest.fixture(scope="module", params=runnable_isas())
def pool(request: pytest.FixtureRequest) -> Any:
    with ThreadPool(isa=request.param) as made:
        yield made


# ---- Formats ----


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_equals_plain_fp32(
    pool: ThreadPool, rule: str, dtype: torch.dtype, accumulate: bool
) -> None:
    n = 1003
    grad = floats(9, n).to(dtype)
    acc = floats(10, n) if accumulate else None
    before = states(n)
    common: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [RULES[rule]]}
    total = grad.float() if acc is None else acc + grad.float()
    plain = clones(before)
    pool.run(Update(grad=total * 0.3, **plain, **common))

    for copy in (None, torch.float32, torch.bfloat16, torch.float16):
        now = clones(before)
        out = None if copy is None else torch.empty(n, dtype=copy)
        pool.run(Update(grad=grad, accumulated=acc, scale=0.3, copy=out, **now, **common))
        assert all(same_bits(now[name], plain[name]) for name in plain)
        if copy is torch.bfloat16:
            assert same_bits(out, round_half_up(plain["parameter"]))
        elif out is not None:
            assert same_bits(out, plain["parameter"].to(copy))

    now = clones(before)
    high, low = split(now.pop("parameter"))
    pool.run(Update(grad=grad, accumulated=acc, scale=0.3, parameter=high, remainder=low, **now, **common))
    assert same_bits(join(high, low), plain["parameter"])
    assert same_bits(high, round_half_up(plain["parameter"]))
    assert all(same_bits(now[name], plain[name]) for name in now)


@pytest.mark.parametrize("rule", RULES)
def test_split_master_stays_equal_over_steps(pool: ThreadPool, rule: str) -> None:
    n = 5000
    plain = states(n, finite=True)
    halves = clones(plain)
    high, low = split(halves.pop("parameter"))
    copy = torch.empty(n, dtype=torch.bfloat16)
    for step in range(20):
        grad = torch.randn(n, generator=torch.Generator().manual_seed(step)).bfloat16()
        work: dict[str, Any] = {"grad": grad, "segments": [Segment(0, n)], "hypers": [RULES[rule]]}
        pool.run(Update(copy=copy, **plain, **work))
        pool.run(Update(parameter=high, remainder=low, **halves, **work))
        assert same_bits(join(high, low), plain["parameter"])
        assert same_bits(high, copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(pool: ThreadPool, dtype: torch.dtype) -> None:
    grad = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    acc = torch.empty(2**16)
    pool.run(Gradient(grad=grad, accumulated=acc, add=False, store=True, segments=[Segment(0, 2**16)]))
    assert same_bits(acc, quiet(grad.float()))


def test_rounding_of_copies(pool: ThreadPool) -> None:
    around = [0x3F808000 + d for d in range(-3, 4)]  # a tie between two values of bf16
    around += [0x3F801000 + d for d in range(-3, 4)] + [
        0x3F803000 + d for d in range(-3, 4)
    ]  # ties between values of fp16
    around += [0x33000000 + d for d in range(-3, 4)]  # half of fp16's smallest denormal
    around += [0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F800001, 0x7FFFFFFF, 0x387FFFFF]
    words = np.array(around, dtype=np.uint32)
    random = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    x = torch.from_numpy(np.concatenate([words, words | 0x80000000, random]).view(np.float32))
    x = x[~x.isinf()]  # weight decay, even of 0, makes NaN of an infinity
    n = x.numel()
    for copy in (torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.float16)):
        pool.run(
            Update(
                grad=torch.zeros(n),
                parameter=x.clone(),
                copy=copy,
                segments=[Segment(0, n)],
                hypers=[SGD(lr=0.0, first_step=False)],
            )
        )
        expected = round_half_up(x) if copy.dtype is torch.bfloat16 else quiet(x).half()
        assert same_bits(copy, expected)


def test_zero_learning_rate_keeps_parameters(pool: ThreadPool) -> None:
    before = states(4001, finite=True)
    now = clones(before)
    hyper = AdamW(lr=0.0, weight_decay=0.0, step=2)
    pool.run(Update(grad=floats(4, 4001, finite=True), **now, segments=[Segment(0, 4001)], hypers=[hyper]))
    assert torch.equal(now["parameter"], before["parameter"])
    assert not torch.equal(now["first_moment"], before["first_moment"])


def test_nonfinite_gradients_are_reported_per_segment(pool: ThreadPool) -> None:
    n = 4 * BLOCK
    grad = torch.ones(n)
    grad[5], grad[2 * BLOCK + 1] = torch.inf, torch.nan
    grad[3 * BLOCK] = 3e38
    segments = [Segment(i * BLOCK, BLOCK) for i in range(4)]
    work: dict[str, Any] = {"grad": grad, "segments": segments, "hypers": [RULES["adamw"]]}
    assert pool.run(Update(**states(n, finite=True), **work)).nonfinite == (0, 2)
    assert pool.run(Update(**states(n, finite=True), scale=4.0, **work)).nonfinite == (0, 2, 3)


def test_only_segments_are_touched_each_with_its_hypers(pool: ThreadPool) -> None:
    n = 3 * BLOCK
    before = states(n, finite=True)
    grad = floats(3, n, finite=True)
    now = clones(before)
    ranges = [Segment(7, 100, 1), Segment(107, BLOCK + 3, 0), Segment(2 * BLOCK + 500, 1, 1)]
    hypers = [RULES["adamw"], RULES["momentum"]]
    pool.run(Update(grad=grad, **now, segments=ranges, hypers=hypers))
    expected = clones(before)
    for each in ranges:
        start, count, hyper = each.start, each.count, each.hyper
        views = {name: state[start : start + count] for name, state in expected.items()}
        pool.run(
            Update(
                grad=grad[start : start + count],
                **views,
                segments=[Segment(0, count)],
                hypers=[hypers[hyper]],
            )
        )
    assert all(same_bits(now[name], expected[name]) for name in now)


def test_maximize_is_descent_on_the_negative(pool: ThreadPool) -> None:
    grad = floats(3, 1000, finite=True)
    up, down = states(1000, finite=True), states(1000, finite=True)
    segments = [Segment(0, 1000)]
    pool.run(Update(grad=grad, **up, segments=segments, hypers=[AdamW(step=1, maximize=True)]))
    pool.run(Update(grad=-grad, **down, segments=segments, hypers=[AdamW(step=1)]))
    assert all(same_bits(up[name], down[name]) for name in up)


# ---- Bits depend on nothing but the element ----


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_partition(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5 * BLOCK), label="elements")
    rule = RULES[data.draw(st.sampled_from(sorted(RULES)), label="rule")]
    cuts = data.draw(st.lists(st.integers(0, n), max_size=6, unique=True), label="cuts")
    edges = [0, *sorted(cuts), n]
    isa = data.draw(st.sampled_from(runnable_isas()), label="isa")
    offsets = data.draw(st.lists(st.integers(0, 33), min_size=5, max_size=5), label="offsets")
    before = {"grad": floats(3, n).bfloat16(), **states(n)}
    names = ["grad", "parameter", "first_moment", "second_moment"]

    expected = clones(before)
    expected_copy = torch.zeros(n, dtype=torch.bfloat16)
    with ThreadPool(threads=1, isa="scalar", chunk=64 * BLOCK) as reference:
        reference.run(Update(**expected, copy=expected_copy, segments=[Segment(0, n)], hypers=[rule]))

    now = {name: padded(before[name], offset) for name, offset in zip(names, offsets[:4], strict=True)}
    copy = padded(torch.zeros(n, dtype=torch.bfloat16), offsets[4])
    segments = [Segment(a, b - a) for a, b in itertools.pairwise(edges)]
    chunk = BLOCK * data.draw(st.integers(1, 3), label="blocks per chunk")
    with ThreadPool(threads=data.draw(st.integers(1, 5), label="threads"), isa=isa, chunk=chunk) as other:
        other.run(Update(**now, copy=copy, segments=segments, hypers=[rule]))
    assert all(same_bits(now[name], expected[name]) for name in names)
    assert same_bits(copy, expected_copy)


def test_all_isas_give_the_same_bits() -> None:
    n = 300_001
    results = []
    for isa in runnable_isas():
        now = states(n, 21)
        with ThreadPool(isa=isa) as pool:
            for rule in RULES.values():
                pool.run(Update(grad=floats(5, n), **now, segments=[Segment(0, n)], hypers=[rule]))
            blocks = pool.run(
                Gradient(grad=floats(6, n, finite=True), squares=True, segments=[Segment(0, n)])
            ).blocks
        results.append((now, torch.from_numpy(blocks[0])))
    for now, blocks in results[1:]:
        assert all(same_bits(now[name], results[0][0][name]) for name in now)
        assert torch.equal(blocks, results[0][1])


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("copy", ["split", torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("offset", [0, 5])
def test_results_beside_are_those_in_place(
    pool: ThreadPool, rule: str, copy: Any, moments: torch.dtype, offset: int
) -> None:
    """The arrays keep what they had, and elements outside the segments are not written."""
    n = 5003
    arrays: dict[str, torch.Tensor] = {"grad": floats(9, n), **states(n)}
    for name in ("first_moment", "second_moment"):
        if moments is torch.uint8:
            arrays[name] = (arrays[name].view(torch.int32) & 0x7F).to(torch.uint8)
            arrays[name.replace("moment", "scale")] = torch.full((n // CODE_BLOCK + 1,), 120).to(torch.uint8)
        arrays[name] = arrays[name].to(moments)
    if copy == "split":
        arrays["parameter"], arrays["remainder"] = split(arrays["parameter"])
    elif copy is not None:
        arrays["copy"] = torch.zeros(n, dtype=copy)
    arrays = {name: padded(each, offset) for name, each in arrays.items()}
    expected, beside = clones(arrays), {name: padded(each, offset) for name, each in arrays.items()}
    segments = [Segment(64, 1003, seed=1), Segment(1152, 3800)]
    work: dict[str, Any] = {"segments": segments, "hypers": [RULES[rule]]}
    pool.run(Update(**expected, **work))

    before, update = clones(arrays), Update(**arrays, **work)
    parts = [(each.start, each.count, each.index, number) for number, each in enumerate(segments)]
    pool.submit_updates(
        [form_of(update, list(arrays.values()), parts)],
        [[each.data_ptr() for each in arrays.values()]],
        [(number, each.hyper, each.seed) for number, each in enumerate(segments)],
        [each.native() for each in update.hypers],
        scale=1.0,
        outputs=[[each.data_ptr() for each in beside.values()]],
        owners=[*arrays.values(), *beside.values()],
    ).wait()
    assert all(same_bits(beside[name], expected[name]) for name in arrays)
    assert all(same_bits(arrays[name], before[name]) for name in arrays)


def test_flushing_denormals_changes_nothing() -> None:
    n = 10_000
    tiny = torch.full((n,), 1e-40)
    hyper = SGD(lr=1e-39, momentum=0.9, first_step=False)  # a denormal rate must not be flushed either
    work: dict[str, Any] = {"grad": tiny * 3, "segments": [Segment(0, n)], "hypers": [hyper]}
    expected = clones({"parameter": tiny, "first_moment": tiny})
    now = clones(expected)
    with ThreadPool() as pool:
        pool.run(Update(**expected, **work))
    assert bool((expected["first_moment"] > 1e-40).all())
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        with ThreadPool() as pool:  # the pool's threads inherit this thread's mode
            pool.run(Update(**now, **work))
    finally:
        torch.set_flush_denormal(False)
    assert all(same_bits(now[name], expected[name]) for name in now)


# ---- Gradients ----


def reference_blocks(x: torch.Tensor) -> list[float]:
    """Return the sum of squares of each block of BLOCK successive elements of `x`, computed in numpy.

    The squares are added in the same order as in the kernels, so that the kernels must return the same bits.
    [Note: fixed lanes] in csrc/cpu_adam/formats.hpp defines this order.
    """
    sums = []
    squares = x.numpy().astype(np.float64) ** 2
    for start in range(0, len(squares), BLOCK):
        block = squares[start : start + BLOCK]
        rows = np.pad(block, (0, -len(block) % 32)).reshape(-1, 32)
        lanes = np.zeros(32)
        for row in rows:
            lanes += row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        sums.append(float(lanes[0]))
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_follow_the_definition(pool: ThreadPool, dtype: torch.dtype) -> None:
    n = 3 * BLOCK + 37
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)
    acc = floats(2, n, finite=True).clamp(-1e18, 1e18)
    segments = [Segment(0, n)]
    alone = pool.run(Gradient(grad=grad, squares=True, segments=segments))
    assert list(alone.blocks[0]) == reference_blocks(grad.float())
    scaled = pool.run(Gradient(grad=grad, accumulated=acc, scale=0.3, squares=True, segments=segments))
    assert list(scaled.blocks[0]) == reference_blocks((acc + grad.float()) * 0.3)
    stored = acc.clone()
    fused = pool.run(Gradient(grad=grad, accumulated=stored, store=True, squares=True, segments=segments))
    assert same_bits(stored, acc + grad.float())
    assert list(fused.blocks[0]) == reference_blocks(acc + grad.float())
    copy = torch.zeros_like(grad)
    copied = pool.run(Gradient(grad=grad, copy=copy, squares=True, segments=segments))
    assert same_bits(copy, grad) and list(copied.blocks[0]) == list(alone.blocks[0])


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 6 * BLOCK),
    threads=st.integers(1, 4),
    chunk=st.integers(1, 4),
    isa=st.sampled_from(runnable_isas()),
    offset=st.integers(0, 31),
    cut=st.integers(0, 6),
)
def test_squares_compose(  # noqa: PLR0917
    n: int, threads: int, chunk: int, isa: str, offset: int, cut: int
) -> None:
    x = floats(8, n, finite=True)
    first = min(cut * BLOCK, n)
    with ThreadPool(threads=threads, chunk=chunk * BLOCK, isa=isa) as pool:
        work = [Segment(0, first), Segment(first, n - first)]
        a, b = pool.run(Gradient(grad=padded(x, offset), squares=True, segments=work)).blocks
    expected = reference_blocks(x)
    assert [*a, *b] == expected


def test_a_copy_has_the_bits_of_its_segments_only(pool: ThreadPool) -> None:
    n = 2 * BLOCK + 13
    bits = torch.arange(n, dtype=torch.int32).to(torch.int16)  # NaNs of every kind are among the values
    for grad in (bits.view(torch.bfloat16), bits.view(torch.float16), floats(3, n)):
        copy = torch.zeros_like(grad)
        kept = [Segment(5, BLOCK), Segment(BLOCK + 100, n - BLOCK - 101)]
        pool.run(Gradient(grad=grad, copy=copy, segments=kept))
        expected = torch.zeros_like(grad)
        for each in kept:
            expected[each.start : each.start + each.count] = grad[each.start : each.start + each.count]
        assert torch.equal(copy.view(torch.uint8), expected.view(torch.uint8))


def test_squares_are_finite_if_and_only_if_the_elements_are(pool: ThreadPool) -> None:
    x = torch.full((BLOCK * 2,), 3e38)
    segments = [Segment(0, BLOCK), Segment(BLOCK, BLOCK)]

    def squares() -> list[float]:
        found = pool.run(Gradient(grad=x, squares=True, segments=segments))
        return [float(each[0]) for each in found.blocks]

    assert np.isfinite(squares()).all()
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[BLOCK + 17] = bad
        one, two = squares()
        assert np.isfinite(one) and not np.isfinite(two)


def test_accumulation_from_the_first_to_the_update(pool: ThreadPool) -> None:
    n = 2000
    grads = [floats(i, n, finite=True).bfloat16() for i in range(3)]
    acc = torch.full((n,), torch.nan)  # the first store must not read this memory
    segments = [Segment(0, n)]
    for i, grad in enumerate(grads):
        pool.run(Gradient(grad=grad, accumulated=acc, add=i > 0, store=True, segments=segments))
    assert same_bits(acc, grads[0].float() + grads[1].float() + grads[2].float())
