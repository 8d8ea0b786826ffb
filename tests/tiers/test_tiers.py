"""Tests of the memory tiers: a tier takes exactly the bytes of its budget, leases are aligned, and unified
memory leases pages of the host arena. Where there is a GPU, tiers in its memory are tested too.
"""

import contextlib
import gc
import mmap
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulated_device import EmulatedDevice

from infinity import _tiers
from infinity.errors import BudgetError, ConfigError
from infinity.system import machine
from infinity.tiers import CpuDeviceTier, HostArena, MemoryTier, Tier, UnifiedTier, open_device
from infinity.tiers import arena as arena_module
from infinity.tiers.arena import register_with_cuda
from infinity.tiers.driver import cuda_driver
from infinity.tiers.pool import tensor_over

PAGE = 4096
MIB = 1 << 20
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mapping_of(address: int) -> dict[str, str]:
    """Return the fields of /proc/self/smaps, by name, for the mapping that starts at `address`.

    Returns {} if no mapping starts there.
    """
    record: dict[str, str] = {}
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                if record:
                    return record
                start, end = (int(part, 16) for part in head.split("-"))
                if start == address:
                    record["bytes"] = str(end - start)
            elif record:
                name, _, value = line.partition(":")
                record[name] = value.strip()
    return record


def test_the_arena_maps_exactly_its_budget_on_a_huge_page_boundary() -> None:
    with HostArena(5 * MIB + PAGE) as arena:
        assert arena.region.address % (2 * MIB) == 0
        assert arena.region.nbytes == 5 * MIB + PAGE
        assert arena.region.resident_bytes() == 0, "untouched memory costs nothing"


@pytest.mark.parametrize(("advised", "flag"), [(True, "hg"), (False, "nh")])
def test_the_kernel_was_told_about_huge_pages_and_forks(advised: bool, flag: str) -> None:
    if machine.transparent_huge_pages() == "absent":
        pytest.skip("this kernel has no transparent huge pages")
    with HostArena(64 * MIB + PAGE, huge_pages=advised) as arena:
        flags = mapping_of(arena.region.address)["VmFlags"].split()
        assert flag in flags
        assert "dc" in flags, "a fork must not inherit the arena"


def test_populate_brings_every_page_in() -> None:
    with HostArena(4 * MIB, populate=True) as arena:
        assert arena.region.resident_bytes() == 4 * MIB


def test_closing_unmaps_once_the_last_alias_is_gone() -> None:
    arena = HostArena(3 * MIB + PAGE)
    address = arena.region.address
    tensor = arena.pool("pages", MIB).lease(MIB).residency().fill_(5)
    arena.close()
    arena.close()
    assert int(tensor[-1]) == 5
    assert mapping_of(address)
    del tensor
    assert not mapping_of(address)


def test_pools_are_carved_from_the_budget_and_no_further() -> None:
    with HostArena(8 * PAGE) as arena:
        first = arena.pool("first", 5 * PAGE - 7)
        assert first.nbytes == 5 * PAGE
        assert arena.free_bytes == 3 * PAGE
        with pytest.raises(BudgetError) as error:
            arena.pool("second", 3 * PAGE + 1)
        assert error.value.needed == 9 * PAGE
        arena.pool("second", 3 * PAGE)
        assert arena.free_bytes == 0
        with first.lease(1):
            assert [pool.leased for pool in arena.pools.values()] == [PAGE, 0]
    with HostArena(9 * PAGE) as arena:
        arena.pool("first", 5 * PAGE)
        arena.pool("second", 3 * PAGE + 1)


def test_pools_of_one_arena_do_not_overlap() -> None:
    with HostArena(8 * PAGE) as arena:
        small = arena.pool("small", 3 * 256).lease(3 * 256)
        large = arena.pool("large", 4 * PAGE).lease(4 * PAGE)
        assert small.offset + small.nbytes <= large.offset
        assert large.address % PAGE == 0


def test_a_pool_of_negative_size() -> None:
    with HostArena(8 * PAGE) as arena, pytest.raises(ConfigError):
        arena.pool("pages", -1)


