"""Tests of the lock of a directory for a rank.

One process at a time holds it, through one object. It ends with its process, whatever forked children
still have open, and its file never outlives it except after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from failing_files import FailingFiles
from process_resources import nothing_left

from infinity.errors import StorageError
from infinity.tiers.path_lock import PathLock

NAME = "infinity-rank0.lock"


def in_child(act: Callable[[], str]) -> str:
    """What `act` returns in a forked child, or the text of the StorageError that it raises there."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs ends here, and has told nothing
        try:
            os.write(tell, act().encode())
        except StorageError as error:
            os.write(tell, f"{errno.errorcode[error.errno or 0]}: {error}".encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def try_lock(directory: Path) -> str:
    with PathLock(directory):
        return "locked"


def start_owner(directory: Path, then: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(f"""
        import os, signal, sys, time
        from infinity.tiers.path_lock import PathLock
        lock = PathLock({str(directory)!r})
        {then}
    """)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_file_goes_with_the_lock(tmp_path: Path) -> None:
    with PathLock(tmp_path) as lock:
        assert lock.path == tmp_path / NAME
        assert lock.path.stat().st_mode & 0o777 == 0o600
    lock.close()
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_directories_are_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with PathLock(tmp_path), PathLock(tmp_path, rank=1), PathLock(tmp_path / "other"):
        assert sorted(file.name for file in tmp_path.glob("*.lock")) == [NAME, "infinity-rank1.lock"]


def test_one_process_has_it_once(tmp_path: Path) -> None:
    with PathLock(tmp_path):
        for _ in range(2):
            with pytest.raises(StorageError, match="in use by this process") as error:
                PathLock(tmp_path)
            assert error.value.errno == errno.EBUSY
            assert "runtime.close()" in error.value.cure
        assert in_child(lambda: try_lock(tmp_path)).startswith("EBUSY"), "the refusals did not end the lock"
    assert try_lock(tmp_path) == "locked"


def test_a_lock_that_only_a_circle_of_references_keeps_is_free(tmp_path: Path) -> None:
    circle: list[object] = [PathLock(tmp_path)]
    circle.append(circle)
    gc.disable()
    try:
        del circle
        with PathLock(tmp_path):
            pass
    finally:
        gc.enable()


def test_a_hard_link_to_the_lock_file_is_the_same_lock(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with PathLock(tmp_path) as lock:
        os.link(lock.path, tmp_path / "other" / NAME)
        with pytest.raises(StorageError, match="in use by this process"):
            PathLock(tmp_path / "other")
        assert in_child(lambda: try_lock(tmp_path)).startswith("EBUSY")


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    inside, most, outcomes = 0, 0, []
    guard, start = threading.Lock(), threading.Barrier(4)

    def contend() -> None:
        nonlocal inside, most
        start.wait()
        for _ in range(100):
            try:
                with PathLock(tmp_path):
                    with guard:
                        inside += 1
                        most = max(most, inside)
                    with guard:
                        inside -= 1
                outcomes.append("locked")
            except StorageError as error:
                outcomes.append(errno.errorcode[error.errno or 0])

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 400
    assert most == 1
    assert set(outcomes) <= {"locked", "EBUSY"}
    assert "locked" in outcomes
    assert list(tmp_path.iterdir()) == []


def test_processes_exclude_each_other_while_the_file_comes_and_goes(tmp_path: Path) -> None:
    """Of many processes that lock and unlock, no two are ever inside at once.

    The file is unlinked at each unlock, so some of them open a file that is gone when they have locked it.
    """
    witness = tmp_path / "witness"
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code, locked = 2, 0
            try:
                while locked < 50:
                    try:
                        with PathLock(tmp_path):
                            os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
                            os.unlink(witness)
                            locked += 1
                    except StorageError as error:
                        assert error.errno == errno.EBUSY
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_another_process_is_named(warm: None, tmp_path: Path) -> None:
    owner = start_owner(tmp_path, 'print("ready", flush=True); time.sleep(600)')
    try:
        assert line_of(owner) == "ready"
        with pytest.raises(StorageError, match=rf"in use by process {owner.pid}\.") as error:
            PathLock(tmp_path)
        assert error.value.errno == errno.EBUSY
        assert error.value.path == str(tmp_path / NAME)
        assert "directory of its own" in error.value.cure
    finally:
        owner.kill()
        owner.wait()
    assert (tmp_path / NAME).exists(), "a killed process removes nothing"
    assert try_lock(tmp_path) == "locked"
    assert list(tmp_path.iterdir()) == []


def test_the_lock_ends_with_its_process_although_a_forked_child_lives(warm: None, tmp_path: Path) -> None:
    """After the owner was killed, others can lock, although its child still has the file open.

    The child must be alive, and have the descriptor, when the lock is taken.
    """
    fork = "child = os.fork(); child or time.sleep(600); print(child, flush=True); time.sleep(600)"
    owner = start_owner(tmp_path, fork)
    child = int(line_of(owner))
    try:
        owner.kill()
        owner.wait()
        opened = [os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")]
        assert str(tmp_path / NAME) in opened
        assert try_lock(tmp_path) == "locked"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_neither_has_nor_ends_its_parents_lock(tmp_path: Path) -> None:
    lock = PathLock(tmp_path)

    def drop() -> str:
        nonlocal lock
        lock.close()
        return try_lock(tmp_path)

    assert in_child(lambda: try_lock(tmp_path)).startswith(f"EBUSY: The slabs of rank 0 in {tmp_path} are")
    assert f"process {os.getpid()}" in in_child(drop)
    assert lock.path.exists()
    assert in_child(lambda: try_lock(tmp_path)).startswith("EBUSY")
    lock.close()
    assert in_child(lambda: try_lock(tmp_path)) == "locked"


def test_a_forked_child_that_collects_the_lock_leaves_it(tmp_path: Path) -> None:
    locks = [PathLock(tmp_path)]

    def collect() -> str:
        locks.clear()
        gc.collect()
        return "collected"

    assert in_child(collect) == "collected"
    assert (tmp_path / NAME).exists()
    assert in_child(lambda: try_lock(tmp_path)).startswith("EBUSY")
    locks.clear()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_while_another_thread_locks_does_not_hang_the_child(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(FailingFiles):
        def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
            if operation == "lock":
                inside.set()
                go_on.wait(60)
            return super().begins(operation, path, target=target, offset=offset, data=data)

    (tmp_path / "other").mkdir()
    thread = threading.Thread(target=lambda: PathLock(tmp_path, files=Slow()).close())
    thread.start()
    assert inside.wait(60)
    outcome = in_child(lambda: try_lock(tmp_path / "other"))
    go_on.set()
    thread.join()
    assert outcome == "locked"


def test_a_file_that_was_removed_and_made_by_others_is_left_alone(tmp_path: Path) -> None:
    lock = PathLock(tmp_path)
    lock.path.unlink()
    lock.path.write_text("of others")
    lock.close()
    assert lock.path.read_text() == "of others"


def test_a_file_that_goes_between_open_and_lock_is_not_believed(tmp_path: Path) -> None:
    class Removing(FailingFiles):
        def begins(self, operation: str, path: str, *, target: str, offset: int, data: bytes) -> int:
            if operation == "lock" and len(self.operations) < 6:  # two of them
                os.unlink(path)
            return super().begins(operation, path, target=target, offset=offset, data=data)

    files = Removing()
    with PathLock(tmp_path, files=files) as lock:
        assert [operation for operation, _ in files.operations].count("lock") == 3
        assert lock.path.exists()
        assert in_child(lambda: try_lock(tmp_path)).startswith("EBUSY")


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    place, victim = tmp_path / NAME, tmp_path / "victim"
    victim.write_text("precious")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "symlink" else tmp_path / "absent")
    with nothing_left(), pytest.raises(StorageError) as error:
        PathLock(tmp_path)
    assert error.value.path == str(place)
    assert os.path.lexists(place)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "absent").exists()


def test_a_lock_of_a_kind_that_names_nobody(tmp_path: Path) -> None:
    """An open file description lock, whose owner the kernel does not name, is respected."""
    descriptor = os.open(tmp_path / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    set_lock = 37  # F_OFD_SETLK, which the module fcntl of Python 3.11 does not name
    fcntl.fcntl(descriptor, set_lock, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    try:
        with pytest.raises(StorageError, match="in use by another process") as error:
            PathLock(tmp_path)
        assert error.value.errno == errno.EBUSY
    finally:
        os.close(descriptor)
    assert try_lock(tmp_path) == "locked"


def test_every_operation_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    recorded = FailingFiles()
    PathLock(tmp_path, files=recorded).close()
    names = [operation for operation, _ in recorded.operations]
    assert names == ["open", "create", "lock", "remove"]
    for place, name in enumerate(names):
        files = FailingFiles(place)
        with nothing_left():
            if name == "remove":  # a file without a lock means nothing
                PathLock(tmp_path, files=files).close()
            else:
                with pytest.raises(StorageError, match="EIO"):
                    PathLock(tmp_path, files=files)
        assert files.failed == (name, NAME)
        assert in_child(lambda: try_lock(tmp_path)) == "locked"
        assert list(tmp_path.iterdir()) == []
