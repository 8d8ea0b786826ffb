"""Tests of PagedOptimizer on plain tensors (update_backend.py) instead of pages.

It must update parameters, run closures and hooks, obey schedulers and refuse misuse as torch's optimizers do.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_optimizers import (
    assert_same,
    build,
    every_kind,
    give_gradients,
    page,
    parameters,
    pool,
    train,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from infinity import ConfigError

__all__ = ["page", "pool"]


# ---- Updates ----


@every_kind
def test_updates_are_torchs(page: Any, kind: str) -> None:
    ours, theirs = parameters(), parameters()
    train(page(build(kind, ours))[0], range(4))
    train(build(kind, theirs), range(4))
    assert_same(ours, theirs)


@every_kind
def test_states_gathered_before_are_adopted(page: Any, kind: str) -> None:
    ours, theirs = parameters(), parameters()
    before = build(kind, ours)
    train(before, range(2))
    paged, _ = page(before)
    assert not before.state
    train(paged, range(2, 4))
    train(build(kind, theirs), range(4))
    assert_same(ours, theirs)


def test_a_frozen_parameter_needs_no_state_that_torchs_adagrad_gave_it(page: Any) -> None:
    values = parameters()
    values[0].requires_grad_(False)
    paged, _ = page(torch.optim.Adagrad(values))
    assert [each is value for each, value in zip(paged.state, values[1:], strict=True)] == [True, True]


def test_a_closure_runs_with_gradients_on_and_its_loss_comes_back(page: Any) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    before = values[0].detach().clone()

    def closure() -> torch.Tensor:
        paged.zero_grad()
        loss = values[0].square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = paged.step(closure)
    assert loss == before.square().sum()
    assert not torch.equal(values[0], before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_gradients(page: Any, set_to_none: bool) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    give_gradients(values, 0)
    paged.zero_grad(set_to_none=set_to_none)
    before = copy.deepcopy(values)
    paged.step()
    if set_to_none:
        assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
        assert len(paged.state) == 0
    else:  # gradients of zeros, by which moments begin
        assert len(paged.state) == len(values)
        assert not any(paged.state[each]["exp_avg"].any() for each in values)


def test_a_bad_group_stops_a_step_before_the_first_parameter(page: Any) -> None:
    values = parameters()
    paged, _ = page(build("sgd", values))
    before = copy.deepcopy(values)
    give_gradients(values, 0)
    paged.param_groups[1]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="momentum"):
        paged.step()
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))


def test_a_step_is_not_captured_in_a_cuda_graph(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, _ = page(build("sgd", parameters()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="CUDA graph"):
        paged.step()


# ---- torch's protocol ----


def test_hooks_of_both_optimizers_run(page: Any) -> None:
    user = build("adamw", parameters())
    seen: list[str] = []
    old = user.register_step_pre_hook(lambda *_: seen.append("old"))
    paged, _ = page(user)
    paged.register_step_pre_hook(lambda *_: seen.append("before"))
    paged.register_step_post_hook(lambda *_: seen.append("after"))
    paged.step()
    old.remove()
    paged.step()
    assert seen == ["old", "before", "after", "before", "after"]


def test_state_dict_hooks_run_and_may_replace(page: Any) -> None:
    paged, _ = page(build("adamw", parameters()))
    seen: list[str] = []
    paged.register_state_dict_pre_hook(lambda _: seen.append("save"))
    paged.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    saved = paged.state_dict()
    assert saved["more"] == 1
    replaced = copy.deepcopy(saved)
    replaced["param_groups"][0]["lr"] = 0.125
    paged.register_load_state_dict_pre_hook(lambda *_: replaced)
    paged.register_load_state_dict_post_hook(lambda each: seen.append(str(each.param_groups[0]["lr"])))
    paged.load_state_dict(saved)
    assert seen == ["save", "0.125"]


def test_what_would_need_new_pages_or_another_process_is_refused(page: Any) -> None:
    paged, _ = page(build("adamw", parameters()))
    with pytest.raises(ConfigError, match="offload again"):
        paged.add_param_group({"params": parameters()})
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="state_dict"):
            refused(paged)
    assert len(paged.param_groups) == 2


@pytest.mark.parametrize("name", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_the_optimizer_before_says_who_took_its_place(page: Any, name: str) -> None:
    user = build("adamw", parameters())
    page(user)
    with pytest.raises(ConfigError, match=rf"runtime\.optimizer\.{name}\(\)"):
        getattr(user, name)()


# ---- Schedulers ----

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=2),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["paged", "user before", "user after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_run_on_either_optimizer_without_a_warning(page: Any, name: str, where: str) -> None:
    def run(optimizer: Any, scheduler: Any) -> list[list[Any]]:
        rates = []
        for step in range(3):
            train(optimizer, range(step, step + 1))
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return rates

    ours, theirs = parameters(), parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = build("adamw", theirs)
        try:
            expected = run(twin, SCHEDULERS[name](twin))
        except UserWarning as warning:  # SequentialLR of torch 2.6 steps in a way that is deprecated there
            pytest.skip(f"this torch warns: {warning}")
        user = build("adamw", ours)
        early = SCHEDULERS[name](user) if where == "user before" else None
        paged, _ = page(user)
        assert run(paged, early or SCHEDULERS[name](paged if where == "paged" else user)) == expected
    assert_same(ours, theirs)


def test_a_learning_rate_tensor_is_scheduled_in_place(page: Any) -> None:
    rate = torch.tensor(0.1)
    paged, _ = page(torch.optim.AdamW(parameters(), lr=rate))
    scheduler = lr_scheduler.ExponentialLR(paged, 0.5)
    train(paged, range(1))
    scheduler.step()
    assert rate.item() == pytest.approx(0.05)
    assert paged.state_dict()["param_groups"][0]["lr"] is rate
