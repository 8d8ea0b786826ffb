"""Tests of durable NVMe tiers: where pages lie, what a commit records of them, and what keeps the files."""

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
    FILES,
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

from infinity.aio import BACKENDS
from infinity.errors import (
    BudgetError,
    ConfigError,
    StorageError,
)
from infinity.tiers import NvmeTier
from infinity.tiers.slab_header import SLAB_HEADER_BYTES, read_header


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("durable", [False, True])
def test_the_first_lease_begins_at_zero(tmp_path: Path, count: int, durable: bool) -> None:
    """The durable range is leased first, so that its offsets are the volume's."""
    paths = directories(tmp_path, count)
    for nbytes in (1, PAGE, SIZE):
        with NvmeTier(
            budgets(paths), SIZE, speeds=[1.0] * count, stripe_bytes=STRIPE, durable=durable
        ) as tier:
            first = tier.lease(nbytes)
            assert first.offset == 0
            if nbytes < SIZE:
                assert tier.lease(1).offset == -(-nbytes // PAGE) * PAGE, "and the next follows it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_lie_behind_the_header(tmp_path: Path, backend: str) -> None:
    paths = directories(tmp_path, 2)
    with NvmeTier(
        budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=True, backend=backend
    ) as tier:
        assert tier.budget == SIZE
        assert not tier.keep
        lease = tier.lease(SIZE)
        tier.write(lease, CONTENT).result()
        tier.sync().result()
        extents = tier.extents(lease)
        assert min(extent.offset for extent in extents) == SLAB_HEADER_BYTES
        pieces = (
            Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
            for extent in extents
        )
        assert b"".join(pieces) == CONTENT.numpy().tobytes()
        for slab in tier.slabs:
            assert not read_header(slab.path, FILES).committed
            assert slab.path.stat().st_size == SLAB_HEADER_BYTES + slab.nbytes
    assert files_in(paths) == []


def test_the_record_says_all_that_the_map_needs(tmp_path: Path) -> None:
    paths = directories(tmp_path, 3)
    with NvmeTier(budgets(paths), SIZE, speeds=[2.0, 1.0, 1.0], stripe_bytes=STRIPE, durable=True) as tier:
        record = tier.record
        assert record.stripe_bytes == STRIPE
        assert [slab.weight for slab in record.slabs] == [2, 1, 1]
        assert [slab.nbytes for slab in record.slabs] == [slab.nbytes for slab in tier.slabs]
        assert [slab.uuid for slab in record.slabs] == [slab.uuid for slab in tier.slabs]
        assert record.nbytes == tier.budget
    with NvmeTier(budgets(paths), SIZE, speeds=[1.0] * 3) as plain:
        for use in (lambda: plain.record, plain.mark_committed):
            with pytest.raises(ConfigError, match="not durable"):
                use()


def test_a_path_without_a_share_is_not_in_the_record(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    with NvmeTier(
        {paths[0]: PAGE, paths[1]: 8 * MIB}, SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=True
    ) as tier:
        assert [os.fspath(slab.directory) for slab in tier.slabs] == [paths[1]]
        assert len(tier.record.slabs) == 1
        assert os.listdir(paths[0]) == []


def test_the_header_counts_against_the_budget(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    with pytest.raises(BudgetError) as error:
        NvmeTier({path: MIB}, MIB, durable=True)
    assert error.value.needed == MIB + SLAB_HEADER_BYTES
    with NvmeTier({path: error.value.needed}, MIB, durable=True) as tier:
        assert sum(slab.path.stat().st_size for slab in tier.slabs) == error.value.needed
    (tmp_path / "two").mkdir()
    two = directories(tmp_path / "two", 2)
    with NvmeTier(
        budgets(two, MIB + SLAB_HEADER_BYTES), 2 * MIB, speeds=[1.0] * 2, stripe_bytes=STRIPE, durable=True
    ) as tier:
        assert [slab.path.stat().st_size for slab in tier.slabs] == [MIB + SLAB_HEADER_BYTES] * 2


def test_only_a_commit_keeps_the_files(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    tier = NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=True)
    tier.mark_committed()
    tier.mark_committed()
    assert tier.keep
    assert all(read_header(slab.path, FILES).committed for slab in tier.slabs)
    kept = [os.fspath(slab.path) for slab in tier.slabs]
    del tier
    gc.collect()
    assert files_in(paths) == sorted(kept)


def test_a_forgotten_tier_removes_its_files(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    with NvmeTier(budgets(paths), SIZE, adopt=record) as tier:
        assert tier.keep
        tier.forget()
        assert not tier.keep
        check_content(tier)
    assert files_in(paths) == []


def test_plain_and_durable_tiers_leave_a_commit_alone(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    record = commit(paths)
    committed = {path: Path(path).read_bytes() for path in files_in(paths)}
    for durable in (False, True):
        with NvmeTier(budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=durable) as tier:
            tier.write(tier.lease(SIZE), torch.zeros(SIZE, dtype=torch.uint8)).result()
        assert {path: Path(path).read_bytes() for path in files_in(paths)} == committed
    check_adoptable(paths, record)


def test_every_operation_that_fails_leaves_no_new_slab(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)

    def use(files: FailingFiles) -> None:
        with NvmeTier(
            budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=True, files=files
        ) as tier:
            tier.mark_committed()
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
    assert failed == len(recorded.operations) - 2 - 4, "all but the texts of two locks, and four removals"


def test_a_mark_that_fails_keeps_nothing(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    files = FailingFiles()
    with NvmeTier(
        budgets(paths), SIZE, speeds=[1.0, 1.0], stripe_bytes=STRIPE, durable=True, files=files
    ) as tier:
        files.fail_at = len(files.operations) + 3  # the sync of the second slab's header
        with pytest.raises(StorageError):
            tier.mark_committed()
        assert not tier.keep
    assert files_in(paths) == []
