"""The workspace of updates on the device: memory that the plan has reserved, a window of elements at a time.

Operations write into it (`out=`) or in place, so that a step takes nothing from torch's allocator: budgets
are hard. Beside the arrays that a window needs lie the gradients' sums of squares, one a block, until the
host asks for them.

[Note: one workspace]
Every update and gradient uses the same bytes, one after the other: what orders them is the stream that they
are queued on. A backward may run on several, and `order` has the one that comes next wait for the one before.
"""

from __future__ import annotations

import torch

from infinity.config import round_up
from infinity.cpu_adam import BLOCK, CODE_BLOCK
from infinity.tiers import PAGE_ALIGNMENT

MOST_ELEMENTS = 1 << 20
"""Of a window: many enough that launching kernels costs little, few enough for a GPU's L2 cache."""

_ARRAYS = 6
_ARRAYS_OF_BLOCKS = 3


def workspace_bytes(elements: int, blocks: int) -> int:
    """Bytes of a workspace for windows of `elements`, a multiple of BLOCK, and sums of `blocks` blocks."""
    return _scratch_bytes(elements) + round_up(blocks * 8, PAGE_ALIGNMENT)


def _scratch_bytes(elements: int) -> int:
    return round_up(4 * (_ARRAYS * elements + _ARRAYS_OF_BLOCKS * (elements // CODE_BLOCK)), PAGE_ALIGNMENT)


class Workspace:
    """Arrays on the device for windows of up to `elements` elements. What they hold is nobody's."""

    def __init__(self, memory: torch.Tensor, elements: int, blocks: int) -> None:
        """memory: uint8 (workspace_bytes(elements, blocks),) on the device, the workspace's alone."""
        assert elements % BLOCK == 0 and memory.nbytes == workspace_bytes(elements, blocks)
        self.device = memory.device
        self.elements = elements
        arrays = memory[: 4 * _ARRAYS * elements].view(torch.float32).view(_ARRAYS, elements)
        self.gradient, self.parameter, self.first, self.second, self.one, self.other = arrays.unbind()
        """float32 (elements,): of a window's states, and two for what lies between operations."""
        of_blocks = memory[4 * _ARRAYS * elements : _scratch_bytes(elements)].view(torch.int32)
        count = elements // CODE_BLOCK
        self.exponent, self.unit, masks = of_blocks[: _ARRAYS_OF_BLOCKS * count].view(-1, count).unbind()
        """int32 (elements // CODE_BLOCK,)."""
        self.mask = masks.view(torch.bool)[:count]
        """bool (elements // CODE_BLOCK,)."""
        self.doubles = memory[: 8 * elements].view(torch.float64)
        """float64 (elements,), over `gradient` and `parameter`."""
        self.sums = memory[_scratch_bytes(elements) :].view(torch.float64)[:blocks]
        """float64 (blocks,): kept from one use to the next."""
        self._stream: torch.cuda.Stream | None = None

    def order(self) -> None:
        """Have what is queued from now on follow whatever used the workspace before; see the note."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def integers(values: torch.Tensor) -> torch.Tensor:
    """The bits of float32 values, int32, in place."""
    return values.view(torch.int32)


def low_halves(values: torch.Tensor) -> torch.Tensor:
    """The 16 low bits of each of contiguous 32-bit values, int16, in place (little-endian)."""
    return values.view(torch.int16)[::2]


def high_halves(values: torch.Tensor) -> torch.Tensor:
    """The 16 high bits of each of contiguous 32-bit values, int16, in place (little-endian)."""
    return values.view(torch.int16)[1::2]


def quiet(values: torch.Tensor) -> None:
    """Make every NaN of float32 values the same one, 0x7FC00000: a payload would carry into the rounding."""
    values.nan_to_num_(nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
