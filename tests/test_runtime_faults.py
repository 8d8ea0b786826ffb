"""Every I/O call of a training failed in turn: typed errors, no hang, nothing left behind, never a wrong number."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import budget_for, check_homes
from parity import copied, differences, tensors_copied
from small_runtime import files
from zoo import Entry, entry

import infinity
from infinity.aio import Faults
from infinity.errors import ConfigError, InfinityError, StorageError, StorageFull, storage_error
from infinity.store import injected

STEPS = 3
HANG = 120
"""Seconds after which a test counts as hung: the process ends with the stacks of all threads."""
CASES = (("nvme", "bf16"), ("unified-nvme", "fp32"))
"""Homes and compute dtypes."""
SPREAD = 5
"""Calls that are failed by default, of each kind; all of them with -m slow."""


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
    """What a training came to."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    poisoned: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    """Of the steps."""

    @property
    def result(self) -> dict[str, Any]:
        return {"losses": self.losses, "parameters": self.parameters, "optimizer": self.optimizer}


@contextlib.contextmanager
def opened(
    home: str, compute: str, directory: Path, faults: Faults, *, of: Entry | None = None
) -> Iterator[tuple[Any, Any]]:
    """(model, runtime); at the end nothing is left of it: no file, descriptor or thread."""
    start_torch_threads()
    before = resources()
    model = (of or entry("tied")).make()
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
        assert resources() == before


def resources() -> tuple[int, int]:
    """(open descriptors, threads)."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@functools.cache
def start_torch_threads() -> None:
    """Those that torch starts once a process, with the first backward, and keeps."""
    of = entry("tied")
    of.loss(of.make(), of.batch(0, 0)).backward()


def one_step(model: Any, runtime: Any, step: int) -> float:
    of = entry("tied")
    loss = of.loss(model, of.batch(step, 0))
    loss.backward()
    runtime.optimizer.step()
    return loss.item()


def train(home: str, compute: str, directory: Path, prepare: Callable[[Faults], None], code: int) -> Trained:
    """Train, repeating a step that fails after zero_grad(), until the runtime refuses for good."""
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
            try:
                runtime.optimizer.zero_grad()
            except StorageError as error:
                check_error(error, code, directory)
                trained.poisoned = True
        trained.calls = {kind: count - before[kind] for kind, count in faults.calls.items()}
        if trained.poisoned:
            check_refuses(model, runtime, code, directory)
        else:
            faults.clear()
            trained.parameters = copied(model.state_dict())
            trained.optimizer = tensors_copied(runtime.optimizer.state_dict())
    return trained


def check_error(error: StorageError, code: int, directory: Path) -> None:
    assert error.errno == code
    assert Path(error.path).parent == directory
    assert isinstance(error, StorageFull) == (code == errno.ENOSPC)


def check_refuses(model: Any, runtime: Any, code: int, directory: Path) -> None:
    """Whatever is asked of the runtime raises the error that ended it."""
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
    """Calls to fail: all, or so many, the first and the last among them."""
    if spread is None or calls <= spread:
        return list(range(1, calls + 1))
    return sorted({1 + round(at * (calls - 1) / (spread - 1)) for at in range(spread)})


def sweep(
    home: str, compute: str, kind: str, code: int, directory: Path, spread: int | None
) -> dict[str, int]:
    expected = clean(home, compute)
    outcomes = {"poisoned": 0, "repeated": 0, "unnoticed": 0}
    for nth in places(expected.calls[kind], spread):
        trained = train(home, compute, directory, lambda faults: faults.fail(kind, nth, code), code)
        if trained.poisoned:
            assert trained.failures
            assert trained.losses == expected.losses[: len(trained.losses)]
            outcomes["poisoned"] += 1
            continue
        assert differences(trained.result, expected.result) == [], nth
        outcomes["repeated" if trained.failures else "unnoticed"] += 1
    return outcomes


FAILING = [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)]


@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize(("kind", "code"), FAILING)
def test_a_failed_call_in_training(home: str, compute: str, kind: str, code: int, tmp_path: Path) -> None:
    outcomes = sweep(home, compute, kind, code, tmp_path, SPREAD)
    print(outcomes)
    assert outcomes["poisoned"] and outcomes["repeated"]


@pytest.mark.slow
@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize(("kind", "code"), FAILING)
def test_every_failed_call_in_training(home: str, compute: str, kind: str, code: int, tmp_path: Path) -> None:
    with watched(3600):
        outcomes = sweep(home, compute, kind, code, tmp_path, None)
    assert outcomes["poisoned"] and outcomes["repeated"]


@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_short_transfers_go_on(home: str, compute: str, kind: str, tmp_path: Path) -> None:
    def every_third(faults: Faults) -> None:
        for nth in range(1, 2 * clean(home, compute).calls[kind], 3):
            faults.shorten(kind, nth, 512)

    trained = train(home, compute, tmp_path, every_third, 0)
    assert trained.calls[kind] > clean(home, compute).calls[kind]
    assert trained.failures == 0
    assert differences(trained.result, clean(home, compute).result) == []


def counted(action: Callable[[], Any], faults: Faults, kind: str) -> int:
    """Transfers of a kind that an action makes."""
    before = faults.calls[kind]
    action()
    return faults.calls[kind] - before


def trained_before() -> tuple[Any, torch.optim.Optimizer]:
    """A plain model, and its optimizer with states."""
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
    resources_before = resources()
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
        assert resources() == resources_before
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


def edit(model: Any, runtime: Any) -> None:
    with runtime.full_parameters(model.blocks[0].mlp[0]), torch.no_grad():
        model.blocks[0].mlp[0].weight.mul_(0.5)


def save(model: Any, runtime: Any) -> Any:
    return copied(model.state_dict())


