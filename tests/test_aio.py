"""One suite over every backend: what a caller of infinity.aio sees where nothing fails."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from aio_backends import (
    BLOCK,
    PAGE,
    WITHOUT_TORCH,
    descriptors,
    each_backend,
    engine,
    filled,
    held,
    make_file,
    memory,
    threads,
)

from infinity import aio
from infinity.errors import ConfigError, StorageError

SIZES = [1, 511, 512, PAGE - 1, PAGE, PAGE + 1, BLOCK, BLOCK + 1, 3 * BLOCK - 7, 40 * BLOCK + 13]
OFFSETS = [0, 1, 512, PAGE, PAGE + 511, BLOCK - 1]


@each_backend
@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_any_size_offset_and_address(backend: str, shift: int, tmp_path: Path) -> None:
    rng = random.Random(shift)
    model = bytearray(rng.randbytes(max(SIZES) + max(OFFSETS) + 2 * PAGE))
    path = make_file(tmp_path / "file", bytes(model))
    with engine(path, backend) as e, e.open(str(path)) as file:
        for size in SIZES:
            for offset in OFFSETS:
                content = rng.randbytes(size)
                assert file.write(filled(content, shift), offset).result() == size
                model[offset : offset + size] = content
                back = memory(size, shift)
                assert file.read(back, offset).result() == size
                assert back == content
        assert path.read_bytes() == model
        assert file.size == len(model)


@each_backend
def test_neighbours_in_flight_share_pages(backend: str, tmp_path: Path) -> None:
    """Writes side by side, cut at odd places, all in flight at once: none undoes another's bytes."""
    rng = random.Random(5)
    size = 64 * PAGE + 100
    path = make_file(tmp_path / "file", size)
    with engine(path, backend, depth=64) as e, e.open(str(path)) as file:
        for _ in range(20):
            content = rng.randbytes(size)
            source = filled(content)
            cuts = [0, *sorted(rng.sample(range(1, size), 60)), size]
            parts = list(pairwise(cuts))
            rng.shuffle(parts)
            aio.wait_all([file.write(source[begin:end], begin) for begin, end in parts])
            back = memory(size)
            aio.wait_all([file.read(back[begin:end], begin) for begin, end in parts])
            assert back == content
            assert path.read_bytes() == content


@each_backend
def test_aligned_requests_avoid_the_page_cache(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 8 * BLOCK)
    with engine(path, backend) as e, e.open(str(path)) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT in the temporary directory")
        aio.wait_all([file.write(memory(4 * BLOCK), 0), file.read(memory(2 * BLOCK), 4 * BLOCK)])
        assert e.stats.buffered_bytes == 0
        file.write(memory(PAGE + 20), PAGE).wait()
        assert e.stats.buffered_bytes == 20
        assert e.stats.write_bytes == 4 * BLOCK + PAGE + 20
        assert e.stats.read_requests == 1
        assert e.stats.read_transfers == 2
        assert e.stats.read_busy_seconds > 0
        assert e.stats.sync_requests == 0


def test_memory_file_system_is_buffered_and_says_so() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    report = aio.probe(shm)
    assert not report.direct
    for backend in report.backends:
        assert not backend.direct
        assert backend.reason
        if not backend.ok:
            continue
        path = make_file(shm / f"infinity-test-{os.getpid()}", 3 * BLOCK)
        try:
            with aio.Engine(shm, backend=backend.name) as e, e.open(str(path)) as file:
                assert not file.direct
                assert not e.facts.chosen.direct
                content = os.urandom(2 * BLOCK + 5)
                file.write(content, 7).wait()
                back = bytearray(len(content))
                file.read(back, 7).wait()
                assert back == content
                assert e.stats.buffered_bytes == 2 * len(content)
        finally:
            path.unlink()


@each_backend
def test_buffers_of_every_kind(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 1 << 20)
    rng = np.random.default_rng(1)
    with engine(path, backend) as e, e.open(str(path)) as file:
        array = rng.standard_normal((37, 53))
        back = np.empty_like(array)
        file.write(array, 64).wait()
        file.read(back, 64).wait()
        assert (array == back).all()
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            tensor = torch.from_numpy(array).to(dtype)
            other = torch.zeros_like(tensor)
            assert file.write(tensor, 4096).result() == tensor.nbytes
            file.read(other, 4096).wait()
            assert torch.equal(tensor, other)
        parameter = torch.nn.Parameter(torch.ones(100))
        file.read(parameter.untyped_storage(), 1 << 19).wait()
        assert (parameter == 0).all()
        file.write(b"read-only memory may be written from", 5).wait()
        target = torch.zeros(100, dtype=torch.uint8)
        file.read((target.data_ptr() + 10, 9, target), 5).wait()
        assert bytes(target[10:19].tolist()) == b"read-only"
        assert target[:10].sum() == 0
        assert target[19:].sum() == 0


