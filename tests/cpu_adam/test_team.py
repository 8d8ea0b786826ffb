"""Tests of ThreadPool(openmp=True): the OpenMP threads of a thread that waits for updates compute them.

The pool's own threads must sleep meanwhile, and the results must have the bits that those would compute. If
OpenMP has fewer threads than the pool, the pool's own threads must compute the updates.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_adam_cases import RULES, same_bits, states
from homes import budget_for
from parity import copied, differences
from process_resources import threads_of
from small_runtime import TIED, train_step

import infinity
from infinity.cpu_adam import Segment, ThreadPool, Update


def woken() -> Callable[[], int]:
    """Return a function that returns how often threads of update pools were woken since the call of `woken`.

    The returned function counts how often the threads have gone to sleep again. Threads of closed pools
    that are still ending add nothing, because they do not wake up any more.
    """

    def times(task: int) -> int | None:
        try:
            status = Path(f"/proc/self/task/{task}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)
        assert found is not None
        return int(found[1])

    before = {task: times(task) for task in threads_of("infinity-update")}

    def since() -> int:
        return sum(now - then for task, then in before.items() if then is not None and (now := times(task)))

    return since


def update_of(n: int) -> Update:
    segments, hypers = [Segment(0, n)], [RULES["adamw"]]
    return Update(grad=torch.ones(n), **states(n, finite=True), segments=segments, hypers=hypers)


@pytest.fixture
def openmp_threads() -> Iterator[Callable[[int], None]]:
    """Give the test a function that sets torch's number of threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.alone
def test_openmp_threads_help_who_waits_and_the_pool_sleeps(openmp_threads: Callable[[int], None]) -> None:
    n, jobs = 1 << 20, 50
    openmp_threads(2)
    with ThreadPool(threads=2) as alone, ThreadPool(threads=2, openmp=True) as helped:
        first, second = update_of(n), update_of(n)
        for pool, work in ((alone, first), (helped, second)):
            pool.submit(work).wait()  # the threads have begun
        assert isinstance(first.parameter, torch.Tensor) and isinstance(second.parameter, torch.Tensor)
        time.sleep(0.01)
        awoken = woken()
        for _ in range(jobs):
            helped.submit(second, awaited=True).wait()
        assert awoken() < jobs // 5
        for _ in range(jobs):
            alone.run(first)
        assert same_bits(first.parameter, second.parameter)


@pytest.mark.alone
def test_fewer_openmp_threads_than_the_pool_has_do_not_stand_in_for_it(
    openmp_threads: Callable[[int], None],
) -> None:
    openmp_threads(1)
    with ThreadPool(threads=2, openmp=True) as pool:
        work = update_of(1 << 22)
        pool.submit(work).wait()
        time.sleep(0.01)
        awoken = woken()
        for _ in range(20):
            pool.run(work)
        end = time.monotonic() + 60
        while awoken() == 0:  # they were called, and went back to sleep as soon as they had run
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("update", ["sync", "lazy"])
def test_a_model_trains_to_the_same_bits_whoever_does_its_updates(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openmp_threads: Callable[[int], None]
) -> None:
    openmp_threads(2)

    def trained(threads: int) -> dict[str, torch.Tensor]:
        """Train three steps with an update pool of `threads` threads, and return the parameters by name.

        The test has two OpenMP threads. They compute the updates if the pool has two threads, too. A pool of
        more threads computes its updates itself.
        """

        def pool_of(**options: Any) -> ThreadPool:
            return ThreadPool(threads=threads, chunk=4096, **options)

        monkeypatch.setattr("infinity.cpu_adam.ThreadPool", pool_of)
        model = TIED.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = infinity.Precision(compute="bf16")
        budget = budget_for("mixed", model, optimizer, tmp_path, precision)
        with infinity.offload(
            model, optimizer, budget=budget, precision=precision, device="cpu", update=update
        ) as runtime:
            for number in range(3):
                train_step(model, runtime, number)
            return copied(model.state_dict())

    assert differences(trained(2), trained(3)) == []
