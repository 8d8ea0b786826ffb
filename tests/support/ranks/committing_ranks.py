"""A training of several ranks that commit after every step, one of which dies; see commit_plans.py.

A rank prints lines: "begins STEP" (the step of the commit that it continues, or 0), "step STEP LOSS", and
"durable STEP" when it knows that the commit of a step is durable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import link_faults
import rank_processes
import torch
from commit_plans import PLAN, Plan
from ranked_cases import Case, Place, backwards, digest, opened
from safetensors.torch import load_file

from infinity.aio import Faults
from infinity.checkpoint import initial_pages
from infinity.checkpoint.committer import Committer
from infinity.distributed.barrier import CommitVotes
from infinity.distributed.communicator import Communicator
from infinity.pages.durable_io import DurableIO
from infinity.pages.ledger import Commit, Ledger
from infinity.pages.store import Store
from infinity.system.disk_files import injected
from infinity.tiers import NvmeTier

OPERATIONS = {
    "name of a slab": ("rename", ".slab"),
    "data file": ("write", ".safetensors"),
    "manifest": ("sync", ".tmp"),
    "before the rename": ("rename", ".tmp"),
    "after the rename": ("sync directory", "rank-"),
    "removal": ("remove", ""),
}
"""Point -> (operation on files, part of the path's last name) with whose beginning it is reached."""
BEFORE: dict[str, tuple[Any, str]] = {
    "before the vote": (CommitVotes, "decide"),
    "before old places are free": (Committer, "_remove_old"),
    "closing": (Communicator, "leave"),
}
"""Point -> (owner, name) of the function with whose call it is reached."""
AFTER: dict[str, tuple[Any, str]] = {
    "agreed": (CommitVotes, "begin"),
    "update": (Ledger, "updated"),
    "flush": (DurableIO, "copy_out"),
    "slab sync": (NvmeTier, "sync"),
    "after the vote": (CommitVotes, "_vote"),
    "votes heard": (CommitVotes, "decide"),
    "resume": (initial_pages, "adopt_slabs"),
    "re-layout": (Store, "patch"),
    "after a re-layout": (initial_pages, "restore"),
}
"""Point -> (owner, name) of the function with whose return it is reached."""
POINTS = (*OPERATIONS, *BEFORE, *AFTER, "step", "any time")


class Killer:
    """Kills this process, or cuts its link, at the nth visit of a plan's point (an Observer of operations on
    files).
    """

    def __init__(self, plan: Plan) -> None:
        self._point = plan.point if plan.rank == int(os.environ["RANK"]) else ""
        self._left = plan.nth
        self._pause = plan.pause
        self._fault = plan.fault
        for points, wrapped in ((BEFORE, self._before), (AFTER, self._after)):
            if self._point in points:
                owner, name = points[self._point]
                setattr(owner, name, wrapped(getattr(owner, name)))

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        kind, part = OPERATIONS.get(self._point, ("", ""))
        if operation == kind and part in os.path.basename(path):
            self.visit()
        return 0

    def ended(self, ticket: int) -> None:
        """Every operation is looked at when it begins."""

    def stepped(self) -> None:
        if self._point == "step":
            self.visit()
        elif self._point == "any time":
            self._point = ""
            timer = threading.Timer(self._left / 1000, self._strike)
            timer.daemon = True
            timer.start()

    def visit(self) -> None:
        self._left -= 1
        if self._left == 0:
            time.sleep(self._pause)
            self._strike()

    def _strike(self) -> None:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        link_faults.strike(self._fault)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.visit()
            return function(*arguments, **options)

        return watched

    def _after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.visit()
            return result

        return watched


def say(*words: object) -> None:
    """Write a line to stdout at once, so that a kill leaves the whole line or nothing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def plan_of_this_rank() -> tuple[Plan, Case, Place]:
    """The plan, its case, and this rank's place."""
    plan = Plan(**json.loads(os.environ[PLAN]))
    place = Place(int(os.environ["RANK"]), plan.size, alone=False)
    home = plan.homes[place.rank % len(plan.homes)]
    declared = plan.update in ("eager", "speculative")
    return plan, Case(plan.subject, plan.stage, home=home, update=plan.update, declared=declared), place


def offloaded(plan: Plan, case: Case, place: Place) -> AbstractContextManager[Any]:
    """What yields (model, runtime) of a plan."""
    torch.set_num_threads(1)
    commits = {"resume" if plan.resume else "checkpoint": plan.commits}
    return opened(case, place, Path(plan.directory), **commits)


def take_step(case: Case, place: Place, model: Any, runtime: Any, step: int) -> float:
    """Take a step, counted from 1. Returns this rank's loss."""
    (loss,) = backwards(case, place, model, runtime, step - 1)
    runtime.optimizer.step()
    runtime.optimizer.zero_grad()
    return loss


def everything(model: Any, runtime: Any) -> dict[str, str]:
    """Digests of all parameters and of all optimizer states, by name."""
    found = {name: digest(each) for name, each in model.state_dict().items()}
    for number, states in runtime.optimizer.state_dict()["state"].items():
        for name, each in states.items():
            found[f"{number}.{name}"] = digest(torch.as_tensor(each))
    return found


class Waiting:
    """The commits of a run that this rank does not know to be durable."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._commits: list[tuple[int, Commit]] = []

    def begun(self, step: int, commit: Commit) -> None:
        self._commits.append((step, commit))

    def look(self) -> None:
        """Wait for them, if this rank waits, and say which are durable."""
        while self._commits and (self._waits or self._commits[0][1].done):
            step, commit = self._commits.pop(0)
            if self._waits:
                commit.wait()
            if commit.failure is None:
                say("durable", step)


def train() -> dict[str, str]:
    """Train as the module's docstring says. Returns `everything` at the end."""
    plan, case, place = plan_of_this_rank()
    killer = Killer(plan)
    if plan.fault == link_faults.CUT:
        link_faults.quick_liveness()
    waiting = Waiting(plan.waits == "all" or (plan.waits == "zero" and place.rank == 0))
    with injected(Faults(), killer), offloaded(plan, case, place) as (model, runtime):
        begun = runtime.load()["step"] if plan.resume else 0
        say("begins", begun)
        for step in range(begun + 1, plan.last + 1):
            say("step", step, take_step(case, place, model, runtime, step).hex())
            waiting.look()
            waiting.begun(step, runtime.save(state={"step": step}))
            killer.stepped()
        found = everything(model, runtime)
    waiting.look()
    return found


def train_in_halves() -> dict[str, Any]:
    """Train half of the steps with a commit after each, close the runtime at once, and go on with another.

    Returns losses as texts, `everything` at the end, and the digests of the model's values that rank 0 has
    exported after each step.
    """
    plan, case, place = plan_of_this_rank()
    losses: list[str] = []
    exported: list[dict[str, str]] = []
    half = plan.last // 2
    with offloaded(plan, case, place) as (model, runtime):
        for step in range(1, half + 1):
            losses.append(take_step(case, place, model, runtime, step).hex())
            commit = runtime.save(state={"step": step})
            if plan.exports and place.rank == 0:
                runtime.export(f"{plan.directory}/export-{step}")
                exported.append(exported_values(Path(f"{plan.directory}/export-{step}")))
            if plan.waits == "all" or (plan.waits == "zero" and place.rank == 0):
                commit.wait()
    with offloaded(replace(plan, resume=True), case, place) as (model, runtime):
        assert runtime.load() == {"step": half}
        for step in range(half + 1, plan.last + 1):
            losses.append(take_step(case, place, model, runtime, step).hex())
            runtime.save(state={"step": step})
        return {"losses": losses, "end": everything(model, runtime), "exported": exported}


def exported_values(directory: Path) -> dict[str, str]:
    """Digests of all tensors in an export, by name."""
    return {
        name: digest(tensor)
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rank_processes.serve(globals())
