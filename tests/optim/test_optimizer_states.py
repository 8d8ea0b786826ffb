"""Tests of the state dicts of PagedOptimizer.

Torch's optimizers must be able to load them, and PagedOptimizer must be able to load those of torch's
optimizers. A state dict that does not fit the optimizer is refused, and changes nothing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_optimizers import assert_same, build, every_kind, page, parameters, pool, train
from small_runtime import opened, two_layers
from torch import nn

from infinity import BudgetError, ConfigError, UnsupportedOptimizer
from infinity.cpu_adam import AdamW
from infinity.optim.state_copies import StateCopies

__all__ = ["page", "pool"]


@every_kind
def test_state_dicts_have_torchs_form(page: Any, kind: str) -> None:
    paged, _ = page(build(kind, parameters()))
    twin = build(kind, parameters())
    train(paged, range(3))
    train(twin, range(3))
    ours, theirs = paged.state_dict(), twin.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    # torch leaves an empty dict, or no dict, for parameters whose rule keeps no state.
    theirs["state"] = {key: state for key, state in theirs["state"].items() if state}
    assert {k: list(v) for k, v in ours["state"].items()} == {k: list(v) for k, v in theirs["state"].items()}
    assert_same(ours["state"], theirs["state"])


@every_kind
def test_torch_goes_on_from_our_state_dict(page: Any, kind: str) -> None:
    ours, theirs = parameters(), parameters()
    paged, _ = page(build(kind, ours))
    train(paged, range(3))
    other = copy.deepcopy(ours)
    loaded = build(kind, other)
    loaded.load_state_dict(pickle.loads(pickle.dumps(paged.state_dict())))
    train(loaded, range(3, 5))
    train(build(kind, theirs), range(5))
    assert_same(other, theirs)


@every_kind
def test_we_go_on_from_torchs_state_dict(page: Any, kind: str) -> None:
    theirs = parameters()
    twin = build(kind, theirs)
    twin.param_groups[0]["lr"] = 0.03
    train(twin, range(3))
    ours = copy.deepcopy(theirs)
    paged, _ = page(build(kind, ours))
    train(paged, range(10, 12))  # load_state_dict() discards these steps
    for mine, other in zip(ours, theirs, strict=True):
        mine.data.copy_(other)
    paged.load_state_dict(twin.state_dict())
    train(paged, range(3, 5))
    train(twin, range(3, 5))
    assert_same(ours, theirs)


def test_a_state_dict_without_states_starts_anew(page: Any) -> None:
    fresh = build("adamw", parameters()).state_dict()
    paged, _ = page(build("adamw", parameters()))
    train(paged, range(2))
    paged.load_state_dict(fresh)
    assert len(paged.state) == 0
    assert paged.state_dict() == fresh


def test_a_bf16_state_dict_keeps_the_master_and_torch_takes_it(page: Any) -> None:
    values = parameters(dtype=torch.bfloat16)
    paged, _ = page(build("adamw", values))
    train(paged, range(3))
    saved = paged.state_dict()
    assert list(saved["state"][0]) == ["step", "exp_avg", "exp_avg_sq", "master"]
    assert all(each.dtype == torch.float32 for each in saved["state"][0].values())
    again = copy.deepcopy(values)
    resumed, _ = page(build("adamw", again))
    resumed.load_state_dict(saved)
    third = copy.deepcopy(values)
    plain = build("adamw", third)
    plain.load_state_dict(saved)
    for optimizer in (paged, resumed, plain):
        train(optimizer, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
    torch.testing.assert_close(third, values, rtol=2**-5, atol=1e-3)


def test_a_load_keeps_the_groups_that_others_hold(page: Any) -> None:
    user = build("adamw", parameters())
    saved = copy.deepcopy(user.state_dict())
    saved["param_groups"][0].update(lr=0.5, betas=(0.5, 0.6), note="from the file")
    del saved["param_groups"][0]["fused"]  # as in a file from a torch without this option
    paged, _ = page(user)
    paged.param_groups[0]["initial_lr"] = 0.1
    held, kept = list(paged.param_groups), [group["params"] for group in paged.param_groups]
    paged.load_state_dict(saved)
    assert paged.param_groups is user.param_groups
    assert all(a is b for a, b in zip(paged.param_groups, held, strict=True))
    assert all(group["params"] is params for group, params in zip(held, kept, strict=True))
    assert (held[0]["lr"], held[0]["betas"], held[0]["note"]) == (0.5, (0.5, 0.6), "from the file")
    assert held[0]["fused"] is None
    assert "initial_lr" not in held[0]


def test_adamw_stays_decoupled_with_a_state_dict_of_adam(page: Any) -> None:
    paged, _ = page(build("adamw", parameters()))
    paged.load_state_dict(build("adam", parameters()).state_dict())
    has_option = issubclass(torch.optim.AdamW, torch.optim.Adam)  # torch 2.6 has no such option
    assert all(group["decoupled_weight_decay"] for group in paged.param_groups if has_option)
    hyper = paged._rule.hyper(paged.param_groups[0], 1, False)
    assert type(hyper) is AdamW
    assert paged.param_groups[0]["weight_decay"] == 0.1


def drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["state"][0].pop(key)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved["state"][0].update({key: value})


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [
        (lambda saved: saved["param_groups"].pop(), ConfigError, "1 parameter groups, the optimizer 2"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), ConfigError, "has 1 parameters"),
        (lambda saved: saved["state"].update({9: {}}), ConfigError, "a state for 9"),
        (lambda saved: saved["state"].update({1: 3.0}), ConfigError, "is a float"),
        (lambda saved: saved["param_groups"][1].update(amsgrad=True), UnsupportedOptimizer, "amsgrad"),
        (lambda saved: saved["param_groups"][1].update(lr=-1.0), ConfigError, "lr"),
        (drop("exp_avg"), ConfigError, "parameter 0 has no 'exp_avg'"),
        (drop("step"), ConfigError, "the step None"),
        (put("step", 1.5), ConfigError, r"the step 1\.5"),
        (put("exp_avg", torch.zeros(3, 7)), ConfigError, r"\(3, 7\), not \(7, 3\)"),
        (put("exp_avg", torch.zeros(7, 3, dtype=torch.int64)), ConfigError, "floats"),
        (put("exp_avg", [0.0]), ConfigError, "floats"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(page: Any, spoil: Any, kind: Any, text: str) -> None:
    paged, _ = page(build("adamw", parameters()))
    train(paged, range(2))
    before = copy.deepcopy(paged.state_dict())
    spoiled = copy.deepcopy(before)
    spoiled["param_groups"][0]["lr"] = 0.9
    spoil(spoiled)
    with pytest.raises(kind, match=text):
        paged.load_state_dict(spoiled)
    after = paged.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in place": lambda state: state["exp_avg"].zero_(),
    "of a view": lambda state: state["exp_avg"].view(-1)[:5].fill_(2.0),
    "of data": lambda state: state["exp_avg"].data.mul_(0.5),
    "of detach()": lambda state: state["exp_avg"].t().detach().neg_(),
    "of elements": lambda state: state["exp_avg"].__setitem__((0, 1), 3.0),
    "augmented": lambda state: state["exp_avg"].__iadd__(1.0),
    "by init": lambda state: torch.nn.init.constant_(state["exp_avg"], 0.25),
    "by out=": lambda state: torch.add(state["exp_avg"], 1.0, out=state["exp_avg"]),
    "by foreach": lambda state: torch._foreach_mul_([state["exp_avg"], state["exp_avg_sq"]], 0.5),
    "by inplace=": lambda state: nn.functional.relu(state["exp_avg"], inplace=True),
    "by an overload": lambda state: torch.ops.aten.fill_.Scalar(state["exp_avg"], 2.0),
    "by a Python function": lambda state: state["exp_avg"].apply_(lambda value: 2 * value),
    "assigned to data": lambda state: setattr(state["exp_avg"], "data", torch.ones_like(state["exp_avg"])),
    "in inference mode": torch.inference_mode()(lambda state: state["exp_avg"].mul_(2)),
    "twice": lambda state: [state["exp_avg"].mul_(each) for each in (3.0, 0.1)],
    "of NaN": lambda state: state["exp_avg"].fill_(torch.nan).nan_to_num_(1.0),
    "of all": lambda state: [each.zero_() for each in state.values()],
    "assigned": lambda state: state.__setitem__("exp_avg", torch.ones_like(state["exp_avg"])),
    "updated": lambda state: state.update(exp_avg_sq=state["exp_avg_sq"] * 2),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_a_state_are_those_of_torch(page: Any, name: str) -> None:
    plain, values = parameters(), parameters()
    theirs = build("adamw", plain)
    paged, _ = page(build("adamw", values))
    train(paged, range(2))
    theirs.load_state_dict(paged.state_dict())
    with torch.no_grad():
        for one, other in zip(plain, values, strict=True):
            one.copy_(other)
    for one, other in zip(plain, values, strict=True):
        if one.dim() == 2:
            EDITS[name](theirs.state[one])
            EDITS[name](paged.state[other])
    assert_equal(paged.state_dict()["state"], theirs.state_dict()["state"])
    train(paged, range(2, 3))
    train(theirs, range(2, 3))
    torch.testing.assert_close(paged.state_dict()["state"], theirs.state_dict()["state"])


def assert_equal(got: Any, right: Any) -> None:
    torch.testing.assert_close(got, right, rtol=0, atol=0)


def test_copies_of_a_state_are_plain_where_they_leave_it(page: Any, tmp_path: Path) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    train(paged, range(1))
    state = paged.state[values[0]]
    right = paged.state_dict()["state"][0]
    for found in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), right):
        assert not isinstance(found, StateCopies)
        assert all(type(each) is torch.Tensor for each in found.values())
        found["exp_avg"].add_(0.0)
    assert type(state["exp_avg"] + 1) is torch.Tensor
    assert type(state["exp_avg"].clone()) is torch.Tensor
    torch.save(state, tmp_path / "state.pt")
    assert_equal(torch.load(tmp_path / "state.pt"), right)
    with torch.inference_mode():
        assert_equal(paged.state[values[0]]["exp_avg"] * 2, right["exp_avg"] * 2)
    for read in (torch.Tensor.numpy, np.asarray):
        assert np.array_equal(read(state["exp_avg"]), right["exp_avg"])
        with pytest.raises(ValueError, match="read-only"):
            read(state["exp_avg"])[0] = 1.0
    with pytest.raises(ConfigError, match="whole state"):
        del state["exp_avg"]


def test_an_edit_of_an_old_copy_is_refused(page: Any) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    train(paged, range(1))
    old = paged.state[values[0]]
    train(paged, range(1, 2))
    before = paged.state_dict()
    with pytest.raises(ConfigError, match="older than the state"):
        old["exp_avg"].mul_(0.5)
    assert_equal(paged.state_dict()["state"], before["state"])


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_a_copy_is_rounded_as_its_page(states: str, tmp_path: Path) -> None:
    model = two_layers()
    with opened(model, tmp_path, home="unified", compute="bf16", states=states) as runtime:
        model(torch.randn(4, 64)).square().sum().backward()
        runtime.optimizer.step()
        state = runtime.optimizer.state[model[0].weight]
        for factor in (0.3, 0.7):
            before = state["exp_avg"].clone()
            torch._foreach_mul_([state["exp_avg"], state["exp_avg_sq"]], factor)
            pages = runtime.optimizer.state[model[0].weight]
            assert_equal(dict(state), dict(pages))
            torch.testing.assert_close(pages["exp_avg"].clone(), before * factor, rtol=2**-8, atol=1e-2)
            assert not torch.equal(before, pages["exp_avg"])


@pytest.mark.parametrize(
    "share",
    [
        lambda copy: copy.set_(torch.ones(7, 3)),
        lambda copy: copy.resize_(3),
        lambda copy: copy.as_subclass(torch.Tensor),
        torch.from_dlpack,
    ],
)
def test_memory_that_would_hide_an_edit_is_refused(page: Any, share: Any) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    train(paged, range(1))
    with pytest.raises(ConfigError, match=r"neither replaced nor shared.*clone\(\)"):
        share(paged.state[values[0]]["exp_avg"])


def test_states_are_read_at_each_access_and_written_by_assignment(page: Any) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    assert (len(paged.state), values[0] in paged.state, paged.state[values[0]]) == (0, False, {})
    train(paged, range(1))
    state = {name: torch.zeros_like(each) for name, each in paged.state[values[0]].items()}
    assert paged.state[values[0]]["exp_avg"].any()
    paged.state[values[0]] = state
    assert not paged.state[values[0]]["exp_avg"].any()
    del paged.state[values[0]]
    assert [each is value for each, value in zip(paged.state, values[1:], strict=True)] == [True, True]
    assert values[0] not in paged.state
    with pytest.raises(KeyError):
        paged.state[torch.zeros(3)]


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_read(page: Any) -> None:
    values = parameters()
    paged, backend = page(build("adamw", values))
    backend.capacity = 0
    assert paged.state_dict()["state"] == {}
    train(paged, range(1))
    backend.capacity = sum(each.numel() for each in values) * 8
    paged.state_dict()
    backend.capacity -= 1
    reads = backend.reads
    with pytest.raises(BudgetError):
        paged.state_dict()
    assert backend.reads == reads
    backend.capacity = 21 * 8 - 1
    with pytest.raises(BudgetError):
        paged.state[values[0]]
    assert paged.state[values[1]]