@pytest.mark.parametrize("misalignment", [0, 512, 1536])
def test_pools_align_in_the_address_space_wherever_the_region_starts(misalignment: int) -> None:
    """A lease's address is a multiple of its tier's granule, also in a region that is aligned to 512 bytes.

    torch's CUDA allocator promises no stricter alignment of the region than this.
    """
    block = torch.empty(16 * PAGE, dtype=torch.uint8)
    start = -(-block.data_ptr() // PAGE) * PAGE + misalignment
    region = _tiers.adopt(start, 8 * PAGE, device_kind=1, device_index=0, owner=block)
    with MemoryTier(Tier.DEVICE, region, 8 * PAGE, granule=512) as tier:
        assert tier.pool("small", 1000).lease(1).address % 512 == 0
        assert tier.pool("large", 2 * PAGE).lease(1).address % 512 == 0
        tier.pool("rest", tier.free_bytes)
        assert tier.free_bytes == 0


def test_names_are_unique_and_closed_tiers_say_so() -> None:
    arena = HostArena(8 * PAGE)
    arena.pool("pages", PAGE)
    with pytest.raises(ConfigError, match="pages"):
        arena.pool("pages", PAGE)
    arena.close()
    with pytest.raises(ConfigError, match="closed"):
        arena.pool("more", PAGE)
    with pytest.raises(ConfigError, match="closed"):
        _ = arena.region


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_arena_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError):
        HostArena(nbytes)


@pytest.mark.alone
def test_more_than_the_machine_has_fails_before_anything_is_taken() -> None:
    usable = machine.memory().usable
    for make in (HostArena, CpuDeviceTier):
        with pytest.raises(BudgetError, match="at most"):
            make(2 * usable)


