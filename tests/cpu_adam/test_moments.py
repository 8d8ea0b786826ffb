"""Tests of updates with moments in bf16 and int8.

Errors must stay within bounds, stochastic rounding must have no bias, and the bits of an element must depend
only on its inputs, its index and the seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cpu_adam_cases import RULES, bits, clones, floats, join, padded, same_bits, split, states
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_codes import code_step

from infinity.cpu_adam import BLOCK, CODE_BLOCK, SGD, AdamW, Segment, ThreadPool, Update, runnable_isas
from infinity.errors import ConfigError
from infinity.formats.encodings import FIRST_SPAN, SECOND_SPAN, decode, encode

FORMATS = ("bf16", "int8")
SPANS = {"first_moment": FIRST_SPAN, "second_moment": SECOND_SPAN}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=runnable_isas())
def pool(request: pytest.FixtureRequest) -> Any:
    with ThreadPool(isa=request.param) as made:
        yield made


def stored(plain: State, form: str) -> State:
    """Convert float32 states to tensors for cpu_adam.Update, and return them by argument name.

    plain: "parameter", "first_moment" and "second_moment" in float32. form: the format, "bf16" or "int8", to
    which the moments are rounded to nearest.
    """
    found = {"parameter": plain["parameter"].clone()}
    for name, span in SPANS.items():
        if form == "bf16":
            found[name] = plain[name].bfloat16()
        else:
            found[name], found[name.replace("moment", "scale")] = encode(plain[name], span)
    return found


def read(now: State, form: str) -> State:
    """Convert tensors made by `stored` back to float32 states. form: the format of the moments."""
    found = {"parameter": now["parameter"].clone()}
    for name, span in SPANS.items():
        if form == "bf16":
            found[name] = now[name].float()
        else:
            found[name] = decode(now[name], now[name.replace("moment", "scale")], span)
    return found


def width(values: torch.Tensor, name: str, form: str) -> torch.Tensor:
    """Return for each finite value the distance, as float64, between its two neighbours in a moment format.

    The neighbours are the numbers of the format just below and just above the value. form: "bf16" or "int8".
    name: "first_moment" or "second_moment", because these have different int8 codes. values: moments
    from the first element of a block on, since int8 codes depend on the largest value in their block.
    """
    if form == "int8":
        return code_step(values, SPANS[name])
    exponent = torch.frexp(values.double())[1].clamp(min=-125)
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 8)


def ordinary(n: int, seed: int = 1) -> State:
    """Make random float32 states and a gradient of `n` elements, by argument name of cpu_adam.Update.

    Their sizes are as uneven as in training: a few are much larger than the rest, and there are runs of
    zeros, of denormal numbers and of huge values.
    """
    random = torch.Generator().manual_seed(seed)
    size = torch.exp(3 * torch.randn(n, generator=random)) * 1e-3
    size[n // 2 : n // 2 + 200] = 0.0
    size[n // 3 : n // 3 + 150] *= 1e-38
    size[n // 4 : n // 4 + 150] *= 1e12
    made = {"parameter": torch.randn(n, generator=random), "grad": torch.randn(n, generator=random) * size}
    made["first_moment"] = torch.randn(n, generator=random) * size
    made["second_moment"] = (torch.randn(n, generator=random) * size).square()
    return made


# ---- Bounds ----


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "sgd"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_update_is_exact_but_for_one_rounding_of_its_moments(
    pool: ThreadPool, form: str, rule: str
) -> None:
    n = 20_011
    inputs = ordinary(n)
    grad = inputs.pop("grad")
    work: dict[str, Any] = {"grad": grad, "hypers": [RULES[rule]]}
    now = stored(inputs, form)
    exact = read(now, form)
    pool.run(Update(**now, **work, segments=[Segment(0, n, seed=9)]))
    pool.run(Update(**exact, **work, segments=[Segment(0, n)]))
    got = read(now, form)
    assert same_bits(got["parameter"], exact["parameter"])
    for name in SPANS:
        error = (got[name].double() - exact[name].double()).abs()
        assert bool((error <= width(exact[name], name, form)).all()), name


@pytest.mark.parametrize("form", FORMATS)
def test_an_update_is_within_its_bound_of_fp64(pool: ThreadPool, form: str) -> None:
    """A new moment differs from its value in fp64 by at most d + 2**-20 * m, and a parameter by 2**-20 * m.

    d: the distance between neighbouring values of the moment's format. m: the larger magnitude of the two
    terms whose sum is the new value. The term with m covers the 8 ULP that an fp32 update may be off.
    """
    n = 50_000
    inputs = ordinary(n, 3)
    grad = inputs.pop("grad")
    h = AdamW(lr=1e-3, weight_decay=0.1, step=7)
    now = stored(inputs, form)
    before = {name: each.double() for name, each in read(now, form).items()}
    pool.run(Update(**now, grad=grad, segments=[Segment(0, n, seed=3)], hypers=[h]))
    g = grad.double()
    terms = {
        "first_moment": (0.9 * before["first_moment"], 0.1 * g),
        "second_moment": (0.999 * before["second_moment"], (1 - 0.999) * g * g),
    }
    exact = {name: a + b for name, (a, b) in terms.items()}
    root = (exact["second_moment"] / (1 - 0.999**7)).sqrt()
    change = 1e-3 / (1 - 0.9**7) * exact["first_moment"] / (root + 1e-8)
    parameter = before["parameter"] * (1 - 1e-4) - change
    got = read(now, form)
    error = (got["parameter"].double() - parameter).abs()
    assert bool((error <= 2.0**-20 * torch.maximum(before["parameter"].abs(), change.abs())).all())
    for name, (a, b) in terms.items():
        slack = 2.0**-20 * torch.maximum(a.abs(), b.abs()) + 2.0**-145
        error = (got[name].double() - exact[name]).abs()
        assert bool((error <= width(exact[name].float(), name, form) * (1 + 2.0**-18) + slack).all()), name


@pytest.mark.parametrize("form", FORMATS)
def test_a_second_moment_is_never_less_than_half_of_what_it_should_be(pool: ThreadPool, form: str) -> None:
    """Second moments are at least 0.4 times those of a run with fp32 moments.

    After three steps, parameters have changed by at most 1.42 times as much as in that run. This holds
    although the int8 moments of a block share one scale, which the block's largest element sets.
    """
    n = 64 * 600
    grad = torch.exp(12 * torch.randn(n, generator=torch.Generator().manual_seed(0))) * 1e-8
    grad = grad.clamp(1e-18, 1e18)
    plain = {"parameter": torch.zeros(n), "first_moment": torch.zeros(n), "second_moment": torch.zeros(n)}
    now = stored(plain, form)
    for step in range(1, 4):
        hyper = AdamW(lr=1e-3, eps=0.0, weight_decay=0.0, step=step)
        pool.run(Update(**now, grad=grad, segments=[Segment(0, n, seed=step)], hypers=[hyper]))
        pool.run(Update(**plain, grad=grad, segments=[Segment(0, n)], hypers=[hyper]))
        second = read(now, form)["second_moment"]
        assert bool((second >= 0.4 * plain["second_moment"]).all())
        assert bool(now["parameter"].isfinite().all())
    assert float((now["parameter"] / plain["parameter"]).max()) < 1.42


# ---- Bias ----


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_is_right_on_average(pool: ThreadPool, form: str) -> None:
    """The stochastic rounding of moments has no bias: its mean error is 0 within 5 standard deviations.

    This holds for the mean over all elements with the same seed, and for the mean over seeds of one element.
    The roundings of an element's two moments are not correlated. Nor are a moment's roundings in the first
    and in the second half of a block.
    """
    n = 64 * 512
    value, square = 0.7123, 0.3391
    plain = {"parameter": torch.zeros(n), "first_moment": torch.full((n,), value)}
    plain["second_moment"] = torch.full((n,), square)
    over_elements, over_seeds = [], []
    for seed in range(64):
        now = stored(plain, form)
        # Gradients are 0: the stored moments are the moments read, times the betas.
        work: dict[str, Any] = {"grad": torch.zeros(n), "hypers": [AdamW(step=5, betas=(0.97, 0.99))]}
        exact = read(now, form)
        pool.run(Update(**exact, **work, segments=[Segment(0, n)]))
        pool.run(Update(**now, **work, segments=[Segment(0, n, seed=seed)]))
        got = read(now, form)
        for name in SPANS:
            step = width(exact[name][:64], name, form)[0]
            error = (got[name].double() - exact[name].double()) / step
            assert 0 < error.abs().max() < 1
            over_elements.append(float(error.mean()) * n**0.5)
            over_seeds.append(error[:4096])
    assert max(abs(each) for each in over_elements) < 0.5 * 5
    for first in (0, 1):
        mean = torch.stack(over_seeds[first::2]).mean(0) * 64**0.5
        assert float(mean.abs().max()) < 0.5 * 5
    # The two moments of an element round independently, and so does one moment in the two halves of a
    # block.
    ups = [(torch.stack(over_seeds[first::2]) > 0).double() for first in (0, 1)]
    halves = [up.view(64, -1, 2, CODE_BLOCK // 2).unbind(2) for up in ups]
    for one, other in (ups, *halves):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(float(correlation)) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize("form", FORMATS)
def test_means_do_not_stand_still(form: str) -> None:
    """The mean of second moments falls from 1 as in exact arithmetic, within 2%, over 3000 steps.

    Each step changes a moment by at most a thousandth, less than the format can show. With rounding to
    nearest instead of stochastic rounding, the moments would stay at 1.
    """
    n, steps = 4096, 3000
    now = stored({name: torch.ones(n) for name in ("parameter", *SPANS)}, form)
    grad = torch.full((n,), 0.5**0.5)
    with ThreadPool(threads=1) as pool:
        for step in range(1, steps + 1):
            hyper = AdamW(lr=0.0, step=step)
            pool.run(Update(**now, grad=grad, segments=[Segment(0, n, seed=step)], hypers=[hyper]))
    expected = 0.5 + 0.5 * 0.999**steps
    got = read(now, form)["second_moment"].double()
    spread = float(got.std() / got.mean())
    assert float(got.mean()) == pytest.approx(expected, rel=0.02)
    assert spread < (0.07 if form == "bf16" else 0.3)


# ---- Bits depend on nothing but the element, its index and the seed ----


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_partition(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5 * BLOCK), label="elements")
    form = data.draw(st.sampled_from(FORMATS), label="format")
    rule = RULES[data.draw(st.sampled_from(sorted(RULES)), label="rule")]
    cuts = data.draw(st.lists(st.integers(0, n // BLOCK), max_size=4, unique=True), label="cuts")
    edges = sorted({0, n, *(cut * BLOCK for cut in cuts)})
    isa = data.draw(st.sampled_from(runnable_isas()), label="isa")
    index = CODE_BLOCK * data.draw(st.integers(0, 2**30), label="index")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    wild = data.draw(st.booleans(), label="infinities and NaNs")
    plain = states(n, finite=not wild)
    high, low = split(plain["parameter"])
    before = stored(plain, form) | {"grad": floats(3, n, finite=not wild).bfloat16()}
    before |= {"parameter": high, "remainder": low}

    expected = clones(before)
    with ThreadPool(threads=1, isa="scalar", chunk=64 * BLOCK) as reference:
        whole = [Segment(0, n, index=index, seed=seed)]
        reference.run(Update(**expected, segments=whole, hypers=[rule]))
    now = {name: padded(each, data.draw(st.integers(0, 33))) for name, each in before.items()}
    segments = [Segment(a, b - a, 0, index + a, seed) for a, b in itertools.pairwise(edges)]
    chunk = BLOCK * data.draw(st.integers(1, 3), label="blocks per chunk")
    threads = data.draw(st.integers(1, 3), label="threads")
    with ThreadPool(threads=threads, isa=isa, chunk=chunk) as other:
        other.run(Update(**now, segments=segments, hypers=[rule]))
    assert all(torch.equal(bits(now[name]), bits(expected[name])) for name in now)


@pytest.mark.parametrize("form", FORMATS)
def test_seed_and_index_choose_the_rounding(pool: ThreadPool, form: str) -> None:
    n = 1000
    inputs = ordinary(n)
    grad = inputs.pop("grad")
    found = []
    for index, seed in ((0, 1), (0, 1), (0, 2), (64, 1), (2**32, 1)):
        now = stored(inputs, form)
        segments = [Segment(0, n, 0, index, seed)]
        pool.run(Update(**now, grad=grad, segments=segments, hypers=[RULES["adamw"]]))
        found.append(now["first_moment"])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[4])  # an index counts modulo 2**32
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[0], found[3])


@pytest.mark.parametrize("form", FORMATS)
def test_a_split_master_stays_equal_to_a_plain_one(pool: ThreadPool, form: str) -> None:
    n = 5001
    plain = stored(states(n, finite=True), form)
    halves = clones(plain)
    high, low = split(halves.pop("parameter"))
    copy = torch.empty(n, dtype=torch.bfloat16)
    for step in range(1, 6):
        grad = floats(step, n, finite=True).bfloat16()
        segments = [Segment(0, n, seed=step)]
        work: dict[str, Any] = {"grad": grad, "segments": segments, "hypers": [RULES["adam"]]}
        pool.run(Update(copy=copy, **plain, **work))
        pool.run(Update(parameter=high, remainder=low, **halves, **work))
        assert same_bits(join(high, low), plain["parameter"]) and same_bits(high, copy)
        assert all(same_bits(halves[name], plain[name]) for name in halves)


# ---- What is not finite ----


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_a_gradient_that_is_not_finite_marks_its_element_in_bf16_and_its_block_in_int8(
    pool: ThreadPool, bad: float
) -> None:
    n, at = 5 * CODE_BLOCK, 2 * CODE_BLOCK + 3
    grad = torch.ones(n)
    grad[at] = bad  # the square of 1e30 is infinite
    for form in FORMATS:
        now = stored({name: torch.ones(n) for name in ("parameter", *SPANS)}, form)
        done = pool.run(Update(**now, grad=grad, segments=[Segment(0, n)], hypers=[RULES["adamw"]]))
        assert done.nonfinite == (() if bad == 1e30 else (0,))
        second = read(now, form)["second_moment"]
        marked = (~second.isfinite()).nonzero().flatten().tolist()
        block = list(range(2 * CODE_BLOCK, 3 * CODE_BLOCK))
        assert marked == ([at] if form == "bf16" else block)
        if form == "bf16" and bad != bad:  # noqa: PLR0124
            assert bits(now["first_moment"])[at] == 0x7FC0
        pool.run(Update(**now, grad=torch.ones(n), segments=[Segment(0, n)], hypers=[RULES["adamw"]]))
        lost = now["parameter"].isnan().nonzero().flatten().tolist()
        if form == "int8":
            assert lost == block
        else:
            assert lost == ([] if bad == 1e30 else [at])


# ---- Refusals ----


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"first_moment": torch.zeros(128)}, "moments have dtypes"),
        ({"first_moment": torch.zeros(128, dtype=torch.int8)}, "moments have dtypes"),
        ({"first_scale": None}, "'first_scale' is missing"),
        ({"second_scale": torch.zeros(3, dtype=torch.uint8)}, "'second_scale' has 3 elements"),
        ({"second_scale": torch.zeros(2)}, "'second_scale' has dtype"),
        ({"second_moment": torch.zeros(64, dtype=torch.uint8)}, "'second_moment' has 64 elements"),
        ({"segments": [Segment(1, 100)]}, "int8 moments"),
        ({"segments": [Segment(0, 100, index=32)]}, "int8 moments"),
        ({"segments": [Segment(0, 100, seed=2**32)]}, "seed"),
        ({"segments": [Segment(0, 100, index=-64)]}, "negative"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_touched(change: dict[str, Any], cause: str) -> None:
    now = stored(states(128, finite=True), "int8")
    before = clones(now)
    work = now | {"grad": torch.ones(128), "segments": [Segment(0, 128)], "hypers": [RULES["adamw"]]}
    with ThreadPool(threads=1) as pool:
        with pytest.raises(ConfigError, match=cause):
            pool.run(Update(**(work | change)))
        with pytest.raises(ConfigError, match="given scales"):
            plain = states(128, finite=True)
            scale = torch.zeros(2, dtype=torch.uint8)
            pool.run(
                Update(
                    grad=torch.ones(128),
                    **plain,
                    first_scale=scale,
                    segments=[Segment(0, 128)],
                    hypers=[SGD(first_step=False)],
                )
            )
    assert all(same_bits(now[name], before[name]) for name in now)
