"""Tests of I/O engines: bad options must raise an error, the next backend must be chosen where one is
forbidden, and reads into buffers that are registered with the kernel, or are not, must be correct.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aio_backends import (
    BLOCK,
    PAGE,
    WITHOUT_TORCH,
    each_backend,
    engine,
    make_file,
    memory,
)
from process_resources import BOUND, threads_of

from infinity import aio
from infinity.errors import ConfigError, StorageError


@each_backend
def test_registered_buffers(backend: str, tmp_path: Path) -> None:
    content = os.urandom(8 * BLOCK)
    path = make_file(tmp_path / "file", content)
    with engine(path, backend) as e, e.open(str(path)) as file:
        target = np.zeros(10 * BLOCK, dtype=np.uint8)
        address = target.ctypes.data
        registered = e.register_buffer(address, 4 * BLOCK)
        assert e.facts.registered_bytes == (4 * BLOCK if registered else 0)
        assert bool(e.facts.registration_failure) != registered
        for begin in (0, 3 * BLOCK, 5 * BLOCK):  # inside the registered memory, across its end, outside
            file.read(target[begin : begin + 4 * BLOCK], 100).wait()
            assert target[begin : begin + 4 * BLOCK].tobytes() == content[100 : 100 + 4 * BLOCK]
        file.read(target[: 8 * BLOCK], 0).wait()
        assert target[: 8 * BLOCK].tobytes() == content
        for bad in ((0, 10), (address, 0)):
            with pytest.raises(ConfigError):
                e.register_buffer(*bad)


def test_engine_options(tmp_path: Path) -> None:
    for bad in (
        {"depth": 0},
        {"depth": 5000},
        {"depth": -1},
        {"block_bytes": 0},
        {"block_bytes": 5000},
        {"block_bytes": 2 << 30},
        {"write_slack": -1.0},
        {"write_slack": float("nan")},
        {"backend": "uring"},
    ):
        with pytest.raises(ConfigError):
            aio.Engine(tmp_path, **bad)  # type: ignore[arg-type]
    with pytest.raises(StorageError) as missing:
        aio.Engine(tmp_path / "missing")
    assert missing.value.errno == errno.ENOENT
    assert missing.value.path == str(tmp_path / "missing")
    with pytest.raises(StorageError):
        aio.probe(make_file(tmp_path / "file", 1))
    with aio.Engine() as e:  # without a directory, backends are tried in memory
        assert e.facts.backend in aio.BACKENDS
        file = e.open(str(make_file(tmp_path / "other", PAGE)))
        assert file.read(memory(PAGE), 0).result() == PAGE


@each_backend
def test_environment_forces_a_backend(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_AIO", backend)
    with aio.Engine(tmp_path) as e:
        assert e.facts.backend == backend
        assert e.facts.rejected == ()
    with aio.Engine(tmp_path, backend="threads") as e:
        assert e.facts.backend == "threads"
    monkeypatch.setenv("INFINITY_AIO", "uring")
    with pytest.raises(ConfigError, match="no I/O engine named 'uring'"):
        aio.Engine(tmp_path)
    monkeypatch.setenv("INFINITY_AIO", "")
    with aio.Engine(tmp_path) as e:
        assert e.facts.backend in aio.BACKENDS


REFUSE = """
import ctypes, json, struct, sys
from infinity import aio
from infinity.errors import ConfigError

# A seccomp filter that answers EPERM to the given system calls, as container runtimes have them.
def refuse(numbers):
    code = [(0x20, 0, 0, 0)]
    for left, number in zip(range(len(numbers), 0, -1), numbers):
        code.append((0x15, left, 0, number))
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0, ctypes.get_errno()

directory = sys.argv[1]
refuse([int(number) for number in sys.argv[2].split(",")])
with aio.Engine(directory) as engine:
    rejected = {report.name: report.reason for report in engine.facts.rejected}
    print(json.dumps([engine.facts.backend, rejected]))
for name in rejected:
    try:
        aio.Engine(directory, backend=name)
    except ConfigError as error:
        assert rejected[name] in error.cause, error
    else:
        raise SystemExit(f"{name} works")
"""


@pytest.mark.parametrize("refused", [["io_uring"], ["io_uring", "libaio"]])
def test_next_backend_where_one_is_forbidden(refused: list[str], tmp_path: Path) -> None:
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        pytest.skip("system call numbers of this machine are unknown to the test")
    numbers = {"io_uring": 425, "libaio": 206 if machine == "x86_64" else 0}
    program = WITHOUT_TORCH + REFUSE
    command = [sys.executable, "-c", program, str(tmp_path), ",".join(str(numbers[name]) for name in refused)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "prctl" in done.stderr:
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stderr
    backend, rejected = json.loads(done.stdout)
    assert backend == aio.BACKENDS[len(refused)]
    assert set(rejected) == set(refused)
    assert all("Operation not permitted" in reason for reason in rejected.values())


LITTLE_MEMLOCK = """
import os, resource
import numpy as np
from infinity import aio
with aio.Engine(backend="io_uring") as engine:
    pass
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
memory = np.zeros(64 << 20, dtype=np.uint8)
with aio.Engine(backend="io_uring") as engine:
    assert engine.register_buffer(memory.ctypes.data, memory.nbytes) is False
    print(engine.facts.registration_failure)
"""


def test_no_locked_memory_is_no_error() -> None:
    if not next(report.ok for report in aio.probe(None).backends if report.name == "io_uring"):
        pytest.skip("no io_uring here")
    command = [sys.executable, "-c", WITHOUT_TORCH + LITTLE_MEMLOCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "locked memory" in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="only one CPU may be used")
def test_the_engines_thread_keeps_off_the_cpu_of_whoever_wakes_it(tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * PAGE)
    every = os.sched_getaffinity(0)
    before = threads_of("infinity-aio")
    found: dict[int, set[int]] = {}

    def ask() -> None:
        for cpu in every:
            os.sched_setaffinity(0, {cpu})  # of this thread
            for _ in range(1000):  # a read that comes before the engine's thread sleeps does not wake it
                file.read(target, 0).wait()
                found[cpu] = os.sched_getaffinity(task)
                if cpu not in found[cpu]:
                    break

    with engine(path, "auto") as e, e.open(str(path)) as file:
        task = _the_new("infinity-aio", before)
        target = memory(PAGE)
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
    assert found == {cpu: every - {cpu} for cpu in every}


def _the_new(name: str, before: set[int]) -> int:
    """Wait until this process has exactly one thread named `name` that is not in `before`, and return its id.

    before: ids of threads that existed earlier. To choose a backend, an engine opens other engines for a
    moment. Their threads may still be ending, so there can be several new threads at first.
    """
    end = time.monotonic() + BOUND
    while len(found := threads_of(name) - before) != 1:
        assert time.monotonic() < end, f"{len(found)} new threads are called {name}"
        time.sleep(0.01)
    (task,) = found
    return task
