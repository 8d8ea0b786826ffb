"""Cases of tests/ranked_cases.py whose runs are copied (`Runtime.save(path)`), and go on from copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ranked_cases import SEED, Case, Place, digest, nothing, running, tell_values


def train_and_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train two steps of a case, save a copy of the run, and go on. Returns what `train` does."""
    found = nothing()
    with running(case, place, directory) as run:
        run.take_steps(range(2), found)
        state = {"rank": place.rank, "schedulers": run.schedules()}
        run.runtime.save(_copy_of(case, directory), state=state).wait()
        run.take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def train_from_copy(case: Case, place: Place, directory: Path) -> dict[str, Any]:
    """Train a step of a case with other values, take over a copy of a run, and go on from there.

    Returns what `train` does about the steps after the copy's.
    """
    found = nothing()
    with running(case, place, directory, seed=SEED + 100) as run:
        run.take_steps(range(1), nothing())
        roomy = case.home in ("unified", "device")  # the other budgets have no room for views that are held
        held = {name: each.detach() for name, each in list(run.model.named_parameters())[: 2 * roomy]}
        state = run.runtime.load(_copy_of(case, directory))
        for name in list(held):
            assert digest(held.pop(name)) == digest(run.model.get_parameter(name)), (
                "views have the new values"
            )
        assert state["rank"] == 0
        run.load_schedules(state["schedulers"])
        run.take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def train_in_turns(case: Case, places: Sequence[Place], directory: Path) -> dict[str, Any]:
    """Train a case on one rank, with the micro-batches of one place for two steps, and of another one for the
    others. Returns what `train_from_copy` does at the second place.
    """
    found = nothing()
    with running(case, places[0], directory) as run:
        run.take_steps(range(2), nothing())
        replace(run, place=places[1]).take_steps(range(2, case.steps), found)
        tell_values(run.model, found)
    return found


def _copy_of(case: Case, directory: Path) -> Path:
    return directory / "copies" / case.copy
