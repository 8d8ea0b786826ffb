"""What a parameter points at while its page is away: memory of any size that holds next to none.

One chunk of bytes 0xff, mapped again and again over a range of addresses: every element is there to be
read (NaN, so that a leak shows), every shape and stride works, and all that is held is the chunk.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from infinity import _tiers
from infinity.config import format_size
from infinity.errors import BudgetError, InfinityError

_NAN_BYTE = 0xFF
"""All bits one is a NaN in every IEEE-like float type, bfloat16 and OCP's float8 types included."""

_CPU_CHUNK = 1 << 20
"""Bytes of RAM a CPU stand-in holds."""

_MOST_MAPPINGS = 4096
"""The kernel grants a process some 65,000 mappings; the chunk grows before a stand-in takes more of them."""

_CPU_KIND, _CUDA_KIND = 1, 2
"""kDLCPU, kDLCUDA."""


class StandIns:
    """Tensors for evicted parameters, all over one storage.

    device: where they claim to be, the CPU or a CUDA device. largest: the most bytes that the elements of
    one of them span. The memory is unmapped once this object and the last tensor are gone. A stray write
    is lost: on the CPU it stays with the 4 KiB pages written, on CUDA it shows wherever the chunk does.

    Raises BudgetError where not even the chunk is to be had, InfinityError where the kernel or the CUDA
    driver refuses the mapping.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.device = torch.device("cuda", index)
            # Makes the device's context the current one, which the driver's calls below need.
            with torch.cuda.device(index):
                torch.cuda.synchronize()
                mapping: CpuMapping | CudaMapping = CudaMapping(CudaDriver(load_libcuda()), index, largest)
                # The fill runs on the default stream, for which torch's other streams do not wait.
                torch.cuda.synchronize()
            weakref.finalize(mapping, _release_cuda, mapping.release, index).atexit = False
            kind = _CUDA_KIND
        else:
            self.device = torch.device("cpu")
            index, kind = 0, _CPU_KIND
            mapping = CpuMapping(largest)
            # At exit the kernel unmaps; tensors that die later than that must not find their memory gone.
            weakref.finalize(mapping, mapping.release).atexit = False
        region = _tiers.adopt(
            mapping.address, mapping.nbytes, device_kind=kind, device_index=index, owner=mapping
        )
        lease = _tiers.Pool(region, 0, mapping.nbytes, mmap.PAGESIZE).lease(mapping.nbytes, 0.0)
        assert isinstance(lease, _tiers.Lease)
        with torch.inference_mode(False):
            whole: torch.Tensor = from_dlpack(lease.to_dlpack())
        self._storage = whole.untyped_storage()
        self.nbytes = mapping.nbytes
        """Bytes of addresses; at least `largest`."""
        self.held = mapping.chunk
        """Bytes of memory."""

    def of(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of exactly this shape, these strides (elements, none negative) and this dtype.

        Reads as NaN for the float types, as all bits one for the others. The elements span at most
        `largest` bytes.
        """
        # param.data refuses a tensor born in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                self._storage, 0, tuple(shape), tuple(stride)
            )


