"""infinity.optimizer over a backend in memory: torch's protocol, states in both directions, schedulers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from update_backend import MemoryBackend

from infinity import BudgetError, ConfigError, UnsupportedOptimizer
from infinity.cpu_adam import ThreadPool
from infinity.optimizer import PagedOptimizer, adopt, retire
from infinity.rules import Rule

SHAPES = ((7, 3), (3,), ())
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def build(kind: str, values: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups: the second has a learning rate of its own and, with momentum, none."""
    make, options = KINDS[kind]
    second = {"params": values[2:], "lr": 0.02}
    return make(
        [{"params": values[:2]}, second | ({"momentum": 0.0} if kind == "momentum" else {})], **options
    )


def give_gradients(values: list[torch.nn.Parameter], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for each in values:
        each.grad = torch.randn(each.shape, generator=random).to(each.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    values = [each for group in optimizer.param_groups for each in group["params"]]
    for step in steps:
        give_gradients(values, step)
        optimizer.step()


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(threads=1) as made:
        yield made


@pytest.fixture
def page(pool: ThreadPool) -> Callable[[torch.optim.Optimizer], tuple[PagedOptimizer, MemoryBackend]]:
    """What offload will do: adopt the states, take the place, retire."""

    def take_over(optimizer: torch.optim.Optimizer) -> tuple[PagedOptimizer, MemoryBackend]:
        backend = MemoryBackend(optimizer, pool)
        adopt(optimizer, backend.write_state, lambda parameter: parameter.dtype)
        paged = PagedOptimizer(optimizer, Rule.of(optimizer), backend)
        retire(optimizer)
        return paged, backend

    return take_over


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
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
    assert len(paged.state) == 0


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


# ---- States ----


@every_kind
def test_state_dicts_have_torchs_form(page: Any, kind: str) -> None:
    paged, _ = page(build(kind, parameters()))
    twin = build(kind, parameters())
    train(paged, range(3))
    train(twin, range(3))
    ours, theirs = paged.state_dict(), twin.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    # torch leaves an empty dict, or none, for parameters whose rule keeps nothing.
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
    train(paged, range(10, 12))  # to be forgotten
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
    del saved["param_groups"][0]["fused"]  # as of a torch that did not know it
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
    assert all(group["decoupled_weight_decay"] for group in paged.param_groups)
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


def test_states_are_read_at_each_access_and_written_by_assignment(page: Any) -> None:
    values = parameters()
    paged, _ = page(build("adamw", values))
    assert (len(paged.state), values[0] in paged.state, paged.state[values[0]]) == (0, False, {})
    train(paged, range(1))
    state = paged.state[values[0]]
    state["exp_avg"].zero_()
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
        expected = run(twin, SCHEDULERS[name](twin))
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