@each_backend
def test_bad_buffers(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    with engine(path, backend) as e, e.open(str(path)) as file:
        for bad in (
            b"read-only",
            np.zeros((4, 4))[:, 1],
            torch.zeros(4, 4).t()[1:],
            torch.zeros(4, device="meta"),
            (1, 2),
            ("address", 2, None),
            (0, 10, None),
            (4096, -1, None),
            17,
            None,
            "text",
        ):
            with pytest.raises(ConfigError):
                file.read(bad, 0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="offset is -1"):
            file.write(b"x", -1)
        with pytest.raises(ConfigError, match="2\\^63"):
            file.write(b"xy", 2**63 - 2)
        assert e.stats.read_requests == e.stats.write_requests == 0


@each_backend
def test_no_bytes_are_done_at_once(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 0)
    with engine(path, backend) as e, e.open(str(path)) as file:
        assert file.read(bytearray(), 10**6).result() == 0
        assert file.write(b"", 3).done()
        assert path.stat().st_size == 0


@each_backend
def test_closed_and_missing(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", PAGE)
    e = engine(path, backend)
    with pytest.raises(StorageError) as missing:
        e.open(str(tmp_path / "missing"))
    assert missing.value.errno == errno.ENOENT
    assert missing.value.path == str(tmp_path / "missing")
    with pytest.raises(StorageError) as directory:
        e.open(str(tmp_path))
    assert directory.value.errno == errno.EISDIR
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a regular file"):
        e.open(str(tmp_path / "pipe"))
    reader = e.open(path, write=False)
    assert reader.read(bytearray(10), 0).result() == 10
    with pytest.raises(ConfigError, match="reading only"):
        reader.write(b"x", 0)
    file = e.open(str(path))
    assert not file.closed
    file.close()
    file.close()
    assert file.closed
    assert file.path == str(path)
    for use in (
        lambda: file.read(bytearray(1), 0),
        lambda: file.write(b"x", 0),
        file.sync,
        lambda: file.size,
    ):
        with pytest.raises(ConfigError, match="is closed"):
            use()
    e.close()
    e.close()
    assert e.closed
    with pytest.raises(ConfigError, match=r"engine .* is closed"):
        reader.read(bytearray(1), 0)
    with pytest.raises(ConfigError, match="closed"):
        e.open(str(path))
    reader.close()


@each_backend
def test_end_of_file(backend: str, tmp_path: Path) -> None:
    content = os.urandom(2 * BLOCK + 100)
    path = make_file(tmp_path / "file", content)
    with engine(path, backend) as e, e.open(str(path)) as file:
        for offset, size in ((len(content), 1), (0, len(content) + 1), (BLOCK, 5 * BLOCK), (10**9, PAGE)):
            future = file.read(memory(size), offset)
            with pytest.raises(StorageError, match="shorter than expected") as short:
                future.wait()
            assert short.value.path == str(path)
            assert short.value.offset is not None
            assert short.value.offset >= len(content)
            assert isinstance(future.exception(), StorageError)
        back = memory(len(content))
        file.read(back, 0).wait()
        assert back == content
        file.write(b"behind the end", len(content) + PAGE).wait()
        assert path.stat().st_size == len(content) + PAGE + 14


@each_backend
def test_futures(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        with held(faults, "write"):
            slow = file.write(memory(PAGE), 0)
            assert not slow.done()
            assert slow.wait(timeout=0.01) is False
            assert slow.wait(timeout=0) is False
            for call in (slow.result, slow.exception, lambda timeout: aio.wait_all([slow], timeout)):
                with pytest.raises(TimeoutError):
                    call(timeout=0.01)
        assert slow.wait() is True
        assert slow.done()
        assert slow.result() == PAGE
        assert slow.exception() is None
        faults.fail("read", 2, errno.EIO)
        faults.delay("read", 3, 0.1)
        reads = [file.read(memory(PAGE), 0) for _ in range(3)]
        with pytest.raises(StorageError):
            aio.wait_all(reads)
        assert all(read.done() for read in reads), "the error must not come before the others have landed"
        aio.wait_all([])


@each_backend
def test_a_request_ended_when_it_landed(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        faults.delay("read", 2, 0.3)
        before = time.monotonic_ns()
        slow = file.read(memory(4 * BLOCK), 0)
        timing = slow.timing
        assert timing.times() is None
        slow.wait()
        seen = time.monotonic_ns()
        times = timing.times()
        assert times is not None
        assert before <= times[0] < times[1] <= seen
        assert times[1] - times[0] >= 300_000_000, "the delay of its second block is in it"
        assert slow.timing.times() == times
        faults.fail("read", 1, errno.EIO)
        failed = file.read(memory(PAGE), 0)
        assert failed.exception() is not None
        assert failed.timing.times() is not None
        nothing = file.read(bytearray(), 0).timing.times()
        assert nothing is not None and nothing[0] == nothing[1]


@each_backend
def test_times_keep_no_buffer(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    with engine(path, backend) as e, e.open(str(path)) as file:
        target, owner = np.zeros(PAGE, dtype=np.uint8), Owner()
        gone = weakref.ref(owner)
        future = file.read((target.ctypes.data, PAGE, owner), 0)
        timing = future.timing
        del owner
        future.wait()
        del future
        assert gone() is None
        assert timing.times() is not None


def ended(future: aio.Future) -> int:
    """When it landed, in ns, whoever looks when."""
    times = future.timing.times()
    assert times is not None
    return times[1]


@each_backend
def test_reads_go_ahead_of_writes(backend: str, tmp_path: Path) -> None:
    """One block at a time, the first held until all are queued: they end in the order of their deadlines."""
    path = make_file(tmp_path / "file", 64 * PAGE)
    faults = aio.Faults()
    with engine(path, backend, depth=1, block_bytes=PAGE, faults=faults, write_slack=60) as e:
        file = e.open(str(path))
        with held(faults, "write"):
            write = file.write(memory(64 * PAGE), 0)
            reads = [file.read(memory(PAGE), 0) for _ in range(3)]
            lazy = file.read(memory(PAGE), 0, deadline=time.monotonic() + 1000)
            urgent = file.write(memory(PAGE), 0, deadline=time.monotonic() - 1)
        in_order = [urgent, *reads, write, lazy]
        aio.wait_all(in_order)
        assert sorted(in_order, key=ended) == in_order


@each_backend
def test_writes_do_not_starve(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 64 * PAGE)
    faults = aio.Faults()
    with engine(path, backend, depth=1, block_bytes=PAGE, faults=faults, write_slack=0) as e:
        file = e.open(str(path))
        with held(faults, "write"):
            write = file.write(memory(8 * PAGE), 0)
            reads = [file.read(memory(8 * PAGE), 0) for _ in range(20)]
        aio.wait_all([write, *reads])
        assert ended(write) < ended(reads[0])


@each_backend
def test_a_large_request_has_all_its_blocks_in_flight(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 64 * BLOCK)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        with held(faults, "read", times=8):
            read = file.read(memory(64 * BLOCK), 0)
            while faults.fired < 8:
                time.sleep(0.001)
        read.wait()
        assert e.stats.in_flight_peak == 8
        assert e.stats.read_transfers == 64


class Owner:
    """Stands for whatever owns a buffer."""


@each_backend
def test_owners_live_as_long_as_the_kernel_needs_them(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        target = np.zeros(PAGE, dtype=np.uint8)

        def request() -> tuple[aio.Future, weakref.ref[Owner]]:
            owner = Owner()
            return file.read((target.ctypes.data, PAGE, owner), 0), weakref.ref(owner)

        with held(faults, "read"):
            future, owner = request()
            del future
            gc.collect()
            assert owner() is not None, "the future is gone, the transfer is not"
        while e.stats.read_requests == 0:
            time.sleep(0.01)
        for _ in range(3):  # dropped by one of the next calls
            file.read(bytearray(1), 0).wait()
        assert owner() is None
        future, owner = request()
        future.wait()
        assert owner() is None, "a done future needs its buffer no more"
        faults.delay("read", 1, 0.1)
        future, owner = request()
        del future
    assert owner() is None, "close drops what is left"


@each_backend
def test_bytearray_cannot_shrink_in_flight(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    faults = aio.Faults()
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        buffer = bytearray(PAGE)
        with held(faults, "read"):
            future = file.read(buffer, 0)
            with pytest.raises(BufferError):
                buffer.clear()
        future.wait()
        buffer.clear()


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
        for begin in (0, 3 * BLOCK, 5 * BLOCK):  # inside, across the end, outside
            file.read(target[begin : begin + 4 * BLOCK], 100).wait()
            assert target[begin : begin + 4 * BLOCK].tobytes() == content[100 : 100 + 4 * BLOCK]
        if registered:
            e.unregister_buffer(address)
            assert e.facts.registered_bytes == 0
        file.read(target[: 8 * BLOCK], 0).wait()
        assert target[: 8 * BLOCK].tobytes() == content
        for bad in ((0, 10), (address, 0)):
            with pytest.raises(ConfigError):
                e.register_buffer(*bad)


@each_backend
def test_nothing_leaks(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)

    def once() -> None:
        e = engine(path, backend)
        file = e.open(str(path))
        aio.wait_all([file.read(memory(4 * BLOCK), 0), file.write(b"x", 1), file.sync()])
        with pytest.raises(StorageError):
            e.open(str(tmp_path / "missing"))
        e.close()
        with pytest.raises(ConfigError):
            engine(path, backend, depth=0)

    once()
    gc.collect()
    before = threads(), descriptors()
    for _ in range(20):
        once()
    gc.collect()
    assert (threads(), descriptors()) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"], "a probe left its file"


@each_backend
def test_close_of_a_file_frees_its_descriptors(backend: str, tmp_path: Path) -> None:
    path = make_file(tmp_path / "file", 4 * BLOCK)
    with engine(path, backend) as e:
        before = descriptors()
        for _ in range(300):  # more than there are slots for registered files
            with e.open(str(path)) as file:
                file.read(memory(PAGE), 0).wait()
        assert descriptors() == before
        files = [e.open(str(path)) for _ in range(200)]
        aio.wait_all([file.read(memory(PAGE), 0) for file in files])
        for file in files:
            file.close()
        assert descriptors() == before


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
    with aio.Engine() as e:  # tried in memory
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
