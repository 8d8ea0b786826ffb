"""Tests of the recording that `Faults` makes, on every I/O backend, and of operations noted in it."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from aio_backends import BLOCK, each_backend, engine, filled, held, make_file
from recorded_run import Event

from infinity import aio
from infinity.errors import StorageError

CONTENT = bytes(range(256)) * (2 * BLOCK // 256)


def events(faults: aio.Faults) -> list[Event]:
    return [Event(*event) for event in faults.recorded()]


@each_backend
def test_transfers_are_recorded_with_their_bytes_and_order(backend: str, tmp_path: Path) -> None:
    path, faults = make_file(tmp_path / "file", 4 * BLOCK), aio.Faults()
    with engine(tmp_path, backend, faults=faults) as core, core.open(path) as file:
        file.write(filled(CONTENT), 0).wait()
        faults.record()
        file.write(filled(CONTENT), BLOCK).wait()
        file.read(filled(CONTENT), 0).wait()
        file.sync().wait()
    first, second, sync = events(faults)
    assert [first.offset, second.offset] == [BLOCK, 2 * BLOCK]
    assert first.data + second.data == CONTENT
    for event in (first, second):
        assert (event.kind, event.path, event.target) == ("write", str(path), "")
        assert event.ok and event.moved == BLOCK and not event.changed
        assert event.completed is not None and event.submitted < event.completed < sync.submitted
    assert sync.completed is not None
    assert sync == ("sync", str(path), "", 0, b"", sync.submitted, sync.completed, True, 0, False)
    numbers = [number for event in (first, second, sync) for number in (event.submitted, event.completed)]
    assert sorted(numbers) == list(range(1, 7))


@each_backend
def test_what_a_rule_does_is_recorded(backend: str, tmp_path: Path) -> None:
    path, faults = make_file(tmp_path / "file", 4 * BLOCK), aio.Faults()
    faults.record()
    faults.shorten("write", 1, 1000)
    faults.fail("write", 3, errno.EIO)
    faults.fail("sync", 1, errno.EIO)
    with engine(tmp_path, backend, faults=faults) as core, core.open(path) as file:
        file.write(filled(CONTENT[:BLOCK]), 0).wait()
        for request in (file.write(filled(CONTENT[:BLOCK]), BLOCK), file.sync()):
            with pytest.raises(StorageError):
                request.wait()
    short, rest, failed, sync = sorted(
        events(faults), key=lambda event: (event.kind == "sync", event.submitted)
    )
    assert (short.ok, short.moved, len(short.data)) == (True, 1000, BLOCK)
    assert (rest.ok, rest.offset, rest.moved) == (True, 1000, BLOCK - 1000)
    assert (failed.ok, failed.moved, failed.data) == (False, 0, CONTENT[:BLOCK])
    assert not sync.ok and sync.completed is not None


@each_backend
def test_a_write_whose_memory_changes_in_flight_is_told(backend: str, tmp_path: Path) -> None:
    path, faults = make_file(tmp_path / "file", BLOCK), aio.Faults()
    faults.record()
    memory = filled(CONTENT[:BLOCK])
    with engine(tmp_path, backend, faults=faults) as core, core.open(path) as file:
        with held(faults, "write"):
            write = file.write(memory, 0)
            while not (begun := events(faults)):
                pass
            assert begun[0].completed is None and not begun[0].ok
            memory[0] ^= 1
        write.wait()
        file.write(memory, 0).wait()
    assert [event.changed for event in events(faults)] == [True, False]
    assert events(faults)[0].data == CONTENT[:BLOCK]


@each_backend
def test_a_rule_for_a_path_leaves_other_files_alone(backend: str, tmp_path: Path) -> None:
    faults = aio.Faults()
    paths = [make_file(tmp_path / name, BLOCK) for name in ("a", "b")]
    faults.fail("sync", 2, errno.EIO, path=str(paths[1]))
    with engine(tmp_path, backend, faults=faults) as core, core.open(paths[0]) as a, core.open(paths[1]) as b:
        for file in (a, b, a, a):
            file.sync().wait()
        with pytest.raises(StorageError, match="b"):
            b.sync().wait()


def test_operations_are_noted_in_the_same_order() -> None:
    faults = aio.Faults()
    assert faults.note("create", "/a", "", 0, b"") == 0
    faults.record()
    rename = faults.note("rename", "/a", "/b", 0, b"")
    write = faults.note("write", "/b", "", 7, b"\0bytes")
    faults.noted(write)
    faults.noted(write)
    assert faults.recorded() == [
        ("rename", "/a", "/b", 0, b"", 1, None, False, 0, False),
        ("write", "/b", "", 7, b"\0bytes", 2, 3, True, 6, False),
    ]
    faults.clear_record()
    faults.noted(rename)
    assert faults.recorded() == [] and faults.note("remove", "/b", "", 0, b"") == 0
    faults.record()
    faults.noted(rename)
    faults.note("remove", "/b", "", 0, b"")
    assert faults.recorded() == [("remove", "/b", "", 0, b"", 4, None, False, 0, False)]


def test_threads_share_one_counter() -> None:
    faults, count = aio.Faults(), 200
    faults.record()

    def work(name: str) -> None:
        for _ in range(count):
            faults.noted(faults.note("sync", name, "", 0, b""))

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = events(faults)
    numbers = [number for event in found for number in (event.submitted, event.completed)]
    assert sorted(map(int, filter(None, numbers))) == list(range(1, 8 * count + 1))
    assert [event.submitted for event in found] == sorted(event.submitted for event in found)
