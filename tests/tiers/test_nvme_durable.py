"""Tests of NVMe tiers that are committed: what a commit records of them, and what keeps the files."""

from __future__ import annotations

import errno
import gc
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

from infinity.errors import StorageError
from infinity.tiers import NvmeTier
from infinity.tiers.slab import slab_name


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_lease_begins_at_zero(tmp_path: Path, count: int) -> None:
    """The durable range is leased first, so that its offsets are the volume's."""
    paths = directories(tmp_path, count)
    for nbytes in (1, PAGE, SIZE):
        with NvmeTier(budgets(paths), SIZE, speeds=[1.0] * count, stripe_bytes=STRIPE) as tier:
            first = tier.lease(nbytes)
            assert first.offset == 0
            if nbytes < SIZE:
                assert tier.lease(1).offset == -(-nbytes // PAGE) * PAGE, "and the next follows it"


def test_the_record_says_all_that_the_map_needs(tmp_path: Path) -> None:
    paths = directories(tmp_path, 3)
    with NvmeTier(budgets(paths), SIZE, speeds=[2.0, 1.0, 1.0], stripe_bytes=STRIPE) as tier:
        record = tier.record
        assert record.stripe_bytes == STRIPE
        assert [slab.weight for slab in record.slabs] == [2, 1, 1]
        assert [slab.nbytes for slab in record.slabs] == [slab.nbytes for slab in tier.slabs]
        assert [slab.uuid for slab in record.slabs] == [slab.uuid for slab in tier.slabs]
        assert record.nbytes == tier.budget


def test_a_path_without_a_share_is_not_in_the_record(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    with NvmeTier({paths[0]: PAGE, paths[1]: 8 * MIB}, SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE) as tier:
        assert [os.fspath(slab.directory) for slab in tier.slabs] == [paths[1]]
        assert len(tier.record.slabs) == 1
        assert os.listdir(paths[0]) == []


def test_only_a_commit_keeps_the_files(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    tier = NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE)
    lease = tier.lease(SIZE)
    tier.write(lease, CONTENT).result()
    for _ in range(2):
        tier.commit()
        assert tier.keep
    kept = [os.fspath(slab.path) for slab in tier.slabs]
    assert [os.path.basename(path) for path in kept] == [slab_name(0, slab.uuid) for slab in tier.slabs]
    back = torch.empty(SIZE, dtype=torch.uint8)
    tier.read(lease, back).result()
    assert torch.equal(back, CONTENT), "the engines go on under the new names"
    assert {extent.path for extent in tier.extents(lease)} == set(kept)
    del tier, lease
    gc.collect()
    assert files_in(paths) == sorted(kept)


def test_a_commit_that_is_undone_leaves_new_slabs(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    with NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE) as tier:
        new = [slab.path for slab in tier.slabs]
        tier.commit()
        tier.uncommit()
        assert not tier.keep
        assert [slab.path for slab in tier.slabs] == new
        tier.commit()
        assert tier.keep
        tier.uncommit()
    assert files_in(paths) == []


def test_a_forgotten_tier_removes_its_files(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    with NvmeTier(budgets(paths), SIZE, adopt=record) as tier:
        assert tier.keep
        tier.forget()
        assert not tier.keep
        check_content(tier)
    assert files_in(paths) == []


def test_another_tier_leaves_a_commit_alone(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    committed = {path: Path(path).read_bytes() for path in files_in(paths)}
    with NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE) as tier:
        tier.write(tier.lease(SIZE), torch.zeros(SIZE, dtype=torch.uint8)).result()
        assert {path: Path(path).read_bytes() for path in committed} == committed
    assert {path: Path(path).read_bytes() for path in files_in(paths)} == committed
    check_adoptable(paths, record)


def test_every_operation_that_fails_leaves_no_new_slab(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)

    def use(files: FailingFiles) -> None:
        with NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, files=files) as tier:
            tier.commit()
            tier.forget()

    recorded = FailingFiles()
    use(recorded)
    failed = 0
    for place in range(len(recorded.operations)):
        files = FailingFiles(place)
        with nothing_left():
            try:
                use(files)
            except StorageError as error:
                assert error.errno == errno.EIO
                failed += 1
        assert files.failed is not None
        leftover = [name for name in map(os.path.basename, files_in(paths)) if name.endswith(".slab")]
        assert leftover == ([files.failed[1]] if files.failed[0] == "remove" and leftover else [])
        for path in paths:
            shutil.rmtree(path)
            os.mkdir(path)
    assert failed == len(recorded.operations) - 4, "all but the removals of two slabs and two locks"


@pytest.mark.parametrize("place, syncs", [(1, False), (2, True)], ids=["rename", "sync"])
def test_a_commit_of_slabs_that_fails_keeps_nothing(tmp_path: Path, place: int, syncs: bool) -> None:
    paths = directories(tmp_path, 2)
    files = FailingFiles()
    with NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, files=files) as tier:
        files.fail_at = len(files.operations) + place
        with pytest.raises(StorageError):
            tier.commit()
        assert files.failed is not None
        assert files.failed[0] == ("sync directory" if syncs else "rename")
        assert (tier.keep, tier.sync_failed) == (False, syncs)
        if not syncs:
            tier.commit()
            tier.uncommit()
    assert files_in(paths) == []
