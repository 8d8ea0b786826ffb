"""The exact split of an fp32 master into a bfloat16 parameter and 16 more bits.

The parameter is the master rounded half up in the last place of its 16 high bits, (u + 0x8000) >> 16, and the
remainder is what is missing, as a signed number: u = (parameter << 16) + remainder, for every u. Ties to even
could not be split so: both neighbours of a tie would need the remainder 0x8000.
"""

from __future__ import annotations

import torch


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bfloat16, int16) of flat float32 values. NaN becomes a bfloat16 NaN with remainder 0."""
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    high = (bits + 0x8000) >> 16
    remainder = (bits - (high << 16)).to(torch.int16)
    parameter = ((high + 0x8000) % 0x10000 - 0x8000).to(torch.int16).view(torch.bfloat16)
    lost = master.isnan()
    if bool(lost.any()):
        parameter = parameter.masked_fill(lost, float("nan"))
        remainder = remainder.masked_fill(lost, 0)
    return parameter, remainder


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of flat (bfloat16, int16) halves."""
    bits = (parameter.contiguous().view(torch.int16).to(torch.int64) << 16) + remainder.to(torch.int64)
    return ((bits + 0x80000000) % 0x100000000 - 0x80000000).to(torch.int32).view(torch.float32)
