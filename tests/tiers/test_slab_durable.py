"""Tests of durable slabs: made with a header, marked as committed, kept, adopted and grown.

Whatever fails, a new slab leaves no file, and a committed one stays as it was.
"""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
from failing_files import FailingFiles
from process_resources import nothing_left

from infinity.errors import ConfigError, CorruptState, IncompatibleCheckpoint, StorageError, StorageFull
from infinity.system import directory
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock
from infinity.tiers.slab import Slab
from infinity.tiers.slab_header import SLAB_HEADER_BYTES, SlabHeader, read_header, slab_name

MIB = 1 << 20
FILES = DiskFiles()
UUID = f"{1:032x}"


def committed(directory: Path, nbytes: int = MIB, *, rank: int = 0) -> Path:
    """Make a committed slab with recognizable pages, and close it."""
    with Slab(directory, nbytes, rank=rank, durable=True) as slab:
        with open(slab.path, "r+b") as file:
            file.seek(SLAB_HEADER_BYTES)
            file.write(pages(nbytes))
        slab.mark_committed()
        slab.keep = True
    return slab.path


def pages(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251)


def test_a_new_slab_has_a_durable_header_before_its_pages(tmp_path: Path) -> None:
    files = FailingFiles()
    with Slab(tmp_path, MIB + 1, rank=2, durable=True, files=files) as slab:
        assert slab.uuid is not None
        assert slab.path.name == slab_name(2, slab.uuid)
        assert slab.nbytes == MIB + 4096
        status = slab.path.stat()
        assert status.st_size == SLAB_HEADER_BYTES + slab.nbytes
        assert status.st_blocks * 512 >= status.st_size, "preallocated, not sparse"
        assert status.st_mode & 0o777 == 0o600
        assert read_header(slab.path, FILES) == SlabHeader(slab.uuid, 2, slab.nbytes, committed=False)
        assert files.operations[-4:] == [
            ("create", slab.path.name),
            ("write", slab.path.name),
            ("sync", slab.path.name),
            ("sync directory", tmp_path.name),
        ]
        assert slab.base == SLAB_HEADER_BYTES
        with Slab(tmp_path, MIB, rank=3, durable=True) as other:
            assert other.uuid != slab.uuid
    assert list(tmp_path.iterdir()) == []


def test_marking_writes_and_syncs_the_header_once(tmp_path: Path) -> None:
    files = FailingFiles()
    with Slab(tmp_path, MIB, durable=True, files=files) as slab:
        assert not slab.committed
        before = len(files.operations)
        slab.mark_committed()
        slab.mark_committed()
        assert files.operations[before:] == [("write", slab.path.name), ("sync", slab.path.name)]
        assert slab.committed
        assert read_header(slab.path, FILES).committed
    assert list(tmp_path.iterdir()) == [], "a mark alone keeps nothing"


def test_a_sync_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    files = FailingFiles()
    with Slab(tmp_path, MIB, durable=True, files=files) as slab:
        files.fail_at = len(files.operations) + 1
        for _ in range(2):
            with pytest.raises(StorageError, match="EIO"):
                slab.mark_committed()
        assert files.failed == ("sync", slab.path.name)
        assert len(files.operations) == files.fail_at + 1
        assert not slab.committed
        assert slab.sync_failed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_header_that_was_not_written_is_written_by_the_next_call(tmp_path: Path, code: int) -> None:
    files = FailingFiles(code=code)
    with Slab(tmp_path, MIB, durable=True, files=files) as slab:
        files.fail_at = len(files.operations)
        with pytest.raises(StorageError) as caught:
            slab.mark_committed()
        assert caught.value.errno == code
        assert files.failed == ("write", slab.path.name)
        assert not slab.committed
        assert not slab.sync_failed
        slab.mark_committed()
        assert slab.committed
        assert read_header(slab.path, FILES).committed


def test_a_plain_slab_cannot_be_committed(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB) as slab, pytest.raises(ConfigError):
        slab.mark_committed()