def save_optimizer(model: Any, runtime: Any) -> Any:
    return tensors_copied(runtime.optimizer.state_dict())


def load(model: Any, runtime: Any) -> None:
    try:
        model.load_state_dict(clean("nvme", "bf16").parameters)
    except RuntimeError as error:  # torch takes whatever a copy raises, and lists it in one of its own
        assert "Could not" in str(error)
        raise storage_error("load", str(runtime._parts.store.nvme.slabs[0].path), None, errno.EIO) from error


def load_optimizer(model: Any, runtime: Any) -> None:
    runtime.optimizer.load_state_dict(clean("nvme", "bf16").optimizer)


def evaluate(model: Any, runtime: Any) -> Any:
    of = entry("tied")
    with torch.no_grad():
        return of.loss(model, of.batch(0, 0)).item()


OPERATIONS: list[Callable[[Any, Any], Any]] = [edit, save, save_optimizer, load, load_optimizer, evaluate]


@functools.cache
def done_well(operation: Callable[[Any, Any], Any]) -> tuple[Any, dict[str, int]]:
    """What an operation after a step returns and leaves, and the transfers that it makes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as directory:
        faults = Faults()
        with opened("nvme", "bf16", Path(directory), faults) as (model, runtime):
            one_step(model, runtime, 0)
            runtime.optimizer.zero_grad()
            before = faults.calls
            returned = operation(model, runtime)
            calls = {kind: count - before[kind] for kind, count in faults.calls.items()}
            return (returned, everything(model, runtime)), calls


def everything(model: Any, runtime: Any) -> Any:
    return save(model, runtime), save_optimizer(model, runtime)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failed_operation_can_be_repeated_or_says_that_it_cannot(
    operation: Callable[[Any, Any], Any], kind: str, tmp_path: Path
) -> None:
    expected, calls = done_well(operation)
    for nth in places(calls[kind], 4):
        faults = Faults()
        with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
            one_step(model, runtime, 0)
            runtime.optimizer.zero_grad()
            faults.fail(kind, nth, errno.EIO)
            with contextlib.suppress(StorageError):
                got = operation(model, runtime), everything(model, runtime)
                # What failed was read ahead, and nobody came to need it.
                assert kind == "read" or not faults.fired
                assert differences(got, expected) == [], nth
                continue
            faults.clear()
            try:
                got = operation(model, runtime), everything(model, runtime)
            except StorageError as error:
                check_error(error, errno.EIO, tmp_path)
                assert kind == "write"
                with pytest.raises(StorageError):
                    everything(model, runtime)
                continue
            if operation is not edit:  # an edit in place is not the same twice
                assert differences(got, expected) == [], nth
            detached = next(model.parameters()).detach()
            assert detached.data_ptr() == next(model.parameters()).data_ptr()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_runtime_closes_whatever_fails_then(kind: str, tmp_path: Path) -> None:
    faults = Faults()
    with opened("nvme", "bf16", tmp_path, faults) as (model, runtime):
        one_step(model, runtime, 0)
        runtime.optimizer.zero_grad()
        faults.delay(kind, 1, 0.01, times=None)
        faults.fail(kind, 1, errno.EIO, times=None)
        with pytest.raises(StorageError):
            one_step(model, runtime, 1)
        runtime.close()


class Interrupting(torch.autograd.Function):
    """The identity, whose backward is interrupted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyboardInterrupt


def interrupted_forward(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1].mlp[1], "forward", forward)
        one_step(model, runtime, 1)


def interrupted_backward(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = model.blocks[0].register_forward_hook(lambda module, args, result: Interrupting.apply(result))
    try:
        one_step(model, runtime, 1)
    finally:
        handle.remove()


def interrupted_hook(model: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[0].mlp[0].weight.register_hook(hook)
    try:
        one_step(model, runtime, 1)
    finally:
        handle.remove()


INTERRUPTS = [interrupted_forward, interrupted_backward, interrupted_hook]


@pytest.mark.parametrize(("home", "compute"), CASES)
@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=lambda each: each.__name__)
def test_training_goes_on_after_an_interrupt(
    interrupt: Callable[..., None], home: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(home, compute, tmp_path, Faults()) as (model, runtime):
        losses = [one_step(model, runtime, 0)]
        runtime.optimizer.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            interrupt(model, runtime, monkeypatch)
        runtime.optimizer.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        for step in (1, 2):
            losses.append(one_step(model, runtime, step))
            runtime.optimizer.zero_grad()
        parameters = copied(model.state_dict())
    expected = clean(home, compute)
    assert losses == expected.losses
    assert differences(parameters, expected.parameters) == []


@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=lambda each: each.__name__)
def test_an_interrupted_runtime_closes(
    interrupt: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        with pytest.raises(KeyboardInterrupt):
            interrupt(model, runtime, monkeypatch)
        runtime.close()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_interrupted_update_says_so_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        of = entry("tied")
        of.loss(model, of.batch(0, 0)).backward()
        with monkeypatch.context() as patch:
            patch.setattr("infinity.update.Updater._masters", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runtime.optimizer.step()
        for use in (model.state_dict, runtime.optimizer.zero_grad, lambda: of.loss(model, of.batch(0, 0))):
            with pytest.raises(ConfigError, match="interrupted half way"):
                use()


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_gradient_is_lost_until_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = entry("tied")
    with opened("nvme", "bf16", tmp_path, Faults()) as (model, runtime):
        with monkeypatch.context() as patch:
            patch.setattr("infinity.store.Store.write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                of.loss(model, of.batch(0, 0)).backward()
        with pytest.raises(ConfigError, match="interrupted while a gradient"):
            runtime.optimizer.step()
        runtime.optimizer.zero_grad()
        assert one_step(model, runtime, 0) == clean("nvme", "bf16").losses[0]
