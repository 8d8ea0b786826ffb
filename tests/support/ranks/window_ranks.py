"""Programs of ranks that copy from each other's RAM while one of them dies, or that tell their plans."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import rank_processes
import torch
from emulated_device import EmulatedDevice
from racing_ranks import RANK, SIZE, Training
from ranked_cases import Case, Place, backwards, opened
from ranked_models import SUBJECTS

from infinity.errors import RankFailure


def dying() -> list[int]:
    """The last rank is killed while the others copy what it owns, over and over. Returns the number of times
    that this rank has read the model, and the bytes that it has copied.
    """
    case, times = Case("even", 3, home="host"), 0
    subject = SUBJECTS[case.subject]
    with opened(case, Place(RANK, SIZE, alone=False), Path()) as (model, runtime):
        wire = runtime._components.ranks.wire
        if RANK == SIZE - 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                with torch.no_grad():
                    subject.loss_of(model, subject.batch(0, 0))
                times += 1
        except RankFailure:
            return [times, wire.traffic().copied["parameters"]]


def dying_device() -> int:
    """The last rank is killed while all train with parameters on emulated devices. Returns the bytes that
    this rank has copied from the others' devices.
    """
    case, place = Case("even", 3, home="device"), Place(RANK, SIZE, alone=False)
    with EmulatedDevice(RANK).in_use(shared=True), opened(case, place, Path()) as (model, runtime):
        if RANK == SIZE - 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                backwards(case, place, model, runtime, 0)
                runtime.optimizer.step()
                runtime.optimizer.zero_grad()
        except RankFailure:
            return runtime._components.ranks.wire.traffic().copied["parameters"]


def plans() -> str:
    with Training("parameters").runtime as runtime:
        return str(runtime.plan)


def plans_of_devices() -> list[str]:
    """The plans of ranks whose parameters are on emulated devices: shared memory first, then private one."""
    case, place, found = Case("even", 3, home="device"), Place(RANK, SIZE, alone=False), []
    for shared in (True, False):
        with EmulatedDevice(RANK).in_use(shared=shared), opened(case, place, Path()) as (_, runtime):
            found.append(str(runtime.plan))
    return found


if __name__ == "__main__":
    rank_processes.serve(globals())
