"""The NVMe tier: extents on one and several paths, real bytes back, budgets, faults, nothing left behind."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.aio import BACKENDS, Faults
from infinity.errors import BudgetError, ConfigError, StorageError, StorageFull
from infinity.tiers import HostArena, NvmeTier

PAGE = 4096
MIB = 1 << 20


def directories(tmp_path: Path, count: int) -> list[str]:
    made = [tmp_path / f"nvme{number}" for number in range(count)]
    for directory in made:
        directory.mkdir()
    return [os.fspath(directory) for directory in made]


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 3], ids=["one path", "three paths"])
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NvmeTier]:
    paths = directories(tmp_path, request.param)
    speeds = [2.0, 1.0, 1.0][: request.param]
    with NvmeTier(dict.fromkeys(paths, 8 * MIB), 4 * MIB, speeds=speeds, stripe_bytes=2 * PAGE) as tier:
        yield tier
    assert [file for path in paths for file in Path(path).iterdir()] == []


def test_pages_come_back_as_they_went_through_the_tiers(tier: NvmeTier) -> None:
    with HostArena(2 * MIB) as arena:
        tier.register(arena)
        pool = arena.pool("pages", 2 * MIB)
        pages = {}
        for number, nbytes in enumerate((100, PAGE, 300_001, 500_000, 0)):
            with pool.lease(nbytes) as lease:
                source = lease.residency().copy_(random_bytes(nbytes, number))
                extent = tier.extent(nbytes)
                tier.write(extent, source).result()
                pages[number] = extent
            del source
        tier.sync().result()
        for number, extent in pages.items():
            with pool.lease(extent.nbytes) as lease:
                back = lease.residency()
                tier.read(extent, back).result()
                assert torch.equal(back, random_bytes(extent.nbytes, number))
            del back
        assert pool.counters.leased == 0


def test_parts_of_an_extent_and_dtypes(tier: NvmeTier) -> None:
    extent = tier.extent(100_000)
    weights = torch.randn(64, 32, dtype=torch.bfloat16)
    tier.write(extent, torch.zeros(100_000, dtype=torch.uint8)).result()
    tier.write(extent, weights, offset=5000).result()
    back = torch.empty(64, 32, dtype=torch.bfloat16)
    tier.read(extent, back, offset=5000).result()
    assert torch.equal(back, weights)
    edge = torch.empty(100, dtype=torch.uint8)
    tier.read(extent, edge, offset=4950).result()
    assert edge[:50].sum() == 0
    assert torch.equal(edge[50:], weights.view(torch.uint8).flatten()[:50])


def test_places_name_the_very_bytes(tier: NvmeTier) -> None:
    tier.extent(12345)
    extent = tier.extent(200_000)
    source = random_bytes(200_000, 7)
    tier.write(extent, source).result()
    tier.sync().result()
    found = b""
    for path, offset, nbytes in tier.places(extent):
        with open(path, "rb") as file:
            file.seek(offset)
            found += file.read(nbytes)
    assert found == source.numpy().tobytes()


def test_the_budget_is_what_the_files_hold(tier: NvmeTier) -> None:
    assert tier.budget >= 4 * MIB
    assert sum(slab.path.stat().st_size for slab in tier.slabs) == tier.budget
    whole = tier.extent(tier.budget)
    assert tier.free_bytes == 0
    with pytest.raises(BudgetError) as error:
        tier.extent(1)
    assert error.value.needed == tier.budget + PAGE
    whole.release()
    whole.release()
    assert tier.free_bytes == tier.budget


def test_stripes_lie_as_the_speeds_say(tmp_path: Path) -> None:
    fast, slow = directories(tmp_path, 2)
    budgets = {fast: 64 * MIB, slow: 64 * MIB}
    with NvmeTier(budgets, 8 * MIB, speeds=[3.0, 1.0], stripe_bytes=MIB) as tier:
        assert [slab.nbytes for slab in tier.slabs] == [6 * MIB, 2 * MIB]
    with NvmeTier({fast: 64 * MIB, slow: MIB}, 8 * MIB, speeds=[1.0, 1.0], stripe_bytes=MIB) as tier:
        assert [slab.nbytes for slab in tier.slabs] == [7 * MIB, MIB]


def test_speeds_are_measured_where_none_are_given(tmp_path: Path) -> None:
    paths = directories(tmp_path, 2)
    with NvmeTier(dict.fromkeys(paths, 256 * MIB), 64 * MIB) as tier:
        assert sum(slab.nbytes for slab in tier.slabs) >= 64 * MIB
        extent = tier.extent(33 * MIB)
        source = random_bytes(33 * MIB, 3)
        tier.write(extent, source).result()
        back = torch.empty_like(source)
        tier.read(extent, back).result()
        assert torch.equal(back, source)
    assert [file for path in paths for file in Path(path).iterdir()] == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=25),
    st.sampled_from(BACKENDS),
    st.data(),
)
def test_extents_never_share_a_byte(
    tmp_path_factory: pytest.TempPathFactory,
    wishes: list[tuple[int, bool]],
    backend: str,
    data: st.DataObject,
) -> None:
    paths = directories(tmp_path_factory.mktemp("nvme"), 2)
    budgets = dict.fromkeys(paths, MIB)
    with NvmeTier(budgets, 256 << 10, speeds=[1.0, 1.0], stripe_bytes=PAGE, backend=backend) as tier:
        held: dict[int, tuple[object, torch.Tensor]] = {}
        for number, (nbytes, release) in enumerate(wishes):
            try:
                extent = tier.extent(nbytes)
            except BudgetError:
                assert nbytes + PAGE > tier.free_bytes or len(held) > 1
                continue
            content = random_bytes(nbytes, number)
            tier.write(extent, content).result()
            held[number] = extent, content
            if release:
                gone, _ = held.pop(data.draw(st.sampled_from(sorted(held))))
                gone.release()  # type: ignore[attr-defined]
        for extent, content in held.values():
            back = torch.empty_like(content)
            tier.read(extent, back).result()  # type: ignore[arg-type]
            assert torch.equal(back, content)


def test_what_lies_outside_an_extent_is_refused(tier: NvmeTier) -> None:
    extent = tier.extent(100)
    for offset, nbytes in ((1, 100), (-1, 10), (0, 101)):
        with pytest.raises(ConfigError, match="outside"):
            tier.read(extent, torch.empty(nbytes, dtype=torch.uint8), offset=offset)
    extent.release()
    with pytest.raises(ConfigError, match="released"):
        tier.write(extent, torch.empty(1, dtype=torch.uint8))
    with pytest.raises(ConfigError):
        tier.extent(-1)


def test_strided_tensors_are_refused(tier: NvmeTier) -> None:
    extent = tier.extent(PAGE)
    with pytest.raises(ConfigError):
        tier.write(extent, torch.zeros(10, 10)[:, ::2])


def test_a_device_error_comes_out_of_its_future_alone(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    faults = Faults()
    with NvmeTier({path: MIB}, MIB, faults=faults) as tier:
        extent = tier.extent(PAGE)
        page = torch.full((PAGE,), 5, dtype=torch.uint8)
        faults.fail("write", 1, errno.EIO)
        faults.fail("write", 2, errno.ENOSPC)
        with pytest.raises(StorageError, match="write") as error:
            tier.write(extent, page).result()
        assert (error.value.errno, error.value.offset) == (errno.EIO, 0)
        with pytest.raises(StorageFull):
            tier.write(extent, page).result()
        tier.write(extent, page).result()
        back = torch.empty_like(page)
        tier.read(extent, back).result()
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
    futures = [tier.write(tier.extent(MIB), page) for _ in range(4)]
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


def test_a_full_disk_leaves_nothing_on_the_others(tmp_path: Path, small_disk: Path) -> None:
    (roomy,) = directories(tmp_path, 1)
    budgets = {roomy: 128 * MIB, os.fspath(small_disk): 128 * MIB}
    with pytest.raises(StorageFull) as error:
        NvmeTier(budgets, 128 * MIB, speeds=[1.0, 1.0])
    assert error.value.path.startswith(os.fspath(small_disk))
    assert os.listdir(roomy) == []
    assert list(small_disk.glob("*.slab")) == []


def test_an_unknown_engine_leaves_nothing(tmp_path: Path) -> None:
    (path,) = directories(tmp_path, 1)
    with pytest.raises(ConfigError, match="spdk"):
        NvmeTier({path: MIB}, MIB, backend="spdk")
    assert os.listdir(path) == []


@pytest.mark.parametrize("arguments", [{"budgets": {}}, {"stripe_bytes": 1000}, {"stripe_bytes": 0}])
def test_arguments_that_cannot_be_used(tmp_path: Path, arguments: dict) -> None:
    given = {"budgets": {os.fspath(tmp_path): MIB}, "nbytes": MIB, **arguments}
    with pytest.raises(ConfigError):
        NvmeTier(**given)


def test_less_budget_than_needed(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as error:
        NvmeTier({os.fspath(tmp_path): MIB}, MIB + 1)
    with NvmeTier({os.fspath(tmp_path): error.value.needed}, MIB + 1):
        pass
