"""Tests of calls of `infinity.offload` in which one I/O call fails, and of trainings with short transfers.

Trainings in which a call fails are those of tests/test_fault_sweep.py.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import (
    CASES,
    check_error,
    clean,
    one_step,
    opened,
    places,
    start_torch_threads,
    train_steps,
    watchdog,
)
from homes import budget_for
from parity import copied, differences, tensors_copied
from process_resources import check_nothing_left, resources
from small_runtime import files, settle
from torch import nn
from zoo import entry

import infinity
from infinity.aio import Faults
from infinity.errors import StorageError
from infinity.system.disk_files import injected
from infinity.telemetry.stats import Edge
from infinity.tiers import Tier

__all__ = ["watchdog"]

SPREAD = 4
"""Number of I/O calls of each kind that are made to fail, one in each call of offload()."""


FAILING = [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)]


@dataclass(frozen=True)
class Moved:
    """Counts of what a runtime has moved to and from its disk, taken while nothing is under way."""

    asked: int
    """Bytes of all requests, as the runtime counts them when it makes the requests."""
    nbytes: int
    """Bytes that the I/O engine has moved, by its own count."""
    requests: int
    transfers: int
    short: int
    retries: int

    def since(self, before: Moved) -> Moved:
        return Moved(*(getattr(self, name) - getattr(before, name) for name in vars(self)))


def moved(runtime: Any) -> Moved:
    """Wait for all that is under way. Returns what the runtime has moved so far."""
    settle(runtime)
    (stats,) = runtime._components.store.nvme.stats
    edges = runtime.stats.edges
    return Moved(
        edges[Edge.NVME_TO_HOST].bytes + edges[Edge.HOST_TO_NVME].bytes,
        stats.read_bytes + stats.write_bytes,
        stats.read_requests + stats.write_requests,
        stats.read_transfers + stats.write_transfers,
        stats.short_transfers,
        stats.retries,
    )


@pytest.mark.sweep
@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_short_transfers_go_on(home: str, compute: str, kind: str, tmp_path: Path) -> None:
    """Every short transfer is followed by one transfer of the rest, and no bit of the training changes.

    So the number of transfers is the sum of the numbers of requests, short transfers and retries. All of
    these are the engine's own counts, because the number of requests differs from run to run.
    """
    expected = clean(home, compute)  # not below, where its check for threads would see the other runtime's
    faults = Faults()
    with opened(home, compute, tmp_path, faults) as (model, runtime):
        before, calls = moved(runtime), faults.calls[kind]
        most = 10 * expected.calls[kind]
        for nth in range(1, most, 3):
            faults.shorten(kind, nth, 512)
        trained = train_steps(model, runtime)
        found, calls = moved(runtime).since(before), faults.calls[kind] - calls
    assert found.short == faults.fired == -(-calls // 3)
    assert calls < most
    # Every request fits a block, and every short transfer is followed by one of the rest.
    assert found.transfers == found.requests + found.short + found.retries
    assert found.nbytes == found.asked
    assert differences(trained.result, expected.result) == []


def test_a_runtime_that_an_error_has_ended_refuses_all_use(tmp_path: Path) -> None:
    faults, of = Faults(), entry("tied")
    with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
        for nth in range(1, 40):  # a gradient's write that fails can be repeated, an update's cannot
            try:
                faults.fail("write", nth, errno.EIO)
                one_step(model, runtime, nth)
                settle(runtime)
            except StorageError as error:
                check_error(error, errno.EIO, tmp_path)
            faults.clear()
            try:
                runtime.optimizer.zero_grad()
            except StorageError:
                break
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
            check_error(caught.value, errno.EIO, tmp_path)


def counted(action: Callable[[], Any], faults: Faults, kind: str) -> int:
    """Run an action and return how many transfers it made. kind: "read" or "write"."""
    before = faults.calls[kind]
    action()
    return faults.calls[kind] - before


def trained_before() -> tuple[Any, torch.optim.Optimizer]:
    """Train one step in plain PyTorch, so that the optimizer has states, and return (model, optimizer)."""
    of = entry("tied")
    model = of.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    of.loss(model, of.batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def offloaded(model: Any, optimizer: Any, directory: Path, faults: Faults) -> Any:
    precision = infinity.Precision(compute="bf16")
    budget = budget_for("nvme", model, optimizer, directory, precision)
    with injected(faults):
        return infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu")


@pytest.mark.parametrize(("kind", "code"), FAILING)
def test_a_failed_offload_leaves_model_and_optimizer_as_they_were(
    kind: str, code: int, tmp_path: Path
) -> None:
    model, optimizer = trained_before()
    before = copied(model.state_dict()), tensors_copied(optimizer.state_dict())
    faults = Faults()
    calls = counted(lambda: offloaded(*trained_before(), tmp_path, faults).close(), faults, kind)
    assert calls > 3
    start_torch_threads()
    held = resources()
    for nth in places(calls, SPREAD):
        faults = Faults()
        faults.fail(kind, nth, code)
        with pytest.raises(StorageError) as caught:
            offloaded(model, optimizer, tmp_path, faults)
        check_error(caught.value, code, tmp_path)
        del caught
        assert files(tmp_path) == []
        assert {type(each) for each in model.parameters()} == {torch.nn.Parameter}
        assert differences((model.state_dict(), optimizer.state_dict()), before) == []
        check_nothing_left(held, garbage=True)
    with offloaded(model, optimizer, tmp_path, Faults()) as runtime:
        again = runtime.optimizer.state_dict()
        one_step(model, runtime, 1)
    assert again["state"].keys() == before[1]["state"].keys()
    for key, state in again["state"].items():
        assert differences(state["exp_avg"], before[1]["state"][key]["exp_avg"]) == []


def test_a_failed_offload_of_a_model_without_memory_can_be_repeated(tmp_path: Path) -> None:
    of = entry("transformer")
    with torch.device("meta"):
        model = of.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for nth in (1, 5, 20):
        faults = Faults()
        faults.fail("write", nth, errno.EIO)
        with pytest.raises(StorageError):
            offloaded(model, optimizer, tmp_path, faults)
        assert files(tmp_path) == []
        assert all(each.is_meta for each in model.parameters())
    with offloaded(model, optimizer, tmp_path, Faults()):
        assert torch.isfinite(of.loss(model, of.batch(0, 0)))


def test_a_read_ahead_that_fails_is_an_error_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    x = torch.ones(1, 64)
    expected = model(x)
    optimizer = torch.optim.AdamW(model.parameters())
    precision = infinity.Precision(compute="fp32")
    least = budget_for("nvme", model, optimizer, tmp_path, precision)
    # There is room to look ahead but not for all pages, so that pages are read all the time.
    assert least.device_bytes is not None and least.host_bytes is not None
    budget = infinity.Budget(device=3 * least.device_bytes, host=least.host_bytes + 49152, nvme=least.nvme)
    faults = Faults()
    with (
        injected(faults),
        infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu") as runtime,
        torch.no_grad(),
    ):
        assert runtime.plan.home_bytes[Tier.NVME]
        model(x)
        runtime._components.prefetch_engine.step_done()
        for request in range(1, 9):
            faults.fail("read", request, errno.EIO)
            failures = 0
            for _ in range(6):
                try:
                    assert torch.equal(model(x), expected)
                except infinity.StorageError:
                    failures += 1
            assert failures == 1