def _chunk_bytes(largest: int, granule: int) -> int:
    """Bytes of the chunk, a multiple of `granule`: as small as the number of mappings allows."""
    return max(1, -(-largest // (_MOST_MAPPINGS * granule))) * granule


class CpuMapping:
    """One memfd of 0xff, mapped privately side by side over `nbytes` (whole chunks, at least `largest`)."""

    def __init__(self, largest: int) -> None:
        self.chunk = _chunk_bytes(largest, _CPU_CHUNK)
        self.nbytes = max(1, -(-largest // self.chunk)) * self.chunk
        libc = _libc()
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _mapped(libc.mmap(None, self.nbytes, _PROT_NONE, reserve, -1, 0), self.nbytes)
        self.release = functools.partial(libc.munmap, self.address, self.nbytes)
        try:
            self._fill(libc)
        except OSError as error:
            self.release()
            raise InfinityError(
                f"The kernel gives no memory file for evicted parameters: {error.strerror}.",
                "Raise the limit of open files (ulimit -n), or free memory.",
            ) from error
        except BaseException:
            self.release()
            raise

    def _fill(self, libc: ctypes.CDLL) -> None:
        # Private: a stray write gets a page of its own, it neither crashes nor reaches the chunk.
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        with os.fdopen(os.memfd_create("infinity-standin", os.MFD_CLOEXEC), "wb") as file:
            for _ in range(self.chunk // _CPU_CHUNK):
                file.write(bytes([_NAN_BYTE]) * _CPU_CHUNK)
            file.flush()
            for address in range(self.address, self.address + self.nbytes, self.chunk):
                _mapped(libc.mmap(address, self.chunk, protection, flags, file.fileno(), 0), self.chunk)


_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _mapped(address: int | None, nbytes: int) -> int:
    if address is None or address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise InfinityError(
            f"The kernel maps no {format_size(nbytes)} of addresses for evicted parameters: {reason}.",
            "Raise the limit of addresses (ulimit -v) or of mappings (vm.max_map_count).",
        )
    return address


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""

_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""

_MINIMUM = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM."""

_READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE. Read-only is refused for device memory, and would turn a stray
write into the end of the context."""

_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""

_POINTER, _HANDLE, _FLAGS = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_ulonglong

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(_AllocationProperties),
        ctypes.c_int,
    ),
    "cuMemAddressReserve": (
        ctypes.POINTER(_POINTER),
        ctypes.c_size_t,
        ctypes.c_size_t,
        _POINTER,
        _FLAGS,
    ),
    "cuMemCreate": (
        ctypes.POINTER(_HANDLE),
        ctypes.c_size_t,
        ctypes.POINTER(_AllocationProperties),
        _FLAGS,
    ),
    "cuMemMap": (_POINTER, ctypes.c_size_t, ctypes.c_size_t, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_POINTER, ctypes.c_size_t, ctypes.POINTER(_Access), ctypes.c_size_t),
    "cuMemsetD8_v2": (_POINTER, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemUnmap": (_POINTER, ctypes.c_size_t),
    "cuMemAddressFree": (_POINTER, ctypes.c_size_t),
    "cuMemRelease": (_HANDLE,),
}
"""The driver calls used here and their arguments; each returns a CUresult."""


def load_libcuda() -> ctypes.CDLL:
    """The CUDA driver's library. Raises InfinityError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InfinityError(
            f"The CUDA driver's library cannot be loaded: {error}.",
            'Install the NVIDIA driver, or give device="cpu".',
        ) from error


class CudaDriver:
    """The CUDA driver API: every call is checked."""

    def __init__(self, library: Any) -> None:
        self._functions = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> None:
        """Call `name`. Raises BudgetError for CUDA_ERROR_OUT_OF_MEMORY, InfinityError for any other."""
        result = self._functions[name](*arguments)
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._functions["cuGetErrorName"](result, ctypes.byref(text))
        error = (text.value or b"unknown error").decode(errors="replace")
        cause = f"The CUDA driver refused {name} for evicted parameters: {error} ({result})."
        if result == _OUT_OF_MEMORY:
            raise BudgetError(cause, "Lower the device budget, or end other processes on the device.")
        raise InfinityError(
            cause, "Check the driver (nvidia-smi), or update it: this needs CUDA 11 or later."
        )


class CudaMapping:
    """One allocation of device memory of 0xff, mapped side by side over `nbytes` (whole chunks, at least
    `largest`). The device's context must be current on the calling thread, also for `release`."""

    def __init__(self, driver: CudaDriver, index: int, largest: int) -> None:
        location = _Location(_ON_DEVICE, index)
        properties = _AllocationProperties(type=_PINNED, location=location)
        granularity = ctypes.c_size_t()
        driver.call("cuMemGetAllocationGranularity", granularity, properties, _MINIMUM)
        self.chunk = _chunk_bytes(largest, granularity.value)
        self.nbytes = max(1, -(-largest // self.chunk)) * self.chunk
        undo: list[tuple[Any, ...]] = []
        self.release = functools.partial(_undo, driver, undo)
        try:
            base = _POINTER()
            driver.call("cuMemAddressReserve", base, self.nbytes, 0, 0, 0)
            self.address = base.value
            undo.append(("cuMemAddressFree", self.address, self.nbytes))
            handle = _HANDLE()
            driver.call("cuMemCreate", handle, self.chunk, properties, 0)
            undo.append(("cuMemRelease", handle.value))
            for address in range(self.address, self.address + self.nbytes, self.chunk):
                driver.call("cuMemMap", address, self.chunk, 0, handle.value, 0)
                undo.append(("cuMemUnmap", address, self.chunk))
            access = _Access(location, _READ_WRITE)
            driver.call("cuMemSetAccess", self.address, self.nbytes, access, 1)
            driver.call("cuMemsetD8_v2", self.address, _NAN_BYTE, self.chunk)
        except BaseException:
            self.release()
            raise


def _undo(driver: CudaDriver, calls: list[tuple[Any, ...]]) -> None:
    """Run `calls` from the last to the first, all of them, and forget them; the first error is raised."""
    failed: InfinityError | None = None
    while calls:
        try:
            driver.call(*calls.pop())
        except InfinityError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _release_cuda(release: functools.partial[None], index: int) -> None:
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # kernels in flight may still read it
        release()
