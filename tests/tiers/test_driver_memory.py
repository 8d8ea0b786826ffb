"""Tests of memory in the driver for tests: which wrong uses of registered RAM and of mapped addresses it
reports, that it lists memory that is never given back, and that a training gives all of its memory back.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice, compute_uses, host_uses
from homes import evict_all
from random_programs import Blocks, Place, adamw, budget_of, program_of, stepped, trained

import infinity
from infinity.errors import DeviceError
from infinity.tiers import arena as arena_module

ROOT = Path(infinity.__file__).parent
SIZE = 1 << 12
GRANULE = 4096


@pytest.fixture(params=[False, True], ids=["stepped", "threads"])
def device(request: pytest.FixtureRequest) -> Iterator[EmulatedDevice]:
    gc.collect()
    yield EmulatedDevice(5, threads=request.param)


class Registered:
    """A host tensor `host` that is registered with the driver, a tensor `there` that stands for device
    memory, and a stream.

    `up` queues a copy from `host` to `there` on the stream, `down` one in the other direction. Both return
    the copy's event.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self.driver = device.driver
        self.host, self.there = torch.ones(SIZE), torch.zeros(SIZE)
        self.driver.register_host(self.host.data_ptr(), self.host.nbytes)
        self.stream = self.driver.stream()

    def up(self) -> Any:
        return self.stream.transfer(self.there.data_ptr(), self.host.data_ptr(), self.host.nbytes)

    def down(self) -> Any:
        return self.stream.transfer(self.host.data_ptr(), self.there.data_ptr(), self.host.nbytes)

    def unregister(self) -> None:
        self.driver.unregister_host(self.host.data_ptr())


@pytest.mark.parametrize("direction", ["up", "down"])
def test_memory_is_not_unregistered_while_a_copy_is_under_way(device: EmulatedDevice, direction: str) -> None:
    bench = Registered(device)
    device.hold(bench.stream)
    getattr(bench, direction)()
    bench.unregister()
    device.let_go(bench.stream)
    bench.stream.synchronize()
    (found,) = device.violations
    assert "unregistering" in found and "copy" in found


def test_a_copy_that_is_done_and_unseen_to_be_is_under_way(device: EmulatedDevice) -> None:
    bench = Registered(device)
    with device.unseen():
        bench.up().synchronize()
    bench.unregister()
    assert len(device.violations) == 1


@pytest.mark.parametrize("wait", ["event", "stream", "device"])
def test_memory_may_be_unregistered_after_its_copies(device: EmulatedDevice, wait: str) -> None:
    bench = Registered(device)
    event = bench.up()
    {"event": event.synchronize, "stream": bench.stream.synchronize, "device": device.driver.synchronize}[
        wait
    ]()
    bench.unregister()
    assert device.violations == []
    assert device.left == []


@pytest.mark.parametrize("waits", [False, True])
def test_the_whole_device_is_waited_for(device: EmulatedDevice, waits: bool) -> None:
    other = torch.zeros(SIZE)
    compute_uses(device, other, writes=True)
    bench = Registered(device)
    bench.up()
    if waits:
        bench.driver.synchronize()
        assert torch.equal(bench.there, bench.host)
    for memory in (bench.there, other):
        host_uses(device, memory, writes=True)
    assert len(device.violations) == (0 if waits else 2)
    bench.driver.synchronize()
    bench.unregister()


def test_what_is_never_unregistered_is_left(device: EmulatedDevice) -> None:
    bench = Registered(device)
    (found,) = device.left
    assert found == f"{bench.host.nbytes} bytes at 0x{bench.host.data_ptr():x}, registered"
    device.reset(1)
    assert device.left == [], "that of a test before is not this one's"
    bench.unregister()


