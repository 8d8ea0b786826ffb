"""Tests of edits by users between `save` and the landing of its commit: the commit has the values of before,
and the run goes on with the edited ones.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commit_states import continued
from committed_runs import Job, opened, take_step, user_state
from faulty import watchdog
from parity import tensors_copied

from infinity.aio import Faults
from infinity.system.disk_files import injected

__all__ = ["watchdog"]

STEP = 2
JOBS = [Job(home=home, update=update) for home in ("nvme", "ram", "device") for update in ("lazy", "eager")]


def edit_parameters(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    for module in (model.first, model.norm, model.spare):  # one after the other, as the budget is small
        with runtime.full_parameters(module), torch.no_grad():
            for each in module.parameters():
                each.fill_(0.25)
    return lambda: bool((model.state_dict()["first.weight"] == 0.25).all())


def edit_in_place(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    with torch.no_grad():
        model.first.weight.fill_(0.25)
    return lambda: bool((model.state_dict()["first.weight"] == 0.25).all())


def load_optimizer(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    changed = tensors_copied(runtime.optimizer.state_dict())
    for each in changed["state"].values():
        each["exp_avg"].fill_(0.5)
        each["step"] += 3
    runtime.optimizer.load_state_dict(changed)

    def edited() -> bool:
        found = runtime.optimizer.state_dict()["state"].values()
        return all(bool((each["exp_avg"] == 0.5).all()) and each["step"] == STEP + 3 for each in found)

    return edited


def change_options(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    for group in runtime.optimizer.param_groups:
        group["lr"], group["betas"], group["mine"] = 0.5, (0.1, 0.2), [1]
    return lambda: all((each["lr"], each["mine"]) == (0.5, [1]) for each in runtime.optimizer.param_groups)


def change_buffers(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    model.seen.fill_(7.0)
    return lambda: bool((model.seen == 7.0).all())


def change_state(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    state["step"] = 99
    state["tensor"].fill_(9.0)
    state["array"][:] = 9
    state["list"].append(1)
    return lambda: bool(state["step"] == 99)


def draw(model: Any, runtime: Any, state: Any) -> Callable[[], bool]:
    before = torch.get_rng_state()
    torch.randn(5)
    np.random.rand(5)
    random.random()
    return lambda: not torch.equal(torch.get_rng_state(), before)


EDITS = [edit_parameters, edit_in_place, load_optimizer, change_options, change_buffers, change_state, draw]


def check(edits: list[Any], job: Job, directory: Path) -> None:
    """Make edits after a save while its writes are slow, and look at the run and at the commit."""
    directories, faults = job.directories(directory), Faults()
    with injected(faults), opened(job, directories) as (model, runtime):
        for step in range(1, STEP + 1):
            take_step(model, runtime, step)
        faults.delay("write", 1, 0.02, times=None)
        faults.delay("sync", 1, 0.05, times=None)
        state = {**user_state(STEP), "tensor": torch.ones(3), "array": np.ones(3), "list": []}
        kept = copy.deepcopy(state)
        commit = runtime.save(state=state)
        assert not commit.done
        edited = [edit(model, runtime, state) for edit in edits]
        commit.wait()
        faults.clear()
        assert all(each() for each in edited)
    with opened(job, directories, resume=True) as (_, runtime):
        found = runtime.load()
        assert {**found, "tensor": 0, "array": 0} == {**kept, "tensor": 0, "array": 0}
        assert torch.equal(found["tensor"], kept["tensor"])
        assert np.array_equal(found["array"], kept["array"])
    assert continued(job, directories, STEP, more=True) is None


@pytest.mark.sweep
@pytest.mark.parametrize("job", [each for each in JOBS if each.update == "lazy"], ids=str)
@pytest.mark.parametrize("pages", [edit_parameters, edit_in_place, load_optimizer])
def test_the_commit_has_the_values_of_the_save(pages: Any, job: Job, tmp_path: Path) -> None:
    check([pages, change_options, change_buffers, change_state, draw], job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_one_edit_at_a_time(edit: Any, job: Job, tmp_path: Path) -> None:
    check([edit], job, tmp_path)
