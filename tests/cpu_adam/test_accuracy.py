"""Accuracy of the update against an fp64 oracle, and against torch's own optimizers on the same inputs.

The error is bounded for each element of each output, where the outputs are the parameter and its moments.
The bound is 8 ULP of the largest operand. An operand is a term of the sum that makes the output, at the
size that the term has in the oracle. An ULP is the spacing of fp32 at that size, 2^-149 at least. The
operands are:

- first moment: beta1 m and (1 - beta1) g;
- second moment: beta2 v and (1 - beta2) g^2;
- parameter: p, lr wd p, and the change of the parameter. The change is computed with the larger of the two
  operands of the first moment in place of the first moment.

With L2 decay the gradient is g + wd p. As an operand it is then taken to be as large as the largest of g,
wd p and their sum.

A moment or gradient can be denormal. It can also be smaller than its operands, such as a gradient that its
L2 decay almost cancels. The error of the change is then measured in units of the change that one ULP of
that moment or gradient makes. If a state, or the first moment (for Adagrad the gradient) divided by the
root of the second moment, exceeds fp32's range, it is infinite in the oracle too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cpu_adam_cases import adversarial
from other_optimizers import Lion as PlainLion

from infinity.cpu_adam import SGD, Adagrad, Adam, AdamW, Lion, Segment, ThreadPool, Update, runnable_isas

N = 10_000_000
LARGEST = torch.finfo(torch.float32).max
State = dict[str, torch.Tensor]


@dataclass
class Oracle:
    """The fp64 results of an update (`exact`), and for each element of each result the size of one unit of
    error (`unit`): one ULP of its largest operand, where the docstring of this module names no larger unit.
    """

    exact: State
    unit: State


def fit(x: torch.Tensor) -> torch.Tensor:
    """Replace values beyond fp32's range by an infinity of their sign."""
    return torch.where(x.abs() < LARGEST * (1 + 2**-25), x, x.sign() * torch.inf)


