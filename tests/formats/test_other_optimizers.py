"""Tests of infinity.formats.optimizer_rules: optimizers of other packages have their rules, or are refused.

The classes are stand-ins of equal names (other_optimizers.py). Where the real packages are installed,
their classes must be recognised too.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_optimizers import Lion as PlainLion
from other_optimizers import bitsandbytes

import infinity
from infinity import ConfigError, UnsupportedOptimizer
from infinity.cpu_adam import AdamW, Lion
from infinity.formats.optimizer_rules import _BITSANDBYTES, _LION_PYTORCH, Rule

ADAMW = ("AdamW", "AdamW8bit", "AdamW32bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit")
LION = ("Lion", "Lion8bit", "Lion32bit", "PagedLion", "PagedLion8bit", "PagedLion32bit")


def made(kind: Any, **options: Any) -> Any:
    return kind([torch.nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize("name", [*ADAMW, *LION])
def test_bitsandbytes_has_the_rule_of_its_group_and_int8_states_of_8_bits(name: str) -> None:
    rule = Rule.of(made(bitsandbytes(name), weight_decay=0.2, lr=0.5))
    group = {"lr": 0.5, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6, "alpha": 0.0, "t_alpha": None}
    expected = (
        AdamW(lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, step=3)
        if name in ADAMW
        else Lion(lr=0.5, betas=(0.8, 0.9), weight_decay=0.2)
    )
    assert rule.hyper(group, 3, False) == expected
    assert rule.states == ("int8" if name.endswith("8bit") else "fp32")
    assert "bitsandbytes" not in sys.modules


def test_the_number_of_bits_is_an_option_too() -> None:
    eight = made(bitsandbytes("AdamW"), optim_bits=8)  # as transformers' Trainer has it
    assert Rule.of(eight).states == Rule.of(eight, "int8").states == "int8"
    assert Rule.of(made(bitsandbytes("PagedAdamW")), "bf16").states == "bf16"
    with pytest.raises(ConfigError, match="8 bits"):
        Rule.of(eight, "bf16")


@pytest.mark.parametrize(
    ("option", "value"), [("percentile_clipping", 5), ("max_unorm", 0.1), ("skip_zeros", True)]
)
def test_options_without_an_equal_are_refused_by_name(option: str, value: Any) -> None:
    usual = {"optim_bits": 8, "percentile_clipping": 100, "block_wise": True, "max_unorm": 0.0}
    kind = bitsandbytes("AdamW8bit")
    assert Rule.of(made(kind, args=SimpleNamespace(**usual))).states == "int8"
    with pytest.raises(UnsupportedOptimizer, match=option):
        Rule.of(made(kind, args=SimpleNamespace(**{**usual, option: value})))
    with pytest.raises(UnsupportedOptimizer, match="amsgrad"):
        Rule.of(made(kind, amsgrad=True))


def test_options_of_single_parameters_are_refused_but_for_bits() -> None:
    eight = made(bitsandbytes("AdamW8bit"))
    (parameter,) = eight.param_groups[0]["params"]
    module = SimpleNamespace(weight=parameter)
    eight.mng.module_weight_config_triple.append((module, "weight", {"optim_bits": 32}))
    assert Rule.of(eight).states == "int8"
    eight.mng.module_weight_config_triple.append((module, "weight", {"lr": 1.0}))
    with pytest.raises(UnsupportedOptimizer, match=r"GlobalOptimManager") as caught:
        Rule.of(eight)
    assert "(lr)" in caught.value.cause
    other = made(bitsandbytes("AdamW8bit"))
    other.mng.pid2config[id(torch.zeros(1))] = {"lr": 1.0}  # of another model
    assert Rule.of(other).states == "int8"


def test_states_of_bitsandbytes_are_refused() -> None:
    eight = made(bitsandbytes("Lion8bit"))
    eight.state[eight.param_groups[0]["params"][0]] = {"step": 1, "state1": torch.zeros(3)}
    with pytest.raises(ConfigError, match="has taken a step"):
        Rule.of(eight)


def test_options_of_lion_without_an_equal_are_refused_by_name() -> None:
    assert Rule.of(made(PlainLion, weight_decay=0.1)).moments == ("exp_avg",)
    with pytest.raises(UnsupportedOptimizer, match="decoupled_weight_decay"):
        Rule.of(made(PlainLion, decoupled_weight_decay=True))
    cautious = made(PlainLion)
    cautious.param_groups[0]["cautious_factor"] = 0.5
    with pytest.raises(UnsupportedOptimizer, match="cautious_factor"):
        Rule.of(cautious)


def test_equal_names_elsewhere_and_subclasses_are_refused() -> None:
    class Mine(PlainLion):
        pass

    for kind in (Mine, type("AdamW8bit", (torch.optim.SGD,), {}), bitsandbytes("Adam8bit")):
        with pytest.raises(UnsupportedOptimizer, match=kind.__name__) as caught:
            Rule.of(made(kind) if kind is Mine else kind([torch.nn.Parameter(torch.zeros(3))]))
        assert "Lion" in caught.value.cure and "bitsandbytes" in caught.value.cure


@pytest.mark.parametrize("package", ["bitsandbytes", "lion_pytorch"])
def test_the_names_are_those_of_the_packages(package: str) -> None:
    pytest.importorskip(package)
    for path in _BITSANDBYTES if package == "bitsandbytes" else _LION_PYTORCH:
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        assert f"{kind.__module__}.{kind.__qualname__}" == path
        Rule.of(kind([torch.nn.Parameter(torch.zeros(3))]))


def test_8_bit_adamw_trains_as_adamw_with_int8_states() -> None:
    found = []
    for kind, states in ((torch.optim.AdamW, "int8"), (bitsandbytes("PagedAdamW8bit"), "fp32")):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        precision = infinity.Precision(compute="fp32", states=states)
        optimizer = kind(model.parameters(), lr=1e-2)
        with infinity.offload(
            model, optimizer, budget=infinity.Budget(host="64MiB"), precision=precision, device="cpu"
        ) as runtime:
            for seed in range(3):
                inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
                model(inputs).square().mean().backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            assert runtime.plan.precision.states == "int8"
            found.append(model.weight.detach().clone())
    assert torch.equal(*found)
