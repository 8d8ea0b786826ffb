"""Tests of lazy updates, which run after step() has returned: they give the same bits as updates inside of
step() ("sync"), and code that accesses a parameter, state or gradient first waits for its update.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for
from parity import copied, differences, tensors_copied
from small_runtime import TIED, files, loss_of
from torch import Tensor, nn

import infinity
from infinity.aio import Faults
from infinity.errors import StorageError
from infinity.system.disk_files import injected

HOMES = ("nvme", "unified-nvme", "mixed")


@contextlib.contextmanager
def opened(
    home: str,
    directory: Path,
    update: str = "lazy",
    model: Any = None,
    *,
    faults: Any = None,
    more: int = 0,
) -> Iterator[Any]:
    """Offload a model in bf16 with its pages in `directory`, and yield (model, runtime, scheduler).

    The scheduler halves the learning rate at each of its steps. Asserts at the end that no file is left.
    home: one of HOMES in homes.py. update: as in `offload`. model: None makes a small model with tied
    parameters. faults: injects faults into the runtime's I/O. more: bytes of host budget beyond what `home`
    needs.
    """
    model = TIED.make() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute="bf16")
    budget = budget_for(home, model, optimizer, directory, precision)
    budget = infinity.Budget(device=budget.device, host=(budget.host_bytes or 0) + more, nvme=budget.nvme)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", update=update
        ) as runtime,
    ):
        yield model, runtime, torch.optim.lr_scheduler.StepLR(runtime.optimizer, 1, 0.5)
    assert files(directory) == []


def pending(runtime: Any) -> list[int]:
    """Indices of the units that the last step has not updated yet."""
    return [
        page.index for page in runtime._components.pages if runtime._components.scheduler.pending(page.index)
    ]


def train(home: str, directory: Path, update: str, act: Callable[[Any, Any, int], Any]) -> list[Any]:
    """Train four steps, and assert that step() leaves updates pending if and only if `update` is "lazy".

    Returns a list: for each step, a pair of the loss and the result of `act`; then the final state dicts of
    the model and of the optimizer. act: called right after each step(), with the model, the runtime and the
    step number.
    """
    directory.mkdir()
    seen = []
    with opened(home, directory, update) as (model, runtime, scheduler):
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            runtime.clip_grad_norm_(0.5)
            runtime.optimizer.step()
            scheduler.step()
            assert bool(pending(runtime)) == (update == "lazy")
            seen.append((loss.item(), act(model, runtime, step)))
            runtime.optimizer.zero_grad()
        seen.append(copied(model.state_dict()))
        seen.append(tensors_copied(runtime.optimizer.state_dict()))
    return seen


def nothing(model: Any, runtime: Any, step: int) -> None:
    return None


def gradient(model: Any, runtime: Any, step: int) -> Tensor:
    return runtime.grad(next(model.parameters()))


def state(model: Any, runtime: Any, step: int) -> Any:
    return runtime.optimizer.state[list(model.parameters())[step]]


def values(model: Any, runtime: Any, step: int) -> Tensor:
    return list(model.parameters())[-1 - step].detach().clone()


def evaluation(model: Any, runtime: Any, step: int) -> float:
    with torch.no_grad():
        return float(loss_of(model, 7).item())


def edit(model: Any, runtime: Any, step: int) -> None:
    with torch.no_grad():
        list(model.parameters())[step].mul_(0.5)


def edit_of_data(model: Any, runtime: Any, step: int) -> None:
    list(model.parameters())[step].data.add_(0.125)


def whole(model: Any, runtime: Any, step: int) -> None:
    module = [each for each in model.modules() if isinstance(each, nn.Linear)][step]
    with runtime.full_parameters(module), torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)


def reload(model: Any, runtime: Any, step: int) -> None:
    model.load_state_dict(copied(model.state_dict()))
    runtime.optimizer.load_state_dict(runtime.optimizer.state_dict())


def another_rate(model: Any, runtime: Any, step: int) -> None:
    """Change the learning rate after step(). Pending updates must still use the rate that step() saw."""
    for group in runtime.optimizer.param_groups:
        group["lr"] *= 0.7


ACTS = [nothing, gradient, state, values, evaluation, edit, edit_of_data, whole, reload, another_rate]


@pytest.mark.sweep
@pytest.mark.parametrize("act", ACTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("home", HOMES)
def test_whatever_comes_between_steps_sees_the_update_done(home: str, act: Any, tmp_path: Path) -> None:
    lazy = train(home, tmp_path / "lazy", "lazy", act)
    assert differences(lazy, train(home, tmp_path / "sync", "sync", act)) == []


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", HOMES)
def test_gradients_that_nobody_resets_go_on_growing(home: str, tmp_path: Path) -> None:
    def train(update: str) -> Any:
        directory = tmp_path / update
        directory.mkdir()
        with opened(home, directory, update) as (model, runtime, _):
            for step in range(4):
                if step == 3:
                    runtime.optimizer.zero_grad()
                loss_of(model, step).backward()
                runtime.optimizer.step()
            return copied(model.state_dict()), runtime.grad(next(model.parameters()))

    assert differences(train("lazy"), train("sync")) == []


class Two(nn.Module):
    """A model of three linear layers. A forward uses one layer only: that with the index `number`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))

    def forward(self, number: int) -> Tensor:
        return self.parts[number](torch.ones(2, 96, dtype=torch.bfloat16)).square().mean()


