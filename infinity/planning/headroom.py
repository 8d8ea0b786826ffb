"""Headroom: memory of a CUDA device that torch takes beside pages and live tensors. Pure.

Workspaces of cuBLAS, segments that are not full, and fragmentation take it.

[Note: reserved bytes]
Torch's allocator takes segments from CUDA and cuts tensors out of them; its limit (infinity/tiers/cap.py) and
`torch.cuda.memory_reserved` count segments. A tensor of up to 1 MiB lies in a segment of 2 MiB, one of less
than 10 MiB in a segment of 20 MiB; a larger one has a segment of its own, a multiple of 2 MiB. When room is
short, a segment goes back to CUDA only if nothing lies in it. cuBLAS keeps a workspace, a tensor of torch's,
for each handle and stream: each thread that multiplies has a handle, and backward runs in a thread of its
own. The CUDA context and kernels' code are not among reserved bytes: `infinity.tiers.device.available_bytes`
keeps a margin for them. (c10/cuda/CUDACachingAllocator.cpp and aten/src/ATen/cuda/CublasHandlePool.cpp,
torch 2.6 to 2.13.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MIB = 1 << 20

SMALL, SMALL_SEGMENT = _MIB, 2 * _MIB
"""Bytes of the largest tensor that lies in a small segment, and bytes of such a segment."""
MEDIUM, MEDIUM_SEGMENT = 10 * _MIB, 20 * _MIB
"""Bytes from which on a tensor has a segment of its own, and bytes of the segment for tensors below that."""
WHOLE = 2 * _MIB
"""Bytes; a tensor's own segment is a multiple of them."""

_THREADS = 2
"""Threads that multiply: the trainer's and autograd's."""

_PARTLY_USED = SMALL_SEGMENT + 2 * MEDIUM_SEGMENT + WHOLE
"""Bytes of segments that are not full: a small one, two medium ones (one of tensors that live through a
backward, one of tensors that come and go in it), and the end of the pages' own."""

_SHARE = 8
"""Bytes of live tensors divided by this are lost to rounding and fragmentation. A choice: a model of the
allocator that runs the steps of decoders stays below it (tests/planning/test_headroom.py); no GPU has said
yet."""

_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def segment(nbytes: int) -> int:
    """Bytes of the new segment that a tensor of `nbytes` bytes needs if no other one has room for it."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if nbytes < MEDIUM else -(-nbytes // WHOLE) * WHOLE


def workspace(capability: tuple[int, int], variables: Mapping[str, str]) -> int:
    """Bytes of the workspace that torch gives cuBLAS and cuBLASLt for one handle and stream.

    capability: the device's (major, minor). variables: the environment. CUBLAS_WORKSPACE_CONFIG is a list
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
    """Bytes of cuBLAS's workspace for each thread that multiplies."""
    segments: int = 0
    """Bytes of segments that are not full."""
    share: int | None = None
    """Bytes of live tensors divided by this are lost besides; None: no byte is."""

    @staticmethod
    def for_cuda(capability: tuple[int, int], variables: Mapping[str, str]) -> Headroom:
        """The headroom of a CUDA device. capability, variables: see `workspace`."""
        return Headroom(workspace(capability, variables), _PARTLY_USED, _SHARE)

    @staticmethod
    def of(device: torch.device) -> Headroom:
        """The headroom of a device of this machine; zero on the CPU."""
        if device.type != "cuda":
            return Headroom()
        return Headroom.for_cuda(torch.cuda.get_device_capability(device), os.environ)

    def beside(self, live: int) -> int:
        """Bytes of headroom for a step whose tensors have at most `live` bytes at one time."""
        return _THREADS * self._per_thread + self.segments + self._lost(live)

    def one_more(self, live: int) -> int:
        """Bytes of headroom for one more thread, whose tensors have at most `live` bytes at one time; see
        infinity/accumulation/task_threads.py."""
        return self._per_thread + self._lost(live)

    @property
    def _per_thread(self) -> int:
        """Bytes of one thread's workspace: of its whole segment, where that is its own."""
        return segment(self.workspace) if self.workspace >= MEDIUM else self.workspace

    def _lost(self, live: int) -> int:
        return -(-live // self.share) if self.share else 0


NO_HEADROOM = Headroom()
"""The headroom of a device whose memory is the plan's alone: zero."""
