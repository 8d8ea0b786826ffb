"""Tests of the I/O engine under threads, signals, forks, close() and the end of the interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aio_backends import (
    BLOCK,
    PAGE,
    WITHOUT_TORCH,
    each_backend,
    engine,
    held,
    make_file,
    memory,
)
from process_resources import check_nothing_left, resources

from infinity import aio
from infinity.errors import ConfigError, StorageError


@each_backend
def test_waits_release_the_gil(backend: str, tmp_path: Path) -> None:
    """While a thread waits, another thread counts in Python, which it could not if the wait held the GIL."""
    path = make_file(tmp_path / "file", 4 * BLOCK)
    faults = aio.Faults()
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        counter = threading.Thread(target=count)
        for wait in (
            lambda: file.read(memory(PAGE), 0).wait(),
            lambda: file.read(memory(PAGE), 0).result(),
            lambda: file.read(memory(PAGE), 0).exception(),
            lambda: aio.wait_all([file.read(memory(PAGE), 0)]),
        ):
            faults.delay("read", 1, 0.2)
            if not counter.is_alive():
                counter.start()
            before = counted
            wait()
            assert counted > before + 100
        faults.delay("read", 1, 0.2)
        pending = file.read(memory(PAGE), 0)
        before = counted
        file.close()
        assert pending.done()
        assert counted > before + 100
        stop.set()
        counter.join()


@each_backend
def test_many_threads_on_one_file(backend: str, tmp_path: Path) -> None:
    region = 5 * BLOCK + 77
    path = make_file(tmp_path / "file", 8 * region)
    errors: list[BaseException] = []
    with engine(path, backend) as e, e.open(str(path)) as file:

        def work(index: int) -> None:
            try:
                for turn in range(30):
                    content = os.urandom(region)
                    file.write(content, index * region).wait()
                    back = bytearray(region)
                    file.read(back, index * region).wait()
                    assert back == content, (index, turn)
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not errors


@each_backend
def test_one_future_many_waiters(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        results: list[int] = []
        with held(faults, "read"):
            future = file.read(memory(PAGE), 0)
            waiters = [threading.Thread(target=lambda: results.append(future.result())) for _ in range(8)]
            for waiter in waiters:
                waiter.start()
        for waiter in waiters:
            waiter.join()
        assert results == [PAGE] * 8


@each_backend
def test_ctrl_c_ends_a_wait(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        with held(faults, "read"):
            future = file.read(memory(PAGE), 0)
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                future.wait(60)
            assert not future.done()
        assert future.result() == PAGE
        timer.join()


@each_backend
def test_signal_handlers_run_and_the_wait_goes_on(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    faults = aio.Faults()
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        if len(heard) == 3:
            faults.release()

    before = signal.signal(signal.SIGALRM, hear)
    signal.siginterrupt(signal.SIGALRM, False)  # SA_RESTART: the kernel resumes the sleep by itself
    try:
        with engine(path, backend, faults=faults) as e, e.open(str(path)) as file, held(faults, "read"):
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            future = file.read(memory(PAGE), 0)
            assert future.wait(60)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(heard) >= 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@each_backend
def test_close_cancels_what_is_queued(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 64 * PAGE)
    faults = aio.Faults()
    faults.delay("any", 1, 30, times=None)  # an injected delay, for which close does not wait
    e = engine(path, backend, depth=2, block_bytes=PAGE, faults=faults)
    file = e.open(str(path))
    futures = [file.read(memory(64 * PAGE), 0), file.write(memory(64 * PAGE), 0), file.sync()]
    time.sleep(0.05)
    start = time.monotonic()
    e.close()
    assert time.monotonic() - start < 20
    for future in futures:
        assert future.done()
        error = future.exception()
        assert isinstance(error, StorageError)
        assert error.errno == 125  # ECANCELED
        assert "closed" in error.cure
    file.close()


@each_backend
def test_close_under_load(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    before = resources()
    for round_ in range(10):
        e = engine(path, backend)
        file = e.open(str(path))
        futures = [file.read(memory(1 << 20), 0) for _ in range(20)]
        if round_ % 2:
            e.close()
        else:
            del e, file  # the futures hold the engine; the last of them closes it
        if round_ % 2:
            assert all(future.done() for future in futures)
            errors = [future.exception() for future in futures]
            assert all(error is None or error.errno == 125 for error in errors)
        futures.clear()
    e = file = None  # type: ignore[assignment]
    check_nothing_left(before)


@each_backend
def test_close_from_several_threads(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    e = engine(path, backend)
    file = e.open(str(path))
    futures = [file.read(memory(1 << 20), 0) for _ in range(20)]
    closers = [threading.Thread(target=e.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert all(future.done() for future in futures)


def run(program: str, *arguments: object, dev: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            *(["-X", "dev"] if dev else []),
            "-c",
            WITHOUT_TORCH + program,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PREPARE = """
