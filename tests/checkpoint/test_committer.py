"""Tests of commits under failed reads, slow writes and tight budgets."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import entry

import infinity
from infinity.aio import Faults
from infinity.errors import StorageError
from infinity.system.disk_files import injected

TIED = entry("tied")
BUDGETS: dict[str, dict[str, Any]] = {"nvme": {"host": 98304}, "apart": {"device": 1 << 20, "host": 1 << 20}}


def opened(home: str, directory: Path, faults: Faults | None = None, **where: Path) -> tuple[Any, Any]:
    model = TIED.make("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slabs = directory / "slabs"
    slabs.mkdir(exist_ok=True)
    budget = infinity.Budget(**BUDGETS[home], nvme={str(slabs): 64 << 20})
    precision = infinity.Precision(compute="bf16")
    with injected(faults or Faults()):
        runtime = infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", **where
        )
    return model, runtime


def train(model: Any, runtime: Any, first: int, last: int) -> list[float]:
    losses = []
    for index in range(first, last):
        loss = TIED.loss(model, TIED.batch(index, 0))
        loss.backward()
        runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


pytestmark = pytest.mark.filterwarnings("ignore:Saved activations")


def test_a_failed_read_does_not_leave_save_waiting_for_ever(tmp_path: Path) -> None:
    faults = Faults()
    model, runtime = opened("nvme", tmp_path, faults, checkpoint=tmp_path / "commits")
    with runtime:
        train(model, runtime, 0, 2)
        commit = runtime.save()
        assert not commit.done
        faults.fail("read", 1, errno.EIO, times=None)
        with pytest.raises(StorageError):
            runtime.save()
        assert faults.fired
        faults.clear()
        commit.wait()
        assert commit.failure is None


def test_a_commit_before_the_first_step_can_be_continued(tmp_path: Path) -> None:
    commits = tmp_path / "commits"
    model, runtime = opened("nvme", tmp_path, checkpoint=commits)
    with runtime:
        runtime.save().wait()
        expected = train(model, runtime, 0, 2)
    model, runtime = opened("nvme", tmp_path, resume=commits)
    with runtime:
        assert train(model, runtime, 0, 2) == expected


def test_slow_writes_of_states_on_the_device_give_their_staging_back(tmp_path: Path) -> None:
    faults = Faults()
    model, runtime = opened("apart", tmp_path, faults, checkpoint=tmp_path / "commits")
    with runtime:
        train(model, runtime, 0, 2)
        commit = runtime.save()
        faults.delay("write", 1, 0.05, times=None)
        train(model, runtime, 2, 4)
        faults.clear()
        commit.wait()
        assert commit.failure is None
