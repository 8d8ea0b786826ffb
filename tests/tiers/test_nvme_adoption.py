"""Tests of the adoption of a committed NVMe tier's slabs by a later tier.

The pages must be found again, byte for byte, wherever the slabs were moved. Whatever is wrong must be a typed
error that leaves every committed slab as it was.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from durable_tiers import (
    CONTENT,
    SIZE,
    STRIPE,
    budgets,
    check_adoptable,
    check_content,
    commit,
    files_in,
)
from failing_files import FailingFiles
from nvme_tiers import MIB, PAGE, directories
from process_resources import nothing_left

from infinity.errors import (
    BudgetError,
    ConfigError,
    CorruptState,
    IncompatibleCheckpoint,
    InfinityError,
    StorageError,
    StorageFull,
)
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier, remove_slab
from infinity.tiers.slab import slab_name


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_slabs_are_adopted_in_any_order_from_any_paths(tmp_path: Path, order: tuple[int, ...]) -> None:
    paths = directories(tmp_path, 3)
    record = commit(paths)
    (tmp_path / "moved").mkdir()
    moved = directories(tmp_path / "moved", 4)
    for place, path in zip(order, paths, strict=True):
        (file,) = os.listdir(path)
        shutil.move(os.path.join(path, file), moved[place])
    with NvmeTier(budgets(moved), SIZE, adopt=record) as tier:
        assert tier.record == record
        assert [os.fspath(slab.directory) for slab in tier.slabs] == [moved[place] for place in order]
        assert tier.budget == record.nbytes
        check_content(tier)
        assert len(tier.locks) == 4
    assert len(files_in(moved)) == 3
    assert files_in(paths) == []


def test_all_slabs_may_lie_in_one_directory(tmp_path: Path) -> None:
    paths = directories(tmp_path, 3)
    record = commit(paths)
    for path in paths[1:]:
        (file,) = os.listdir(path)
        shutil.move(os.path.join(path, file), paths[0])
    whole = sum(slab.nbytes for slab in record.slabs)
    with pytest.raises(BudgetError) as error:
        NvmeTier({paths[0]: whole - PAGE}, SIZE, adopt=record)
    assert (error.value.needed, error.value.tier) == (whole, "nvme")
    assert f"Give {paths[0]} {whole} bytes" in error.value.cure
    with NvmeTier({paths[0]: whole}, SIZE, adopt=record) as tier:
        check_content(tier)
        with pytest.raises(StorageError, match="in use by this process") as busy:
            NvmeTier({paths[0]: 8 * MIB}, MIB)
        assert busy.value.errno == errno.EBUSY
    check_adoptable(paths[:1], record)


def test_a_missing_slab_is_named_with_the_directories_that_were_searched(tmp_path: Path) -> None:
    paths = directories(tmp_path, 3)
    record = commit(paths)
    with nothing_left(), pytest.raises(IncompatibleCheckpoint) as error:
        NvmeTier(budgets(paths[:2]), SIZE, adopt=record)
    assert record.slabs[2].uuid in error.value.cause
    assert paths[0] in error.value.cause
    assert paths[1] in error.value.cause
    assert "nvme budget" in error.value.cure
    with pytest.raises(IncompatibleCheckpoint):
        NvmeTier(budgets(paths), SIZE, rank=1, adopt=record)
    check_adoptable(paths, record)


def test_a_copied_slab_is_refused(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    (file,) = os.listdir(paths[0])
    shutil.copy(os.path.join(paths[0], file), paths[1])
    with nothing_left(), pytest.raises(IncompatibleCheckpoint, match="2 times"):
        NvmeTier(budgets(paths), SIZE, adopt=record)
    os.unlink(os.path.join(paths[0], file))
    check_adoptable(paths, record)


@pytest.mark.parametrize("kind", ["shrunk", "symlink", "fifo"])
def test_a_slab_that_is_not_the_commit_s_is_refused(tmp_path: Path, kind: str) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    slab = record.slabs[1]
    path = Path(paths[1]) / slab_name(0, slab.uuid)
    whole = path.read_bytes()
    saved = path.rename(tmp_path / "saved")
    if kind == "symlink":
        path.symlink_to(saved)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(whole[:-PAGE])
    errors = (StorageError, CorruptState)
    with nothing_left(), pytest.raises(errors) as error:
        NvmeTier(budgets(paths), SIZE, adopt=record)
    assert slab.uuid in str(error.value)
    assert os.path.lexists(path), "what a commit names is never reclaimed"
    assert saved.read_bytes() == whole
    saved.replace(path)
    check_adoptable(paths, record)


def test_adopted_slabs_grow_and_never_shrink(tmp_path: Path) -> None:
    paths = directories(tmp_path, 3)
    record = commit(paths)
    with NvmeTier(budgets(paths), PAGE, adopt=record) as tier:
        assert tier.record == record
    with NvmeTier(budgets(paths), 2 * SIZE, adopt=record) as tier:
        grown = tier.record
        assert tier.budget >= 2 * SIZE
        assert [slab.uuid for slab in grown.slabs] == [slab.uuid for slab in record.slabs]
        assert all(new.nbytes > old.nbytes for new, old in zip(grown.slabs, record.slabs, strict=True))
        for slab in tier.slabs:
            assert slab.path.stat().st_size == slab.nbytes
        check_content(tier)
        behind = tier.lease(tier.budget)
        tier.write(behind, torch.zeros(MIB, dtype=torch.uint8), offset=tier.budget - MIB).result()
    check_adoptable(paths, record)
    check_adoptable(paths, grown)


def test_a_single_slab_grows_to_the_page(tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    record = commit(paths)
    with NvmeTier(budgets(paths), SIZE + 1, adopt=record) as tier:
        assert tier.budget == SIZE + PAGE
        check_content(tier)


def test_growth_keeps_to_the_budgets(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    before = {path: Path(path).read_bytes() for path in files_in(paths)}
    with nothing_left(), pytest.raises(BudgetError) as error:
        NvmeTier({paths[0]: 8 * MIB, paths[1]: MIB}, 2 * SIZE, adopt=record)
    assert {path: Path(path).read_bytes() for path in files_in(paths)} == before
    needed = error.value.needed
    assert needed is not None
    with NvmeTier({paths[0]: 8 * MIB, paths[1]: needed}, 2 * SIZE, adopt=record) as tier:
        check_content(tier)


def test_a_full_disk_lets_no_slab_grow(tmp_path: Path, small_disk: Path) -> None:
    """The slab on the roomy disk, which grew first, gives its room back."""
    (roomy,) = directories(tmp_path, 1)
    paths = [roomy, os.fspath(small_disk)]
    record = commit(paths)
    sizes = {slab.uuid: slab.nbytes for slab in record.slabs}
    with nothing_left(), pytest.raises(StorageFull) as error:
        NvmeTier(budgets(paths, 256 * MIB), 128 * MIB, adopt=record)
    assert error.value.path.startswith(os.fspath(small_disk))
    for path, slab in zip(paths, record.slabs, strict=True):
        assert (Path(path) / slab_name(0, slab.uuid)).stat().st_size == sizes[slab.uuid]
    check_adoptable(paths, record)


def test_two_tiers_of_one_process_are_refused_unless_one_is_beside_the_other(tmp_path: Path) -> None:
    """A resume under other units streams from the old slabs into new ones in the same directories."""
    paths = directories(tmp_path, 2)
    record = commit(paths)
    old = NvmeTier(budgets(paths), SIZE, adopt=record)
    arguments = {"speeds": [1.0, 1.0], "stripe_bytes": STRIPE}
    with pytest.raises(StorageError, match="in use by this process"):
        NvmeTier(budgets(paths), SIZE, **arguments)
    new = NvmeTier(budgets(paths), SIZE, shared=old.locks, **arguments)
    again = NvmeTier(budgets(paths), SIZE, adopt=record, shared=new.locks)
    assert len(files_in(paths)) == 6, "two slabs and a lock in each: nothing was removed"
    again.close()
    lease = new.lease(SIZE)
    new.write(lease, CONTENT).result()
    check_content(old)
    new.commit()
    old.forget()
    record = new.record
    new.close()
    with pytest.raises(StorageError, match="in use by this process"):
        NvmeTier(budgets(paths), SIZE, **arguments)
    old.close()
    assert len(files_in(paths)) == 2
    check_adoptable(paths, record)


def test_a_superseded_slab_is_removed_beside_the_running_tier(tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    superseded, record = commit(paths), commit(paths)
    with NvmeTier(budgets(paths), SIZE, adopt=record) as tier:
        lock = tier.locks[Path(paths[0]).resolve()]
        remove_slab(lock, superseded.slabs[0].uuid, DiskFiles())
        check_content(tier)
    assert [os.path.basename(path) for path in files_in(paths)] == [slab_name(0, record.slabs[0].uuid)]


def test_one_directory_given_twice_is_refused(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    record = commit([path])
    (tmp_path / "link").symlink_to(path)
    twice = budgets([path, os.fspath(tmp_path / "link")])
    for arguments in ({"adopt": record}, {"speeds": [1.0, 1.0], "stripe_bytes": STRIPE}):
        with nothing_left(), pytest.raises(StorageError, match="in use by this process"):
            NvmeTier(twice, SIZE, **arguments)
    check_adoptable([path], record)


def test_every_operation_that_fails_leaves_a_commit_as_it_was(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    before = {path: Path(path).read_bytes() for path in files_in(paths)}

    def use(files: FailingFiles) -> None:
        with NvmeTier(budgets(paths), 2 * SIZE, adopt=record, files=files) as tier:
            assert tier.budget >= 2 * SIZE

    recorded = FailingFiles()
    use(recorded)
    failed = 0
    for place in range(len(recorded.operations)):
        for path, content in before.items():
            Path(path).write_bytes(content)
        with nothing_left():
            try:
                use(FailingFiles(place))
            except StorageError as error:
                failed += 1
                assert error.errno == errno.EIO
                assert {path: os.path.getsize(path) for path in before} == {
                    path: len(content) for path, content in before.items()
                }, "the room went back"
        for path, content in before.items():
            assert Path(path).read_bytes()[: len(content)] == content
        check_adoptable(paths, record)
    assert failed == len(recorded.operations) - 2, "all but the removals of two locks"


def test_an_engine_that_cannot_open_lets_no_slab_grow(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    before = {path: os.path.getsize(path) for path in files_in(paths)}
    with nothing_left(), pytest.raises(InfinityError):
        NvmeTier(budgets(paths), 2 * SIZE, adopt=record, backend="spdk")
    assert {path: os.path.getsize(path) for path in files_in(paths)} == before


def test_what_is_no_size_is_refused(tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    record = commit(paths)
    for nbytes in (0, -1):
        with pytest.raises(ConfigError):
            NvmeTier(budgets(paths), nbytes, adopt=record)
    check_adoptable(paths, record)