def test_a_unit_that_the_next_forward_leaves_out_is_updated_by_the_next_step(tmp_path: Path) -> None:
    def train(update: str) -> Any:
        directory = tmp_path / update
        directory.mkdir()
        torch.manual_seed(1)
        with opened("nvme", directory, update, Two()) as (model, runtime, _):
            for number in (0, 1, 0, 2, 2, 0):
                model(number).backward()
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
                assert len(pending(runtime)) <= 1
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train("lazy"), train("sync")) == []


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", HOMES)
def test_a_view_that_code_holds_is_updated_before_step_returns(home: str, tmp_path: Path) -> None:
    with opened(home, tmp_path) as (model, runtime, _):
        loss_of(model).backward()
        held = next(model.parameters()).detach()
        before = held.clone()
        runtime.optimizer.step()
        assert pending(runtime)
        changed = held.clone()
        assert not torch.equal(changed, before)
        assert torch.equal(changed, next(model.parameters()).detach())


def test_what_rests_in_host_ram_is_updated_at_once(tmp_path: Path) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = budget_for("unified", model, optimizer, tmp_path, infinity.Precision())
    with infinity.offload(model, optimizer, budget=budget, device="cpu") as runtime:
        loss_of(model).backward()
        runtime.optimizer.step()
        assert pending(runtime) == []


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", HOMES)
def test_a_runtime_closes_with_updates_due(home: str, tmp_path: Path) -> None:
    faults = Faults()
    with opened(home, tmp_path, faults=faults) as (model, runtime, _):
        loss_of(model).backward()
        faults.delay("read", 1, 0.05, times=None)
        runtime.optimizer.step()
        assert pending(runtime)
        runtime.close()
        assert all(pool.counters.leased == 0 for name, pool in runtime._components.store.pools.items())


def test_a_read_that_fails_leaves_the_update_due(tmp_path: Path) -> None:
    def train(directory: Path, *, failing: bool) -> Any:
        directory.mkdir()
        faults, failures = Faults(), 0
        with opened("unified-nvme", directory, faults=faults) as (model, runtime, _):
            loss_of(model).backward()
            runtime.optimizer.step()
            if failing:
                faults.fail("read", 1, errno.EIO, times=None)
                for _ in range(2):
                    with pytest.raises(StorageError):
                        loss_of(model, 1)
                    failures += 1
                faults.clear()
            runtime.optimizer.zero_grad()
            loss_of(model, 1).backward()
            runtime.optimizer.step()
            return copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict())

    assert differences(train(tmp_path / "a", failing=True), train(tmp_path / "b", failing=False)) == []


def test_an_outcome_that_cannot_be_written_ends_the_runtime(tmp_path: Path) -> None:
    faults = Faults()
    with opened("unified-nvme", tmp_path, faults=faults, more=256 << 10) as (model, runtime, _):
        loss_of(model).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()  # only updated states are left to write
        assert pending(runtime)
        faults.fail("write", 1, errno.EIO, times=None)
        with pytest.raises(StorageError):
            for _ in range(3):
                loss_of(model, 1)
                runtime._components.store.settle()
        faults.clear()
        for use in (lambda: loss_of(model, 1), runtime.optimizer.zero_grad, runtime.optimizer.state_dict):
            with pytest.raises(StorageError):
                use()
