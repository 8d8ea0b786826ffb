"""Tests of what happens to the files in a directory of slabs: what is removed, and what never is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from failing_files import FailingFiles
from process_resources import nothing_left

from infinity.errors import CorruptState, IncompatibleCheckpoint, StorageError
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import Slab
from infinity.tiers.slab_directory import find_slab, leftover_bytes, lock_directory, remove_slab
from infinity.tiers.slab_header import SlabHeader, slab_name

MIB = 1 << 20
UUIDS = [f"{number:032x}" for number in range(10)]


def header(number: int, *, rank: int = 0, committed: bool = False) -> bytes:
    return SlabHeader(UUIDS[number], rank, 4096, committed).pack()


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_only_leftovers_of_the_rank_go(tmp_path: Path) -> None:
    stay = {
        slab_name(0, UUIDS[1]): header(1, committed=True),
        slab_name(1, UUIDS[2]): header(2, rank=1),
        slab_name(1): b"of rank 1",
        slab_name(0, UUIDS[3]): b"INFSLAB1" + b"\2" + header(3)[9:],  # version 2
        slab_name(0, UUIDS[4]): b"JNFSLAB1" + header(4, committed=True)[8:],
        slab_name(0, UUIDS[5]): b"somebody's own text",
        "infinity-rank0-.slab": b"",
        "infinity-rank0-short.slab": b"",
        f"infinity-rank0-{UUIDS[6]}.slab.bak": b"",
        "other.slab": b"",
    }
    go = {
        slab_name(0): b"pages of a plain slab",
        slab_name(0, UUIDS[7]): header(7) + bytes(4096),
        slab_name(0, UUIDS[8]): b"",
        slab_name(0, UUIDS[9]): bytes(8192),
    }
    for name, content in {**stay, **go}.items():
        (tmp_path / name).write_bytes(content)
    sizes = {name: (tmp_path / name).stat().st_blocks * 512 for name in go}
    assert leftover_bytes(tmp_path, 0) == sum(sizes.values()) > 0
    files = FailingFiles()
    with lock_directory(tmp_path, 0, files):
        assert leftover_bytes(tmp_path, 0) == 0
        assert names(tmp_path) == sorted({*stay, "infinity-rank0.lock"})
    assert {name: (tmp_path / name).read_bytes() for name in stay} == stay
    opened = {name for operation, name in files.operations if operation in {"read", "remove", "open"}}
    assert opened <= {slab_name(0), "infinity-rank0.lock", *(slab_name(0, uuid) for uuid in UUIDS)}


def test_what_a_commit_names_stays_whatever_its_header_says(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / slab_name(0, UUIDS[number])).write_bytes(header(number))
    with lock_directory(tmp_path, 0, DiskFiles(), spared={UUIDS[2]}):
        assert names(tmp_path) == [slab_name(0, UUIDS[2]), "infinity-rank0.lock"]


@pytest.mark.parametrize("name", [slab_name(0), slab_name(0, UUIDS[0])], ids=["plain", "durable"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory"])
def test_what_is_no_regular_file_is_neither_opened_nor_removed(tmp_path: Path, name: str, kind: str) -> None:
    place, victim = tmp_path / name, tmp_path / "victim"
    victim.write_bytes(bytes(4096))
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "symlink" else "absent")
    files = FailingFiles()
    with lock_directory(tmp_path, 0, files):
        assert os.path.lexists(place)
        assert name not in {opened for _, opened in files.operations}
    assert victim.read_bytes() == bytes(4096)


def test_a_killed_run_s_slabs_are_reclaimed_unless_committed(warm: None, tmp_path: Path) -> None:
    program = f"""
