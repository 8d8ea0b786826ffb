"""Master weights: the exact split of an fp32 master into a bfloat16 parameter and 16 more bits.

The parameter is the master rounded half up in the last place of its 16 high bits, (u + 0x8000) >> 16, where u
are the master's bits. The remainder is the signed difference: u = (parameter << 16) + remainder, for every u.
Rounding ties to even could not be split so: a tie that rounds up needs the remainder -0x8000, one that rounds
down 0x8000, which int16 lacks. 32-bit arithmetic that wraps is enough both ways: only the sum for a NaN
overflows, and NaN is treated apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 17
"""Elements at a time, so that results between two operations stay in the cache."""


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves (bfloat16, int16) of flat float32 values. NaN becomes a bfloat16 NaN with remainder 0."""
    parameter = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    remainder = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    for place in _blocks(master.numel()):
        bits = master[place].contiguous().view(torch.int32)
        high = (bits + 0x8000).bitwise_right_shift_(16)
        parameter[place].view(torch.int16).copy_(high)
        remainder[place].copy_(bits - high.bitwise_left_shift_(16))
        lost = master[place].isnan()
        if bool(lost.any()):
            parameter[place].masked_fill_(lost, float("nan"))
            remainder[place].masked_fill_(lost, 0)
    return parameter, remainder


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of flat (bfloat16, int16) halves."""
    master = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    for place in _blocks(parameter.numel()):
        high = parameter[place].contiguous().view(torch.int16).to(torch.int32)
        master[place].view(torch.int32).copy_(high.bitwise_left_shift_(16).add_(remainder[place]))
    return master


def _blocks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, _BLOCK):
        yield slice(start, start + _BLOCK)
