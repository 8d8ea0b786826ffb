"""Updates by torch's operations on a device: every rule and format, against fp64 and the CPU's kernels.

With the CPU as the device here; on a GPU where there is one. test_twin_flow.py and
test_twin_flow_training.py have whole runtimes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpu_adam_cases import RULES as CASES
from cpu_adam_cases import clones, floats, join, same_bits, split, states
from homes import each_device
from test_cpu_adam import reference_blocks
from test_cpu_adam_accuracy import RULES, adversarial, errors, in_chunks, oracle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.cpu_adam import BLOCK, CODE_BLOCK, SGD, AdamW, Segment, ThreadPool, Update
from infinity.device_update import sum_squares, update
from infinity.moments import FIRST_SPAN, SECOND_SPAN, encode
from infinity.workspace import Workspace, workspace_bytes

MOMENTS = ("fp32", "bf16", "int8")
MASTERS = ("fp32", "split", "fp16", "bf16 copy", "fp32 copy")
Arrays = dict[str, torch.Tensor]


def workspace(device: str, elements: int = 2 * BLOCK, blocks: int = 0) -> Workspace:
    """Filled with NaN: nothing may rest on what it held."""
    nbytes = workspace_bytes(elements, blocks)
    return Workspace(torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device), elements, blocks)


def on_device(arrays: Arrays, space: Workspace, **work: Any) -> Arrays:
    """The arrays as an update on the workspace's device leaves them, on the CPU."""
    there = {name: each.to(space.device, copy=True) for name, each in arrays.items()}
    update(Update(**there, **work), space)
    return {name: each.cpu() for name, each in there.items()}


def on_cpu(arrays: Arrays, **work: Any) -> Arrays:
    """The arrays as the CPU's kernels leave them."""
    there = clones(arrays)
    with ThreadPool(threads=1) as pool:
        pool.run(Update(**there, **work))
    return there


def stored(plain: Arrays, form: str, master: str = "fp32") -> Arrays:
    """The arguments of an Update that hold these float32 states and gradient."""
    found = {"grad": plain["grad"].clone(), "parameter": plain["parameter"].clone()}
    for name, span in (("first_moment", FIRST_SPAN), ("second_moment", SECOND_SPAN)):
        if form == "int8":
            found[name], found[name.replace("moment", "scale")] = encode(plain[name], span)
        else:
            found[name] = plain[name].to(torch.bfloat16 if form == "bf16" else torch.float32)
    if master == "split":
        found["parameter"], found["remainder"] = split(plain["parameter"])
    elif master != "fp32":
        dtypes = {"fp16": torch.float16, "bf16 copy": torch.bfloat16, "fp32 copy": torch.float32}
        found["copy"] = torch.zeros(plain["parameter"].numel(), dtype=dtypes[master])
    return found


def masters(arrays: Arrays) -> torch.Tensor:
    return join(arrays["parameter"], arrays["remainder"]) if "remainder" in arrays else arrays["parameter"]


# ---- Against fp64 ----


@each_device
@pytest.mark.parametrize("rule", RULES)
def test_every_update_is_within_8_ulp_of_fp64(rule: str, device: str) -> None:
    """The bound of the CPU's kernels, over all magnitudes; test_cpu_adam_accuracy.py says of what."""
    given, g = adversarial(300_000)
    n = g.numel()
    work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [RULES[rule]]}
    now = on_device({"grad": g, **given}, workspace(device, 16 * BLOCK), **work)
    for part in in_chunks(n, 100_000):
        expected = oracle(RULES[rule], {name: each[part] for name, each in given.items()}, g[part])
        for name, exact in expected.exact.items():
            worst = errors(now[name][part], exact, expected.unit[name]).max().item()
            assert worst <= 8, f"{name}: {worst} ULP"


@each_device
@pytest.mark.parametrize("rule", RULES)
def test_nan_and_infinity_go_where_the_oracle_sends_them(rule: str, device: str) -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -2.0])
    p, m, v, g = torch.cartesian_prod(values, values, values, values).unbind(1)
    given = {"parameter": p.clone(), "first_moment": m.clone(), "second_moment": v.abs().clone()}
    expected = oracle(RULES[rule], given, g).exact
    work: dict[str, Any] = {"segments": [Segment(0, len(g))], "hypers": [RULES[rule]]}
    now = on_device({"grad": g.clone(), **given}, workspace(device), **work)
    for name, exact in expected.items():
        assert torch.equal(now[name].isfinite(), exact.isfinite()), name
        infinite = now[name].isinf()
        assert torch.equal(now[name][infinite].double(), exact[infinite]), name


# ---- Formats ----


