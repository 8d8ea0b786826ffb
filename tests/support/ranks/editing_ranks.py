"""Programs of ranks that edit parameters while updates of these are still being written to slow disks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import rank_processes
import torch
from ranked_commits import Divided, Job, Node, opened, take_step

from infinity.aio import Faults
from infinity.distributed.page_service import PageService
from infinity.system.disk_files import injected

STAGES = (1, 2, 3)
ROOT = "EDITING_RANKS"
"""Environment variable: a directory for the runs."""
_LATE, _SLOW = 0.1, 0.2
"""Seconds after which rank 1 serves a request for values after the step, and seconds that its disk takes
longer for a write.
"""


def edits() -> list[list[float]]:
    """For each stage, the values of a bias that all ranks edit after a step.

    Rank 1 owns the bias. It edits it before rank 0 has it, while the update of the step is being written.
    """
    torch.set_num_threads(1)
    rank, found = int(os.environ["RANK"]), []
    if rank == 1:
        serve_late()
    for number, stage in enumerate(STAGES):
        faults, job = Faults(), Job(stage=stage)
        node = Node(Path(os.environ[ROOT]) / str(number), rank)
        with injected(faults), opened(job, node, rank) as (model, runtime):
            if rank == 1:
                faults.delay("write", 1, _SLOW, times=None)
            take_step(model, runtime, job, 1, range(rank, rank + 1))
            edit(model, runtime)
            faults.clear()
            found.append(model.state_dict()["first.bias"].tolist())
    return found


def serve_late() -> None:
    serve = PageService._serve

    def late(service: PageService, request: Any) -> None:
        time.sleep(_LATE if request.step else 0.0)
        serve(service, request)

    PageService._serve = late  # type: ignore[method-assign]


def edit(model: Divided, runtime: Any) -> None:
    with runtime.full_parameters(model.first), torch.no_grad():
        model.first.bias.add_(0.125)


if __name__ == "__main__":
    rank_processes.serve(globals())
