"""Tests of task threads, in which runtime.accumulate computes its micro-batches.

A task's thread uses as many OpenMP threads as torch was set to use in the thread that made the task.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity.accumulation.task_threads import Surroundings, Task


def of_openmp() -> Callable[[], int]:
    """Return omp_get_max_threads, the OpenMP function that gives the calling thread's number of threads.

    torch.get_num_threads() would not show a missing setting, because the call itself sets the number in a new
    thread. The test is skipped if torch has no OpenMP.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    for library in mapped:
        found = getattr(ctypes.CDLL(library), "omp_get_max_threads", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    pytest.skip("torch brings no OpenMP that can be asked")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_task_has_its_owner_s_number_of_threads(threads: int) -> None:
    ask, found, before = of_openmp(), [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Task(lambda: found.append(ask()), Surroundings()).proceed()
    finally:
        torch.set_num_threads(before)
    assert found == [threads]
