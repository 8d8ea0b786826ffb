"""Tests of infinity.formats.optimizer_rules: every option of a parameter group counts or is refused.

Arrays of states have torch's names and first values, and start on multiples of 4096 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from infinity import ConfigError, UnsupportedOptimizer
from infinity.cpu_adam import SGD, Adagrad, Adam, AdamW
from infinity.formats.optimizer_rules import Rule, StateArray, StateFormat

ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2, "maximize": True}
SGD_OPTIONS = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True}
NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.2, "eps": 1e-6, "weight_decay": 0.3, "maximize": True}
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",)}


decoupled_adam = pytest.mark.skipif(
    not issubclass(torch.optim.AdamW, torch.optim.Adam), reason="this torch's Adam decouples no weight decay"
)


def optimizer(kind: str, **options: Any) -> Any:
    return getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("AdamW", ADAM, AdamW(**ADAM, step=7)),
        ("AdamW", {}, AdamW(step=7)),
        ("Adam", ADAM, Adam(**ADAM, step=7)),
        ("Adam", {}, Adam(step=7)),
        pytest.param(
            "Adam", {**ADAM, "decoupled_weight_decay": True}, AdamW(**ADAM, step=7), marks=decoupled_adam
        ),
        ("SGD", {}, SGD(first_step=False)),
        ("SGD", SGD_OPTIONS, SGD(**SGD_OPTIONS, first_step=False)),
        ("SGD", NESTEROV, SGD(**NESTEROV, first_step=False)),
        ("Adagrad", {}, Adagrad(step=7)),
        ("Adagrad", ADAGRAD, Adagrad(**ADAGRAD, step=7)),
    ],
)
def test_every_option_of_a_group_counts(kind: str, options: dict[str, Any], expected: Any) -> None:
    made = optimizer(kind, **options)
    hyper = Rule.of(made).hyper(made.param_groups[0], 7, False)
    assert type(hyper) is type(expected)
    assert hyper == expected


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_counts_as_its_value(kind: str, dtype: torch.dtype) -> None:
    made = optimizer(kind, lr=torch.tensor(0.25, dtype=dtype))
    hyper = Rule.of(made).hyper(made.param_groups[0], 1, True)
    assert type(hyper.lr) is float
    assert hyper.lr == 0.25


def test_the_live_group_is_read() -> None:
    made = optimizer("AdamW")
    rule = Rule.of(made)
    made.param_groups[0].update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.0)
    assert rule.hyper(made.param_groups[0], 2, False) == AdamW(
        lr=0.5, betas=(0.1, 0.2), weight_decay=0.0, step=2
    )


def test_first_says_that_the_buffer_is_empty() -> None:
    made = optimizer("SGD", momentum=0.9)
    assert Rule.of(made).hyper(made.param_groups[0], 3, True) == SGD(momentum=0.9, first_step=True)


class Mine(torch.optim.AdamW):
    pass


OTHERS = ("Adafactor", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam")


@pytest.mark.parametrize("kind", [*(getattr(torch.optim, name) for name in OTHERS), Mine])
def test_other_optimizers_are_refused_and_the_cure_names_those_that_work(kind: Any) -> None:
    with pytest.raises(UnsupportedOptimizer) as caught:
        Rule.of(kind([torch.nn.Parameter(torch.zeros(3))]))
    assert kind.__name__ in caught.value.cause
    for name in ("AdamW", "Adam", "SGD", "Adagrad"):
        assert name in caught.value.cure.replace(",", "").split()


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("AdamW", "amsgrad"),
        ("Adam", "amsgrad"),
        *((kind, "differentiable") for kind in ("AdamW", "Adam", "SGD", "Adagrad")),
    ],
)
def test_options_without_an_equal_are_refused_at_first_and_later(kind: str, option: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=f"{kind} with {option}"):
        Rule.of(optimizer(kind, **{option: True}))
    made = optimizer(kind)
    rule = Rule.of(made)
    made.param_groups[0][option] = True
    with pytest.raises(UnsupportedOptimizer, match=f"{kind} with {option}"):
        rule.check(made.param_groups)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_options_that_choose_an_implementation_change_nothing(option: str) -> None:
    made = optimizer("AdamW", **{option: True})
    assert Rule.of(made).hyper(made.param_groups[0], 1, True) == AdamW(step=1)


def test_a_learning_rate_that_wants_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="lr requires gradients"):
        Rule.of(optimizer("SGD", lr=torch.tensor(0.1, requires_grad=True)))


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("AdamW", "lr", -1e-3),
        ("AdamW", "lr", math.nan),
        ("AdamW", "lr", "fast"),
        ("AdamW", "lr", torch.ones(2)),
        ("AdamW", "betas", (1.0, 0.9)),
        ("AdamW", "betas", (0.9, -0.1)),
        ("Adam", "eps", -1.0),
        ("Adam", "weight_decay", math.inf),
        ("SGD", "momentum", -0.5),
        ("SGD", "dampening", math.nan),
        ("SGD", "nesterov", True),
        ("Adagrad", "lr_decay", -1.0),
    ],
)
def test_values_out_of_range_are_refused_before_an_update(kind: str, option: str, value: Any) -> None:
    made = optimizer(kind)
    rule = Rule.of(made)
    made.param_groups[0][option] = value
    with pytest.raises(ConfigError, match=option):
        rule.check(made.param_groups)


def test_momentum_that_comes_too_late_is_refused() -> None:
    made = optimizer("SGD")
    rule = Rule.of(made)
    assert rule.moments == ()
    made.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"momentum is now 0\.9"):
        rule.check(made.param_groups)


def test_one_group_with_momentum_gives_all_a_buffer_and_only_it_fills_one() -> None:
    still, moving = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    made = torch.optim.SGD([{"params": [still]}, {"params": [moving], "momentum": 0.9}], lr=0.1)
    rule = Rule.of(made)
    assert rule.moments == ("momentum_buffer",)
    assert [rule.written(group) for group in made.param_groups] == [(), ("momentum_buffer",)]
    made.param_groups[0]["momentum"] = 0.5
    assert rule.hyper(made.param_groups[0], 2, True) == SGD(lr=0.1, momentum=0.5, first_step=True)


@pytest.mark.parametrize("kind", MOMENTS)
def test_moments_are_named_as_in_torchs_state(kind: str) -> None:
    made = optimizer(kind)
    made.param_groups[0]["params"][0].grad = torch.ones(3)
    made.step()
    rule = Rule.of(made)
    assert rule.moments == rule.written(made.param_groups[0]) == MOMENTS[kind]
    (state,) = made.state.values()
    assert tuple(state) == ("step", *rule.moments)
    assert rule.counts_steps
    assert {rule.first_moment, rule.second_moment} - {None} == set(rule.moments)


def test_arrays_hold_what_a_parameter_dtype_lacks_of_fp32() -> None:
    rule = Rule.of(optimizer("SGD", momentum=0.9))
    buffer = StateArray("momentum_buffer", torch.float32)
    assert rule.arrays(torch.bfloat16) == (StateArray("remainder", torch.int16), buffer)
    assert rule.arrays(torch.float16) == (StateArray("master", torch.float32), buffer)
    assert rule.arrays(torch.float32) == (buffer,)
    with pytest.raises(ConfigError, match="float64"):
        rule.arrays(torch.float64)


def test_arrays_start_on_multiples_of_4096_bytes() -> None:
    arrays = Rule.of(optimizer("AdamW")).arrays(torch.bfloat16)
    made = StateFormat(arrays, 2049)
    assert (made.offsets, made.nbytes) == ((0, 8192, 20480), 32768)
    made = StateFormat(arrays, 2048)
    assert (made.offsets, made.nbytes) == ((0, 4096, 12288), 20480)
    assert StateFormat((), 5).nbytes == 0


def test_moments_begin_as_torch_fills_them() -> None:
    made = optimizer("Adagrad", initial_accumulator_value=0.5)
    group = made.param_groups[0]
    assert Rule.of(made).initial("sum") == 0.5 == made.state[group["params"][0]]["sum"][0]
    made = optimizer("AdamW")
    assert Rule.of(made).initial("exp_avg") == 0.0