def ulp(size: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(size)[1].clamp(min=-125)
    return torch.ldexp(torch.ones_like(size), exponent - 24)


def unit_of_change(rest: torch.Tensor, source: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the size of one unit of error of the parameter `rest - source * factor`, for each element.

    It is the larger of two: one ULP of the larger operand, `rest` or `source * factor`; and the change that
    one ULP of `source` makes, which is that ULP times `factor`. The arguments are absolute values.
    """
    return torch.maximum(ulp(torch.maximum(rest, source * factor)), ulp(source) * factor)


def decayed(g: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (g + decay, size of its largest operand), elementwise: the gradient with L2 decay added.

    decay: weight decay times parameter. The size is the largest of |g|, |decay| and |g + decay|, from which
    error bounds are derived.
    """
    total = g + decay
    return total, torch.maximum(torch.maximum(g.abs(), decay.abs()), total.abs())


def adam_oracle(h: Adam, s: State, g: torch.Tensor) -> Oracle:
    p, m, v = (s[name].double() for name in ("parameter", "first_moment", "second_moment"))
    g = g.double()
    decoupled = isinstance(h, AdamW)
    gradient_size = g.abs()
    if not decoupled:
        g, gradient_size = decayed(g, h.weight_decay * p)
    b1, b2 = h.betas
    first, second = fit(b1 * m + (1 - b1) * g), fit(b2 * v + (1 - b2) * g * g)
    first_size = torch.maximum((b1 * m).abs(), (1 - b1) * gradient_size)
    second_size = torch.maximum(b2 * v, (1 - b2) * gradient_size**2)
    step = h.lr / (1 - b1**h.step)
    denominator = second.sqrt() / (1 - b2**h.step) ** 0.5 + h.eps
    decay = h.lr * h.weight_decay * p if decoupled else torch.zeros_like(p)
    parameter = fit(p - decay - step * fit(first / denominator))
    rest = torch.maximum(p.abs(), decay.abs())
    unit = unit_of_change(rest, first_size, step / denominator)
    if not decoupled:  # the second moment can be smaller than its operands only then
        slope = step * first.abs() / denominator**2 / (2 * second.sqrt() * (1 - b2**h.step) ** 0.5)
        unit = torch.maximum(unit, torch.where(second > 0, slope * ulp(second_size), 0.0))
    return Oracle(
        {"parameter": parameter, "first_moment": first, "second_moment": second},
        {
            "parameter": unit,
            "first_moment": ulp(first_size),
            "second_moment": ulp(second_size),
        },
    )


def sgd_oracle(h: SGD, s: State, g: torch.Tensor) -> Oracle:
    p, m, g = s["parameter"].double(), s["first_moment"].double(), g.double()
    g, size = decayed(g, h.weight_decay * p)
    first = g if h.first_step else h.momentum * m + (1 - h.dampening) * g
    first_size = size if h.first_step else torch.maximum((h.momentum * m).abs(), size)
    change, change_size = first, first_size
    if h.nesterov:
        change, change_size = g + h.momentum * first, torch.maximum(size, h.momentum * first_size)
    return Oracle(
        {"parameter": fit(p - h.lr * change), "first_moment": fit(first)},
        {
            "parameter": unit_of_change(p.abs(), change_size, torch.tensor(h.lr)),
            "first_moment": ulp(first_size),
        },
    )


def adagrad_oracle(h: Adagrad, s: State, g: torch.Tensor) -> Oracle:
    p, v, g = s["parameter"].double(), s["second_moment"].double(), g.double()
    g, size = decayed(g, h.weight_decay * p)
    second = fit(v + g * g)
    rate = h.lr / (1 + (h.step - 1) * h.lr_decay)
    denominator = second.sqrt() + h.eps
    return Oracle(
        {"parameter": fit(p - rate * fit(g / denominator)), "second_moment": second},
        {
            "parameter": unit_of_change(p.abs(), size, rate / denominator),
            "second_moment": ulp(torch.maximum(v, size**2)),
        },
    )


def lion_oracle(h: Lion, s: State, g: torch.Tensor) -> Oracle:
    """A direction that rounding may turn round counts as right either way, and NaN if it is not finite."""
    p, m, g = s["parameter"].double(), s["first_moment"].double(), g.double()
    b1, b2 = h.betas
    direction = fit(b1 * m + (1 - b1) * g)
    near = direction.abs() <= 8 * ulp(torch.maximum((b1 * m).abs(), ((1 - b1) * g).abs()))
    decay = h.lr * h.weight_decay * p
    sign = torch.where(direction.isfinite(), direction.sign(), torch.nan)
    unit = ulp(torch.maximum(p.abs(), decay.abs()).clamp(min=h.lr))
    first_size = torch.maximum((b2 * m).abs(), ((1 - b2) * g).abs())
    return Oracle(
        {"parameter": fit(p - decay - h.lr * sign), "first_moment": fit(b2 * m + (1 - b2) * g)},
        {"parameter": torch.where(near, unit.clamp(min=2 * h.lr), unit), "first_moment": ulp(first_size)},
    )


def oracle(h: Any, s: State, g: torch.Tensor) -> Oracle:
    if isinstance(h, Adam):
        return adam_oracle(h, s, g)
    if isinstance(h, Lion):
        return lion_oracle(h, s, g)
    return sgd_oracle(h, s, g) if isinstance(h, SGD) else adagrad_oracle(h, s, g)


def in_chunks(n: int, size: int = 1_000_000) -> Iterator[slice]:
    return (slice(a, min(a + size, n)) for a in range(0, n, size))


RULES = {
    "adamw": AdamW(lr=1e-3, weight_decay=0.1, step=7),
    "adamw first": AdamW(lr=3e-4, step=1),
    "adamw late": AdamW(lr=1e-4, weight_decay=0.1, betas=(0.95, 0.98), eps=1e-6, step=100_000),
    "adamw small betas": AdamW(lr=1e-3, betas=(0.3, 0.4), step=5),
    "adam": Adam(lr=1e-3, weight_decay=0.1, step=7),
    "sgd": SGD(lr=0.1, weight_decay=1e-2, momentum=0.9, dampening=0.1, first_step=False),
    "nesterov": SGD(lr=0.1, weight_decay=1e-2, momentum=0.9, nesterov=True, first_step=False),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.01, weight_decay=1e-2, step=7),
    "lion": Lion(lr=1e-3, weight_decay=0.1),
}


def ours(pool: ThreadPool, h: Any, s: State, g: torch.Tensor) -> State:
    now = {name: each.clone() for name, each in s.items()}
    pool.run(Update(grad=g, **now, segments=[Segment(0, g.numel())], hypers=[h]))
    return now


def torch_optimizer(h: Any, parameter: torch.Tensor, **how: bool) -> torch.optim.Optimizer:
    if isinstance(h, Adam):
        kind = torch.optim.AdamW if isinstance(h, AdamW) else torch.optim.Adam
        return kind([parameter], h.lr, h.betas, h.eps, h.weight_decay, **how)  # type: ignore[arg-type]
    if isinstance(h, Lion):
        return PlainLion([parameter], h.lr, h.betas, h.weight_decay)
    if isinstance(h, SGD):
        return torch.optim.SGD([parameter], h.lr, h.momentum, h.dampening, h.weight_decay, h.nesterov, **how)
    return torch.optim.Adagrad([parameter], h.lr, h.lr_decay, h.weight_decay, eps=h.eps, **how)


def torchs(h: Any, s: State, g: torch.Tensor, **how: bool) -> State:
    now = {name: each.clone() for name, each in s.items()}
    parameter = now["parameter"].requires_grad_()
    parameter.grad = g
    optimizer = torch_optimizer(h, parameter, **how)
    if isinstance(h, SGD):
        optimizer.state[parameter] = {"momentum_buffer": now["first_moment"]}
    elif isinstance(h, Lion):
        optimizer.state[parameter] = {"exp_avg": now["first_moment"]}
    elif isinstance(h, Adagrad):
        optimizer.state[parameter] = {"step": torch.tensor(h.step - 1.0), "sum": now["second_moment"]}
    else:
        optimizer.state[parameter] = {
            "step": torch.tensor(h.step - 1.0),
            "exp_avg": now["first_moment"],
            "exp_avg_sq": now["second_moment"],
        }
    optimizer.step()
    now["parameter"] = parameter.detach()
    return now


def errors(now: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return the error |now - exact| / unit for each element.

    now: a result of the update. exact, unit: the oracle's result, and the size of one unit of error (about
    an ULP), for each element. Where `exact` is infinite or NaN, the error is 0 if `now` is the same value,
    and infinite otherwise.
    """
    finite = exact.isfinite()
    error = ((now.double() - exact) / unit).abs()
    same = (now == exact) | (now.isnan() & exact.isnan())
    return torch.where(finite, error, torch.where(same, 0.0, torch.inf))


@pytest.fixture(scope="module")
def inputs() -> tuple[State, torch.Tensor]:
    return adversarial(N)


@pytest.mark.parametrize("rule", RULES)
def test_every_update_is_within_8_ulp(inputs: tuple[State, torch.Tensor], rule: str) -> None:
    """Every result of an update differs by at most 8 ULP from the fp64 oracle, with every instruction set.

    To save time, AdamW and Adam get every fourth input, and the other rules every sixteenth.
    """
    stride = 4 if rule in ("adamw", "adam") else 16
    states, g = inputs
    check_bound(
        RULES[rule], {name: each[::stride].clone() for name, each in states.items()}, g[::stride].clone()
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_update_is_within_8_ulp_over_all_values(inputs: tuple[State, torch.Tensor], rule: str) -> None:
    check_bound(RULES[rule], *inputs)


def check_bound(h: Any, states: State, g: torch.Tensor) -> None:
    per_isa = {}
    for isa in runnable_isas():
        with ThreadPool(isa=isa) as pool:
            per_isa[isa] = ours(pool, h, states, g)
    for part in in_chunks(g.numel()):
        expected = oracle(h, {name: each[part] for name, each in states.items()}, g[part])
        for isa, now in per_isa.items():
            for name, exact in expected.exact.items():
                worst = errors(now[name][part], exact, expected.unit[name]).max().item()
                assert worst <= 8, f"{isa} {name}: {worst} ULP"


@pytest.mark.parametrize("rule", RULES)
def test_rms_error_is_no_worse_than_torchs(rule: str) -> None:
    h = RULES[rule]
    random = torch.Generator().manual_seed(5)
    n = 1_000_000
    g = torch.randn(n, generator=random) * 1e-2
    states = {
        "parameter": torch.randn(n, generator=random) * 0.05,
        "first_moment": torch.randn(n, generator=random) * 1e-2,
        "second_moment": (torch.randn(n, generator=random) * 1e-2) ** 2,
    }
    expected = oracle(h, states, g).exact

    def rms(now: State, name: str) -> float:
        return float((now[name].double() - expected[name]).square().mean().sqrt())

    rivals = [torchs(h, states, g, foreach=True)]
    if not isinstance(h, Adagrad):
        rivals.append(torchs(h, states, g, fused=True))
    for isa in runnable_isas():
        with ThreadPool(isa=isa) as pool:
            now = ours(pool, h, states, g)
        for name in expected:
            best = min(rms(each, name) for each in rivals)
            # Where the final rounding is the only error, both errors are equal up to chance.
            assert rms(now, name) <= best * 1.002, f"{isa} {name}: {rms(now, name)} against torch's {best}"


@pytest.mark.parametrize("rule", RULES)
def test_nan_and_infinity_go_where_the_oracle_sends_them(rule: str) -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -2.0])
    p, m, v, g = torch.cartesian_prod(values, values, values, values).unbind(1)
    states = {"parameter": p.clone(), "first_moment": m.clone(), "second_moment": v.abs().clone()}
    expected = oracle(RULES[rule], states, g).exact
    with ThreadPool(threads=1) as pool:
        now = ours(pool, RULES[rule], states, g.clone())
    for name, exact in expected.items():
        # The values are non-finite in both or close in both. An infinity may become a NaN (inf - inf on the
        # way).
        assert torch.equal(now[name].isfinite(), exact.isfinite()), name
        infinite = now[name].isinf()
        assert torch.equal(now[name][infinite].double(), exact[infinite]), name
