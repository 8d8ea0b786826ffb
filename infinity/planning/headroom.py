"""Headroom: the memory that torch takes in addition to pages and live tensors where the model computes; and
the reserve, all memory that pages leave free there.

On a CUDA device workspaces of cuBLAS, segments of torch's allocator that are not full, and fragmentation take
this memory. On the CPU holes in the C library's heap do (infinity/activations/heap.py). Pure, except for
`Headroom.of`.

[Note: reserved bytes]
Torch's allocator takes segments from CUDA and cuts tensors out of these segments. The allocator's limit
(infinity/tiers/device.py) and `torch.cuda.memory_reserved` count segments. A tensor of up to 1 MiB lies in a
segment of 2 MiB, and a tensor of less than 10 MiB in a segment of 20 MiB. A larger tensor has a segment of
its own, a multiple of 2 MiB. When room is short, a segment goes back to CUDA only if no tensor lies in it.
cuBLAS keeps a workspace, a tensor of torch's, for each handle and stream. Each thread that multiplies
matrices has a handle, and backward runs in a thread of its own. The CUDA context and kernels' code are not
among reserved bytes; `infinity.tiers.device.available_bytes` keeps a margin for both.
(c10/cuda/CUDACachingAllocator.cpp and aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.6 to 2.13.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.config import round_up
from infinity.tiers import PAGE_ALIGNMENT

_MIB = 1 << 20

SMALL, SMALL_SEGMENT = _MIB, 2 * _MIB
MEDIUM, MEDIUM_SEGMENT = 10 * _MIB, 20 * _MIB
WHOLE = 2 * _MIB
"""Bytes. Tensors of up to SMALL share small segments, and larger tensors of less than MEDIUM share medium
segments. Any other tensor has a segment of its own, a multiple of WHOLE.
"""

_THREADS = 2
"""Number of threads that multiply matrices: the training thread and autograd's thread for backward."""

_PARTLY_USED = SMALL_SEGMENT + 2 * MEDIUM_SEGMENT + WHOLE
"""Bytes of segments that are not full: one small segment, two medium segments, and the unused end of the
segment of the pages. One medium segment is for tensors that live through a backward, the other for tensors
that come and go during a backward.
"""

_SHARE = 8
"""The bytes of live tensors divided by this number are assumed to be lost to rounding and fragmentation.
The number is an estimate: in a simulation of the allocator with the steps of decoders the loss is smaller
(tests/planning/test_headroom.py). The estimate has not been checked on a GPU yet.
"""
_SCRATCH = 30 * _MIB
"""Bytes of oneDNN's compiled operations and of their scratch (20 to 25 MiB), and of holes in the heap, that
100 steps of a decoder of 9.9M parameters took on the CPU, with 128 MiB of live tensors in bf16.
"""

_SMALL_STEP = 4 * _MIB
"""Bytes of live tensors up to which a step multiplies matrices so small that oneDNN takes little for them.
Steps of that decoder with 9 to 50 MiB of live tensors, because the others leave or are recomputed, took as
much as those with 128 MiB.
"""

_ENTRY = re.compile(r":([0-9]+):([0-9]+)")


