"""Trainings whose I/O fails, and checks that errors are typed, nothing hangs, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for, check_homes
from parity import copied, tensors_copied
from process_resources import check_nothing_left, resources
from small_runtime import files
from zoo import entry

import infinity
from infinity.aio import Faults
from infinity.errors import StorageError, StorageFull
from infinity.system.disk_files import injected

STEPS = 3
HANG = 120
"""Seconds after which a test counts as hung. The process then prints the stacks of all threads and ends."""
CASES = (("nvme", "bf16"), ("unified-nvme", "fp32"))
"""Pairs (home, compute dtype) for tests to train with. The home, one of homes.HOMES, is where pages rest."""


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    with watched(HANG):
        yield


@dataclass
class Trained:
    """The outcome of a training: losses, and final parameters and optimizer states."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    """Number of I/O calls during the steps, by kind: "read", "write" or "sync"."""

    @property
    def result(self) -> dict[str, Any]:
        return {"losses": self.losses, "parameters": self.parameters, "optimizer": self.optimizer}


@contextlib.contextmanager
def opened(home: str, compute: str, directory: Path, faults: Faults) -> Iterator[tuple[Any, Any]]:
    """Offload a small model with AdamW, and yield (model, runtime).

    Closes the runtime at the end, and asserts that no file, descriptor or thread of it is left. home: where
    all pages rest, one of homes.HOMES. compute: the compute dtype. directory: the folder of the NVMe tier.
    faults: injects faults into the runtime's I/O.
    """
    start_torch_threads()
    before = resources()
    model = entry("tied").make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = infinity.Precision(compute=compute)
    budget = budget_for(home, model, optimizer, directory, precision)
    with injected(faults):
        runtime = infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu")
    try:
        check_homes(home, runtime.plan)
        yield model, runtime
    finally:
        runtime.close()
        assert files(directory) == []
        del model, optimizer, runtime
        check_nothing_left(before, garbage=True)


@functools.cache
def start_torch_threads() -> None:
    """Start the threads that torch starts at a process's first backward and keeps."""
    of = entry("tied")
    of.loss(of.make(), of.batch(0, 0)).backward()


def one_step(model: Any, runtime: Any, step: int) -> float:
    of = entry("tied")
    loss = of.loss(model, of.batch(step, 0))
    loss.backward()
    runtime.optimizer.step()
    return loss.item()


def check_error(error: StorageError, code: int, directory: Path) -> None:
    assert error.errno == code
    assert Path(error.path).parent == directory
    assert isinstance(error, StorageFull) == (code == errno.ENOSPC)


def train_steps(model: Any, runtime: Any) -> Trained:
    """Train STEPS steps. `calls` is left empty."""
    losses = []
    for step in range(STEPS):
        losses.append(one_step(model, runtime, step))
        runtime.optimizer.zero_grad()
    return Trained(losses, copied(model.state_dict()), tensors_copied(runtime.optimizer.state_dict()))


@functools.cache
def clean(home: str, compute: str) -> Trained:
    """Train without faults."""
    faults = Faults()
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory,
        opened(home, compute, Path(directory), faults) as (model, runtime),
    ):
        before = faults.calls
        trained = train_steps(model, runtime)
        trained.calls = {kind: count - before[kind] for kind, count in faults.calls.items()}
    return trained


def places(calls: int, spread: int | None) -> list[int]:
    """Choose which of `calls` I/O calls shall fail, and return their numbers, counted from 1.

    spread: how many to choose, at equal distances from the first call to the last; None: all.
    """
    if spread is None or calls <= spread:
        return list(range(1, calls + 1))
    return sorted({1 + round(at * (calls - 1) / (spread - 1)) for at in range(spread)})