def test_a_kept_slab_outlives_everything_but_its_own_removal(tmp_path: Path) -> None:
    slab = Slab(tmp_path, MIB, durable=True)
    slab.mark_committed()
    slab.keep = True
    path = slab.path
    del slab
    gc.collect()
    assert list(tmp_path.iterdir()) == [path]
    for durable in (False, True):
        with Slab(tmp_path, MIB, durable=durable):
            assert path.exists()
    assert list(tmp_path.iterdir()) == [path]


def test_a_forked_child_does_not_remove_its_parents_slab(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB, durable=True) as slab:
        child = os.fork()
        if child == 0:
            slab.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slab.path.exists()
    assert list(tmp_path.iterdir()) == []


def test_every_operation_that_fails_leaves_no_new_slab(tmp_path: Path) -> None:
    recorded = FailingFiles()
    with Slab(tmp_path, MIB, durable=True, files=recorded) as slab:
        slab.mark_committed()
    operations = [operation for operation, _ in recorded.operations]
    making = ["open", "create", "lock", "write", "create", "write", "sync", "sync directory"]
    assert operations == [*making, "write", "sync", "remove", "remove"]
    for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        for place, operation in enumerate(operations[:-2]):
            files = FailingFiles(place, code)
            error = StorageError if code == errno.EIO else StorageFull
            with nothing_left():
                if place == 3:  # the lock's text
                    Slab(tmp_path, MIB, durable=True, files=files).close()
                else:
                    with pytest.raises(error), Slab(tmp_path, MIB, durable=True, files=files) as slab:
                        slab.mark_committed()
            assert files.failed is not None
            assert files.failed[0] == operation
            assert list(tmp_path.glob("*.slab")) == []
            Slab(tmp_path, MIB).close()
            assert list(tmp_path.iterdir()) == [], "at most a lock file without a lock was left"


def test_a_removal_that_fails_raises_nothing_and_is_made_up_for(tmp_path: Path) -> None:
    files = FailingFiles()
    slab = Slab(tmp_path, MIB, durable=True, files=files)
    files.fail_at = len(files.operations)
    slab.close()
    assert files.failed == ("remove", slab.path.name)
    assert slab.path.exists()
    Slab(tmp_path, MIB).close()
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_disk_has(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageFull, match="free of"):
        Slab(small_disk, 64 * MIB, durable=True)
    monkeypatch.setattr(directory, "free_bytes", lambda path: 1 << 40)  # a stale answer
    with pytest.raises(StorageFull, match="preallocate"):
        Slab(small_disk, 64 * MIB, durable=True)
    assert list(small_disk.glob("infinity*")) == []


def test_an_adopted_slab_has_its_pages_and_stays(tmp_path: Path) -> None:
    path = committed(tmp_path)
    before = path.read_bytes()
    with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock) as slab:
        assert slab.committed
        assert slab.keep
        assert (slab.path, slab.nbytes, slab.rank, slab.base) == (path, MIB, 0, SLAB_HEADER_BYTES)
        slab.mark_committed()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock) as slab:
        slab.keep = False
    assert list(tmp_path.iterdir()) == []


def test_an_adopted_slab_holds_the_lock_itself(tmp_path: Path) -> None:
    path = committed(tmp_path)
    with PathLock(tmp_path) as lock:
        slab = Slab.adopt(path, MIB, lock=lock)
    with pytest.raises(StorageError, match="in use by this process"):
        Slab(tmp_path, MIB)
    slab.close()
    Slab(tmp_path, MIB).close()


def test_a_copy_with_holes_gets_its_room(tmp_path: Path) -> None:
    path = committed(tmp_path)
    content = path.read_bytes()
    path.unlink()
    with open(path, "wb") as file:
        file.write(content[:8192])
        file.truncate(len(content))
    assert path.stat().st_blocks * 512 < len(content)
    with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock):
        assert path.stat().st_blocks * 512 >= len(content)
        assert path.read_bytes() == content[:8192] + bytes(len(content) - 8192)


def test_growing_keeps_the_pages_and_says_so_in_the_header(tmp_path: Path) -> None:
    path = committed(tmp_path)
    with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock) as slab:
        slab.grow(MIB // 2)
        assert slab.nbytes == MIB
        slab.grow(2 * MIB)
        assert slab.nbytes == 2 * MIB
        assert path.stat().st_size == SLAB_HEADER_BYTES + 2 * MIB
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        header = read_header(path, FILES)
        assert header.committed
        assert header.nbytes == 2 * MIB
        assert path.read_bytes()[SLAB_HEADER_BYTES:] == pages(MIB) + bytes(MIB)
    with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock) as slab:
        assert slab.nbytes == MIB, "the size that the commit recorded"