import mmap, os, sys, threading, time
from infinity import aio
assert "torch" not in sys.modules
path, backend = sys.argv[1:]
faults = aio.Faults()
engine = aio.Engine(os.path.dirname(path), backend=backend, block_bytes=4096, depth=8, faults=faults)
file = engine.open(path)
memory = mmap.mmap(-1, 1 << 20)
"""

EXITS = {
    "in flight": """
futures = [file.read(memory, 0) for _ in range(50)]
""",
    "futures dropped": """
for _ in range(50):
    file.read(bytearray(1 << 20), 0)
""",
    "held back": """
faults.delay("any", 1, 1000, times=None)
future = file.write(memory, 0)
""",
    "another thread waits": """
faults.delay("any", 1, 1000, times=None)
future = file.write(memory, 0)
def wait():
    try:
        future.wait()
    except Exception:
        time.sleep(0.01)
        os.write(1, b"told")
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
""",
    "an exception": """
future = file.write(memory, 0)
raise SystemExit(0)
""",
    "a cycle of garbage": """
class Node: pass
node = Node()
node.self, node.engine, node.future = node, engine, file.read(memory, 0)
del engine, file, node
""",
    "os._exit": """
future = file.write(memory, 0)
os._exit(0)
""",
}


@each_backend
@pytest.mark.parametrize("how", EXITS)
def test_interpreter_exit_without_close(how: str, backend: str, tmp_path: Path) -> None:
    done = run(PREPARE + EXITS[how], make_file(tmp_path / "file", 1 << 20), backend)
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
from infinity.errors import ConfigError
faults.delay("read", 3, 0.5)
done = file.read(bytearray(4096), 0)
done.wait()
open_file = engine.open(path)
pending = file.read(memory, 0)
child = os.fork()
if child == 0:
    status = 1
    try:
        refused = 0
        for call in (lambda: file.read(memory, 0), lambda: file.write(b"x", 0), file.sync,
                     lambda: engine.open(path), lambda: engine.stats, lambda: engine.facts,
                     lambda: file.size, pending.wait, pending.result,
                     lambda: engine.register_buffer(1 << 30, 4096),
                     lambda: aio.wait_all([pending])):
            try:
                call()
            except ConfigError as error:
                assert "forked child" in error.cause
                refused += 1
        assert refused == 11, refused
        assert done.result() == 4096
        file.close()
        engine.close()
        with aio.Engine(os.path.dirname(path), backend=backend) as own:
            own.open(path).read(bytearray(4096), 0).wait()
        del file, engine, open_file, pending
        status = 0
    finally:
        if EXIT == "_exit":
            os._exit(status)
    sys.exit(status)
pid, status = os.waitpid(child, 0)
assert status == 0, status
assert pending.result() == 1 << 20
assert file.read(memory, 0).result() == 1 << 20
engine.close()
print("fine")
"""


@each_backend
@pytest.mark.parametrize("leave", ["_exit", "exit"])
def test_fork(backend: str, leave: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    done = run(PREPARE + f"EXIT = {leave!r}\n" + FORK, path, backend, dev=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def in_child(file: aio.File, path: str, queue: multiprocessing.SimpleQueue[str]) -> None:
    try:
        file.read(bytearray(1), 0)
    except ConfigError as error:
        queue.put(error.cause)
    with aio.Engine(os.path.dirname(path)) as own:
        queue.put(str(own.open(path).read(bytearray(10), 0).result()))


@each_backend
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_multiprocessing_fork(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    context = multiprocessing.get_context("fork")
    with engine(path, backend) as e, e.open(str(path)) as file:
        queue = context.SimpleQueue()
        pending = file.read(memory(1 << 20), 0)
        child = context.Process(target=in_child, args=(file, str(path), queue))
        child.start()
        assert "forked child" in queue.get()
        assert queue.get() == "10"
        child.join(30)
        assert child.exitcode == 0
        assert pending.result() == 1 << 20
        file.write(b"the parent goes on", 0).wait()


@each_backend
def test_idle_engines_do_not_wake_up(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    with engine(path, backend) as e, e.open(str(path)) as file:
        file.read(memory(PAGE), 0).wait()
        time.sleep(0.05)
        before = e.stats.waits
        time.sleep(0.3)
        assert e.stats.waits == before