def segment(nbytes: int) -> int:
    """Bytes of the new segment that torch's allocator takes for a tensor that fits no existing segment."""
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if nbytes < MEDIUM else -(-nbytes // WHOLE) * WHOLE


def workspace(capability: Sequence[int], variables: Mapping[str, str]) -> int:
    """Bytes of the workspace that torch gives cuBLAS and cuBLASLt for one handle and stream.

    capability: the device's compute capability (major, minor). variables: the environment variables.
    CUBLAS_WORKSPACE_CONFIG is a list of entries :KIB:COUNT; without it Hopper and Blackwell GPUs have 32 MiB,
    and others 2 pieces of 4 MiB and 8 of 16 KiB. If TORCH_CUBLASLT_UNIFIED_WORKSPACE is off, cuBLASLt has
    CUBLASLT_WORKSPACE_SIZE KiB (by default 1024) of its own.
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
    """The bytes of a budget that torch takes in addition to pages and live tensors."""

    workspace: int = 0
    """Bytes of cuBLAS's workspace for each thread that multiplies matrices."""
    segments: int = 0
    """Bytes of segments that are not full."""
    share: int | None = None
    """The bytes of live tensors divided by this number are lost to rounding and fragmentation. If None, no
    bytes are lost.
    """
    scratch: int = 0
    """The least number of bytes that are lost, but for small steps; see `_lost`."""

    @staticmethod
    def for_cuda(capability: Sequence[int], variables: Mapping[str, str]) -> Headroom:
        """The headroom of a CUDA device. capability, variables: as in `workspace`."""
        return Headroom(workspace(capability, variables), _PARTLY_USED, _SHARE)

    @staticmethod
    def of(device: torch.device) -> Headroom:
        """The headroom of a device of this machine."""
        if device.type != "cuda":
            return HEAP
        return Headroom.for_cuda(torch.cuda.get_device_capability(device), os.environ)

    def beside(self, live: int) -> int:
        """Bytes that torch takes in a step whose tensors take at most `live` bytes at one time."""
        return _THREADS * self._per_thread + self.segments + self._lost(live)

    def one_more(self, live: int) -> int:
        """Bytes that torch takes for one more thread that multiplies matrices (such as those of
        infinity/accumulation/task_threads.py), whose tensors take at most `live` bytes at one time.
        """
        return self._per_thread + self._lost(live)

    def live_within(self, nbytes: int) -> int:
        """Bytes of live tensors that, with what they lose, take at most `nbytes` more bytes."""
        if not self.share:
            return nbytes
        small = min(nbytes * self.share // (self.share + 2), (nbytes + 4 * _SMALL_STEP) // 5)
        return min(nbytes * self.share // (self.share + 1), max(nbytes - self.scratch, small))  # as `_lost`

    @property
    def _per_thread(self) -> int:
        """Bytes that one thread's cuBLAS workspace takes. If the workspace is so large that torch's allocator
        gives it a segment of its own, all bytes of the segment count.
        """
        return segment(self.workspace) if self.workspace >= MEDIUM else self.workspace

    def _lost(self, live: int) -> int:
        lost = -(-live // self.share) if self.share else 0
        return max(lost, min(self.scratch, max(2 * lost, 4 * (live - _SMALL_STEP))))


HEAP = Headroom(share=_SHARE, scratch=_SCRATCH)
"""The headroom of the CPU. Where holes in the heap take more, HeapGuard returns them to the kernel."""

NO_HEADROOM = Headroom()


@dataclass(frozen=True)
class Reserve:
    """The bytes of a budget that pages leave free for allocations of autograd and the model."""

    nbytes: int
    """Bytes of the model's buffers, of `headroom` and, if known, of activations; a multiple of 4096."""
    kept_out_of: int | None = None
    """None if the bytes of activations are known. Otherwise `budget // kept_out_of` bytes are reserved for
    them, in addition to `nbytes`.
    """

    headroom: int = 0
    """Bytes, counted in `nbytes`, that torch takes in addition to live tensors."""
    activations: int = 0
    """Bytes of activations, counted in `nbytes`; 0 if unknown."""
    buffers: int = 0
    """Bytes of the model's buffers, counted in `nbytes`."""
    least: int = 0
    """The value of `nbytes` if there were no activations."""

    @staticmethod
    def of(
        activations: int | None, buffers: int, *, unknown: int | None, headroom: Headroom = NO_HEADROOM
    ) -> Reserve:
        """Make the reserve for a model.

        activations: bytes of the model's activations; None if unknown. buffers: bytes of the model's buffers.
        unknown: the `kept_out_of` of the reserve if `activations` is None. headroom: the headroom of the
        device that computes.
        """
        live = (activations or 0) + buffers
        beside = headroom.beside(live)
        nbytes = round_up(live + beside, PAGE_ALIGNMENT)
        return Reserve(
            nbytes,
            unknown if activations is None else None,
            headroom=beside,
            activations=activations or 0,
            buffers=buffers,
            least=round_up(buffers + headroom.beside(buffers), PAGE_ALIGNMENT),
        )

    def beside(self, residual: int) -> Reserve:
        """This reserve with the bytes of residual pages in the same tier."""
        nbytes = round_up(residual, PAGE_ALIGNMENT)
        return replace(self, nbytes=self.nbytes + nbytes, activations=self.activations + nbytes)

    def within(self, budget: int) -> int:
        """The number of bytes that pages leave free of a budget of `budget` bytes."""
        return self.nbytes + (budget // self.kept_out_of if self.kept_out_of else 0)

    def budget_for(self, pages: int) -> int:
        """The smallest budget, in bytes, that leaves at least `pages` bytes for pages."""
        needed = pages + self.nbytes
        if self.kept_out_of is None:
            return needed
        budget = round_up(-(-needed * self.kept_out_of // (self.kept_out_of - 1)), PAGE_ALIGNMENT)
        while budget - PAGE_ALIGNMENT - self.within(budget - PAGE_ALIGNMENT) >= pages:
            budget -= PAGE_ALIGNMENT
        return budget
