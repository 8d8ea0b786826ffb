"""Tests of slab files, the files of the NVMe tier.

A slab takes all its room on the disk when it is opened, has one owner, and leaves no file behind. A path that
cannot be used raises a typed error.
"""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from process_resources import nothing_left

from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.system import directory
from infinity.tiers.slab import Slab

MIB = 1 << 20


def test_the_room_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    with Slab(tmp_path, 4 * MIB + 1, rank=3) as slab:
        status = slab.path.stat()
        assert slab.path.name == "infinity-rank3.slab"
        assert status.st_size == slab.nbytes == 4 * MIB + 4096
        assert status.st_blocks * 512 >= slab.nbytes, "preallocated, not sparse"
        assert status.st_mode & 0o777 == 0o600
    slab.close()
    assert list(tmp_path.iterdir()) == []


def test_a_kept_slab_stays_and_is_reclaimed_by_the_next(tmp_path: Path) -> None:
    slab = Slab(tmp_path, MIB)
    slab.path.write_bytes(b"x" * 100)
    slab.keep = True
    slab.close()
    assert [file.name for file in tmp_path.iterdir()] == ["infinity-rank0.slab"], "the lock is gone"
    with Slab(tmp_path, 2 * MIB) as again:
        assert again.path.stat().st_size == 2 * MIB
        assert again.path.read_bytes()[:100] == bytes(100)
    assert not slab.path.exists()


def test_ranks_and_directories_are_apart(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB, rank=0) as first, Slab(tmp_path, MIB, rank=1) as second:
        assert first.path != second.path


def run_owner(directory: Path, then: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(f"""
        import os, sys, time
        from infinity.tiers.slab import Slab
        slab = Slab({str(directory)!r}, {MIB})
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
            Slab(tmp_path, MIB)
        assert error.value.errno == errno.EBUSY
        assert "directory of its own" in error.value.cure
        assert (tmp_path / "infinity-rank0.slab").stat().st_size == MIB, "the owner's file is untouched"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with Slab(tmp_path, 2 * MIB) as reclaimed:
        assert reclaimed.path.stat().st_size == 2 * MIB


def test_this_process_cannot_own_a_slab_twice(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB), pytest.raises(StorageError, match="in use by this process"):
        Slab(tmp_path, MIB)


def test_a_forked_child_does_not_remove_the_parents_slab(tmp_path: Path) -> None:
    with Slab(tmp_path, MIB) as slab:
        child = os.fork()
        if child == 0:
            slab.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slab.path.exists()
        with pytest.raises(StorageError):
            Slab(tmp_path, MIB)


def test_a_slab_removed_and_made_again_by_others_is_left_alone(tmp_path: Path) -> None:
    slab = Slab(tmp_path, MIB)
    slab.path.unlink()
    slab.path.write_text("of others")
    slab.close()
    assert slab.path.read_text() == "of others"


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as error:
        Slab(tmp_path / "absent", MIB)
    assert error.value.errno == errno.ENOENT
    assert "Create the directory" in error.value.cure


@pytest.mark.parametrize(
    ("path", "error"),
    [("x" * 300, StorageError), ("nul\0byte", ConfigError)],
    ids=["too long", "a NUL"],
)
def test_paths_that_are_none(tmp_path: Path, path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Slab(f"{tmp_path}/{path}", MIB)


def as_another_user(tmp_path: Path, path: Path) -> str:
    """Open a slab in `path` as the user nobody, and return the text of the StorageError that this raises.

    If the test does not run as root, the present user opens the slab.
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
            Slab(path, MIB)
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
    slab = Slab(tmp_path, MIB)
    del slab
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        Slab(tmp_path / "file", MIB)


def test_a_read_only_file_system(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="EROFS") as error:
        Slab(small_disk, MIB)
    assert "read-only" in error.value.cure


def test_ram_is_no_disk(ram_disk: Path) -> None:
    with pytest.raises(StorageError, match="which is RAM") as error:
        Slab(ram_disk, MIB)
    assert "disk" in error.value.cure
    assert list(ram_disk.iterdir()) == []


def test_a_symbolic_link_in_the_slabs_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "infinity-rank0.slab").symlink_to(victim)
    with pytest.raises(StorageError):
        Slab(tmp_path, MIB)
    assert victim.read_text() == "precious"


def test_more_than_the_disk_has_free(small_disk: Path) -> None:
    with pytest.raises(StorageFull, match="free of") as error:
        Slab(small_disk, 64 * MIB)
    assert error.value.errno == errno.ENOSPC
    assert list(small_disk.glob("*.slab")) == []
    with Slab(small_disk, 16 * MIB):
        pass


def test_a_disk_that_fills_during_preallocation(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs(small_disk)
    monkeypatch.setattr(directory, "free_bytes", lambda path: 1 << 40)  # a stale answer
    with pytest.raises(StorageFull, match="preallocate"):
        Slab(small_disk, 64 * MIB)
    assert list(small_disk.glob("*.slab")) == []
    assert os.statvfs(small_disk).f_bfree == room.f_bfree, "the room came back"


@pytest.mark.parametrize("nbytes", [0, -4096])
def test_a_slab_without_bytes(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError):
        Slab(tmp_path, nbytes)
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    with nothing_left():
        for _ in range(5):
            with Slab(tmp_path, MIB), pytest.raises(StorageError):
                Slab(tmp_path, MIB)
            with pytest.raises(StorageFull):
                Slab(tmp_path, 1 << 60)
