"""Tests of the NVMe tier on one and on several paths.

Leases must not share bytes, what is written to a lease must be read back, budgets must be kept, and a
closed or forgotten tier must leave no file and no descriptor behind.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvme_tiers import MIB, PAGE, directories, random_bytes
from process_resources import check_nothing_left, resources

from infinity.aio import BACKENDS
from infinity.errors import BudgetError, ConfigError
from infinity.tiers import HostArena, NvmeLease, NvmeTier


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
            with pool.lease(nbytes) as bytes_in_ram:
                source = bytes_in_ram.residency().copy_(random_bytes(nbytes, number))
                lease = tier.lease(nbytes)
                tier.write(lease, source).result()
                pages[number] = lease
            del source
        tier.sync().result()
        for number, lease in pages.items():
            with pool.lease(lease.nbytes) as bytes_in_ram:
                back = bytes_in_ram.residency()
                tier.read(lease, back).result()
                assert torch.equal(back, random_bytes(lease.nbytes, number))
            del back
        assert pool.counters.leased == 0


def test_parts_of_a_lease_and_dtypes(tier: NvmeTier) -> None:
    lease = tier.lease(100_000)
    weights = torch.randn(64, 32, dtype=torch.bfloat16)
    tier.write(lease, torch.zeros(100_000, dtype=torch.uint8)).result()
    tier.write(lease, weights, offset=5000).result()
    back = torch.empty(64, 32, dtype=torch.bfloat16)
    tier.read(lease, back, offset=5000).result()
    assert torch.equal(back, weights)
    edge = torch.empty(100, dtype=torch.uint8)
    tier.read(lease, edge, offset=4950).result()
    assert edge[:50].sum() == 0
    assert torch.equal(edge[50:], weights.view(torch.uint8).flatten()[:50])


def test_extents_name_the_very_bytes(tier: NvmeTier) -> None:
    tier.lease(12345)
    lease = tier.lease(200_000)
    source = random_bytes(200_000, 7)
    tier.write(lease, source).result()
    tier.sync().result()
    found = b""
    for path, offset, nbytes in tier.extents(lease):
        with open(path, "rb") as file:
            file.seek(offset)
            found += file.read(nbytes)
    assert found == source.numpy().tobytes()


def test_the_budget_is_what_the_files_hold(tier: NvmeTier) -> None:
    assert tier.budget >= 4 * MIB
    assert sum(slab.path.stat().st_size for slab in tier.slabs) == tier.budget
    whole = tier.lease(tier.budget)
    assert tier.free_bytes == 0
    with pytest.raises(BudgetError) as error:
        tier.lease(1)
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
        lease = tier.lease(33 * MIB)
        source = random_bytes(33 * MIB, 3)
        tier.write(lease, source).result()
        back = torch.empty_like(source)
        tier.read(lease, back).result()
        assert torch.equal(back, source)
    assert [file for path in paths for file in Path(path).iterdir()] == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=25),
    st.sampled_from(BACKENDS),
    st.data(),
)
def test_leases_never_share_a_byte(
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
                lease = tier.lease(nbytes)
            except BudgetError as error:
                assert error.needed is not None
                assert error.needed > tier.budget
                assert max(nbytes, 1) > tier._spans.largest_free
                continue
            content = random_bytes(nbytes, number)
            tier.write(lease, content).result()
            held[number] = lease, content
            if release:
                gone, _ = held.pop(data.draw(st.sampled_from(sorted(held))))
                gone.release()  # type: ignore[attr-defined]
        for lease, content in held.values():
            back = torch.empty_like(content)
            tier.read(lease, back).result()  # type: ignore[arg-type]
            assert torch.equal(back, content)


def test_budget_errors_name_the_smallest_tier_that_would_do(tmp_path: Path) -> None:
    def fragmented(nbytes: int) -> tuple[NvmeTier, list[NvmeLease]]:
        tier = NvmeTier({os.fspath(tmp_path): 64 * MIB}, nbytes)
        leases = [tier.lease(PAGE) for _ in range(8)]
        for lease in leases[::2]:
            lease.release()
        return tier, leases

    tier, _leases = fragmented(8 * PAGE)
    with tier, pytest.raises(BudgetError) as error:
        tier.lease(2 * PAGE)
    needed = error.value.needed
    assert needed is not None
    tier, _leases = fragmented(needed)
    with tier:
        tier.lease(2 * PAGE)
    tier, _leases = fragmented(needed - PAGE)
    with tier, pytest.raises(BudgetError):
        tier.lease(2 * PAGE)


def test_dropped_leases_and_tiers_give_everything_back(tmp_path: Path) -> None:
    before = resources()
    tier = NvmeTier({os.fspath(tmp_path): MIB}, MIB)
    tier.lease(PAGE)
    assert tier.free_bytes == MIB
    del tier
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    check_nothing_left(before)


def test_a_closed_tier_holds_no_descriptor_and_says_that_it_is_closed(tmp_path: Path) -> None:
    before = resources()
    tier = NvmeTier({os.fspath(tmp_path): MIB}, MIB)
    lease = tier.lease(PAGE)
    tier.close()
    check_nothing_left(before)
    page = torch.zeros(PAGE, dtype=torch.uint8)
    for use in (lambda: tier.read(lease, page), lambda: tier.write(lease, page), tier.sync):
        with pytest.raises(ConfigError, match="closed"):
            use()


def test_a_process_that_forgets_to_close_leaves_nothing(warm: None, tmp_path: Path) -> None:
    running = {}
    for number, end in enumerate(("", "raise RuntimeError", "sys.exit(3)")):
        directory = tmp_path / str(number)
        directory.mkdir()
        program = f"""
