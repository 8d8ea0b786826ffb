"""Tests of eager updates: they begin in the backward and have the bits of lazy updates."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from eager_runtimes import opened, spent
from parity import Recipe, differences
from small_runtime import TIED, loss_of
from staged_gradients import StagedGradients
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, NonFiniteGradient, StorageError
from infinity.planning.placement import Kind
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

pytestmark = pytest.mark.usefixtures("cpu_updates")


@pytest.mark.parametrize("kind", ["read", "write"])
def test_the_same_bits_whatever_is_slow(kind: str, tmp_path: Path) -> None:
    recipe, faults = Recipe(compute="bf16"), Faults()
    faults.delay(kind, 1, 0.001, times=None)
    fast = parity.paged(TIED, recipe, "unified-nvme", tmp_path, update="eager")
    slow = parity.paged(TIED, recipe, "unified-nvme", tmp_path, update="eager", faults=faults)
    assert differences(vars(fast), vars(slow)) == []


def test_units_are_updated_in_the_backward_that_is_declared_the_last(tmp_path: Path) -> None:
    with opened(tmp_path, accumulation=2) as (model, runtime):
        loss_of(model, 0).backward()
        assert spent(runtime) == []
        loss_of(model, 1).backward()
        assert spent(runtime) == list(range(len(runtime.plan.layout.units)))
        runtime.optimizer.step()
        assert len(spent(runtime)) == len(runtime.plan.layout.units)
        runtime.optimizer.zero_grad()
        assert spent(runtime) == []
        assert all(float(each["step"]) == 1 for each in runtime.optimizer.state.values())


def parameters_in_ram(runtime: Any) -> list[int]:
    """Return the indices of the units with parameters at rest in RAM and optimizer states on NVMe."""
    return [
        unit
        for unit, home in enumerate(runtime.plan.homes)
        if home[Kind.PARAMETER] is Tier.HOST and home[Kind.OPTIMIZER] is Tier.NVME
    ]


def test_step_does_not_wait_for_what_began_early(tmp_path: Path) -> None:
    """Of the units whose update began in the backward, some are still being updated when step() returns.

    Reads from the disk are slowed down for this.
    """
    faults = Faults()
    with opened(tmp_path, faults=faults, more=384 << 10) as (model, runtime):
        for step in range(2):  # the first step has no states to read
            if step:
                faults.delay("read", 1, 0.05, times=None)
            loss_of(model, step).backward()
            early = spent(runtime)
            runtime.optimizer.step()
            pending = [
                unit for unit in parameters_in_ram(runtime) if runtime._components.scheduler.pending(unit)
            ]
            runtime.optimizer.zero_grad()
        assert set(pending) & set(early)


def test_a_view_that_code_holds_is_updated_before_step_returns(tmp_path: Path) -> None:
    faults = Faults()
    with opened(tmp_path, faults=faults, more=384 << 10) as (model, runtime):
        first = parameters_in_ram(runtime)[0]
        parameter = runtime._components.pages[first].parameters[0]
        for step in range(2):
            held = parameter.detach()
            before = held.clone()
            if step:
                faults.delay("read", 1, 0.05, times=None)
            loss_of(model, step).backward()
            assert first in spent(runtime)
            runtime.optimizer.step()
            after = held.clone()
            assert not torch.equal(after, before)
            assert torch.equal(after, parameter.detach())
            runtime.optimizer.zero_grad()


@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_what_is_written_is_what_the_plan_says(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes what the plan counts for updates, plus the gradients that staging had no room for.

    The plan counts all gradients on the disk for lazy updates, so a step writes at most what the plan says.
    For eager updates it counts none, so a step writes at least what the plan says.
    """
    staged = StagedGradients(monkeypatch)
    with opened(tmp_path, update=update, more=256 << 10) as (model, runtime):
        staged.runtime = runtime
        before = 0
        for step in range(3):
            staged.count()
            loss_of(model, step).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            runtime._components.scheduler.complete_all()
            written = runtime.stats.edges[Edge.HOST_TO_NVME].bytes
            moved, before = written - before, written
        plan, found = runtime.plan, staged.count()
        on_disk = [unit for unit, home in enumerate(plan.homes) if home[Kind.GRADIENT] is Tier.NVME]
        gradients = sum(plan.page_bytes(unit, Kind.GRADIENT) for unit in on_disk)
        assert moved == plan.traffic.update.disk_write + gradients - found
        assert 0 < found <= gradients
        if update == "eager":
            assert plan.traffic.disk_write == plan.traffic.update.disk_write <= moved
        else:
            assert gradients == plan.traffic.disk_write - plan.traffic.update.disk_write


def test_micro_batches_together_have_the_same_bits(tmp_path: Path) -> None:
    found, early = [], 0
    for update in ("lazy", "eager"):
        directory = tmp_path / update
        directory.mkdir()
        with opened(directory, accumulation=3, update=update, more=256 << 10) as (model, runtime):
            for step in range(3):
                batches = [TIED.batch(step, micro) for micro in range(3)]
                runtime.accumulate(batches, lambda batch: TIED.loss(model, batch) / 3)
                early += len(spent(runtime))
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
            assert bool(early) == (update == "eager")
            found.append({name: each.clone() for name, each in model.state_dict().items()})
    assert differences(*found) == []