@pytest.mark.alone
def test_memory_promised_to_one_tier_is_not_promised_again() -> None:
    usable = machine.memory().usable
    with HostArena(usable * 7 // 10) as host:
        for make in (lambda: HostArena(usable // 2), lambda: open_device("cpu", usable // 2, host)):
            with pytest.raises(BudgetError, match="at most"):
                make()
    with CpuDeviceTier(usable // 2), HostArena(usable // 4):
        pass
    with HostArena(usable * 7 // 10):
        pass


def test_touched_memory_is_not_counted_twice() -> None:
    gc.collect()
    before = _tiers.unbacked_bytes()
    with HostArena(64 * MIB, huge_pages=False) as arena:
        assert _tiers.unbacked_bytes() - before == 64 * MIB
        arena.pool("pages", MIB).lease(MIB).residency().fill_(1)
        assert _tiers.unbacked_bytes() - before == 63 * MIB
    assert _tiers.unbacked_bytes() == before


def test_a_mapping_the_kernel_refuses_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: SimpleNamespace(usable=1 << 62))
    with pytest.raises(BudgetError, match="grants no"):
        HostArena(1 << 60)


def test_a_cpu_device_tier_has_bytes_of_its_own() -> None:
    with HostArena(4 * PAGE) as host, open_device("cpu", 8 * PAGE, host) as device:
        assert isinstance(device, CpuDeviceTier)
        assert device.tier is Tier.DEVICE
        assert not device.shares_host
        page = device.pool("pages", 8 * PAGE).lease(8 * PAGE)
        assert not host.region.address <= page.address < host.region.address + host.region.nbytes
        assert host.free_bytes == 4 * PAGE


def test_unified_memory_leases_pages_of_the_host_arena() -> None:
    with HostArena(4 * PAGE) as host, open_device("cpu", None, host) as device:
        assert isinstance(device, UnifiedTier)
        assert device.shares_host
        pool = device.pool("pages", 3 * PAGE)
        page = pool.lease(PAGE)
        assert host.region.address <= page.address < host.region.address + host.region.nbytes
        assert list(host.pools.values()) == list(device.pools.values()) == [pool]
        assert pool.leased == PAGE
        assert device.free_bytes == host.free_bytes == PAGE
        with pytest.raises(BudgetError):
            device.pool("more", 2 * PAGE)


@pytest.mark.parametrize("device", ["meta", "mps", "gpu", "cuda:99"])
def test_devices_that_are_no_tier(device: str) -> None:
    with HostArena(PAGE) as host, pytest.raises(ConfigError):
        open_device(device, None, host)
    with pytest.raises(ConfigError):
        HostArena(PAGE, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_a_typed_error() -> None:
    with HostArena(PAGE) as host, pytest.raises(ConfigError, match="cuda"):
        open_device("cuda", None, host)


def test_the_huge_page_probe_decides_by_its_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = arena_module.probe_huge_pages.__wrapped__
    monkeypatch.setattr(machine, "transparent_huge_pages", lambda: "madvise")
    for gain, helps in ((1.3, True), (1.0, True), (0.9, False)):
        monkeypatch.setattr(arena_module, "_time_passes", lambda huge, gain=gain: 1.0 if huge else gain)
        assert (probe().helps, probe().speedup) == (helps, pytest.approx(gain))
    monkeypatch.setattr(machine, "transparent_huge_pages", lambda: "never")
    assert not probe().helps
    assert "never" in probe().reason


def test_an_arena_without_huge_pages_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = arena_module.HugePageProbe(False, None, "there are none")
    monkeypatch.setattr(arena_module, "probe_huge_pages", lambda: probe)
    with HostArena(64 * MIB) as large, HostArena(MIB) as small:
        assert not large.huge_pages and large.off == ["huge pages (there are none)"]
        assert small.off == [], "too small for any"


def test_the_huge_page_probe_really_runs() -> None:
    result = arena_module.probe_huge_pages()
    assert result.reason
    assert result.speedup is None or result.speedup > 0


@pytest.mark.parametrize("code", [0, 2])
def test_registration_with_cuda_lasts_as_long_as_the_mapping(code: int) -> None:
    """An arena that is registered with CUDA is unregistered when the last tensor over its memory is deleted.

    This holds even if the arena was never closed. code: what the driver's call cuMemHostRegister returns, 0
    for success. After an error nothing is unregistered.
    """
    device = EmulatedDevice()
    arena = HostArena(PAGE)
    if code:
        device.fail("cuMemHostRegister_v2", code)
    with device.in_use():
        registration = register_with_cuda(arena.region, device.driver, torch.device("cpu"))
    assert registration.done == (code == 0)
    alias = arena.pool("pages", PAGE).lease(1).residency()
    del arena
    gc.collect()
    calls = [each for each in device.calls if "Register" in each]
    assert calls == ["cuMemHostRegister_v2"]
    assert len(device.left) == (1 if code == 0 else 0)
    del alias
    gc.collect()
    expected = ["cuMemHostRegister_v2", "cuMemHostUnregister"]
    calls = [each for each in device.calls if "egister" in each]
    assert calls == expected[: 2 if code == 0 else 1]
    assert device.left == []


def in_three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have arenas of at least 6 MiB registered by three threads."""
    monkeypatch.setattr(arena_module, "_PINNED_AT_ONCE", 2 * MIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))


def test_a_large_arena_is_registered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    in_three_pieces(monkeypatch)
    device = EmulatedDevice()
    arena = HostArena(6 * MIB + PAGE)
    with device.in_use():
        found = register_with_cuda(arena.region, device.driver, torch.device("cpu"))
    assert found.done and found.seconds > 0
    assert [int(each.split()[0]) for each in device.left] == [4 * MIB, 2 * MIB + PAGE]
    assert device.count("cuMemcpyAsync") == 2, "over the seam, to the device and back"
    del arena
    gc.collect()
    assert device.left == [] and device.count("cuMemHostUnregister") == 2


@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemcpyAsync", 1), ("cuMemcpyAsync", 2), ("cuMemHostRegister_v2", 2)]
)
def test_pieces_that_cannot_be_used_give_way_to_the_whole(
    call: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_three_pieces(monkeypatch)
    device = EmulatedDevice()
    with HostArena(6 * MIB) as arena, device.in_use():
        device.fail(call, 1, nth=nth)
        assert register_with_cuda(arena.region, device.driver, torch.device("cpu")).done
        assert [int(each.split()[0]) for each in device.left] == [6 * MIB]


def test_a_registration_that_fails_says_why() -> None:
    device = EmulatedDevice()
    device.fail("cuMemHostRegister_v2", 2)
    with HostArena(PAGE) as arena:
        reason = register_with_cuda(arena.region, device.driver, torch.device("cpu")).reason
        assert "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in reason


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery"])
def test_a_registration_whose_bytes_do_not_come_back_is_undone(call: str) -> None:
    device = EmulatedDevice()
    with device.in_use(), HostArena(3 * PAGE, device="cpu") as arena:
        assert arena.cuda_registration.done and arena.off == []
        assert int(tensor_over(arena.region).sum()) == 0, "the trial leaves nothing behind"
    device.fail(call, 719)
    with device.in_use(), pytest.warns(UserWarning, match=call), HostArena(3 * PAGE, device="cpu") as arena:
        assert not arena.cuda_registration.done
        assert call.removesuffix("_v2") in arena.off[0]
    assert device.left == []


def test_a_registration_that_brings_other_bytes_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    with device.in_use(), pytest.warns(UserWarning, match="other bytes"):
        HostArena(3 * PAGE, device="cpu").close()
    assert device.count("cuMemHostUnregister") == 1 and device.left == []


def test_another_process_reads_a_shared_arena_and_cannot_write_it() -> None:
    """The memory lives as long as a process maps it, and its pages count as this arena's."""
    with HostArena(3 * MIB + PAGE, shared=True) as arena:
        assert arena.region.address % (2 * MIB) == 0
        assert arena.region.resident_bytes() == 0
        memory = arena.pool("pages", MIB).lease(MIB).residency().fill_(5)
        assert arena.region.resident_bytes() == MIB
        before = _tiers.unbacked_bytes()
        path = f"/proc/{os.getpid()}/fd/{arena.region.descriptor}"
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, MIB)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(OSError, match="Invalid argument"):
            _tiers.map_window(descriptor, 4 * MIB)
        window = tensor_over(_tiers.map_window(descriptor, arena.region.nbytes))
        os.close(descriptor)
        assert "dc" in mapping_of(window.data_ptr())["VmFlags"].split(), "a fork must not inherit it"
        memory[7] = 9
        assert window[7] == 9 and window[8] == 5 and _tiers.unbacked_bytes() == before
        arena.region.close_descriptor()
        assert arena.region.descriptor == -1 and not os.path.exists(path)
    del memory
    assert window[7] == 9, "the last mapping keeps the memory"


def test_a_private_arena_has_no_descriptor_and_an_ordinary_file_is_no_window(tmp_path: Path) -> None:
    with HostArena(PAGE) as arena:
        assert arena.region.descriptor == -1
    (tmp_path / "file").write_bytes(bytes(PAGE))
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="Invalid argument"):
        _tiers.map_window(file.fileno(), PAGE)


def test_a_registration_that_fails_is_said_once_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """If arenas cannot be registered with CUDA, the first gives a warning with the cure, the second none.

    All bytes of the arena are brought into RAM before the registration. Otherwise CUDA would fault them in
    on one thread.
    """
    emulated = EmulatedDevice()
    device = torch.device("cuda", 0)
    monkeypatch.setattr(arena_module, "usable_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(arena_module, "_numa_node", lambda device: -1)
    monkeypatch.setattr(arena_module, "_said", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(arena_module, "driver_of", lambda device: emulated.driver)
    monkeypatch.setattr(arena_module, "_lost", lambda *_: None)
    emulated.fail("cuMemHostRegister_v2", 2)
    with pytest.warns(UserWarning, match="memlock") as caught, HostArena(5 * PAGE, device=device) as arena:
        assert arena.region.resident_bytes() == 5 * PAGE
        assert not arena.cuda_registration.done
    assert len(caught) == 1 and "CUDA_ERROR_OUT_OF_MEMORY" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulated.fail("cuMemHostRegister_v2", 2)
        HostArena(PAGE, device=device).close()
    monkeypatch.setattr(arena_module, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with HostArena(PAGE, device=device) as arena:
            assert arena.cuda_registration.done
    assert emulated.count("cuMemHostRegister_v2") == 3


def test_a_region_of_somebody_else_returns_to_its_owner() -> None:
    class Owner:
        pass

    dropped: list[int] = []

    class Watched(Owner):
        def __del__(self) -> None:
            dropped.append(1)

    block = torch.empty(4 * PAGE, dtype=torch.uint8)
    start = -(-block.data_ptr() // 64) * 64
    region = _tiers.adopt(start, 2 * PAGE, device_kind=1, device_index=0, owner=Watched())
    pool = _tiers.Pool(region, 0, 2 * PAGE, 64)
    lease = pool.lease(PAGE, 0.0)
    tensor = torch.utils.dlpack.from_dlpack(lease.to_dlpack())
    del region, pool, lease
    assert not dropped
    del tensor
    assert dropped == [1]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 3 * PAGE), (PAGE, 2 * PAGE), (3 * PAGE, 0), (64, PAGE)])
def test_a_pool_lies_inside_its_region(offset: int, nbytes: int) -> None:
    region = _tiers.map_host(2 * PAGE, huge_pages=False)
    with pytest.raises(ValueError, match="pool must"):
        _tiers.Pool(region, offset, nbytes, PAGE)


def test_a_child_does_not_inherit_the_arena() -> None:
    """A forked child does not have the arena's mapping.

    With the mapping, the parent's later writes would copy pages and exceed the budget.
    """
    with HostArena(PAGE) as arena:
        tensor = arena.pool("pages", PAGE).lease(PAGE).residency().fill_(1)
        child = os.fork()
        if child == 0:
            os._exit(0 if not mapping_of(arena.region.address) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert int(tensor.sum()) == PAGE


@needs_cuda
class TestCuda:
    def test_the_tier_takes_exactly_its_budget(self) -> None:
        before = torch.cuda.memory_allocated()
        with HostArena(PAGE) as host, open_device("cuda", 8 * MIB, host) as device:
            assert torch.cuda.memory_allocated() - before == 8 * MIB
            pool = device.pool("pages", 8 * MIB)
            tensor = pool.lease(MIB).residency()
            assert tensor.device.type == "cuda"
            tensor.fill_(3)
            assert int(tensor.sum()) == 3 * MIB
            kept = tensor[5:7]
        del tensor, device, pool
        assert kept.tolist() == [3, 3]
        del kept
        assert torch.cuda.memory_allocated() == before

    def test_small_tiers_after_odd_allocations(self) -> None:
        kept = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (3_000_001, 513, 700_001)]
        with HostArena(PAGE) as host, open_device("cuda", MIB, host) as device:
            assert device.pool("pages", MIB).lease(MIB).residency().fill_(1).sum() == MIB
        assert len(kept) == 3

    def test_everything_that_is_free(self) -> None:
        with HostArena(PAGE) as host, open_device("cuda", None, host) as device:
            assert device.budget > MIB

    def test_a_failed_registration_does_not_poison_the_next_kernel(self) -> None:
        with HostArena(4 * MIB, device="cuda") as host:
            device = torch.device("cuda", torch.cuda.current_device())
            again = register_with_cuda(host.region, cuda_driver(device.index), device)
            assert not again.done
            assert torch.ones(4, device="cuda").sum().item() == 4

    def test_a_budget_beyond_the_device_is_a_budget_error(self) -> None:
        with HostArena(PAGE) as host, pytest.raises(BudgetError, match="at most"):
            open_device("cuda", 1 << 50, host)

    def test_the_arena_is_pinned_for_cuda(self) -> None:
        with HostArena(4 * MIB, device="cuda") as host:
            assert host.cuda_registration.done, host.cuda_registration.reason
            page = host.pool("pages", MIB).lease(MIB).residency()
            assert page.is_pinned()
            page.fill_(9)
            assert int(page.to("cuda", non_blocking=True).sum()) == 9 * MIB