import sys
from infinity.tiers import NvmeTier
tier = NvmeTier({{{os.fspath(directory)!r}: {MIB}}}, {MIB})
{end}
"""
        running[directory] = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    for directory, process in running.items():
        process.wait(60)
        assert list(directory.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forget", [False, True], ids=["closed", "dropped"])
def test_a_registered_arena_that_goes_is_never_mistaken_for_the_next(
    tmp_path: Path, backend: str, forget: bool
) -> None:
    """Reads into a new arena are correct, even if it lies at the address of an earlier arena that is gone.

    forget: whether the earlier arena is garbage-collected without being closed. io_uring knows registered
    memory by its address, so a stale registration would be taken for the new arena's.
    """
    with NvmeTier({os.fspath(tmp_path): MIB}, MIB, backend=backend) as tier:
        on_disk = tier.lease(MIB)
        tier.write(on_disk, torch.full((MIB,), 7, dtype=torch.uint8)).result()
        for turn in range(3):
            arena = HostArena(4 * MIB)
            if turn % 2 == 0:
                tier.register(arena)
            with arena.pool("pages", 4 * MIB).lease(MIB) as lease:
                page = lease.residency().fill_(turn)
            tier.read(on_disk, page).result()
            assert int(page.sum(dtype=torch.int64)) == 7 * MIB
            del page
            if not forget:
                arena.close()
            del arena, lease
            gc.collect()


def test_what_lies_outside_a_lease_is_refused(tier: NvmeTier) -> None:
    lease = tier.lease(100)
    for offset, nbytes in ((1, 100), (-1, 10), (0, 101)):
        with pytest.raises(ConfigError, match="outside"):
            tier.read(lease, torch.empty(nbytes, dtype=torch.uint8), offset=offset)
    lease.release()
    with pytest.raises(ConfigError, match="released"):
        tier.write(lease, torch.empty(1, dtype=torch.uint8))
    with pytest.raises(ConfigError):
        tier.lease(-1)


def test_strided_tensors_are_refused(tier: NvmeTier) -> None:
    lease = tier.lease(PAGE)
    with pytest.raises(ConfigError):
        tier.write(lease, torch.zeros(10, 10)[:, ::2])


@pytest.mark.parametrize(
    "arguments",
    [
        {"budgets": {}},
        {"stripe_bytes": 1000},
        {"stripe_bytes": 0},
        {"nbytes": 0},
        {"nbytes": -1},
        {"speeds": []},
        {"speeds": [0.0]},
        {"speeds": [float("nan")]},
        {"budgets": {"/tmp\0x": MIB}},
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, arguments: dict) -> None:
    given = {"budgets": {os.fspath(tmp_path): MIB}, "nbytes": MIB, **arguments}
    with pytest.raises(ConfigError):
        NvmeTier(**given)


def test_less_budget_than_needed(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as error:
        NvmeTier({os.fspath(tmp_path): MIB}, MIB + 1)
    with NvmeTier({os.fspath(tmp_path): error.value.needed}, MIB + 1):
        pass


@pytest.mark.parametrize("number", [1, 3], ids=["one path", "three paths"])
def test_scratch_has_no_name_and_lies_beside_the_pages(tmp_path: Path, number: int) -> None:
    paths = directories(tmp_path, number)
    sizes, speeds = dict.fromkeys(paths, 8 * MIB), [1.0] * number
    (Path(paths[0]) / "infinity-rank0.scratch").write_bytes(b"of a process that was killed while it opened")
    with NvmeTier(sizes, MIB, speeds=speeds, stripe_bytes=PAGE) as tier:
        names = {path: os.listdir(path) for path in paths}
        with NvmeTier(
            sizes, MIB, speeds=speeds, stripe_bytes=PAGE, shared=tier.locks, scratch=True, verify=True
        ) as scratch:
            assert {path: os.listdir(path) for path in paths} == names
            lease, source = scratch.lease(300_001), random_bytes(300_001, 1)
            back = torch.empty_like(source)
            scratch.write(lease, source).result()
            scratch.read(lease, back).result()
            assert torch.equal(back, source)
    assert [file for path in paths for file in Path(path).iterdir()] == []