def test_one_gradient_too_many_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, _):
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match=r"One more gradient of .* accumulation="):
            loss_of(model, 1).backward()


def test_a_gradient_that_is_consumed_cannot_be_read_or_clipped(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match="an eager update used the gradient"):
            runtime.grad(next(model.parameters()))
        with pytest.raises(ConfigError, match="eager updates have used the gradients"):
            runtime.clip_grad_norm_(1.0)
        runtime.optimizer.step()


def test_a_second_step_needs_a_second_backward(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        loss_of(model, 0).backward()
        runtime.optimizer.step()
        with pytest.raises(ConfigError, match=r"step\(\) was called again"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        loss_of(model, 1).backward()
        runtime.optimizer.step()


def test_options_changed_between_backward_and_step_are_refused_until_they_are_set_back(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as (model, runtime):
        group = runtime.optimizer.param_groups[0]
        loss_of(model, 0).backward()
        group["lr"] *= 2
        with pytest.raises(ConfigError, match="options were changed"):
            runtime.optimizer.step()
        group["lr"] /= 2
        runtime.optimizer.step()


def test_a_gradient_that_is_not_finite_ends_the_step(tmp_path: Path) -> None:
    with opened(tmp_path) as (model, runtime):
        parameter = next(iter(model.parameters()))
        handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        loss_of(model, 0).backward()
        with pytest.raises(NonFiniteGradient, match=r"[0-9]+ of [0-9]+ units were updated before"):
            runtime.optimizer.step()
        handle.remove()
        runtime.optimizer.zero_grad()
        loss_of(model, 1).backward()
        runtime.optimizer.step()
        assert all(bool(each.isfinite().all()) for each in model.state_dict().values())


def test_a_backward_that_broke_off_ends_with_a_step(tmp_path: Path) -> None:
    """After an exception in a backward, its gradients can only be dropped where no update has begun. step()
    updates what has got gradients; another step works.
    """
    with opened(tmp_path) as (model, runtime):
        first, last = next(iter(model.parameters())), list(model.parameters())[-1]

        def refuse(gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("enough")

        handle = first.register_hook(refuse)
        with pytest.raises(RuntimeError, match="enough"):
            loss_of(model, 0).backward()
        handle.remove()
        assert spent(runtime)
        with pytest.raises(infinity.ConfigError, match=r"zero_grad\(\) was called, but step\(\) was not"):
            runtime.optimizer.zero_grad()
        with pytest.raises(infinity.ConfigError, match=r"dropped .* but step"):
            last.grad = None
        had = {id(each) for each in model.parameters() if each.grad is not None}
        assert had and id(first) not in had
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        loss_of(model, 1).backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        for parameter, state in runtime.optimizer.state.items():
            assert float(state["step"]) == (2 if id(parameter) in had else 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"update": "eager"}, "does not say which"),
        ({"update": "eager", "accumulation": 0}, "accumulation=0 was declared"),
        ({"accumulation": "2"}, "accumulation='2' was declared"),
        ({"update": "soon"}, "not known"),
        ({"update": "eager", "accumulation": 1, "precision": infinity.Precision(compute="fp16")}, "fp16"),
    ],
)
def test_what_cannot_be_together_is_refused_before_anything_moves(
    options: dict[str, Any], words: str
) -> None:
    model = TIED.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [each.data_ptr() for each in model.parameters()]
    for call in (infinity.offload, infinity.plan):
        with pytest.raises(ConfigError, match=words):
            call(model, optimizer, budget=infinity.Budget(host="64MiB"), device="cpu", **options)
    assert [each.data_ptr() for each in model.parameters()] == before


def test_a_parameter_that_backward_needs_after_its_update_is_named(tmp_path: Path) -> None:
    """A backward that needs an updated parameter's old value raises PyTorch's error for modified tensors.

    PyTorch raises the same error where an optimizer steps in a hook.
    """

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = self.second.weight.detach()
            return self.second(torch.sin(self.first(x) @ held))

    model = Late()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        infinity.offload(
            model,
            optimizer,
            budget=infinity.Budget(host="64MiB"),
            device="cpu",
            update="eager",
            accumulation=1,
        ),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        model(torch.randn(3, 40)).sum().backward()


def one_step_after(directory: Path, faults: Faults, fail: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Train two steps, wait until all updates are written, and return the model's parameters by name.

    faults: the faults of the runtime's I/O. fail: called before the second step, to add a fault to `faults`.
    An error of the second step is raised.
    """
    with opened(directory, faults=faults, more=256 << 10) as (model, runtime):
        for step, inject in enumerate((lambda: None, fail)):
            inject()
            loss_of(model, step).backward()
            runtime.optimizer.step()
            runtime.optimizer.zero_grad()
            runtime._components.scheduler.complete_all()
            runtime._components.store.settle()
        return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_fault_is_a_typed_error_or_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """After a failed I/O request, StorageError is raised, or the parameters have the bits of a clean run."""
    clean = one_step_after(tmp_path, Faults(), lambda: None)
    failed = 0
    for number in (1, 3, 8, 21):
        faults = Faults()
        try:
            found = one_step_after(tmp_path, faults, lambda: faults.fail(kind, number, errno.EIO))  # noqa: B023
        except StorageError:
            failed += 1
        else:
            assert differences(clean, found) == []
        faults.clear()
    assert failed or kind == "read"
