"""Tests of steps that Ctrl-C or the disk ends while activations are away: the next step has its bits, and
nothing is left.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import HANG, check_error, watchdog, watched
from interrupted_lines import Lines, places
from parity import differences, injected
from policy_runs import AMPLE, small_pages, smallest_budget
from torch import Tensor, nn
from torch._C import _current_graph_task_id

import infinity
from infinity.activations import autograd_hooks
from infinity.aio import Faults
from infinity.errors import StorageError

__all__ = ["watchdog"]

DIM, ROWS = 16, 32
TIGHT = 56 << 10
"""Bytes of host RAM, hardly more than a plan needs, with which activations go on to NVMe. `smallest_budget`
takes seconds for its search.
"""
POLICIES = ("offload", "recompute+offload")
FAILURES = (("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).tanh()))


class Steps:
    """Steps of a runtime whose activations leave for RAM, and for NVMe. `check` is for after a failed one."""

    def __init__(self, model: nn.Sequential, runtime: Any, faults: Faults) -> None:
        """faults: of the runtime's disks."""
        self.model = model
        self.faults = faults
        self._runtime = runtime
        self._store = runtime._components.store
        self._pages = runtime._components.pager.residual
        self.counts = self._pages.counts
        for _ in range(2):  # the second time, pages are fetched ahead
            self._expected = self._gradients()

    @property
    def scratch(self) -> Path:
        """The file to which activations go."""
        path: Path = self._store.scratch.slabs[0].path
        return path

    def take(self) -> None:
        """A forward and its backward."""
        torch.manual_seed(4)
        self.model(torch.randn(ROWS, DIM)).square().mean().backward()

    def check(self, what: object) -> None:
        """Forget the gradients of the step before, and take one that must have the bits of the first. what:
        the failure.
        """
        self.zero_grad()
        assert differences(self._gradients(), self._expected) == [], what
        self._pages.rest()
        assert self._store.activations.leased == 0, what
        scratch = self._store.scratch
        assert scratch is None or scratch.free_bytes == scratch.budget, what
        assert autograd_hooks.top() is None, what

    def zero_grad(self) -> None:
        self._runtime.optimizer.zero_grad()

    def _gradients(self) -> list[Tensor]:
        self.take()
        found = [self._runtime.grad(each) for each in self.model.parameters()]
        self.zero_grad()
        return found


@contextlib.contextmanager
def opened(memory: str, below: str, policy: str, directory: Path) -> Iterator[Steps]:
    """memory, below: as in policy_runs.Case."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(DIM, DIM), *(Block() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    example = (torch.ones(ROWS, DIM),)
    facts: dict[str, Any] = {"device": "cpu", "activations": policy, "example_inputs": example}
    faults = Faults()
    with small_pages(), injected(faults):
        if memory == "unified":
            nvme = {"host": TIGHT, "nvme": {str(directory): AMPLE}}
            budget = infinity.Budget(**nvme if below == "NVMe" else {"host": AMPLE})
        else:
            planned = functools.partial(infinity.plan, model, optimizer, **facts)
            budget = smallest_budget(planned, memory, below, directory)
        with infinity.offload(model, optimizer, budget=budget, **facts) as runtime:
            steps = Steps(model, runtime, faults)
            assert steps.counts.down > 0
            assert (steps.counts.read > 0) == (below == "NVMe")
            yield steps
    assert list(directory.iterdir()) == []


def raises(*_: object) -> None:
    raise KeyboardInterrupt


def raises_in_a_stack(*_: object) -> None:
    """Leave a cycle: frames of an ExitStack refer to the exception that refers to them."""
    with ExitStack() as stack:
        stack.callback(raises)


def in_forward(block: Block, fails: Callable[..., None]) -> Any:
    return block.up.register_forward_hook(fails)


def in_backward(block: Block, fails: Callable[..., None]) -> Any:
    return block.up.weight.register_hook(fails)


def in_second_run(block: Block, fails: Callable[..., None]) -> Any:
    return block.up.register_forward_pre_hook(lambda *_: fails() if _current_graph_task_id() != -1 else None)


@pytest.mark.parametrize("where", [in_forward, in_backward, in_second_run])
def test_the_pages_of_failed_steps_make_room(where: Callable[..., Any], tmp_path: Path) -> None:
    policy = "recompute+offload" if where is in_second_run else "offload"
    with opened("unified", "RAM", policy, tmp_path) as steps:
        for fails in (raises, raises_in_a_stack):
            handle = where(steps.model[-1], fails)
            with pytest.raises(KeyboardInterrupt):
                steps.take()
            handle.remove()
            steps.check(fails)


def interrupt(steps: Steps, most: int | None) -> None:
    """Send SIGINT before one line of a step after the other. most: the greatest number of lines."""
    with Lines() as lines:
        steps.take()
    steps.zero_grad()
    left, sent = places(lines, most), 0
    for place in left:
        with watched(HANG):
            with contextlib.suppress(KeyboardInterrupt), Lines(place) as interrupted:
                steps.take()
            sent += interrupted.sent
            steps.check(place)
    assert sent >= len(left) * 0.9  # a line that only slow I/O reaches may be missed


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_after_ctrl_c_has_its_bits(policy: str, tmp_path: Path) -> None:
    with opened("unified", "NVMe", policy, tmp_path) as steps:
        interrupt(steps, 5)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["unified", "apart"])
@pytest.mark.parametrize("below", ["RAM", "NVMe"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_after_ctrl_c_before_any_line(policy: str, below: str, memory: str, tmp_path: Path) -> None:
    with opened(memory, below, policy, tmp_path) as steps:
        interrupt(steps, None)


def fail(steps: Steps, kind: str, code: int, transfers: Iterable[int]) -> int:
    """Have one of the transfers of a step to or from scratch fail after the other, until a number is greater
    than the step has. Returns how many steps have failed.
    """
    failed = 0
    for nth in transfers:
        before = steps.faults.fired
        steps.faults.fail(kind, nth, code, path=str(steps.scratch))
        try:
            steps.take()
        except StorageError as error:
            check_error(error, code, steps.scratch.parent)
            assert error.path == str(steps.scratch)
            failed += 1
        steps.faults.clear()
        steps.check((kind, code, nth))
        if steps.faults.fired == before:
            break
    return failed


def test_a_step_after_a_failed_transfer_has_its_bits(tmp_path: Path) -> None:
    with opened("unified", "NVMe", "offload", tmp_path) as steps:
        for kind, code in FAILURES:
            assert fail(steps, kind, code, [1, 4]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["unified", "apart", "streams"])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_transfer_may_fail_and_costs_one_step(policy: str, memory: str, tmp_path: Path) -> None:
    with opened(memory, "NVMe", policy, tmp_path) as steps:
        for kind, code in FAILURES:
            assert fail(steps, kind, code, itertools.count(1)) > 0
