"""Tests of the futures of I/O requests on every backend: results, times, order of requests, and lifetimes.

A buffer must stay alive until the kernel no longer needs it, even if its future is dropped.
"""

from __future__ import annotations

import errno
import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from aio_backends import (
    BLOCK,
    PAGE,
    each_backend,
    engine,
    held,
    make_file,
    memory,
    wait_until_held,
)

from infinity import aio
from infinity.errors import StorageError


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
    """Return the time in ns at which a finished I/O request ended, as the engine recorded it."""
    times = future.timing.times()
    assert times is not None
    return times[1]


@each_backend
def test_reads_go_ahead_of_writes(backend: str, tmp_path: Path) -> None:
    """Requests in the engine's queue end in the order of their I/O deadlines, not in that of the calls.

    By default a write's deadline is later than a read's, so reads that were asked for after a long write end
    before it. All requests are queued while the write's first block is kept from starting.
    """
    path = make_file(tmp_path / "file", 64 * PAGE)
    faults = aio.Faults()
    with engine(path, backend, depth=1, block_bytes=PAGE, faults=faults, write_slack=60) as e:
        file = e.open(str(path))
        with held(faults, "write"):
            write = file.write(memory(64 * PAGE), 0)
            wait_until_held(faults)
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
    faults.delay("read", 1, 0.05, times=8)  # the engine looks for completions after it has sent all blocks
    with engine(path, backend, faults=faults) as e, e.open(str(path)) as file:
        file.read(memory(64 * BLOCK), 0).wait()
        assert e.stats.in_flight_peak == 8
        assert e.stats.read_transfers == 64


class Owner:
    """An object that a test passes as a buffer's owner, to see how long the engine keeps it alive."""


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
        for _ in range(3):  # one of the next calls drops the owner
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
