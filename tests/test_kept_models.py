"""Tests of runtime.close(keep=True), which hands a plain model back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from safetensors.torch import load_file
from small_runtime import TIED, files, gradients_of, loss_of
from torch import nn

import infinity
from infinity.errors import BudgetError, ConfigError
from infinity.system import machine

HOMES = ["nvme", "host", "unified"]


def offloaded(model: nn.Module, directory: Path, home: str = "nvme", **options: Any) -> Any:
    precision = infinity.Precision(compute=options.pop("compute", "fp32"), **options.pop("precision", {}))
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = budget_for(home, model, optimizer, directory, precision)
    return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu", **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_plain(model: nn.Module) -> None:
    for each in model.parameters():
        assert type(each) is nn.Parameter
        assert vars(each) == {}
        assert not each._post_accumulate_grad_hooks
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
        ):
            assert not hooks


@pytest.mark.parametrize("home", HOMES)
def test_the_model_is_plain_and_trains_on(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    before = {name: (id(each), each.dtype, each.stride()) for name, each in model.named_parameters()}
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    runtime = offloaded(model, tmp_path, home)
    for step in range(3):
        train(model, runtime.optimizer, step)
    states = runtime.optimizer.state_dict()
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    runtime.close(keep=True)
    runtime.close(keep=True)
    assert files(tmp_path) == []
    check_plain(model)
    assert {n: (id(p), p.dtype, p.stride()) for n, p in model.named_parameters()} == before
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
    # The states that were read before closing fit a new optimizer, and training goes on as in one run.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(states)
    whole = offloaded(TIED.make(), tmp_path, home)
    for step in range(3):
        train(whole._model, whole.optimizer, step)
    loss_of(whole._model, 3).backward()
    loss_of(model, 3).backward()
    found = gradients_of(model)
    for name, each in whole._model.named_parameters():
        ours = found[name]
        theirs = whole.grad(each)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    optimizer.step()
    whole.optimizer.step()
    for name, each in whole._model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], each, rtol=1e-5, atol=1e-6)
    whole.close()


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_fp32_parameters_have_their_masters(compute: str, tmp_path: Path) -> None:
    model = TIED.make()
    swap = tmp_path / "swap"
    swap.mkdir()
    runtime = offloaded(model, swap, compute=compute)
    for step in range(2):
        train(model, runtime.optimizer, step)
    runtime.export(tmp_path / "masters", dtype="fp32")
    runtime.close(keep=True)
    for name, each in load_file(tmp_path / "masters" / "model.safetensors").items():
        kept = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
        assert torch.equal(kept, each)
        assert kept.dtype == each.dtype


def test_parameters_have_the_dtypes_that_they_had(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16())
    model.frozen = nn.Parameter(torch.tensor([2**40 + 1]), requires_grad=False)
    model[0].bias.requires_grad_(False)
    before = {name: (each.dtype, each.requires_grad) for name, each in model.named_parameters()}
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    runtime = offloaded(model, tmp_path, "unified", compute="bf16", precision={"keep": ("0.*", "1.*")})
    runtime.close(keep=True)
    assert {name: (each.dtype, each.requires_grad) for name, each in model.named_parameters()} == before
    for name, each in model.named_parameters():
        expected = values[name].float().double() if each.dtype == torch.float64 else values[name]
        assert torch.equal(each, expected)


def test_edits_and_a_thawed_parameter_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    runtime = offloaded(model, tmp_path, "unified", compute="bf16")
    model[0].weight.requires_grad_(True)  # a gradient of it would be refused
    with torch.no_grad():
        model[1].bias.fill_(3.0)
    runtime.close(keep=True)
    assert model[0].weight.requires_grad
    assert torch.equal(model[1].bias, torch.full((4,), 3.0))
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_copies_pickles_and_another_offload(tmp_path: Path) -> None:
    model = TIED.make()
    runtime = offloaded(model, tmp_path)
    train(model, runtime.optimizer, 0)
    runtime.close(keep=True)
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_plain(twin)
        assert all(torch.equal(each, expected[name]) for name, each in twin.state_dict().items())
    model.load_state_dict(expected)
    model.to(torch.float64).to(torch.float32)
    again = offloaded(model, tmp_path)
    train(model, again.optimizer, 1)
    again.close(keep=True)
    check_plain(model)
    assert not all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


def test_an_inference_model_and_a_model_from_meta(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = nn.LSTM(4, 4)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.LSTM(4, 4)
    runtime = infinity.offload(
        model,
        None,
        budget=infinity.Budget(host="8MiB"),
        precision=infinity.Precision(compute="fp32"),
        device="cpu",
    )
    with torch.no_grad():
        model(torch.ones(1, 1, 4))
    runtime.close(keep=True)
    check_plain(model)
    assert torch.equal(model(torch.ones(1, 1, 4))[0], expected(torch.ones(1, 1, 4))[0])


def test_without_room_the_runtime_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TIED.make()
    runtime = offloaded(model, tmp_path)
    nbytes = sum(4 * each.numel() for each in model.parameters())
    small = machine.memory()
    with monkeypatch.context() as patched:
        patched.setattr(type(small), "usable", property(lambda _: nbytes - 1))
        with pytest.raises(BudgetError, match=r"export") as error:
            runtime.close(keep=True)
    assert error.value.needed == nbytes
    train(model, runtime.optimizer, 0)
    runtime.close(keep=True)
    check_plain(model)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    model = TIED.make()
    runtime = offloaded(model, tmp_path)
    loss_of(model).backward()
    with pytest.raises(ConfigError, match="between the first backward"):
        runtime.close(keep=True)
    runtime.optimizer.zero_grad()
    runtime.close()
    with pytest.raises(ConfigError, match="keep=True"):
        runtime.close(keep=True)
    with pytest.raises(ConfigError, match=r"keep=True"):
        infinity.offload(model, None)


def test_a_context_manager_gives_no_model_back(tmp_path: Path) -> None:
    model = TIED.make()
    with offloaded(model, tmp_path) as runtime:
        runtime.close(keep=True)
    check_plain(model)


def test_a_commit_under_way_becomes_durable(tmp_path: Path) -> None:
    swap, commits = tmp_path / "swap", tmp_path / "commits"
    swap.mkdir()
    model = TIED.make()
    runtime = offloaded(model, swap, checkpoint=commits)
    train(model, runtime.optimizer, 0)
    runtime.save(state=1)
    runtime.close(keep=True)
    again = TIED.make()
    with offloaded(again, swap, resume=commits) as resumed:
        assert resumed.load() == 1
        found = again.state_dict()
    assert all(torch.equal(each, found[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("home", HOMES)
def test_attributes_that_users_set_on_parameters_stay(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    first, *_, last = model.parameters()
    first.decays = False
    runtime = offloaded(model, tmp_path, home)
    last.scale = torch.ones(2)
    assert first.decays is False
    first_of_pickled, *_, last_of_pickled = pickle.loads(pickle.dumps(model)).parameters()
    assert vars(first_of_pickled) == {"decays": False}
    assert torch.equal(last_of_pickled.scale, torch.ones(2))
    assert vars(next(copy.deepcopy(model).parameters())) == {}  # as in torch
    train(model, runtime.optimizer, 0)
    runtime.close(keep=True)
    assert vars(first) == {"decays": False}
    assert torch.equal(last.scale, torch.ones(2))
    assert set(vars(last)) == {"scale"}
