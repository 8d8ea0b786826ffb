"""Helpers that open runtimes in which the device updates some or all of the units.

The CPU stands in for a GPU: it gets a device tier of its own, and the fixture `kernels` makes the planner
believe that it has update kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import ROOMY
from small_runtime import TIED, loss_of
from torch import nn

import infinity
from infinity.aio import Faults
from infinity.config import Budget
from infinity.gradients.device import DeviceUnits
from infinity.planning import twin_flow
from infinity.system.disk_files import injected


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU update the units whose pages all rest in its device tier, as a GPU does.

    In tests the workspace of updates is large beside the models, so it may push pages from the device to the
    disk. The fixture makes the planner ignore the cost of this. Otherwise the planner would not choose
    updates on the device.
    """
    monkeypatch.setattr(twin_flow, "has_kernels", lambda device: True)
    monkeypatch.setattr(twin_flow, "_DISK_AGAINST_LINK", 0)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one entry with each update of a unit on the device.

    The entry is the number of the unit's parameters that the update changes.
    """
    seen: list[int] = []
    update = DeviceUnits.update

    def counted(units: DeviceUnits, unit: int, updates: Any, scale: float) -> None:
        seen.append(len(updates))
        update(units, unit, updates, scale)

    monkeypatch.setattr(DeviceUnits, "update", counted)
    return seen


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def part_of(model: nn.Module, directory: Path, precision: Any) -> Budget:
    """Return a budget for training `model` with AdamW, under which the device updates at least four units,
    and more than 64 KiB of pages rest on the disk, in `directory`.
    """
    nvme = {str(directory): ROOMY}
    arguments: dict[str, Any] = {"precision": precision, "device": "cpu"}
    whole = infinity.plan(model, adamw(model), budget=Budget(device=ROOMY, host=ROOMY), **arguments)
    for share in range(80, 50, -5):
        budget = Budget(device=whole.device_bytes * share // 100, host=200 << 10, nvme=nvme)
        plan = infinity.plan(model, adamw(model), budget=budget, **arguments)
        if len(plan.updated_on_device) >= 4 and plan.nvme_bytes > 64 << 10:
            return budget
    raise AssertionError("no budget divides the model")


@contextlib.contextmanager
def opened(
    directory: Path,
    *,
    part: bool = False,
    compute: str = "bf16",
    states: str = "fp32",
    update: str = "lazy",
    accumulation: int | None = None,
    faults: Faults | None = None,
) -> Iterator[tuple[nn.Module, Any]]:
    """Offload a small model with AdamW, and yield (model, runtime).

    part: whether only some pages rest on the device, and the others in RAM and on the disk. By default all
    rest on the device. compute, states: as in infinity.Precision. update, accumulation: as in `offload`.
    faults: injects faults into the runtime's I/O.
    """
    directory.mkdir(exist_ok=True)
    model = TIED.make()
    precision = infinity.Precision(compute=compute, states=states)
    options: dict[str, Any] = {"update": update, "accumulation": accumulation}
    budget = part_of(model, directory, precision) if part else Budget(device=ROOMY, host=ROOMY)
    with (
        injected(faults or Faults()),
        infinity.offload(
            model, adamw(model), budget=budget, precision=precision, device="cpu", **options
        ) as runtime,
    ):
        assert bool(runtime.plan.updated_on_device) == twin_flow.has_kernels(torch.device("cpu"))
        yield model, runtime


def step(model: nn.Module, runtime: Any, number: int, clip: float | None = None) -> float:
    loss = loss_of(model, number)
    loss.backward()
    if clip is not None:
        runtime.clip_grad_norm_(clip)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss.item()