import os, signal
from infinity.tiers.slab import Slab
from infinity.tiers.slab_directory import lock_directory
from infinity.system.disk_files import DiskFiles
lock = lock_directory({str(tmp_path)!r}, 0, DiskFiles())
slabs = [Slab({str(tmp_path)!r}, {MIB}, durable=durable, lock=lock) for durable in (False, True, True)]
slabs[2].mark_committed()
print(slabs[2].path.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    committed = killed.stdout.strip()
    assert len(names(tmp_path)) == 4, "three slabs and the lock"
    with Slab(tmp_path, MIB) as slab:
        assert names(tmp_path) == sorted([committed, "infinity-rank0.lock", slab.path.name])
    assert names(tmp_path) == [committed]


def test_nothing_is_reclaimed_from_a_living_owner(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB, durable=True) as slab:
        child = os.fork()
        if child == 0:
            try:
                lock_directory(tmp_path, 0, DiskFiles())
            except StorageError as error:
                os._exit(error.errno == errno.EBUSY)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert slab.path.exists()


def test_every_operation_that_fails_releases_the_lock(tmp_path: Path) -> None:
    def leave() -> None:
        (tmp_path / slab_name(0)).touch()
        (tmp_path / slab_name(0, UUIDS[0])).write_bytes(header(0))

    leave()
    recorded = FailingFiles()
    lock_directory(tmp_path, 0, recorded).close()
    operations = [operation for operation, _ in recorded.operations]
    assert operations == ["open", "create", "lock", "write", "read", "remove", "remove", "remove"]
    for place, operation in enumerate(operations):
        leave()
        files = FailingFiles(place)
        with nothing_left():
            if place in {3, 7}:  # the lock's text, and the lock's own removal
                lock_directory(tmp_path, 0, files).close()
            else:
                with pytest.raises(StorageError, match="EIO"):
                    lock_directory(tmp_path, 0, files)
        assert files.failed is not None
        assert files.failed[0] == operation
        lock_directory(tmp_path, 0, DiskFiles()).close()
        assert names(tmp_path) == []


def test_a_slab_is_found_in_exactly_one_directory(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / slab_name(1, UUIDS[0])).touch()
    with pytest.raises(IncompatibleCheckpoint, match=UUIDS[0]) as error:
        find_slab([one, two], 0, UUIDS[0])
    assert f"{one}, {two}" in error.value.cause
    assert error.value.cure == "Give the directory where it lies in the nvme budget."
    (two / slab_name(0, UUIDS[0])).touch()
    assert find_slab([one, two], 0, UUIDS[0]) == two / slab_name(0, UUIDS[0])
    (one / slab_name(0, UUIDS[0])).touch()
    with pytest.raises(IncompatibleCheckpoint, match="2 times") as error:
        find_slab([one, two], 0, UUIDS[0])
    assert f"{one}/{slab_name(0, UUIDS[0])}, {two}/" in error.value.cause


def test_a_superseded_slab_is_removed_durably(tmp_path: Path) -> None:
    path = tmp_path / slab_name(0, UUIDS[0])
    path.write_bytes(header(0, committed=True))
    other = tmp_path / slab_name(0, UUIDS[1])
    other.write_bytes(header(1, committed=True))
    files = FailingFiles()
    assert remove_slab(tmp_path, UUIDS[0], 0, files)
    assert [operation for operation, _ in files.operations][-3:] == ["remove", "sync directory", "remove"]
    assert names(tmp_path) == [other.name]
    assert not remove_slab(tmp_path, UUIDS[0])
    with pytest.raises(CorruptState):
        remove_slab(tmp_path, "../" + UUIDS[1][3:])
    assert names(tmp_path) == [other.name]


def test_a_slab_is_removed_under_the_lock_alone(tmp_path: Path) -> None:
    path = tmp_path / slab_name(0, UUIDS[0])
    path.write_bytes(header(0, committed=True))
    with PathLock(tmp_path) as lock:
        with pytest.raises(StorageError, match="in use by this process"):
            remove_slab(tmp_path, UUIDS[0])
        assert path.exists()
        assert remove_slab(tmp_path, UUIDS[0], lock=lock)
        assert lock.held
        assert names(tmp_path) == [lock.path.name]
