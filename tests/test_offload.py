"""Tests that models offloaded in RAM, on the meta device and from weight files train and infer correctly.

They also test that the plan has the bytes of activations once example inputs or a first step tell them, and
that a step warns if activations exceed the budget.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from homes import ROOMY, budget_for
from parity import differences
from safetensors.torch import save_file
from small_runtime import TIED, loss_of, train_step
from torch import nn

import infinity
from infinity import build
from infinity.config import format_size
from infinity.errors import BudgetError, ConfigError
from infinity.pages import store
from infinity.tiers import HostArena, Tier

FP32 = infinity.Precision(compute="fp32")


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(31, 24), nn.Linear(24, 300), nn.LayerNorm(300), nn.ReLU(), nn.Linear(300, 31, bias=False)
    )


def offloaded(model: nn.Module, directory: Path, *, train: bool = True, **options: Any) -> infinity.Runtime:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if train else None
    precision = options.pop("precision", FP32)
    budget = budget_for("nvme", model, optimizer, directory, precision)
    return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu", **options)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_meta_model_is_filled_as_its_initialisers_do(compute: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = layers()
    with torch.device("meta"):
        model = layers()
    identities = [id(parameter) for parameter in model.parameters()]
    torch.manual_seed(3)
    with offloaded(model, tmp_path, precision=infinity.Precision(compute=compute)) as runtime:
        assert [id(parameter) for parameter in model.parameters()] == identities
        dtype = runtime.plan.precision.compute_dtype
        got = state(model)
        # The page's rounding of ties may differ from torch's by one unit in the last place.
        for name, values in expected.state_dict().items():
            torch.testing.assert_close(got[name], values.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
        model(torch.arange(31)).float().square().mean().backward()
        runtime.optimizer.step()
        if compute != "fp32":
            masters = {name: runtime.optimizer.state[p]["master"] for name, p in model.named_parameters()}
            moved = max(
                float((masters[name] - p.detach()).abs().max()) for name, p in expected.named_parameters()
            )
            assert 0 < moved < 2e-2, "masters start at the fp32 values and move by the learning rate"


def test_weights_fill_a_meta_model(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "swap").mkdir()
    source = TIED.make()
    save_file(
        {name: p.detach().clone() for name, p in source.named_parameters()},
        tmp_path / "weights/a.safetensors",
    )
    with torch.device("meta"):
        model = type(source)()
    with offloaded(model, tmp_path / "swap", weights=tmp_path / "weights") as runtime:
        assert differences(state(model), dict(source.state_dict())) == []
        assert loss_of(model).item() == loss_of(source).item()
        train_step(model, runtime)


def test_weights_that_do_not_fit_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = TIED.make()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    save_file({"other": torch.zeros(3)}, tmp_path / "a.safetensors")
    swap = tmp_path / "swap"
    swap.mkdir()
    with pytest.raises(ConfigError, match=r"head|embedding|weight"):
        offloaded(model, swap, weights=tmp_path)
    assert differences(dict(model.state_dict()), before) == []
    assert type(next(model.parameters())) is nn.Parameter
    assert list(swap.iterdir()) == []
    with offloaded(model, swap):
        pass


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_inference_only(compute: str, tmp_path: Path) -> None:
    plain, model = TIED.make(), TIED.make()
    if compute == "bf16":
        plain.bfloat16()
    with offloaded(model, tmp_path, train=False, precision=infinity.Precision(compute=compute)) as runtime:
        assert runtime.plan.home_bytes[Tier.NVME] == sum(unit.nbytes for unit in runtime.plan.layout.units)
        with torch.no_grad():
            for step in range(3):
                assert loss_of(model, step).item() == pytest.approx(loss_of(plain, step).item(), rel=1e-3)
        if compute == "fp32":
            loss = loss_of(model)
            assert loss.item() == loss_of(plain).item()
            with pytest.raises(ConfigError, match="without an optimizer"):
                loss.backward()
        with pytest.raises(ConfigError, match="without an optimizer"):
            _ = runtime.optimizer
        with pytest.raises(ConfigError, match="without an optimizer"):
            runtime.clip_grad_norm_(1.0)
    assert list(tmp_path.iterdir()) == []


def test_the_second_pass_of_inference_is_prefetched(tmp_path: Path) -> None:
    model = TIED.make()
    precision = FP32
    smallest = budget_for("nvme", model, None, tmp_path, precision)
    roomier = infinity.Budget(device=4 * smallest.device_bytes, host=ROOMY // 64, nvme=smallest.nvme)
    with (
        infinity.offload(model, None, budget=roomier, precision=precision, device="cpu") as runtime,
        torch.no_grad(),
    ):
        loss_of(model)
        first = runtime.stats
        loss_of(model)
        second = runtime.stats
    assert second.accesses > first.accesses
    assert second.misses == first.misses


def test_an_optimizer_that_has_stepped_brings_its_states(tmp_path: Path) -> None:
    plain, model = TIED.make(), TIED.make()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        loss_of(each).backward()
        optimizer.step()
        optimizer.zero_grad()
    budget = budget_for("nvme", model, optimizers[1], tmp_path, FP32)
    with infinity.offload(model, optimizers[1], budget=budget, precision=FP32, device="cpu") as runtime:
        expected, got = optimizers[0].state_dict(), runtime.optimizer.state_dict()
        assert differences(got["state"], expected["state"]) == []
        loss_of(plain, 1).backward()
        optimizers[0].step()
        loss = train_step(model, runtime, 1)
        assert loss == pytest.approx(loss_of(plain, 1).item(), rel=1) and runtime.stats.steps == 1
        for name, values in plain.state_dict().items():
            torch.testing.assert_close(state(model)[name], values, rtol=1e-5, atol=1e-7)


def test_example_inputs_make_the_plan_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity.offload(
        model,
        optimizer,
        budget=infinity.Budget(host=ROOMY),
        precision=FP32,
        example_inputs=(torch.randn(8, 64),),
    ) as runtime:
        assert runtime.plan.activations is not None and runtime.plan.activations >= 8 * 256 * 4
        assert runtime.plan.prediction is not None and runtime.plan.prediction.seconds > 0
        assert not runtime.plan.prediction.measured and "predicted unknown" not in str(runtime.plan)
        activations = runtime.plan.activations
        model(torch.randn(8, 64)).sum().backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        assert runtime.plan.prediction.measured and runtime.plan.activations == activations


def test_after_a_step_the_plan_knows(tmp_path: Path) -> None:
    model = TIED.make()
    with offloaded(model, tmp_path) as runtime:
        assert runtime.plan.activations is None and "predicted unknown" in str(runtime.plan)
        train_step(model, runtime)
        inputs, _ = TIED.batch(0, 0)
        plan = runtime.plan
        assert plan.activations is not None and plan.activations > inputs.numel() * 40 * 4 * 8
        assert plan.prediction is not None and plan.prediction.measured
        assert "measured" in str(plan) and "unknown" not in str(plan)


def test_activations_that_exceed_the_budget_are_said_once(tmp_path: Path) -> None:
    """Without example inputs the plan leaves no room for activations. The first step warns by how many bytes
    activations exceed the budget, and the second step does not warn again.
    """
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(1000, 64)
    budget = infinity.Budget(host=3 * 2 * 64 * 64 * 4, nvme={tmp_path: ROOMY})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity.offload(model, optimizer, budget=budget, precision=FP32, device="cpu") as runtime:

        def step() -> None:
            model(x).sum().backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()

        with pytest.warns(UserWarning, match="example_inputs=") as told:
            step()
        beyond = runtime.plan.activations - (budget.host_bytes - runtime.plan.host_bytes)
        assert beyond > 0 and f"by {format_size(beyond)}." in str(told[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step()


def test_activations_that_have_room_are_not_warned_of() -> None:
    x = torch.randn(100, 64)
    for known in ({"example_inputs": (x,)}, {"budget": infinity.Budget(host=ROOMY)}):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            infinity.offload(model, optimizer, precision=FP32, device="cpu", **known) as runtime,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            model(x).sum().backward()
            runtime.optimizer.step()


@pytest.mark.parametrize("failing", ["check_room", "_open_nvme"])
def test_what_does_not_fit_is_said_before_ram_is_taken(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all RAM of the plan is page-locked when it is taken, which can take a minute."""
    taken: list[int] = []

    def short(*_: Any, **__: Any) -> Any:
        raise BudgetError("It does not fit.", "Give more.")

    def arena(nbytes: int, **options: Any) -> HostArena:
        taken.append(nbytes)
        return HostArena(nbytes, **options)

    monkeypatch.setattr(store, "HostArena", arena)
    offloaded(layers(), tmp_path).close()
    assert len(taken) == 1
    monkeypatch.setattr(store if failing == "check_room" else store.Store, failing, short)
    with pytest.raises(BudgetError, match="does not fit"):
        offloaded(layers(), tmp_path)
    assert len(taken) == 1 and list(tmp_path.iterdir()) == []


def test_commits_are_off_without_a_directory_for_them(tmp_path: Path) -> None:
    model = TIED.make()
    with offloaded(model, tmp_path) as runtime:
        with pytest.raises(ConfigError, match="commits are off"):
            runtime.save(state={"batch": 1})
        with pytest.raises(ConfigError, match="not resumed"):
            runtime.load()


def test_a_buffer_of_two_places_is_moved_to_the_device_once() -> None:
    shared = torch.zeros(3)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for module in model:
        module.register_buffer("count", shared)
    meta = torch.device("meta")  # stands for a device that this machine may lack
    builder: Any = SimpleNamespace(model=model, plan=SimpleNamespace(device=meta))
    build._Wiring._move_buffers(builder)
    first, last = (module.count for module in model)
    assert first is last
    assert first.is_meta
