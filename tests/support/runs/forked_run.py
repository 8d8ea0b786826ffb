"""A program that forks while a commit is pending; see tests/checkpoint/test_forked_commits.py.

Its argument is JSON: root, job (fields of a Job), child (what the child does, a key of CHILDREN). It prints
lines: "child PID", then "ended CODE" unless the child outlives it. It goes on when it reads a line, and
prints "durable" when the commit has landed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from committed_runs import Job, after, opened, take_step, user_state
from torch.utils.data import DataLoader, Dataset

from infinity.errors import ConfigError

STEP = 3
"""The step whose commit is pending at the fork. The one after step 2 is durable."""


class Indices(Dataset[int]):
    """A data set of eight numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def use(model: Any, runtime: Any, commit: Any) -> None:
    """Call everything that could write, which must be refused at once."""
    calls: list[Callable[[], object]] = [
        commit.wait,
        lambda: runtime.save(state=user_state(STEP)),
        runtime.load,
        lambda: take_step(model, runtime, STEP + 1),
        runtime.optimizer.step,
        model.state_dict,
        lambda: runtime.save(Path.cwd() / "copy"),
    ]
    for call in calls:
        try:
            call()
        except ConfigError as error:
            if "forked" in str(error):
                continue
            raise
        raise AssertionError(f"{call} was not refused")


def leave(model: Any, runtime: Any, commit: Any) -> None:
    """Unwind the stack and end as an interpreter ends, which closes the runtime and collects everything."""
    sys.exit(0)


def close(model: Any, runtime: Any, commit: Any) -> None:
    """Close the runtime, and collect what is left of it."""
    runtime.close()
    gc.collect()


def sleep(model: Any, runtime: Any, commit: Any) -> None:
    """Wait until a signal ends the process."""
    signal.pause()


CHILDREN = {"use": use, "leave": leave, "close": close, "killed": sleep, "outlives": sleep}


def main(root: str, job: dict[str, Any], child: str) -> None:
    """Train and fork as the module's docstring says."""
    torch.set_num_threads(1)
    made = Job(**job)
    with opened(made, made.directories(Path(root))) as (model, runtime):
        for step in range(1, STEP):
            take_step(model, runtime, step)
        runtime.save(state=user_state(STEP - 1)).wait()
        take_step(model, runtime, STEP)
        commit = runtime.save(state=user_state(STEP))
        if made.home == "nvme":
            assert not commit.done, "its updates are due"
        if child == "loader":
            assert len([*DataLoader(Indices(), num_workers=2, multiprocessing_context="fork")]) == 8
            print("child", 0, flush=True)
            print("ended", 0, flush=True)
        else:
            fork(child, model, runtime, commit)
        input()
        after(model, runtime, STEP)
        take_step(model, runtime, STEP + 1)
        commit.wait()
        print("durable", flush=True)
        if child == "outlives":
            os.kill(os.getpid(), signal.SIGKILL)


def fork(child: str, model: Any, runtime: Any, commit: Any) -> None:
    """Fork, and wait for the child unless it outlives this process."""
    process = os.fork()
    if process == 0:
        CHILDREN[child](model, runtime, commit)
        os._exit(0)
    print("child", process, flush=True)
    if child == "killed":
        os.kill(process, signal.SIGKILL)
    if child != "outlives":
        print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
