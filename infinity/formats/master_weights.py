"""Master weights: the exact split of an fp32 master weight into a bfloat16 parameter and an int16 remainder.

Let u be the 32 bits of the master as an integer. The bits of the parameter are (u + 0x8000) >> 16: the
magnitude of the master is rounded to bfloat16, and ties are rounded up. The remainder is the signed
difference, so that u = (parameter << 16) + remainder for every u. Ties are not rounded to even, because a tie
that is rounded down would have the remainder 0x8000, which int16 cannot hold. 32-bit arithmetic that wraps
around is sufficient, because only NaNs overflow, and NaNs are handled separately.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 17
"""Number of elements that are converted at a time. Intermediate results of this size stay in the cache."""


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split flat float32 masters into bfloat16 parameters and int16 remainders of the same shape. A NaN
    becomes a bfloat16 NaN with the remainder 0.
    """
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
    """Join flat bfloat16 parameters and int16 remainders of the same shape to float32 masters."""
    master = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    for place in _blocks(parameter.numel()):
        high = parameter[place].contiguous().view(torch.int16).to(torch.int32)
        master[place].view(torch.int32).copy_(high.bitwise_left_shift_(16).add_(remainder[place]))
    return master


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round flat float32 masters to parameters of a dtype, as updates do."""
    return split(master)[0] if dtype == torch.bfloat16 else master.to(dtype)


def rounds_to(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether flat float32 masters round to the values of a parameter of the same shape."""
    return torch.equal(rounded(master, parameter.dtype), parameter)


def _blocks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, _BLOCK):
        yield slice(start, start + _BLOCK)
