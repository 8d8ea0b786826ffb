"""Placeholder: the tensor that a parameter refers to while its page is away, which takes almost no memory.

One small chunk of memory, filled with bytes 0xff, is mapped repeatedly over a range of addresses. Tensors of
any shape and strides can lie in the range. Every element reads as NaN, so that a wrong use is noticed.
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
from infinity.tiers.pool import adopt, tensor_over

_NAN_BYTE = 0xFF
"""Repeated, it reads as NaN in all IEEE-like types, bfloat16 and OCP float8 too."""

_CPU_CHUNK = 1 << 20
"""Bytes of the repeated chunk of RAM on the CPU; a long range of addresses takes a multiple of it."""

_MOST_MAPPINGS = 4096
"""The most mappings of one chunk of memory; a longer range of addresses gets a larger chunk. Linux allows a
process some 65,000 mappings.
"""


class Placeholders:
    """Makes the tensors that evicted parameters refer to. All of them are views of one storage: a range of
    addresses over which a small block of memory, filled with bytes 0xff, is mapped repeatedly.

    device: the CPU or the CUDA device of the tensors. largest: the most bytes that the elements of one tensor
    span. The memory is unmapped once this object and the last tensor are gone. A stray write to a tensor is
    lost. On the CPU it changes only the 4 KiB of addresses that it hits; on CUDA it changes every repetition
    of the block. Raises BudgetError if there is no memory for the block, InfinityError if the kernel refuses
    the mapping, and DeviceError if the CUDA driver refuses it.
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
            _release_after_last_use(mapping, mapping.release)
        else:
            mapping = _mapped_on(self.device, driver, largest)
        region = adopt(mapping.address, mapping.nbytes, self.device, mapping)
        self._storage = tensor_over(region).untyped_storage()
        self.nbytes = mapping.nbytes
        """Bytes of addresses that the storage spans; at least `largest`."""
        self.held = mapping.chunk
        """Bytes of memory that the storage takes: the size of the repeated chunk."""

    def of(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a placeholder of this shape, these strides (in elements, none negative) and this dtype, which
        spans at most `largest` bytes. In floating-point types it reads as NaN; in other types all bits are
        one.
        """
        # param.data refuses a tensor that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                self._storage, 0, tuple(shape), tuple(stride)
            )


def _chunk_bytes(largest: int, granule: int) -> int:
    """Return the size of the chunk that is mapped repeatedly: the least multiple of `granule` bytes of which
    at most _MOST_MAPPINGS mappings cover `largest` bytes of addresses.
    """
    return max(1, -(-largest // (_MOST_MAPPINGS * granule))) * granule


class CpuMapping:
    """A range of at least `largest` bytes of addresses over which one memory file (memfd) of bytes 0xff is
    mapped repeatedly, privately (MAP_PRIVATE).

    Attributes: `address`, where the range begins; `chunk`, the bytes of the file; `nbytes`, the bytes of the
    range, a multiple of `chunk`; `release`, the function that unmaps the range.
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
                f"The kernel refuses a memory file (memfd) for evicted parameters: {error.strerror}.",
                "Raise the limit of open files (ulimit -n), or free memory.",
            ) from error
        except BaseException:
            self.release()
            raise

    def _fill(self, libc: ctypes.CDLL) -> None:
        # The mapping is private, so that a stray write goes to a copy of the 4 KiB that it hits, and not to
        # the chunk.
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
    """The device's counterpart of CpuMapping: one allocation of device memory, mapped repeatedly. Call
    `release` only when no queued work uses the range.
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
    """Make a DeviceMapping of at least `largest` bytes of addresses on `device`, and wait until its memory is
    filled. The device memory is freed when the last reference to the mapping is gone.
    """
    with current(device):
        # Earlier failures are raised here, and not blamed on the mapping.
        driver.synchronize()
        mapping = DeviceMapping(driver, largest)
        _release_after_last_use(mapping, functools.partial(_release, device, driver, mapping.release))
        # The fill runs on the default stream, and torch's other streams do not wait for it.
        driver.synchronize()
    return mapping


def _release(device: torch.device, driver: Driver, release: Callable[[], None]) -> None:
    with current(device):
        driver.synchronize()  # kernels in flight may still read the memory
        release()


def _release_after_last_use(mapping: object, release: Callable[[], object]) -> None:
    # The finalizer does not run at exit, because tensors that are freed later still need their memory. The
    # kernel or the driver unmaps the memory then.
    weakref.finalize(mapping, release).atexit = False
