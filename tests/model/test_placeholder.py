"""Tests of placeholders, the tensors that stand in for the values of evicted parameters.

They can have any shape and dtype, take almost no memory, and read as NaN where the dtype has it. On a device,
the test driver notices writes to them.
"""

import ctypes
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice, compute_uses
from process_resources import nothing_left

from infinity.errors import BudgetError, DeviceError, InfinityError
from infinity.model import placeholder
from infinity.model.placeholder import CpuMapping, Placeholders
from infinity.tiers.driver import Driver, emulated

CPU = torch.device("cpu")
MIB = 1 << 20
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("infinity-standin")


def kib(field: str, file: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"{file} has no {field}")


def proportional_share() -> int:
    """Return the KiB of anonymous and shared memory that the kernel charges to this process.

    Memory that n processes map counts 1/n (PSS). Mapped files are left out: their share changes when another
    process that maps torch's libraries ends.
    """
    return kib("Pss_Anon", "/proc/self/smaps_rollup") + kib("Pss_Shmem", "/proc/self/smaps_rollup")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((5,), (1,)),
        ((0, 3), (3, 1)),
        ((3, 4), (1, 3)),
        ((2, 3, 4, 5), (60, 1, 15, 3)),
        ((1,), (7,)),
    ],
)
def test_exactly_the_shape_strides_and_type(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = Placeholders(CPU, 4096).of(shape, stride, dtype)
    assert tensor.shape == shape
    assert tensor.stride() == stride
    assert tensor.dtype == dtype
    assert tensor.device == CPU
    assert not tensor.requires_grad
    if tensor.dim() == 4:
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_reads_as_nan(dtype: torch.dtype) -> None:
    placeholders = Placeholders(CPU, 3 * MIB)
    count = 3 * MIB // dtype.itemsize
    # float8 has no isnan, so the values are converted first
    assert placeholders.of((count,), (1,), dtype).to(torch.complex64).isnan().all()
    assert placeholders.of((3 * MIB,), (1,), torch.int8).eq(-1).all()


def test_all_share_one_storage() -> None:
    placeholders = Placeholders(CPU, 100)
    first, second = placeholders.of((3,), (1,), torch.float32), placeholders.of((7,), (1,), torch.bfloat16)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == placeholders.nbytes


@pytest.mark.parametrize("largest", [0, 1, MIB, MIB + 1, 5 * MIB])
def test_at_least_the_bytes_asked_for(largest: int) -> None:
    placeholders = Placeholders(CPU, largest)
    assert largest <= placeholders.nbytes <= largest + MIB
    assert placeholders.of((largest,), (1,), torch.uint8).numel() == largest
    assert placeholders.of((), (), torch.float64).isnan()


def test_beyond_them_is_refused() -> None:
    placeholders = Placeholders(CPU, MIB)
    with pytest.raises(RuntimeError, match="resiz"):
        placeholders.of((placeholders.nbytes + 1,), (1,), torch.uint8)


def test_a_parameter_takes_it_even_from_inference_mode() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    with torch.inference_mode():
        tensor = Placeholders(CPU, 32).of((4, 2), (2, 1), torch.float32)
    assert not tensor.is_inference()
    parameter.data = tensor
    assert parameter.isnan().all()
    with torch.device("meta"):
        assert Placeholders(CPU, 32).of((4,), (1,), torch.float32).device == CPU


def test_a_gibibyte_holds_no_memory() -> None:
    Placeholders(CPU, MIB).of((1,), (1,), torch.int8).item()  # loads whatever the first placeholder needs
    before = kib("VmRSS", "/proc/self/status")
    placeholders = Placeholders(CPU, 1 << 30)
    tensor = placeholders.of((1 << 14, 1 << 14), (1 << 14, 1), torch.float32)
    assert tensor.nbytes == 1 << 30
    assert tensor.is_contiguous()
    assert placeholders.held == MIB
    assert kib("VmRSS", "/proc/self/status") - before < 8 * 1024
    # Each mapping of the one chunk counts in RSS once it is read. Its proportional share (PSS) shows what
    # is held.
    before = proportional_share()
    assert tensor[: 1 << 11].view(torch.int8).eq(-1).all()
    gc.collect()
    assert proportional_share() - before < 64 * 1024


def test_a_stray_write_harms_nobody_else() -> None:
    placeholders = Placeholders(CPU, 4 * MIB)
    written = placeholders.of((MIB,), (1,), torch.float32)
    written[0] = 1.0
    assert written[0] == 1
    assert written[1024:].isnan().all(), "neither the rest of it nor the shared chunk"


def test_a_forked_process_may_read() -> None:
    tensor = Placeholders(CPU, 2 * MIB).of((1000,), (1,), torch.float32)
    child = os.fork()
    if child == 0:
        os._exit(0 if tensor[0].isnan() and tensor[999].isnan() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_memory_goes_with_the_last_tensor() -> None:
    gc.collect()
    before = mappings()
    placeholders = Placeholders(CPU, 8 * MIB)
    tensor = placeholders.of((2,), (1,), torch.float32)
    assert mappings() == before + 8
    del placeholders
    gc.collect()
    assert mappings() == before + 8
    assert tensor.isnan().all()
    del tensor
    gc.collect()
    assert mappings() == before


def test_mappings_stay_few() -> None:
    mapping = CpuMapping(5000 * MIB)
    try:
        assert mapping.chunk == 2 * MIB
        assert mapping.nbytes == 5000 * MIB
    finally:
        mapping.release()


def test_addresses_that_the_kernel_does_not_grant() -> None:
    with nothing_left(), pytest.raises(InfinityError, match="maps no 64 PiB"):
        CpuMapping(1 << 56)


def test_a_mapping_that_fails_gives_its_addresses_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[tuple[int, int]] = []

    class Libc:
        def mmap(self, address: int | None, *rest: Any) -> int:
            return 1 << 40 if address is None else ctypes.c_void_p(-1).value

        def munmap(self, address: int, nbytes: int) -> int:
            released.append((address, nbytes))
            return 0

    monkeypatch.setattr(placeholder, "_libc", Libc)
    with pytest.raises(InfinityError, match=r"vm\.max_map_count"):
        CpuMapping(3 * MIB)
    assert released == [(1 << 40, 3 * MIB)]


def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(InfinityError, match="Too many open files"):
        CpuMapping(MIB)


GRANULE = 4096
"""The granularity of address mappings in the test driver, in bytes."""
OPPOSITES = {
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemCreate": "cuMemRelease",
    "cuMemMap": "cuMemUnmap",
}
MADE = [
    "cuCtxSynchronize",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    *3 * ["cuMemMap"],
    "cuMemSetAccess",
    "cuMemsetD8_v2",
    "cuCtxSynchronize",
]
RELEASED = ["cuCtxSynchronize", *3 * ["cuMemUnmap"], "cuMemRelease", "cuMemAddressFree"]


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    gc.collect()  # frees the stand-ins that earlier tests left
    made = EmulatedDevice(1)
    with made.in_use():
        yield made
    assert made.left == []


def test_the_driver_calls_of_a_stand_in_on_a_device(device: EmulatedDevice) -> None:
    placeholders = Placeholders(CPU, 2 * GRANULE + 1)
    assert (placeholders.nbytes, placeholders.held) == (3 * GRANULE, GRANULE)
    assert device.calls == MADE
    tensor = placeholders.of((3, GRANULE), (GRANULE, 1), torch.int8)
    del placeholders
    assert tensor.eq(-1).all()
    assert device.calls == MADE
    assert len(device.left) == 2
    del tensor
    assert device.calls == MADE + RELEASED, "once, and in the order opposite to how it came"


def test_one_chunk_is_behind_all_addresses_of_a_device(device: EmulatedDevice) -> None:
    memory = device.driver.repeat(GRANULE, 2, 7)
    bytes_of = (ctypes.c_ubyte * (2 * GRANULE)).from_address(memory.address)
    assert set(bytes_of) == {7}
    memory.release()
    memory.release()
    assert device.count("cuMemUnmap") == 2
    for chunk, count in ((0, 1), (GRANULE, 0)):
        with pytest.raises(ValueError, match="at least once"):
            device.driver.repeat(chunk, count, 7)


@pytest.mark.parametrize("number", range(1, 9))
def test_whichever_call_fails_nothing_is_left(device: EmulatedDevice, number: int) -> None:
    call = MADE[number]
    nth = MADE[: number + 1].count(call)
    device.fail(call, 801, nth)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_NOT_SUPPORTED, 801") as caught:
        Placeholders(CPU, 3 * GRANULE)
    assert caught.value.call == call.removesuffix("_v2")
    assert "CUDA 11" in caught.value.cure
    assert device.calls[: number + 1] == MADE[: number + 1]
    undone = [OPPOSITES[name] for name in reversed(MADE[:number]) if name in OPPOSITES]
    assert device.calls[number + 1 :] == undone


def test_work_that_failed_before_is_not_blamed_on_the_mapping(device: EmulatedDevice) -> None:
    for nth in (1, 2):
        device.fail("cuCtxSynchronize", 700, nth)
        with pytest.raises(DeviceError, match="cuCtxSynchronize"):
            Placeholders(CPU, GRANULE)
    assert device.left == []


def test_no_memory_is_a_matter_of_the_budget(device: EmulatedDevice) -> None:
    device.fail("cuMemCreate", 2)
    with pytest.raises(BudgetError, match="cuMemCreate") as caught:
        Placeholders(CPU, GRANULE)
    assert "device budget" in caught.value.cure


def test_a_release_that_fails_still_releases_the_rest() -> None:
    device = EmulatedDevice(2)
    memory = device.driver.repeat(GRANULE, 2, 0xFF)
    device.fail("cuMemUnmap", 1)
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        memory.release()
    # The addresses are still mapped in part, so the driver refuses to free them: this is the second error.
    assert device.calls[-4:] == ["cuMemUnmap", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    memory.release()
    assert len(device.calls) == 10


def test_a_write_to_a_stand_in_of_a_device_is_seen() -> None:
    device = EmulatedDevice(3)
    with emulated(device.driver, device.compute):
        tensor = Placeholders(CPU, GRANULE).of((8,), (1,), torch.float32)
    assert device.violations == []
    tensor[1] = 0.0
    (found,) = device.violations
    assert "written at byte 4" in found and "stand-in" in found


def test_a_stand_in_that_is_written_to_and_gone_is_seen_too() -> None:
    device = EmulatedDevice(3)
    with emulated(device.driver, device.compute):
        tensor = Placeholders(CPU, GRANULE).of((8,), (1,), torch.float32)
    tensor[:] = 0.0
    del tensor
    assert device.left == []
    assert len(device.violations) == 1


def test_memory_that_kernels_may_still_read_is_not_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release of a placeholder's memory waits for kernels that may still read the memory.

    With that wait, the emulated device reports no use of unmapped memory. With the wait taken away, it
    reports one.
    """

    class Hasty:
        def __init__(self, driver: Driver) -> None:
            self._driver = driver

        def synchronize(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._driver, name)

    for wait, expected in ((True, 0), (False, 1)):
        device = EmulatedDevice(4)
        driver: Any = device.driver if wait else Hasty(device.driver)
        monkeypatch.setattr(placeholder, "driver_of", lambda _, driver=driver: driver)
        placeholders = Placeholders(CPU, GRANULE)
        compute_uses(device, torch.zeros(4), writes=True)
        del placeholders
        assert device.left == []
        assert len(device.violations) == expected
