"""Placeholder: the tensor that a parameter points at while its page is away, which takes almost no memory.

One chunk of bytes 0xff is mapped repeatedly over a range of addresses. Every element can be read (as NaN, so
that a wrong use shows), every shape and stride works, and only the chunk takes memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch

from infinity.config import format_size
from infinity.errors import BudgetError, DeviceError, InfinityError
from infinity.tiers.driver import Driver, current, driver_of
from infinity.tiers.region import adopt, tensor_over

_NAN_BYTE = 0xFF
"""All bits one: repeated, it is a NaN in every IEEE-like float type, bfloat16 and OCP's float8 included."""

_CPU_CHUNK = 1 << 20
"""Bytes of RAM that the placeholders on the CPU take."""

_MOST_MAPPINGS = 4096
"""Most mappings for placeholders; larger ones get a larger chunk. Linux allows a process some 65,000."""


class Placeholders:
    """Tensors for evicted parameters, all over one storage.

    device: the CPU or the CUDA device that they are on. largest: the most bytes that the elements of one of
    them span. The memory is unmapped once this object and the last tensor are gone. A stray write is lost: on
    the CPU it changes only the 4 KiB pages written, on CUDA every repetition of the chunk.

    Raises BudgetError if there is no memory for the chunk, and InfinityError (from the CUDA driver
    DeviceError) if the kernel or the driver refuses the mapping.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.device = torch.device("cuda", index)
        else:
            self.device = torch.device("cpu")
        driver = driver_of(self.device)
        mapping: CpuMapping | DeviceMapping
        if driver is None:
            mapping = CpuMapping(largest)
            _with_the_last(mapping, mapping.release)
        else:
            mapping = _mapped_on(self.device, driver, largest)
        region = adopt(mapping.address, mapping.nbytes, self.device, mapping)
        self._storage = tensor_over(region).untyped_storage()
        self.nbytes = mapping.nbytes
        """Bytes of the range of addresses; at least `largest`."""
        self.held = mapping.chunk
        """Bytes of memory that the range takes: the chunk's."""

    def of(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of exactly this shape, these strides (elements, none negative) and this dtype.

        Its elements read as NaN in the float types, as all bits one in the others. They may span at most
        `largest` bytes.
        """
        # param.data refuses a tensor that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                self._storage, 0, tuple(shape), tuple(stride)
            )


def _chunk_bytes(largest: int, granule: int) -> int:
    """Bytes of the chunk, a multiple of `granule`: as small as the number of mappings allows."""
    return max(1, -(-largest // (_MOST_MAPPINGS * granule))) * granule


class CpuMapping:
    """One memfd of bytes 0xff, mapped privately again and again over `nbytes` of addresses.

    nbytes: whole chunks, at least `largest`.
    """

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
        # Private, so that a stray write gets a page of its own: it neither crashes nor reaches the chunk.
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


class DeviceMapping:
    """One allocation of device memory of bytes 0xff, mapped again and again over `nbytes` of addresses.

    nbytes: whole chunks, at least `largest`. No queued work may use it when `release` is called.
    """

    def __init__(self, driver: Driver, largest: int) -> None:
        try:
            self.chunk = _chunk_bytes(largest, driver.granularity)
            count = max(1, -(-largest // self.chunk))
            memory = driver.repeat(self.chunk, count, _NAN_BYTE)
        except DeviceError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise BudgetError(
                f"The device has no memory left for evicted parameters: {error.cause}", error.cure
            ) from error
        self.nbytes = count * self.chunk
        self.address = memory.address
        self.release = memory.release


def _mapped_on(device: torch.device, driver: Driver, largest: int) -> DeviceMapping:
    """A mapping on a device, whose memory is freed with its last reference."""
    with current(device):
        # Earlier failures are raised here, so that they are not blamed on the mapping.
        driver.synchronize()
        mapping = DeviceMapping(driver, largest)
        _with_the_last(mapping, functools.partial(_release, device, driver, mapping.release))
        # The fill runs on the default stream, and torch's other streams do not wait for it.
        driver.synchronize()
    return mapping


def _release(device: torch.device, driver: Driver, release: Callable[[], None]) -> None:
    with current(device):
        driver.synchronize()  # kernels in flight may still read it
        release()


def _with_the_last(mapping: object, release: Callable[[], object]) -> None:
    # Not at exit, when the kernel or the driver unmaps: tensors that are freed later still need their memory.
    weakref.finalize(mapping, release).atexit = False
