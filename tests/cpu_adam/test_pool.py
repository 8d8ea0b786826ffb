"""Tests of cpu_adam's thread pool, which runs updates.

Its jobs must behave as if they ran in the order of their calls. Waiting must release the GIL and see signals.
Buffers must live until their job is done, also at exit. In a forked child the pool must refuse, and wrong
arguments must raise errors.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_adam_cases import (
    RULES,
    same_bits,
    states,
)

from infinity.cpu_adam import (
    SGD,
    AdamW,
    Gradient,
    MemorySpan,
    Segment,
    Stream,
    ThreadPool,
    Update,
    default_cpus,
    runnable_isas,
)
from infinity.errors import ConfigError


@pytest.fixture(scope="module", params=runnable_isas())
def pool(request: pytest.FixtureRequest) -> Any:
    with ThreadPool(isa=request.param) as made:
        yield made


# ---- The pool ----


def many_updates(pool: ThreadPool, jobs: int = 60, n: int = 4_000_000) -> list[Any]:
    page = states(n, finite=True)
    work = Update(grad=torch.ones(n), **page, segments=[Segment(0, n)], hypers=[RULES["adamw"]])
    return [pool.submit(work) for _ in range(jobs)]


def test_jobs_behave_as_if_in_order(pool: ThreadPool) -> None:
    n = 40_000
    queued, waited = (
        tuple(torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in (1, 2)) for _ in "ab"
    )

    def steps(x: torch.Tensor, y: torch.Tensor) -> Iterator[Update]:
        for _ in range(50):  # each job reads what the job before has just written
            for source, target in ((x, y), (y, x)):
                yield Update(
                    grad=source,
                    parameter=target,
                    segments=[Segment(0, n)],
                    hypers=[SGD(lr=0.05, first_step=False)],
                )

    tickets = [pool.submit(work) for work in steps(*queued)]
    assert all(ticket.result().nonfinite == () for ticket in tickets)
    for work in steps(*waited):
        pool.run(work)
    assert all(same_bits(a, b) for a, b in zip(queued, waited, strict=True))


def test_a_ticket_tells_when_its_job_ran(pool: ThreadPool) -> None:
    array = torch.zeros(1 << 20)
    before = time.perf_counter_ns()
    ticket = pool.submit(Stream(read_write=[array]))
    ticket.wait()
    found = ticket.times()
    assert found is not None
    assert before <= found[0] <= found[1] <= time.perf_counter_ns()


def test_waiting_releases_the_gil() -> None:
    with ThreadPool() as pool:
        last = many_updates(pool)[-1]
        waiter = threading.Thread(target=last.wait)
        waiter.start()
        turns = 0
        while not last.done():
            time.sleep(0.001)
            turns += 1
        waiter.join()
        assert turns > 5


def test_threads_work_while_python_holds_the_gil() -> None:
    usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL
    with ThreadPool() as pool:
        ticket = many_updates(pool, jobs=1, n=100_000)[0]
        for _ in range(400):
            usleep(10_000)
            if ticket.done():
                break
        assert ticket.done()


def test_wait_times_out_and_sees_signals() -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    with ThreadPool() as pool:
        last = many_updates(pool)[-1]
        assert last.wait(0.0) is False
        with pytest.raises(TimeoutError):
            last.result(0.001)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Alarm):
                last.wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert last.wait() is True and last.done()


def test_owners_live_until_the_job_is_done() -> None:
    class Owner:
        pass

    with ThreadPool(threads=1) as pool:
        keep = torch.zeros(2_000_000)
        owner = Owner()
        alive = weakref.ref(owner)
        blockers = many_updates(pool, jobs=5)
        ticket = pool.submit(
            Stream(read_write=[MemorySpan(keep.data_ptr(), keep.dtype, keep.numel(), owner)])
        )
        del owner
        gc.collect()
        assert alive() is not None or ticket.done()
        assert all(each.wait() for each in blockers) and ticket.wait()
        gc.collect()
        assert alive() is None


def test_close_finishes_what_is_queued() -> None:
    pool = ThreadPool()
    tickets = many_updates(pool, jobs=10, n=100_000)
    pool.close()
    pool.close()
    assert all(each.done() for each in tickets)
    with pytest.raises(ConfigError, match="closed"):
        many_updates(pool, jobs=1, n=10)


def test_interpreter_exits_with_work_queued(warm: None) -> None:
    program = """
        import torch
        from infinity.cpu_adam import *
        pool = ThreadPool()
        x = torch.zeros(3_000_000)
        tickets = [pool.submit(Stream(read_write=[x])) for _ in range(50)]
        del x
    """
    running = {}
    for ending in ("", "del pool", "del pool, tickets", "pool.close()"):
        command = [sys.executable, "-c", textwrap.dedent(program) + ending]
        running[ending] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for ending, process in running.items():
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, ""), ending


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork() -> None:
    pool = ThreadPool()
    last = many_updates(pool, jobs=20)[-1]
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        ok = False
        try:
            for forbidden in (lambda: many_updates(pool, jobs=1, n=10), last.wait):
                with pytest.raises(ConfigError, match="fork"):
                    forbidden()
            pool.close()
            with ThreadPool(threads=1) as own:
                own.run(Stream(read_write=[torch.zeros(10)]))
            del pool, last
            gc.collect()
            ok = True
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert last.wait()
    pool.close()


def test_choice_of_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runnable_isas()[-1] == "scalar"
    monkeypatch.delenv("INFINITY_ISA", raising=False)
    assert ThreadPool(threads=1).isa == runnable_isas()[0]
    monkeypatch.setenv("INFINITY_ISA", "scalar")
    assert ThreadPool(threads=1).isa == "scalar"
    monkeypatch.setenv("INFINITY_ISA", "pentium")
    with pytest.raises(ConfigError, match=r"pentium.*INFINITY_ISA.*scalar"):
        ThreadPool(threads=1)
    assert ThreadPool(threads=1, isa="scalar").isa == "scalar"


def test_placement() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(default_cpus()) <= allowed
    with ThreadPool() as pool:
        assert pool.cpus == default_cpus() and pool.threads == len(pool.cpus)
    one = min(allowed)
    with ThreadPool(cpus=[one], threads=3) as pool:
        assert pool.cpus == (one, one, one)
        pool.run(Stream(read_write=[torch.zeros(100)]))


# ---- Stream ----


def test_stream_touches_what_it_says(pool: ThreadPool) -> None:
    n = 70_001
    read, both = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int16)
    write = torch.zeros(n, dtype=torch.int32)
    work = Stream(read=[read], read_write=[both], write=[write], granule=300)
    assert work.bytes_moved == n * (4 + 2 * 2 + 4)
    pool.run(work)
    assert torch.equal(read, torch.arange(n, dtype=torch.int32))
    assert bool((both != 0).all()) and bool((write != 0).all())


# ---- Bad input: a typed error, and nothing touched ----


def good_update(n: int = 64) -> dict[str, Any]:
    return {
        "grad": torch.ones(n),
        "parameter": torch.ones(n),
        "first_moment": torch.ones(n),
        "second_moment": torch.ones(n),
        "segments": [Segment(0, n)],
        "hypers": [RULES["adamw"]],
    }


SHARED = torch.ones(64)
BAD: dict[str, dict[str, Any]] = {
    "grad dtype": {"grad": torch.ones(64, dtype=torch.float64)},
    "grad type": {"grad": [1.0] * 64},
    "grad length": {"grad": torch.ones(63)},
    "grad device": {"grad": torch.ones(64, device="meta")},
    "grad layout": {"grad": torch.ones(128)[::2]},
    "grad sparse": {"grad": torch.ones(64).to_sparse()},
    "parameter dtype": {"parameter": torch.ones(64, dtype=torch.bfloat16)},
    "moment missing": {"second_moment": None},
    "moment dtype": {"first_moment": torch.ones(64, dtype=torch.bfloat16)},
    "moments overlap": {"first_moment": SHARED, "second_moment": SHARED},
    "copy dtype": {"copy": torch.ones(64, dtype=torch.int16)},
    "copy and remainder": {
        "parameter": torch.ones(64, dtype=torch.bfloat16),
        "remainder": torch.ones(64, dtype=torch.int16),
        "copy": torch.ones(64),
    },
    "split needs bf16": {"remainder": torch.ones(64, dtype=torch.int16)},
    "segment outside": {"segments": [Segment(1, 64)]},
    "segment negative": {"segments": [Segment(-1, 4)]},
    "segments overlap": {"segments": [Segment(0, 10), Segment(9, 2)]},
    "hyper index": {"segments": [Segment(0, 64, 1)]},
    "beta": {"hypers": [AdamW(betas=(0.9, 1.0), step=1)]},
    "lr": {"hypers": [AdamW(lr=-1.0, step=1)]},
    "lr nan": {"hypers": [AdamW(lr=float("nan"), step=1)]},
    "step": {"hypers": [AdamW(step=0)]},
    "nesterov": {"hypers": [SGD(nesterov=True, first_step=True)]},
    "span negative": {"grad": MemorySpan(-8, torch.float32, 64)},
    "span null": {"grad": MemorySpan(0, torch.float32, 64)},
    "span misaligned": {"grad": MemorySpan(SHARED.data_ptr() + 1, torch.float32, 64)},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_updates(pool: ThreadPool, case: str) -> None:
    arguments = good_update() | BAD[case]
    with pytest.raises(ConfigError) as raised:
        pool.submit(Update(**arguments))
    assert raised.value.cause.endswith(".") and raised.value.cure.endswith(".")
    for name in ("parameter", "first_moment", "second_moment"):
        if arguments[name] is not None:
            assert bool((arguments[name] == 1).all())


def test_other_bad_arguments(pool: ThreadPool) -> None:
    x = torch.ones(10)
    segments = [Segment(0, 10)]
    for work in (
        Gradient(grad=x, segments=segments),
        Gradient(grad=x, store=True, segments=segments),
        Gradient(grad=x, accumulated=x, store=True, segments=segments),
        Gradient(grad=x, copy=x, segments=segments),
        Gradient(grad=x, copy=x.bfloat16(), segments=segments),
        Gradient(grad=x, copy=torch.ones(9), segments=segments),
        Stream(),
        Stream(read=[x] * 9),
        Stream(read=[x], granule=0),
        Stream(read_write=[x, x]),
        "update",
    ):
        with pytest.raises(ConfigError):
            pool.submit(work)  # type: ignore[call-overload]
    for bad in ({"threads": 0}, {"chunk": 100}, {"chunk": 0}, {"cpus": []}, {"cpus": [10_000]}):
        with pytest.raises(ConfigError):
            ThreadPool(**bad)  # type: ignore[arg-type]


def test_empty_work(pool: ThreadPool) -> None:
    empty = good_update(0) | {"segments": []}
    assert pool.run(Update(**empty)).nonfinite == ()
    assert pool.run(Gradient(grad=torch.ones(0), squares=True, segments=[])).blocks == ()
    assert pool.run(Update(**(good_update() | {"segments": []}))).nonfinite == ()
