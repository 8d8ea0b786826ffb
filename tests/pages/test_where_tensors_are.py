"""Tests of where tensors are: on which device a model may be before `offload`, on which device deepcopies of
the model and copies of its optimizer states are, and which memory close() frees.
"""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from homes import each_device, needs_cuda, places
from meta_models import on_meta
from parity import copied, differences
from small_runtime import TIED, WIDE, loss_of, opened, train_step
from torch import nn
from zoo import DIM, entry

import infinity
from infinity.errors import BudgetError

SMALL = infinity.Budget(host="64MiB")


@each_device
@pytest.mark.parametrize("built_on", ["cpu", "meta", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", ["tied", "recurrent", "convnet"])
def test_a_model_may_come_from_any_device(name: str, built_on: str, device: str) -> None:
    of = entry(name)
    torch.manual_seed(7)
    model = on_meta(of.build) if built_on == "meta" else of.build().to(built_on)
    parameters = list(model.parameters())
    for each in parameters:
        each.tag = "mine"  # type: ignore[attr-defined]
    watched = [weakref.ref(each) for each in parameters]
    optimizer = torch.optim.AdamW(parameters)
    torch.manual_seed(7)
    with infinity.offload(
        model, optimizer, budget=SMALL, precision=infinity.Precision(compute="fp32"), device=device
    ) as runtime:
        assert all(found() is each for found, each in zip(watched, parameters, strict=True))
        assert all(now is each for now, each in zip(model.parameters(), parameters, strict=True))
        assert {each.tag for each in parameters} == {"mine"}
        tensors = [*model.parameters(), *model.buffers()]
        assert {each.device for each in tensors} == {runtime.plan.device}
        assert runtime.plan.device.type == device
        before = loss_of(model, of=of).item()
        if built_on == device:
            assert before == loss_of(of.make(device), of=of).item()
        for step in range(3):
            train_step_of(model, runtime, name, step)
        assert loss_of(model, of=of).item() != before


def train_step_of(model: nn.Module, runtime: infinity.Runtime, name: str, step: int) -> None:
    loss_of(model, step, of=entry(name)).backward()
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()


@each_device
def test_a_hook_of_a_parameter_survives_the_move(device: str) -> None:
    model = nn.Linear(DIM, 1, bias=False)
    model.weight.register_hook(lambda gradient: gradient * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity.offload(
        model, optimizer, budget=SMALL, precision=infinity.Precision(compute="fp32"), device=device
    ) as runtime:
        model(torch.ones(1, DIM, device=device)).sum().backward()
        assert runtime.grad(model.weight).tolist() == [[3.0] * DIM]


@places("nvme", "unified", cuda=("nvme", "host", "device"))
def test_copies_of_states_are_in_ram_and_copies_of_models_where_they_were(
    home: str, device: str, tmp_path: Path
) -> None:
    plain, model = TIED.make(device), TIED.make(device)
    with opened(model, tmp_path, home=home) as runtime:
        loss_of(model).backward()
        state = model.state_dict()
        assert {each.device.type for each in state.values()} == {"cpu"}
        assert differences(dict(state), dict(plain.state_dict())) == []
        assert runtime.grad(model.norm.weight).device.type == "cpu"
        assert runtime.clip_grad_norm_(1.0).device.type == "cpu"
        runtime.optimizer.step()
        states = runtime.optimizer.state_dict()["state"].values()
        assert {tensor.device.type for each in states for tensor in each.values()} == {"cpu"}
        twin = copy.deepcopy(model)
        assert {each.device for each in twin.parameters()} == {runtime.plan.device}
        assert loss_of(twin).item() == loss_of(model).item()


@needs_cuda
def test_a_copy_that_the_device_has_no_room_for_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TIED.make("cuda")
    with opened(model, tmp_path):
        assert model.get_parameter(WIDE).device.type == "cuda"
        filled = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        hog = []
        torch.cuda.set_per_process_memory_fraction(min(1.0, filled + 0.001))
        try:
            with pytest.raises(torch.OutOfMemoryError):
                while True:
                    hog.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
            with pytest.raises(torch.OutOfMemoryError):
                while True:
                    hog.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
            with pytest.raises(BudgetError, match="no room"):
                copy.deepcopy(model)
        finally:
            hog.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert loss_of(model).isfinite()


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_default_device_of_the_users_changes_nothing(compute: str, tmp_path: Path) -> None:
    results = []
    for default in ("cpu", "meta"):  # meta tensors have no memory that could be used by accident
        model = TIED.make()
        with torch.device("cpu"), opened(model, tmp_path, compute=compute) as runtime:
            inputs, targets = TIED.batch(0, 0)
            with torch.device(default):
                for _ in range(2):
                    TIED.loss(model, (inputs, targets)).backward()
                    norm = runtime.clip_grad_norm_(0.5)
                    runtime.optimizer.step()
                    runtime.optimizer.zero_grad()
                TIED.loss(model, (inputs, targets)).backward()
                saved = runtime.optimizer.state_dict()
                runtime.optimizer.load_state_dict(saved)
                gradient = runtime.grad(model.norm.weight)
                values = copied(model.state_dict())
            results.append([norm, saved["state"], gradient, values])
    assert differences(results[1], results[0]) == []


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_offload_under_a_default_device_finds_the_same_weights(compute: str, tmp_path: Path) -> None:
    states = []
    for default in ("cpu", "meta"):
        model = TIED.make()
        with torch.device(default), opened(model, tmp_path, compute=compute):
            states.append(copied(model.state_dict()))
    assert differences(states[1], states[0]) == []


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return True
    return False


@pytest.mark.parametrize("home", ["unified", "host", "device"])
def test_a_closed_runtime_gives_its_memory_back_though_the_model_lives(home: str, tmp_path: Path) -> None:
    model = TIED.make()
    with opened(model, tmp_path, home=home) as runtime:
        train_step(model, runtime)
        loss_of(model).backward()
        with runtime.full_parameters(model.norm):
            address = model.norm.weight.data_ptr()
        assert mapped(address)
    gc.collect()
    assert not mapped(address)
    assert not any(each.is_meta for each in model.parameters())


@needs_cuda
def test_a_closed_runtime_gives_the_device_its_memory_back(tmp_path: Path) -> None:
    model = TIED.make("cuda")
    torch.cuda.synchronize()
    with opened(model, tmp_path, home="device") as runtime:
        train_step(model, runtime)
        open_bytes = torch.cuda.memory_allocated()
        held = sum(tier.budget for tier in [runtime._components.store.device])
    gc.collect()
    assert torch.cuda.memory_allocated() <= open_bytes - held