@each_device
@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_master_has_the_bits_of_a_plain_one(dtype: torch.dtype, rule: str, device: str) -> None:
    n = 2 * BLOCK + 1003
    plain = {"grad": floats(9, n).to(dtype), **states(n)}
    work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [CASES[rule]], "scale": 0.3}
    expected = on_device(stored(plain, "fp32"), workspace(device), **work)
    for master in MASTERS:
        now = on_device(stored(plain, "fp32", master), workspace(device), **work)
        assert same_value(masters(now), expected["parameter"])
        for name in ("first_moment", "second_moment"):
            assert same_value(now[name], expected[name]), name
        if master in ("split", "bf16 copy"):
            high = now["copy"] if master == "bf16 copy" else now["parameter"]
            assert same_bits(high, split(quieted(expected["parameter"]))[0])
        elif master != "fp32":
            assert same_value(now["copy"], expected["parameter"].to(now["copy"].dtype))


def quieted(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32), x)


def same_value(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, or NaN on both sides."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0.0), b.nan_to_num(0.0))


@each_device
@pytest.mark.parametrize("rule", [name for name in CASES if name != "sgd"])
@pytest.mark.parametrize("master", ["fp32", "split"])
@pytest.mark.parametrize("form", MOMENTS)
def test_it_is_the_kernels_update_but_for_last_bits(form: str, master: str, rule: str, device: str) -> None:
    """Parameters within 2**-20 of the largest term; moments within one step of their format."""
    n = BLOCK + 1500
    random = torch.Generator().manual_seed(4)
    plain = {
        "grad": torch.randn(n, generator=random) * 1e-2,
        "parameter": torch.randn(n, generator=random),
        "first_moment": torch.randn(n, generator=random) * 1e-2,
        "second_moment": (torch.randn(n, generator=random) * 1e-2).square() + 1e-6,
    }
    work: dict[str, Any] = {"segments": [Segment(0, n, seed=11)], "hypers": [CASES[rule]], "scale": 0.7}
    given = stored(plain, form, master)
    now, expected = on_device(given, workspace(device), **work), on_cpu(given, **work)
    difference = (masters(now).double() - masters(expected).double()).abs()
    assert float(difference.max()) <= 2.0**-20 * float(masters(expected).abs().max())
    same = {name: (now[name] == expected[name]).double().mean().item() for name in now}
    # Values that differ in their last bit seldom round to another neighbour.
    least = 0.3 if form == "fp32" else 0.99
    assert all(same[name] >= least for name in ("first_moment", "second_moment")), same
    if form == "int8":
        assert same["first_scale"] >= 0.98 and same["second_scale"] >= 0.98


@each_device
@pytest.mark.parametrize("cut", [0, 1, 17, BLOCK // CODE_BLOCK])
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_what_is_rounded_has_the_bits_of_the_kernels(form: str, cut: int, device: str) -> None:
    """Of values that no operation rounds, so that the formats alone decide; over windows and cuts."""
    n = 3 * BLOCK + 37
    random = torch.Generator().manual_seed(3)
    few = torch.randint(128, 256, (4, n), generator=random) / 128.0  # 8 bits each, in [1, 2)
    sign = torch.randint(0, 2, (2, n), generator=random) * 2.0 - 1.0
    plain = {
        "grad": few[0] * sign[0],
        "parameter": few[1],
        "first_moment": few[2] * sign[1],
        "second_moment": few[3],
    }
    first = cut * CODE_BLOCK
    segments = [Segment(0, first, 0, 0, 99), Segment(first, n - first, 0, first, 99)]
    work: dict[str, Any] = {"segments": segments, "hypers": [AdamW(lr=1e-3, betas=(0.5, 0.5), step=3)]}
    given = stored(plain, form, "split")
    now, expected = on_device(given, workspace(device, BLOCK), **work), on_cpu(given, **work)
    names = ["first_moment", "second_moment"]
    names += [name.replace("moment", "scale") for name in names] if form == "int8" else []
    for name in names:
        assert torch.equal(now[name].view(torch.uint8), expected[name].view(torch.uint8)), name
        assert not torch.equal(now[name], given[name]) or "scale" in name


@each_device
def test_blocks_with_what_is_not_finite_become_nan_as_the_kernels_have_them(device: str) -> None:
    n = 8 * CODE_BLOCK + 5
    plain = {"grad": torch.ones(n), **{name: torch.ones(n) for name in states(1)}}
    for at, value in ((3, torch.inf), (CODE_BLOCK + 1, torch.nan), (n - 1, 3.3e38)):
        plain["grad"][at] = value
    plain["second_moment"][6 * CODE_BLOCK :] = 0.0
    work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [AdamW(lr=1e-3, betas=(0.5, 0.5), step=3)]}
    given = stored(plain, "int8")
    now, expected = on_device(given, workspace(device), **work), on_cpu(given, **work)
    for name in ("first_moment", "second_moment", "first_scale", "second_scale"):
        assert torch.equal(now[name], expected[name]), name
    assert int((now["second_scale"] == 255).sum()) == 3
    # And from there again: what such a block holds is read as NaN.
    again, expected = on_device(now, workspace(device), **work), on_cpu(now, **work)
    for name in ("first_moment", "second_moment", "first_scale", "second_scale"):
        assert torch.equal(again[name], expected[name]), name
    assert torch.equal(again["parameter"].isnan(), expected["parameter"].isnan())


@each_device
@pytest.mark.parametrize("form", MOMENTS)
def test_only_segments_are_touched_each_with_its_hypers(form: str, device: str) -> None:
    n = 3 * BLOCK
    plain = {"grad": floats(3, n, finite=True).clamp(-2, 2), **states(n, finite=True)}
    segments = [Segment(CODE_BLOCK, 100, 1), Segment(4 * CODE_BLOCK, BLOCK + 3, 0), Segment(n - 64, 1, 2)]
    rules = [CASES["adamw"], CASES["momentum"], dataclasses.replace(CASES["sgd"])]
    given = stored(plain, form)
    now = on_device(given, workspace(device), segments=segments, hypers=rules)
    untouched = torch.ones(n, dtype=torch.bool)
    for each in segments:
        untouched[each.start : each.start + each.count] = False
        alone = on_device(given, workspace(device), segments=[each], hypers=rules)
        part = slice(each.start, each.start + each.count)
        assert same_bits(now["parameter"][part], alone["parameter"][part])
    for name in ("parameter", "first_moment", "second_moment"):
        assert torch.equal(now[name][untouched], given[name][untouched]), name
        assert same_bits(now[name][n - 64 :], given[name][n - 64 :]) == (name != "parameter")


@each_device
def test_maximize_is_descent_on_the_negative(device: str) -> None:
    n = 1000
    plain = {"grad": floats(3, n, finite=True), **states(n, finite=True)}
    work: dict[str, Any] = {"segments": [Segment(0, n)], "scale": 0.5}
    for rule in CASES.values():
        up = on_device(plain, workspace(device), hypers=[dataclasses.replace(rule, maximize=True)], **work)
        negative = {**plain, "grad": -plain["grad"]}
        down = on_device(negative, workspace(device), hypers=[rule], **work)
        assert all(same_bits(up[name], down[name]) for name in up if name != "grad")


@each_device
@pytest.mark.parametrize("form", MOMENTS)
def test_bits_do_not_depend_on_the_window(form: str, device: str) -> None:
    n = 5 * BLOCK + 77
    plain = {"grad": floats(3, n, finite=True).clamp(-2, 2), **states(n, finite=True)}
    for rule in (CASES["adamw"], CASES["nesterov"]):
        work: dict[str, Any] = {"segments": [Segment(0, n, seed=5)], "hypers": [rule]}
        given = stored(plain, form, "split")
        one = on_device(given, workspace(device, BLOCK), **work)
        other = on_device(given, workspace(device, 8 * BLOCK), **work)
        assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def test_a_rule_without_momentum_leaves_the_buffer_alone() -> None:
    n = 1000
    for form in MOMENTS:
        given = stored({"grad": torch.ones(n), **states(n, finite=True)}, form)
        work: dict[str, Any] = {"segments": [Segment(0, n)], "hypers": [SGD(lr=0.1, first_step=False)]}
        now = on_device(given, workspace("cpu"), **work)
        assert torch.equal(now["first_moment"], given["first_moment"])


# ---- Memory ----


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations inside made of new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.found.append((str(func), each.nbytes))
        return made


@pytest.mark.parametrize("rule", CASES)
@pytest.mark.parametrize("form", MOMENTS)
def test_an_update_allocates_nothing(form: str, rule: str) -> None:
    n = BLOCK + 100
    for dtype in (torch.float32, torch.bfloat16):
        plain = {"grad": floats(9, n).to(dtype), **states(n)}
        for master in MASTERS:
            given, space = stored(plain, form, master), workspace("cpu", BLOCK)
            with Allocations() as made:
                update(Update(**given, segments=[Segment(0, n)], hypers=[CASES[rule]], scale=0.5), space)
            assert made.found == []


# ---- Sums of squares ----


@each_device
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_summed_over_blocks_in_fp64(dtype: torch.dtype, n: int, device: str) -> None:
    values = floats(6, n, finite=True).clamp(-1e18, 1e18).to(dtype)
    blocks = -(-n // BLOCK)
    space = workspace(device, 2 * BLOCK, blocks)
    there = values.to(device)
    sum_squares(there, space.sums, space)
    expected = torch.tensor(reference_blocks(values.float()), dtype=torch.float64)
    assert torch.allclose(space.sums.cpu(), expected, rtol=1e-13, atol=0)
    with Allocations() as made:
        sum_squares(there, space.sums, space)
    assert made.found == []


@each_device
def test_squares_are_finite_if_and_only_if_the_elements_are(device: str) -> None:
    values = torch.full((2 * BLOCK,), 3e38, device=device)
    space = workspace(device, BLOCK, 2)
    sum_squares(values, space.sums, space)
    assert bool(space.sums.isfinite().all())
    for bad in (torch.inf, -torch.inf, torch.nan):
        values[BLOCK + 17] = bad
        sum_squares(values, space.sums, space)
        assert space.sums.isfinite().tolist() == [True, False]
