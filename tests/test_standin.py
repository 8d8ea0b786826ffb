"""Stand-ins of evicted parameters: any shape, no memory, NaN to read, nothing left behind."""

import ctypes
import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from process_resources import nothing_left

from infinity import standin
from infinity.errors import BudgetError, InfinityError
from infinity.standin import SIGNATURES, CpuMapping, CudaDriver, CudaMapping, StandIns

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
    tensor = StandIns(CPU, 4096).of(shape, stride, dtype)
    assert tensor.shape == shape
    assert tensor.stride() == stride
    assert tensor.dtype == dtype
    assert tensor.device == CPU
    assert not tensor.requires_grad
    if tensor.dim() == 4:
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_reads_as_nan(dtype: torch.dtype) -> None:
    stand_ins = StandIns(CPU, 3 * MIB)
    count = 3 * MIB // dtype.itemsize
    # float8 has no isnan of its own.
    assert stand_ins.of((count,), (1,), dtype).to(torch.complex64).isnan().all()
    assert stand_ins.of((3 * MIB,), (1,), torch.int8).eq(-1).all()


def test_all_share_one_storage() -> None:
    stand_ins = StandIns(CPU, 100)
    first, second = stand_ins.of((3,), (1,), torch.float32), stand_ins.of((7,), (1,), torch.bfloat16)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == stand_ins.nbytes


@pytest.mark.parametrize("largest", [0, 1, MIB, MIB + 1, 5 * MIB])
def test_at_least_the_bytes_asked_for(largest: int) -> None:
    stand_ins = StandIns(CPU, largest)
    assert largest <= stand_ins.nbytes <= largest + MIB
    assert stand_ins.of((largest,), (1,), torch.uint8).numel() == largest
    assert stand_ins.of((), (), torch.float64).isnan()


def test_beyond_them_is_refused() -> None:
    stand_ins = StandIns(CPU, MIB)
    with pytest.raises(RuntimeError, match="resiz"):
        stand_ins.of((stand_ins.nbytes + 1,), (1,), torch.uint8)


def test_a_parameter_takes_it_even_from_inference_mode() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    with torch.inference_mode():
        tensor = StandIns(CPU, 32).of((4, 2), (2, 1), torch.float32)
    assert not tensor.is_inference()
    parameter.data = tensor
    assert parameter.isnan().all()
    with torch.device("meta"):
        assert StandIns(CPU, 32).of((4,), (1,), torch.float32).device == CPU


def test_a_gibibyte_holds_no_memory() -> None:
    StandIns(CPU, MIB).of((1,), (1,), torch.int8).item()  # what a first one loads
    before = kib("VmRSS", "/proc/self/status")
    stand_ins = StandIns(CPU, 1 << 30)
    tensor = stand_ins.of((1 << 14, 1 << 14), (1 << 14, 1), torch.float32)
    assert tensor.nbytes == 1 << 30
    assert tensor.is_contiguous()
    assert stand_ins.held == MIB
    assert kib("VmRSS", "/proc/self/status") - before < 8 * 1024
    # Each mapping of the one chunk counts in RSS once it is read; its share (PSS) shows what is held.
    before = kib("Pss", "/proc/self/smaps_rollup")
    assert tensor[: 1 << 11].view(torch.int8).eq(-1).all()
    gc.collect()
    assert kib("Pss", "/proc/self/smaps_rollup") - before < 64 * 1024


def test_a_stray_write_harms_nobody_else() -> None:
    stand_ins = StandIns(CPU, 4 * MIB)
    written = stand_ins.of((MIB,), (1,), torch.float32)
    written[0] = 1.0
    assert written[0] == 1
    assert written[1024:].isnan().all(), "neither the rest of it nor the shared chunk"


