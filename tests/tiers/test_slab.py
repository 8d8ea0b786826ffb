"""Tests of slab files, the files of the NVMe tier.

A slab takes all its room on the disk when it is opened, has one owner, and leaves no file behind. A path that
cannot be used raises a typed error.
"""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from failing_files import FailingFiles
from process_resources import nothing_left

from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, StorageError, StorageFull
from infinity.system import directory
from infinity.system.disk_files import DiskFiles
from infinity.tiers import remove_slab
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import Slab, find_slab, leftover_bytes, lock_directory, slab_name

MIB = 1 << 20
FILES = DiskFiles()
UUIDS = [f"{number:032x}" for number in range(3)]


@contextlib.contextmanager
def opened(directory: Path, nbytes: int, *, rank: int = 0, files: DiskFiles = FILES) -> Iterator[Slab]:
    """A new slab under a lock of its directory."""
    with lock_directory(directory, rank, files) as lock, Slab(lock, nbytes, files=files) as slab:
        yield slab


def committed(directory: Path, nbytes: int = MIB) -> Path:
    """Make a committed slab with recognizable pages, and close it."""
    with opened(directory, nbytes) as slab:
        slab.path.write_bytes(pages(nbytes))
        slab.rename(committed=True)
        slab.keep = True
    return slab.path


