"""Cases of tests/ranked_cases.py whose runs are copied (`Runtime.save(path)`), and go on from copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranked_cases import (
    SEED,
    Case,
    Place,
    digest,
    opened,
    schedulers_of,
    take_step,
    tell_values,
)
from torch import nn

from infinity.runtime import Runtime


class _Run(NamedTuple):
    """An open runtime, with the schedulers of its case."""

    model: nn.Module
    runtime: Runtime
    schedulers: Sequence[torch.optim.lr_scheduler.StepLR]


def train_and_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train two steps of a case, save a copy of the run, and go on. Returns what `train` does."""
    found = _nothing()
    with opened(case, place, directory) as (model, runtime):
        run = _Run(model, runtime, schedulers_of(case, runtime))
        _take_steps(case, place, run, range(2), found)
        state = {"rank": place.rank, "schedulers": [each.state_dict() for each in run.schedulers]}
        runtime.save(_copy_of(case, directory), state=state).wait()
        _take_steps(case, place, run, range(2, case.steps), found)
        tell_values(model, found)
    return found


def train_from_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a step of a case with other values, take over a copy of a run, and go on from there.

    Returns what `train` does about the steps after the copy's.
    """
    found = _nothing()
    with opened(case, place, directory, seed=SEED + 100) as (model, runtime):
        run = _Run(model, runtime, schedulers_of(case, runtime))
        _take_steps(case, place, run, range(1), _nothing())
        roomy = case.home in ("unified", "device")  # the other budgets have no room for views that are held
        held = {name: each.detach() for name, each in list(model.named_parameters())[: 2 * roomy]}
        state = runtime.load(_copy_of(case, directory))
        for name in list(held):
            assert digest(held.pop(name)) == digest(model.get_parameter(name)), "views have the new values"
        assert state["rank"] == 0
        for each, saved in zip(run.schedulers, state["schedulers"], strict=True):
            each.load_state_dict(saved)
        _take_steps(case, place, run, range(2, case.steps), found)
        tell_values(model, found)
    return found


def train_in_turns(case: Case, places: Sequence[Place], directory: Path) -> dict[str, Any]:
    """Train a case on one rank, with the micro-batches of one place for two steps, and of another one for the
    others. Returns what `train_from_copy` does at the second place.
    """
    found = _nothing()
    with opened(case, places[0], directory) as (model, runtime):
        run = _Run(model, runtime, schedulers_of(case, runtime))
        _take_steps(case, places[0], run, range(2), _nothing())
        _take_steps(case, places[1], run, range(2, case.steps), found)
        tell_values(model, found)
    return found


def _copy_of(case: Case, directory: Path) -> Path:
    return directory / "copies" / case.copy


def _nothing() -> dict[str, Any]:
    return {"losses": [], "norms": [], "generated": []}


def _take_steps(case: Case, place: Place, run: _Run, steps: range, found: dict[str, Any]) -> None:
    """Take steps with these numbers, each followed by one of the schedulers."""
    for step in steps:
        take_step(case, place, (run.model, run.runtime), step, found)
        for each in run.schedulers:
            each.step()
