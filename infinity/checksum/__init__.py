"""CRC32C checksums of bytes, and of the blocks of pages.

A checksum is the CRC-32C (Castagnoli) of RFC 3720: the reflected polynomial 0x82F63B78, inverted at the
beginning and at the end, so that the checksum of b"123456789" is 0xE3069283 and that of no bytes is 0.

Segments are a C-contiguous int64 array of shape (n, 3). A row is (offset, bytes, bytes of a block), where the
offset is counted in bytes from the beginning of the memory. Each segment is cut into blocks from its
beginning, and its last block may be shorter. A segment of 0 bytes has no block. Segments may overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from infinity import _checksum
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MOST_THREADS", "block_count", "crc32c", "crc32c_blocks", "implementation", "implementations"]

MOST_THREADS: int = _checksum.MOST_THREADS

_IMPLEMENTATIONS = tuple(_checksum.implementations())


def implementations() -> tuple[str, ...]:
    """The implementations that this machine can run, the fastest first. They are "sse4.2" on x86-64 and
    "armv8" on AArch64, if the CPU has the instruction, and "table" anywhere.
    """
    return _IMPLEMENTATIONS


def implementation() -> str:
    """The implementation that is used unless a call names another: the first of `implementations()`."""
    return _IMPLEMENTATIONS[0]


def crc32c(data: Buffer | torch.Tensor, value: int = 0, *, implementation: str = _IMPLEMENTATIONS[0]) -> int:
    """Return the checksum of `data`, from 0 to 2**32 - 1. The GIL is released meanwhile.

    data: bytes, bytearray, memoryview or another C-contiguous buffer, or a contiguous CPU tensor of any
    dtype, whose bytes are taken as they lie in memory. value: the checksum of the bytes before `data`; the
    result is then the checksum of those bytes followed by `data`. implementation: a name of
    `implementations()`, which changes the speed but not the result.

    Raises ConfigError for data that is not contiguous or not in host memory, for a `value` out of range, and
    for an implementation that this machine cannot run.
    """
    if not 0 <= value < 1 << 32:
        raise ConfigError(f"The checksum {value} is out of range.", "Give an int from 0 to 2**32 - 1.")
    if isinstance(data, torch.Tensor):
        _check_memory(data)
        return _checksum.crc32c_at(data.data_ptr(), data.nbytes, int(value), implementation)
    try:
        view = memoryview(data)
    except (TypeError, BufferError):
        raise ConfigError(
            f"A {type(data).__name__} does not give out its memory.",
            "Give bytes, a bytearray, a memoryview or a contiguous CPU tensor.",
        ) from None
    if not view.c_contiguous:
        raise ConfigError("The buffer is not contiguous.", "Give bytes(data).")
    return _checksum.crc32c_of_buffer(view, int(value), implementation)


def crc32c_blocks(
    memory: torch.Tensor,
    segments: npt.NDArray[np.int64],
    *,
    threads: int = 1,
    implementation: str = _IMPLEMENTATIONS[0],
) -> npt.NDArray[np.uint32]:
    """Return the checksum of each block of the segments of `memory`, segment after segment.

    memory: a contiguous CPU tensor of dtype uint8, which nobody writes to meanwhile. segments: see the
    module. threads: the number of threads that divide the work, from 1 to MOST_THREADS, the caller's thread
    included. The other threads are started when first needed and stay for later calls. Each takes 512 KiB or
    more at a time, so less work uses fewer threads. implementation: as for `crc32c`.

    The result is a uint32 array with `block_count(segments)` elements. The GIL is released while checksums
    are computed. Raises ConfigError for a memory or segments of another dtype, shape or layout, for a segment
    that is not inside of the memory, for a block size below 1, and for other values that cannot be used.
    """
    _check_memory(memory)
    _check_segments(segments)
    if memory.dtype is not torch.uint8:
        raise ConfigError(
            f"The memory is a tensor of {memory.dtype}.", "Give its bytes: tensor.view(torch.uint8)."
        )
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"{threads} threads cannot be used.", f"Give from 1 to {MOST_THREADS}.")
    return _checksum.crc32c_blocks_at(memory.data_ptr(), memory.nbytes, segments, threads, implementation)


def block_count(segments: npt.NDArray[np.int64]) -> int:
    """Return the number of blocks of the segments: the length of the array that `crc32c_blocks` returns.

    segments: see the module. Raises ConfigError for another dtype, shape or layout, for negative offsets and
    bytes, for ends beyond byte 2**63 - 1, for a block size below 1, and for more than 2**63 - 1 blocks.
    """
    _check_segments(segments)
    return _checksum.block_count(segments)


def _check_memory(memory: torch.Tensor) -> None:
    if not isinstance(memory, torch.Tensor) or memory.device.type != "cpu":
        where = memory.device if isinstance(memory, torch.Tensor) else type(memory).__name__
        raise ConfigError(
            f"The memory is not a tensor in host memory ({where}).", "Copy it to the CPU first."
        )
    if memory.layout is not torch.strided or not memory.is_contiguous():
        raise ConfigError("The tensor is not contiguous.", "Give tensor.contiguous().")


def _check_segments(segments: npt.NDArray[np.int64]) -> None:
    if not isinstance(segments, np.ndarray) or segments.dtype != np.int64 or segments.shape[1:] != (3,):
        found = (
            f"{segments.dtype} of shape {segments.shape}"
            if isinstance(segments, np.ndarray)
            else type(segments).__name__
        )
        raise ConfigError(f"The segments are {found}.", "Give a numpy array of dtype int64 and shape (n, 3).")
    if not segments.flags.c_contiguous or not segments.flags.aligned:
        raise ConfigError("The segments are not contiguous.", "Give np.ascontiguousarray(segments).")