def pages(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_the_room_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    with opened(tmp_path, 4 * MIB + 1, rank=3) as slab:
        status = slab.path.stat()
        assert slab.path.name == "infinity-rank3.slab"
        assert status.st_size == slab.nbytes == 4 * MIB + 4096
        assert status.st_blocks * 512 >= slab.nbytes, "preallocated, not sparse"
        assert status.st_mode & 0o777 == 0o600
    slab.close()
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_directories_are_apart(tmp_path: Path) -> None:
    with opened(tmp_path, MIB, rank=0) as first, opened(tmp_path, MIB, rank=1) as second:
        assert first.path != second.path


def run_owner(directory: Path, then: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(f"""
        import os, sys, time
        from infinity.system.disk_files import DiskFiles
        from infinity.tiers.slab import Slab, lock_directory
        slab = Slab(lock_directory({str(directory)!r}, 0, DiskFiles()), {MIB})
        print("ready", flush=True)
        {then}
    """)
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def test_a_second_process_is_told_who_has_the_slab(warm: None, tmp_path: Path) -> None:
    owner = run_owner(tmp_path, "time.sleep(600)")
    try:
        with pytest.raises(StorageError, match=f"in use by process {owner.pid}") as error:
            lock_directory(tmp_path, 0, FILES)
        assert error.value.errno == errno.EBUSY
        assert "directory of its own" in error.value.cure
        assert (tmp_path / "infinity-rank0.slab").stat().st_size == MIB, "the owner's file is untouched"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert leftover_bytes(tmp_path, 0) == MIB
    with opened(tmp_path, 2 * MIB) as reclaimed:
        assert reclaimed.path.stat().st_size == 2 * MIB


def test_a_forked_child_does_not_remove_the_parents_slab(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as slab:
        child = os.fork()
        if child == 0:
            slab.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slab.path.exists()
    assert names(tmp_path) == []


def test_a_slab_removed_and_made_again_by_others_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as slab:
        slab.path.unlink()
        slab.path.write_text("of others")
    assert slab.path.read_text() == "of others"


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as error:
        lock_directory(tmp_path / "absent", 0, FILES)
    assert error.value.errno == errno.ENOENT
    assert "Create the directory" in error.value.cure


@pytest.mark.parametrize(
    ("path", "error"),
    [("x" * 300, StorageError), ("nul\0byte", ConfigError)],
    ids=["too long", "a NUL"],
)
def test_paths_that_are_none(tmp_path: Path, path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        lock_directory(f"{tmp_path}/{path}", 0, FILES)


def as_another_user(tmp_path: Path, path: Path) -> str:
    """Lock `path` as the user nobody, and return the text of the StorageError that this raises.

    If the test does not run as root, the present user locks it.
    """
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)
    told, tell = os.pipe()
    child = os.fork()  # a fork, since a new interpreter would import torch first
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            lock_directory(path, 0, FILES)
        except StorageError as error:
            os.write(tell, str(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with open(told, encoding="utf-8") as pipe:
        return pipe.read()


def test_a_directory_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    assert "EACCES" in as_another_user(tmp_path, closed)
    assert list(closed.iterdir()) == []


def test_a_directory_that_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o600)
    error = as_another_user(tmp_path, tmp_path / "closed" / "inner")
    assert "EACCES" in error
    assert "permissions" in error


def test_a_dropped_slab_is_removed(tmp_path: Path) -> None:
    slab = Slab(lock_directory(tmp_path, 0, FILES), MIB)
    assert len(names(tmp_path)) == 2
    del slab
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        lock_directory(tmp_path / "file", 0, FILES)


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="EROFS") as error:
        lock_directory(small_disk, 0, FILES)
    assert "read-only" in error.value.cure


def test_ram_is_no_disk(ram_disk: Path) -> None:
    with pytest.raises(StorageError, match="which is RAM") as error:
        lock_directory(ram_disk, 0, FILES)
    assert "disk" in error.value.cure
    assert list(ram_disk.iterdir()) == []


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory"])
def test_what_is_no_regular_file_is_neither_opened_nor_removed(tmp_path: Path, kind: str) -> None:
    place, victim = tmp_path / slab_name(0), tmp_path / "victim"
    victim.write_text("precious")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "symlink" else "absent")
    assert leftover_bytes(tmp_path, 0) == 0
    with nothing_left(), pytest.raises(StorageError), opened(tmp_path, MIB):
        pass
    assert os.path.lexists(place)
    assert victim.read_text() == "precious"


def test_more_than_the_disk_has_free(small_disk: Path) -> None:
    with pytest.raises(StorageFull, match="free of") as error, opened(small_disk, 64 * MIB):
        pass
    assert error.value.errno == errno.ENOSPC
    assert list(small_disk.glob("*.slab")) == []
    with opened(small_disk, 16 * MIB):
        pass


def test_a_disk_that_fills_during_preallocation(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs(small_disk)
    monkeypatch.setattr(directory, "free_bytes", lambda path: 1 << 40)  # a stale answer
    with pytest.raises(StorageFull, match="preallocate"), opened(small_disk, 64 * MIB):
        pass
    assert list(small_disk.glob("*.slab")) == []
    assert os.statvfs(small_disk).f_bfree == room.f_bfree, "the room came back"


@pytest.mark.parametrize("nbytes", [0, -4096])
def test_a_slab_without_bytes(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError), opened(tmp_path, nbytes):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    with nothing_left():
        for _ in range(5):
            with opened(tmp_path, MIB), pytest.raises(StorageError, match="in use by this process"):
                lock_directory(tmp_path, 0, FILES)
            with pytest.raises(StorageFull), opened(tmp_path, 1 << 60):
                pass


def test_only_the_new_slab_of_the_rank_is_a_leftover(tmp_path: Path) -> None:
    stay = [
        slab_name(0, UUIDS[1]),
        slab_name(1, UUIDS[2]),
        slab_name(1),
        "infinity-rank0-.slab",
        "other.slab",
    ]
    for name in (*stay, slab_name(0)):
        (tmp_path / name).write_text(name)
    size = (tmp_path / slab_name(0)).stat().st_blocks * 512
    assert leftover_bytes(tmp_path, 0) == size > 0
    with lock_directory(tmp_path, 0, FILES):
        assert leftover_bytes(tmp_path, 0) == 0
        assert names(tmp_path) == sorted([*stay, "infinity-rank0.lock"])
    assert {name: (tmp_path / name).read_text() for name in stay} == {name: name for name in stay}


def test_a_leftover_that_cannot_be_removed_releases_the_lock(tmp_path: Path) -> None:
    (tmp_path / slab_name(0)).touch()
    files = FailingFiles(3)
    with nothing_left(), pytest.raises(StorageError, match="EIO"):
        lock_directory(tmp_path, 0, files)
    assert files.failed == ("remove", slab_name(0))
    lock_directory(tmp_path, 0, FILES).close()
    assert names(tmp_path) == []


def test_the_name_says_whether_a_slab_was_committed(tmp_path: Path) -> None:
    files = FailingFiles()
    with opened(tmp_path, MIB, files=files) as slab:
        new, before = slab.path, len(files.operations)
        for _ in range(2):
            slab.rename(committed=True)
            assert (slab.path, new.exists()) == (tmp_path / slab_name(0, slab.uuid), False)
            assert slab.path.stat().st_size == MIB
        slab.rename(committed=False)
        assert (slab.path, new.exists()) == (new, True)
        assert files.operations[before:] == [("rename", new.name), ("rename", slab_name(0, slab.uuid))]
        slab.rename(committed=True)
    assert names(tmp_path) == [], "a name alone keeps nothing"


def test_a_rename_that_fails_changes_nothing(tmp_path: Path) -> None:
    files = FailingFiles(code=errno.ENOSPC)
    with opened(tmp_path, MIB, files=files) as slab:
        new = slab.path
        files.fail_at = len(files.operations)
        with pytest.raises(StorageFull):
            slab.rename(committed=True)
        assert (slab.path, new.exists()) == (new, True)
        slab.rename(committed=True)
        assert not new.exists()


def test_a_committed_slab_outlives_everything_but_its_own_removal(tmp_path: Path) -> None:
    path = committed(tmp_path)
    gc.collect()
    with opened(tmp_path, MIB):
        assert path.read_bytes() == pages(MIB)
    assert names(tmp_path) == [path.name]


def test_every_operation_that_fails_leaves_no_new_slab(tmp_path: Path) -> None:
    recorded = FailingFiles()
    with opened(tmp_path, MIB, files=recorded) as slab:
        slab.rename(committed=True)
    operations = [operation for operation, _ in recorded.operations]
    assert operations == ["open", "create", "lock", "create", "rename", "remove", "remove"]
    for place in range(5):
        files = FailingFiles(place)
        with (
            nothing_left(),
            pytest.raises(StorageError, match="EIO"),
            opened(tmp_path, MIB, files=files) as slab,
        ):
            slab.rename(committed=True)
        assert files.failed is not None
        assert list(tmp_path.glob("*.slab")) == []
        lock_directory(tmp_path, 0, FILES).close()
        assert names(tmp_path) == [], "at most a lock file without a lock was left"


def test_a_removal_that_fails_raises_nothing_and_is_made_up_for(tmp_path: Path) -> None:
    files = FailingFiles(4)
    with opened(tmp_path, MIB, files=files):
        pass
    assert files.failed == ("remove", slab_name(0))
    assert names(tmp_path) == [slab_name(0)]
    lock_directory(tmp_path, 0, FILES).close()
    assert names(tmp_path) == []


def test_an_adopted_slab_has_its_pages_and_stays(tmp_path: Path) -> None:
    path = committed(tmp_path)
    uuid = path.stem[-32:]
    with PathLock(tmp_path) as lock, Slab.adopt(lock, uuid, MIB) as slab:
        assert slab.keep
        assert (slab.path, slab.nbytes, slab.uuid) == (path, MIB, uuid)
    assert path.read_bytes() == pages(MIB)
    assert names(tmp_path) == [path.name]
    with PathLock(tmp_path) as lock, Slab.adopt(lock, uuid, MIB) as slab:
        slab.keep = False
    assert names(tmp_path) == []


def test_a_slab_keeps_its_lock_although_nobody_else_refers_to_it(tmp_path: Path) -> None:
    path = committed(tmp_path)
    slab = Slab.adopt(PathLock(tmp_path), path.stem[-32:], MIB)
    gc.collect()
    with pytest.raises(StorageError, match="in use by this process"):
        PathLock(tmp_path)
    del slab
    gc.collect()
    PathLock(tmp_path).close()


def test_a_copy_with_holes_gets_its_room(tmp_path: Path) -> None:
    path = committed(tmp_path)
    content = path.read_bytes()
    path.unlink()
    with open(path, "wb") as file:
        file.write(content[:8192])
        file.truncate(len(content))
    assert path.stat().st_blocks * 512 < len(content)
    with PathLock(tmp_path) as lock, Slab.adopt(lock, path.stem[-32:], MIB):
        assert path.stat().st_blocks * 512 >= len(content)
        assert path.read_bytes() == content[:8192] + bytes(len(content) - 8192)


def test_growing_keeps_the_pages(tmp_path: Path) -> None:
    path = committed(tmp_path)
    with PathLock(tmp_path) as lock, Slab.adopt(lock, path.stem[-32:], MIB) as slab:
        slab.grow(MIB // 2)
        assert slab.nbytes == MIB
        slab.grow(2 * MIB)
        assert slab.nbytes == path.stat().st_size == 2 * MIB
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        assert path.read_bytes() == pages(MIB) + bytes(MIB)
    with PathLock(tmp_path) as lock, Slab.adopt(lock, path.stem[-32:], MIB) as slab:
        assert slab.nbytes == MIB, "the size that the commit recorded"


def test_a_failed_growth_gives_the_room_back(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = committed(small_disk)
    before, room = path.read_bytes(), os.statvfs(small_disk).f_bfree
    with PathLock(small_disk) as lock, Slab.adopt(lock, path.stem[-32:], MIB) as slab:
        with pytest.raises(StorageFull, match="free of"):
            slab.grow(64 * MIB)
        monkeypatch.setattr(directory, "free_bytes", lambda path: 1 << 40)
        with pytest.raises(StorageFull, match="preallocate"):
            slab.grow(64 * MIB)
        assert slab.nbytes == MIB
    assert path.read_bytes() == before
    assert os.statvfs(small_disk).f_bfree >= room - 8, "but for blocks of the file system's own tree"


@pytest.mark.parametrize("kind", ["short", "symlink", "fifo", "directory", "missing"])
def test_what_cannot_be_adopted_is_left(tmp_path: Path, kind: str) -> None:
    path = committed(tmp_path)
    moved = path.rename(tmp_path / "moved")
    before = moved.read_bytes()
    if kind == "short":
        path.write_bytes(before[:-1])
    elif kind == "symlink":
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    error = CorruptState if kind == "short" else StorageError
    with nothing_left(), PathLock(tmp_path) as lock, pytest.raises(error, match=str(path)):
        Slab.adopt(lock, path.stem[-32:], MIB)
    assert os.path.lexists(path) == (kind != "missing")
    assert moved.read_bytes() == before


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


def test_a_slab_that_no_commit_needs_is_removed_durably(tmp_path: Path) -> None:
    for uuid in UUIDS[:2]:
        (tmp_path / slab_name(0, uuid)).touch()
    (tmp_path / slab_name(0, UUIDS[2])).mkdir()
    files = FailingFiles()
    with PathLock(tmp_path) as lock:
        for uuid in (UUIDS[0], UUIDS[0], UUIDS[2]):
            remove_slab(lock, uuid, files)
    assert [operation for operation, _ in files.operations] == ["remove", "sync directory"]
    assert names(tmp_path) == [slab_name(0, UUIDS[1]), slab_name(0, UUIDS[2])]
