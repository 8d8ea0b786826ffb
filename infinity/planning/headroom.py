"""What torch takes on a CUDA device beside pages and live tensors: workspaces, segments, holes. Pure.

[Note: reserved bytes]
Torch's allocator takes segments from CUDA and cuts tensors out of them; its limit (infinity/tiers/cap.py) and
`torch.cuda.memory_reserved` count segments. A tensor of up to 1 MiB lies in a segment of 2 MiB, one of less
than 10 MiB in a segment of 20 MiB, a larger one has its own of whole 2 MiB. A segment goes back to CUDA, when
room is short, only once nothing lies in it. cuBLAS works in a tensor of torch's for each handle and stream,
which stays: a thread that multiplies has a handle, and backward runs in a thread of its own. Neither the CUDA
context nor kernels' code is among reserved bytes: they are why `infinity.tiers.device.available_bytes` keeps
a margin. (c10/cuda/CUDACachingAllocator.cpp and aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.6 to 2.13.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MIB = 1 << 20

SMALL, SMALL_SEGMENT = _MIB, 2 * _MIB
"""Bytes: the largest tensor in a segment for small ones, and that segment."""
MEDIUM, MEDIUM_SEGMENT = 10 * _MIB, 20 * _MIB
"""Bytes: the first tensor that has a segment of its own, and the segment of those below it."""
WHOLE = 2 * _MIB
"""Bytes that a segment of its own is a multiple of."""

_THREADS = 2
"""The trainer's and autograd's."""

_PARTLY_USED = SMALL_SEGMENT + 2 * MEDIUM_SEGMENT + WHOLE
"""Segments that are begun and not full: a small one, two medium ones (of what lives through a backward, and
of what comes and goes in it), and the last piece of the pages' own."""

_SHARE = 8
"""One in so many bytes of live tensors is lost between them, to rounding and to holes. A choice: a model of
the allocator that runs the steps of decoders stays below it (tests/planning/test_headroom.py); no GPU has
said yet."""

_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def segment(nbytes: int) -> int:
    """Bytes of the segment that a tensor of `nbytes` bytes is cut out of where none has room for it."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if nbytes < MEDIUM else -(-nbytes // WHOLE) * WHOLE


def workspace(capability: tuple[int, int], variables: Mapping[str, str]) -> int:
    """Bytes that cuBLAS and cuBLASLt work in for one handle and stream, as torch chooses them.

    capability: of the device, (major, minor). variables: the environment. CUBLAS_WORKSPACE_CONFIG is a list
    of :KIB:COUNT; without it Hopper and Blackwell have 32 MiB, others 2 pieces of 4 MiB and 8 of 16 KiB.
    """
    default = 32 * _MIB if capability[0] in (9, 10, 12) else 2 * 4 * _MIB + 8 * (16 << 10)
    entries = _ENTRY.findall(variables.get("CUBLAS_WORKSPACE_CONFIG", ""))
    blas = sum(int(size) * int(count) << 10 for size, count in entries) if entries else default
    if variables.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1").lower() in ("0", "n", "no", "false", "off"):
        kib = variables.get("CUBLASLT_WORKSPACE_SIZE", "")
        return blas + (int(kib) if kib.isdecimal() else 1024) * 1024
    return blas


@dataclass(frozen=True)
class Headroom:
    """Bytes of a budget for the device that neither pages nor live tensors take."""

    workspace: int = 0
    """Bytes for each thread that multiplies."""
    segments: int = 0
    """Bytes of segments that are begun and not full."""
    share: int | None = None
    """One in so many bytes of live tensors is lost besides; None: none is."""

    @staticmethod
    def for_cuda(capability: tuple[int, int], variables: Mapping[str, str]) -> Headroom:
        """Of a CUDA device; see `workspace`."""
        return Headroom(workspace(capability, variables), _PARTLY_USED, _SHARE)

    @staticmethod
    def of(device: torch.device) -> Headroom:
        """Of the device as it is here; on the CPU, nothing."""
        if device.type != "cuda":
            return Headroom()
        return Headroom.for_cuda(torch.cuda.get_device_capability(device), os.environ)

    def beside(self, live: int) -> int:
        """Bytes needed beside `live` bytes of tensors, of which at the most so much lives at one time."""
        return _THREADS * self._per_thread + self.segments + self._lost(live)

    def one_more(self, live: int) -> int:
        """Bytes needed beside `live` more of them, in a thread more; see
        infinity/accumulation/task_threads.py."""
        return self._per_thread + self._lost(live)

    @property
    def _per_thread(self) -> int:
        """A workspace with what its segment is larger, where nothing else may use that."""
        return segment(self.workspace) if self.workspace >= MEDIUM else self.workspace

    def _lost(self, live: int) -> int:
        return -(-live // self.share) if self.share else 0


NO_HEADROOM = Headroom()
"""Of a device whose memory is the plan's alone."""
