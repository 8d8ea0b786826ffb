"""A program that trains and commits after every step, until it is killed; see tests/checkpoint/test_kill.py.

Its argument is JSON: root, job (fields of a Job), point (where it kills itself, one of POINTS, or ""), nth
(the visit of the point, from 1, that kills), last (the step after which it ends). It prints lines: "begins
STEP" (the step of the commit that it resumed, or 0), "step STEP LOSS" and "durable GENERATION STEP" when
`Commit.wait` has returned.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from committed_runs import Job, after, opened, take_step, user_state

from infinity.aio import Faults
from infinity.checkpoint import commit_files, initial_pages
from infinity.pages.durable_io import DurableIO
from infinity.pages.ledger import Ledger
from infinity.pages.store import Store
from infinity.system.disk_files import injected
from infinity.tiers import NvmeTier

OPERATIONS = {
    "manifest": ("sync", ".tmp"),
    "data file": ("write", ".safetensors"),
    "name of a slab": ("rename", ".slab"),
    "before the rename": ("rename", ".tmp"),
    "after the rename": ("sync directory", "commits"),
    "removal": ("remove", ""),
}
"""Point -> (operation on files, end of the path) with whose beginning it is reached."""
METHODS: dict[str, tuple[Any, str]] = {
    "update": (Ledger, "updated"),
    "flush": (DurableIO, "copy_out"),
    "slab sync": (NvmeTier, "sync"),
    "resume": (initial_pages, "adopt_slabs"),
    "re-layout": (Store, "patch"),
    "after a re-layout": (initial_pages, "restore"),
}
"""Point -> (owner, name) of the function with whose return it is reached."""
POINTS = (*OPERATIONS, *METHODS)


class Killer:
    """Kills this process at the nth visit of a point (an Observer of operations on files)."""

    def __init__(self, point: str, nth: int) -> None:
        self._point = point
        self._left = nth
        if point in METHODS:
            owner, name = METHODS[point]
            setattr(owner, name, self._watched(getattr(owner, name)))

    def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
        kind, end = OPERATIONS.get(self._point, ("", ""))
        if operation == kind and path.endswith(end):
            self._visit()
        return 0

    def ended(self, ticket: int) -> None:
        """Every operation is looked at when it begins."""

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self._visit()
            return result

        return watched

    def _visit(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(root: str, job: dict[str, Any], point: str, nth: int, last: int) -> None:
    """Train as the module's docstring says."""
    torch.set_num_threads(1)
    made = Job(**job)
    directories = made.directories(Path(root))
    killer = Killer(point, nth)
    resume = bool(commit_files.generations(directories[0]))
    with injected(Faults(), killer), opened(made, directories, resume=resume) as (model, runtime):
        begun = runtime.load()["step"] if resume else 0
        _say("begins", begun)
        if begun:
            after(model, runtime, begun)
        pending = None
        for step in range(begun + 1, last + 1):
            _say("step", step, take_step(model, runtime, step).hex())
            if pending is not None:
                _wait(*pending)
            pending = runtime.save(state=user_state(step)), step
            after(model, runtime, step)
        if pending is not None:
            _wait(*pending)


def _wait(commit: Any, step: int) -> None:
    commit.wait()
    _say("durable", commit.generation, step)


def _say(*words: object) -> None:
    """Write a line to stdout at once, so that a kill leaves the whole line or nothing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