def test_a_forked_process_may_read() -> None:
    tensor = StandIns(CPU, 2 * MIB).of((1000,), (1,), torch.float32)
    child = os.fork()
    if child == 0:
        os._exit(0 if tensor[0].isnan() and tensor[999].isnan() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_memory_goes_with_the_last_tensor() -> None:
    gc.collect()
    before = mappings()
    stand_ins = StandIns(CPU, 8 * MIB)
    tensor = stand_ins.of((2,), (1,), torch.float32)
    assert mappings() == before + 8
    del stand_ins
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

    monkeypatch.setattr(standin, "_libc", Libc)
    with pytest.raises(InfinityError, match=r"vm\.max_map_count"):
        CpuMapping(3 * MIB)
    assert released == [(1 << 40, 3 * MIB)]


def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(InfinityError, match="Too many open files"):
        CpuMapping(MIB)


GRANULE = 2 * MIB
BASE = 1 << 40
HANDLE = 77


class FakeCuda:
    """libcuda, with real C calling conventions: records calls, fails the nth with `error`."""

    def __init__(self, *, fail_at: int | None = None, error: int = 1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fail_at = fail_at
        self._error = error
        self._name = ctypes.c_char_p(b"CUDA_ERROR_OF_THE_TEST")
        for name, arguments in SIGNATURES.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
            setattr(self, name, prototype(self._function(name)))

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1][0] = self._name
                return 0
            return self._answer(name, arguments)

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        number = len(self.calls)
        self.calls.append((name, *(self._plain(argument) for argument in arguments)))
        if number == self._fail_at:
            return self._error
        results = {
            "cuMemGetAllocationGranularity": GRANULE,
            "cuMemAddressReserve": BASE,
            "cuMemCreate": HANDLE,
        }
        if name in results:
            arguments[0][0] = results[name]
        return 0

    def _plain(self, argument: Any) -> Any:
        """Structures by their fields, what is written to as None."""
        if isinstance(argument, int):
            return argument
        content = argument[0]
        if isinstance(content, ctypes.Structure):
            return tuple(
                (value.type, value.id) if isinstance(value, ctypes.Structure) else value
                for value in (getattr(content, field[0]) for field in content._fields_)
                if isinstance(value, (int, ctypes.Structure))
            )
        return None


def properties(index: int) -> tuple[Any, ...]:
    pinned, on_device = 1, 1
    return (pinned, 0, (on_device, index), 0, 0, 0)


def test_the_driver_calls_of_a_cuda_stand_in() -> None:
    cuda = FakeCuda()
    mapping = CudaMapping(CudaDriver(cuda), 3, 2 * GRANULE + 1)
    assert (mapping.address, mapping.nbytes, mapping.chunk) == (BASE, 3 * GRANULE, GRANULE)
    read_write = 3
    assert cuda.calls == [
        ("cuMemGetAllocationGranularity", None, properties(3), 0),
        ("cuMemAddressReserve", None, 3 * GRANULE, 0, 0, 0),
        ("cuMemCreate", None, GRANULE, properties(3), 0),
        ("cuMemMap", BASE, GRANULE, 0, HANDLE, 0),
        ("cuMemMap", BASE + GRANULE, GRANULE, 0, HANDLE, 0),
        ("cuMemMap", BASE + 2 * GRANULE, GRANULE, 0, HANDLE, 0),
        ("cuMemSetAccess", BASE, 3 * GRANULE, ((1, 3), read_write), 1),
        ("cuMemsetD8_v2", BASE, 0xFF, GRANULE),
    ]
    cuda.calls.clear()
    mapping.release()
    mapping.release()
    assert cuda.calls == [
        ("cuMemUnmap", BASE + 2 * GRANULE, GRANULE),
        ("cuMemUnmap", BASE + GRANULE, GRANULE),
        ("cuMemUnmap", BASE, GRANULE),
        ("cuMemRelease", HANDLE),
        ("cuMemAddressFree", BASE, 3 * GRANULE),
    ], "once, and in the order opposite to how it came"


def test_the_structures_are_as_large_as_the_drivers() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (standin._AllocationProperties, standin._Access)]
    assert sizes == [32, 12]


OPPOSITES = {
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemCreate": "cuMemRelease",
    "cuMemMap": "cuMemUnmap",
}


@pytest.mark.parametrize("number", range(7))
def test_whichever_call_fails_nothing_is_left(number: int) -> None:
    cuda = FakeCuda(fail_at=number, error=801)
    with pytest.raises(InfinityError, match=r"CUDA_ERROR_OF_THE_TEST \(801\)") as caught:
        CudaMapping(CudaDriver(cuda), 0, 2 * GRANULE)
    assert cuda.calls[number][0] in str(caught.value)
    done = [call[0] for call in cuda.calls[:number]]
    undone = [call[0] for call in cuda.calls[number + 1 :]]
    assert undone == [OPPOSITES[name] for name in reversed(done) if name in OPPOSITES]


def test_no_memory_is_a_matter_of_the_budget() -> None:
    with pytest.raises(BudgetError, match="cuMemCreate"):
        CudaMapping(CudaDriver(FakeCuda(fail_at=2, error=2)), 0, 1)


def test_a_release_that_fails_still_releases_the_rest() -> None:
    cuda = FakeCuda(fail_at=6)
    mapping = CudaMapping(CudaDriver(cuda), 0, 1)
    cuda.calls = cuda.calls[:6]
    with pytest.raises(InfinityError, match="cuMemUnmap"):
        mapping.release()
    assert [call[0] for call in cuda.calls[6:]] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


def test_no_driver_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(InfinityError, match=r"libcuda\.so\.1") as caught:
        standin.load_libcuda()
    assert 'device="cpu"' in caught.value.cure


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    before, _ = torch.cuda.mem_get_info(device)
    stand_ins = StandIns(torch.device("cuda"), 1 << 30)
    tensor = stand_ins.of((1 << 14, 1 << 14), (1, 1 << 14), torch.float32)
    assert tensor.device == device
    assert tensor.stride() == (1, 1 << 14)
    assert before - torch.cuda.mem_get_info(device)[0] < 64 * MIB
    assert tensor[:, -64:].isnan().all()
    assert torch.nn.Parameter(tensor).data_ptr() == tensor.data_ptr()
    del tensor, stand_ins
    gc.collect()
    assert before - torch.cuda.mem_get_info(device)[0] < 32 * MIB
