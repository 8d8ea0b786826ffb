"""Tests of the NVMe tier on disks that fail or are full.

A failing request must raise StorageError or StorageFull, and other requests must still succeed. No slab file
may be left behind.
"""

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch
from nvme_tiers import MIB, PAGE, directories, random_bytes

from infinity.aio import BACKENDS, Engine, Faults
from infinity.errors import ConfigError, StorageError, StorageFull
from infinity.tiers import NvmeTier


def test_a_device_error_comes_out_of_its_future_alone(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    faults = Faults()
    with NvmeTier({path: MIB}, MIB, faults=faults) as tier:
        lease = tier.lease(PAGE)
        page = torch.full((PAGE,), 5, dtype=torch.uint8)
        faults.fail("write", 1, errno.EIO)
        faults.fail("write", 2, errno.ENOSPC)
        with pytest.raises(StorageError, match="write") as error:
            tier.write(lease, page).result()
        assert (error.value.errno, error.value.offset) == (errno.EIO, 0)
        with pytest.raises(StorageFull):
            tier.write(lease, page).result()
        tier.write(lease, page).result()
        back = torch.empty_like(page)
        tier.read(lease, back).result()
        assert torch.equal(back, page)
        faults.fail("sync", 1, errno.EIO)
        with pytest.raises(StorageError, match="EIO"):
            tier.sync().result()
    assert os.listdir(path) == []


def test_closing_with_requests_in_flight_leaves_nothing(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    faults = Faults()
    faults.delay("any", 1, 0.2, times=None)
    page = torch.zeros(MIB, dtype=torch.uint8)
    tier = NvmeTier({path: 8 * MIB}, 8 * MIB, faults=faults, depth=2, block_bytes=PAGE)
    futures = [tier.write(tier.lease(MIB), page) for _ in range(4)]
    tier.close()
    tier.close()
    assert all(future.done() for future in futures)
    assert any(isinstance(future.exception(), StorageError) for future in futures)
    assert os.listdir(path) == []


def test_one_bad_path_leaves_nothing_on_the_good_ones(tmp_path: Path) -> None:
    good, bad = directories(tmp_path, 2)
    os.rmdir(bad)
    with pytest.raises(StorageError):
        NvmeTier({good: 8 * MIB, bad: 8 * MIB}, 8 * MIB, speeds=[1.0, 1.0], stripe_bytes=MIB)
    with pytest.raises(StorageError):
        NvmeTier({good: 8 * MIB, bad: 8 * MIB}, 8 * MIB)
    assert os.listdir(good) == []


def test_the_speed_probe_keeps_to_the_budget(small_disk: Path) -> None:
    first, second = directories(small_disk, 2)
    with NvmeTier({first: 8 * MIB, second: 8 * MIB}, 4 * MIB) as tier:
        assert tier.budget <= 16 * MIB


def test_a_full_disk_leaves_nothing_on_the_others(tmp_path: Path, small_disk: Path) -> None:
    (roomy,) = directories(tmp_path, 1)
    budgets = {roomy: 128 * MIB, os.fspath(small_disk): 128 * MIB}
    with pytest.raises(StorageFull) as error:
        NvmeTier(budgets, 128 * MIB, speeds=[1.0, 1.0])
    assert error.value.path.startswith(os.fspath(small_disk))
    assert os.listdir(roomy) == []
    assert list(small_disk.glob("*.slab")) == []


def fill_up(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(MIB))


def test_a_disk_that_fills_later_does_not_reach_the_slab(small_disk: Path) -> None:
    """Writes to a slab (the NVMe tier's file in a directory) succeed although the disk has become full.

    The tier allocates the whole slab when it is opened. The bytes read back must be those written.
    """
    with NvmeTier({os.fspath(small_disk): 8 * MIB}, 8 * MIB) as tier:
        fill_up(small_disk)
        lease = tier.lease(8 * MIB)
        content = random_bytes(8 * MIB, 1)
        tier.write(lease, content).result()
        tier.sync().result()
        back = torch.empty_like(content)
        tier.read(lease, back).result()
        assert torch.equal(back, content)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_grows_on_a_full_disk_fails_typed_and_alone(small_disk: Path, backend: str) -> None:
    (small_disk / "whole").write_bytes(bytes(4 * PAGE))
    (small_disk / "growing").touch()
    with Engine(small_disk, backend=backend) as engine:
        whole, growing = (engine.open(small_disk / name) for name in ("whole", "growing"))
        fill_up(small_disk)
        page = torch.ones(16 * MIB, dtype=torch.uint8)
        with pytest.raises(StorageFull) as error:
            growing.write(page, 0).result()
        assert error.value.errno == errno.ENOSPC
        assert error.value.path == os.fspath(small_disk / "growing")
        whole.write(page[: 4 * PAGE], 0).result()
        back = torch.zeros(4 * PAGE, dtype=torch.uint8)
        whole.read(back, 0).result()
        assert bool((back == 1).all())


def test_an_unknown_engine_leaves_nothing(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    with pytest.raises(ConfigError, match="spdk"):
        NvmeTier({path: MIB}, MIB, backend="spdk")
    assert os.listdir(path) == []