def test_copies_from_and_to_memory_that_is_not_registered_are_counted(device: EmulatedDevice) -> None:
    bench = Registered(device)
    bench.up()
    bench.down()
    assert device.unregistered_copies == 0
    other = torch.zeros(SIZE)
    bench.stream.copy(bench.there.data_ptr(), other.data_ptr(), other.nbytes)
    assert device.unregistered_copies == 1
    half = bench.host.data_ptr() + bench.host.nbytes // 2
    bench.stream.copy(bench.there.data_ptr(), half, bench.host.nbytes // 2)
    assert device.unregistered_copies == 1
    bench.driver.synchronize()
    bench.unregister()
    bench.up().synchronize()
    assert device.unregistered_copies == 2


def test_mapped_addresses_are_no_end_of_a_copy(device: EmulatedDevice) -> None:
    memory = device.driver.repeat(GRANULE, 2, 0xFF)
    stream, other = device.driver.stream(), torch.zeros(8)
    stream.copy(other.data_ptr(), memory.address + GRANULE, other.nbytes)
    (found,) = device.violations
    assert "copy reads 32 bytes" in found and "stand-in" in found
    stream.copy(memory.address, other.data_ptr(), other.nbytes)
    device.driver.synchronize()
    assert any("copy writes 32 bytes" in each for each in device.violations)
    memory.release()
    assert device.left == []


def test_mapped_addresses_are_used_by_nobody(device: EmulatedDevice) -> None:
    memory = device.driver.repeat(GRANULE, 1, 0xFF)
    device.compute.touched(memory.address, 16, writes=False, label="page")
    device.driver.touched_by_host(memory.address, 16, writes=True, label="chunk")
    placeholders = [each for each in device.violations if "stand-in" in each]
    assert len(placeholders) == 2
    assert "compute: page reads" in placeholders[0] and "host: chunk writes" in placeholders[1]
    device.driver.synchronize()
    memory.release()


def test_addresses_beside_what_is_mapped_are_refused(device: EmulatedDevice) -> None:
    """If the release of mapped memory fails half-way, some of its addresses have no memory any more. A copy
    from such an address must raise DeviceError.
    """
    memory = device.driver.repeat(GRANULE, 2, 0xFF)
    other = torch.zeros(8)
    device.fail("cuMemUnmap", 1, 2)
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        memory.release()
    assert len(device.left) == 2
    stream = device.driver.stream()
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.copy(other.data_ptr(), memory.address + GRANULE, other.nbytes)


def test_a_chunk_that_is_no_whole_granule_is_refused(device: EmulatedDevice) -> None:
    assert device.driver.granularity == GRANULE
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        device.driver.repeat(GRANULE - 1, 1, 0xFF)
    assert device.left == []


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["host", "mixed", "device", "nvme"])
@pytest.mark.parametrize("update", ["lazy", "eager"])
def test_a_training_registers_and_maps_through_the_driver_and_leaves_nothing(home: str, update: str) -> None:
    gc.collect()
    device = EmulatedDevice(7)
    with device.in_use():
        trained(2, Place(home, update))
    assert device.left == []
    assert device.violations == []
    assert device.count("cuMemHostRegister_v2") == device.count("cuMemHostUnregister") == 1
    for made, ended in (
        ("cuMemAddressReserve", "cuMemAddressFree"),
        ("cuMemCreate", "cuMemRelease"),
        ("cuMemMap", "cuMemUnmap"),
    ):
        assert device.count(made) == device.count(ended) > 0
    assert device.count("cuMemMap") > 1, "or nobody maps a chunk again"
    edits = sum(step.edited is not None for step in program_of(2, update))
    assert device.unregistered_copies <= edits, "only what code outside writes comes into ordinary RAM"


def test_sums_of_squares_come_to_registered_memory() -> None:
    device = EmulatedDevice(7)
    with device.in_use():
        trained(5, Place("device", "lazy", kernels=True))
    steps = program_of(5, "lazy")
    edits = sum(step.edited is not None for step in steps)
    assert any(step.limit is not None for step in steps)
    assert device.unregistered_copies <= edits


def opened(device: EmulatedDevice, between: Callable[[Any], object] = lambda runtime: None) -> None:
    model = Blocks()
    with (
        device.in_use(),
        infinity.offload(model, adamw(model), budget=budget_of(Place("host")), device="cpu") as runtime,
    ):
        stepped(model, runtime)
        between(runtime)


def test_all_copies_of_a_training_go_from_and_to_registered_memory() -> None:
    device = EmulatedDevice(11)
    opened(device)
    assert device.count("cuMemcpyAsync") > 10
    assert device.unregistered_copies == 0
    assert device.left == []


def test_a_training_without_registration_warns_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_said", set())
    device = EmulatedDevice(8)
    device.fail("cuMemHostRegister_v2", 2)
    plans: list[str] = []
    with pytest.warns(UserWarning, match="memlock"):
        opened(device, lambda runtime: plans.append(str(runtime.plan)))
    assert "off: registration of RAM with CUDA (cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in plans[0]
    assert device.count("cuMemHostUnregister") == 0
    assert device.unregistered_copies > 10, "and none of its copies went beside compute"
    assert device.left == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Saved activations take")
        opened(device)


def test_a_training_without_priorities_of_streams_says_so_and_trains() -> None:
    device, plans = EmulatedDevice(12), []
    device.fail("cuCtxGetStreamPriorityRange", 801)
    opened(device, lambda runtime: plans.append(str(runtime.plan)))
    assert "off: priorities of streams (cuCtxGetStreamPriorityRange: CUDA_ERROR_NOT_SUPPORTED" in plans[0]
    opened(device, lambda runtime: plans.append(str(runtime.plan)))
    assert "off:" not in plans[1]
    assert device.left == []


def test_a_training_that_finds_no_memory_for_stand_ins_leaves_nothing() -> None:
    device = EmulatedDevice(9)
    device.fail("cuMemCreate", 2)
    with pytest.raises(infinity.BudgetError, match="evicted parameters"):
        opened(device)
    assert device.left == []
    opened(device)


def test_a_stray_write_in_a_training_is_seen() -> None:
    def stray(runtime: Any) -> None:
        evict_all(runtime._components.prefetch_engine)
        page = next(each for each in runtime._components.pages if each.residency is None)
        page._placeholders[0].view(-1)[0] = 1.0

    device = EmulatedDevice(10)
    with pytest.raises(AssertionError, match="stand-in"):
        opened(device, stray)


def test_no_call_of_the_cuda_driver_goes_around_the_table() -> None:
    names = re.compile(r"cudart|libcuda|\bcu[A-Z]\w+\(")
    found = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        for line in file.read_text().splitlines()
        if names.search(line)
    }
    assert found == {"tiers/driver.py"}
