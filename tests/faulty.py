"""Trainings whose I/O fails, and checks that errors are typed, nothing hangs, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
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
    """The outcome of `train`: losses, final parameters and optimizer states, and what failed."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    poisoned: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    """Number of I/O calls during the steps, by kind: "read", "write" or "sync"."""
    fired: int = 0
    """How many I/O calls were made to fail."""

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


def train(home: str, compute: str, directory: Path, prepare: Callable[[Faults], None], code: int) -> Trained:
    """Train STEPS steps under I/O faults, or until an error has ended the runtime.

    A step that fails is repeated after zero_grad(). Asserts that every error is a StorageError with the errno
    `code`, and that a runtime which an error has ended refuses all further use. prepare: is called with the
    runtime's Faults before the first step, to say which I/O calls fail. home, compute, directory: as in
    `opened`.
    """
    faults = Faults()
    with opened(home, compute, directory, faults) as (model, runtime):
        trained = Trained()
        prepare(faults)
        before = faults.calls
        while len(trained.losses) < STEPS and not trained.poisoned:
            try:
                trained.losses.append(one_step(model, runtime, len(trained.losses)))
            except StorageError as error:
                check_error(error, code, directory)
                trained.failures += 1
                assert trained.failures < 4
            trained.poisoned = poisoned(runtime, code, directory)
        trained.calls = {kind: count - before[kind] for kind, count in faults.calls.items()}
        faults.clear()
        trained.fired = faults.fired
        if not trained.poisoned:
            try:
                model.state_dict()
            except StorageError as error:
                # The error is of a page that was read ahead for a step that never came, or of the last
                # update, whose writes may end after zero_grad().
                check_error(error, code, directory)
                trained.failures += 1
                trained.poisoned = poisoned(runtime, code, directory)
        if trained.poisoned:
            check_refuses(model, runtime, code, directory)
        else:
            trained.parameters = copied(model.state_dict())
            trained.optimizer = tensors_copied(runtime.optimizer.state_dict())
    return trained


def poisoned(runtime: Any, code: int, directory: Path) -> bool:
    """Call zero_grad(), and return whether the runtime refuses the call because an error has ended it.

    Asserts that this error has the errno `code` and names a file in `directory`.
    """
    try:
        runtime.optimizer.zero_grad()
    except StorageError as error:
        check_error(error, code, directory)
        return True
    return False


def check_error(error: StorageError, code: int, directory: Path) -> None:
    assert error.errno == code
    assert Path(error.path).parent == directory
    assert isinstance(error, StorageFull) == (code == errno.ENOSPC)


def check_refuses(model: Any, runtime: Any, code: int, directory: Path) -> None:
    """Assert that every use of the model and the runtime raises the StorageError that ended the runtime.

    code: the error's errno. directory: where the file that the error names lies.
    """
    of = entry("tied")
    parameter = next(model.parameters())
    for use in (
        lambda: of.loss(model, of.batch(0, 0)),
        runtime.optimizer.step,
        runtime.optimizer.zero_grad,
        runtime.optimizer.state_dict,
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: parameter + 1,
        lambda: runtime.grad(parameter),
        lambda: runtime.clip_grad_norm_(1.0),
        lambda: runtime.full_parameters(model).__enter__(),
    ):
        with pytest.raises(StorageError) as caught:
            use()
        check_error(caught.value, code, directory)


@functools.cache
def clean(home: str, compute: str) -> Trained:
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        trained = train(home, compute, Path(directory), lambda faults: None, 0)
    assert (trained.failures, trained.poisoned) == (0, False)
    return trained


def places(calls: int, spread: int | None) -> list[int]:
    """Choose which of `calls` I/O calls shall fail, and return their numbers, counted from 1.

    spread: how many to choose, at equal distances from the first call to the last; None: all.
    """
    if spread is None or calls <= spread:
        return list(range(1, calls + 1))
    return sorted({1 + round(at * (calls - 1) / (spread - 1)) for at in range(spread)})