def test_a_failed_growth_gives_the_room_back(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = committed(small_disk)
    before, room = path.read_bytes(), os.statvfs(small_disk).f_bfree
    with PathLock(small_disk) as lock, Slab.adopt(path, MIB, lock=lock) as slab:
        with pytest.raises(StorageFull, match="free of"):
            slab.grow(64 * MIB)
        monkeypatch.setattr(directory, "free_bytes", lambda path: 1 << 40)
        with pytest.raises(StorageFull, match="preallocate"):
            slab.grow(64 * MIB)
        assert slab.nbytes == MIB
    assert path.read_bytes() == before
    assert os.statvfs(small_disk).f_bfree >= room - 8, "but for blocks of the file system's own tree"


def test_every_operation_that_fails_leaves_a_committed_slab_as_it_was(tmp_path: Path) -> None:
    path = committed(tmp_path)
    before = path.read_bytes()

    def adopt_and_grow(files: FailingFiles) -> None:
        with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock, files=files) as slab:
            slab.grow(2 * MIB)

    recorded = FailingFiles()
    adopt_and_grow(recorded)
    operations = [operation for operation, _ in recorded.operations]
    assert operations == ["open", "read", "sync directory", "write", "sync"]
    for place in range(len(operations)):
        path.write_bytes(before)
        with nothing_left(), pytest.raises(StorageError, match="EIO"):
            adopt_and_grow(FailingFiles(place))
        assert list(tmp_path.iterdir()) == [path]
        assert path.stat().st_size == len(before)
        assert path.read_bytes()[SLAB_HEADER_BYTES:] == before[SLAB_HEADER_BYTES:]
        with PathLock(tmp_path) as lock, Slab.adopt(path, MIB, lock=lock):
            pass


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    path = committed(tmp_path)
    whole = path.read_bytes()
    uuid = read_header(path, FILES).uuid
    wrong: list[tuple[bytes, type[Exception], str]] = [
        (b"X" + whole[1:], CorruptState, "begins with"),
        (whole[:8] + b"\2" + whole[9:], IncompatibleCheckpoint, "version 2"),
        (whole[:-1], CorruptState, "recorded 1048576"),
        (whole[:4096], CorruptState, "recorded 1048576"),
        (whole[:100], CorruptState, "ends after 100"),
        (SlabHeader(uuid, 0, MIB - 4096, True).pack() + whole[4096:], CorruptState, "recorded"),
        (SlabHeader(uuid, 0, MIB, False).pack() + whole[4096:], IncompatibleCheckpoint, "No commit"),
        (SlabHeader(UUID, 0, MIB, True).pack() + whole[4096:], CorruptState, f"is that of .*{UUID}"),
        (SlabHeader(uuid, 1, MIB, True).pack() + whole[4096:], CorruptState, "is that of infinity-rank1"),
    ]
    for content, error, match in wrong:
        path.write_bytes(content)
        with nothing_left(), PathLock(tmp_path) as lock, pytest.raises(error, match=match):
            Slab.adopt(path, MIB, lock=lock)
        assert path.read_bytes() == content, "refused, and left as it is"
    path.write_bytes(whole)
    renamed = path.rename(tmp_path / "renamed.slab")
    with PathLock(tmp_path) as lock, pytest.raises(CorruptState, match="is that of"):
        Slab.adopt(renamed, MIB, lock=lock)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "missing"])
def test_what_is_no_file_cannot_be_adopted(tmp_path: Path, kind: str) -> None:
    path = committed(tmp_path)
    moved = path.rename(tmp_path / "moved")
    before = moved.read_bytes()
    if kind == "symlink":
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with nothing_left(), PathLock(tmp_path) as lock, pytest.raises(StorageError) as error:
        Slab.adopt(path, MIB, lock=lock)
    assert error.value.path == str(path)
    assert os.path.lexists(path) == (kind != "missing")
    assert moved.read_bytes() == before
