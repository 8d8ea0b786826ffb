"""Encodings of what the optimizer keeps: the exact split of an fp32 master weight into a bfloat16 parameter
and an int16 remainder, and the formats of moments with the codec of the int8 format.

Masters. Let u be the 32 bits of the master as an integer. The bits of the parameter are (u + 0x8000) >> 16:
the magnitude of the master is rounded to bfloat16, and ties are rounded up. The remainder is the signed
difference, so that u = (parameter << 16) + remainder for every u. Ties are not rounded to even, because a tie
that is rounded down would have the remainder 0x8000, which int16 cannot hold. 32-bit arithmetic that wraps
around is sufficient, because only NaNs overflow, and NaNs are handled separately.

Moments. The format "fp32" stores float32 values, and "bf16" stores bfloat16 values. The format "int8" stores
one byte, the code, for each element, and one biased exponent e for each block of CODE_BLOCK elements, counted
from the parameter's first element. The unit of a block is `s = 2**(e - 127 - span)`. A code c stands for the
value `(y - 1) * s`, where y is the float32 number whose bits are the bits of 1.0 plus `c << 20`. A code
therefore has three bits of mantissa. A code of a first moment (span 15) has four bits of exponent, and its
highest bit is the sign. A code of a second moment (span 31) has five bits of exponent and no sign. This is
the mu-law of ITU-T G.711 with more segments. If e is 255, all elements of the block are NaN.

The update kernels use the same codec, but round stochastically; see [Note: int8 codes] in
csrc/cpu_adam/moments.inl. The functions here serve reads and writes outside of updates. They round to the
nearest value, so that decoded values are encoded again without loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infinity import _cpu_adam
from infinity.cpu_adam import CODE_BLOCK

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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""The dtype of a moment's elements, by the format's name in `Precision.states`."""

FIRST_SPAN: int = _cpu_adam.FIRST_SPAN
"""The span of first moments in the int8 format."""

SECOND_SPAN: int = _cpu_adam.SECOND_SPAN
"""The span of second moments in the int8 format. A second moment above 0 is never rounded to 0."""

_SHIFT: int = _cpu_adam.CODE_BIT
_ONE = 0x3F800000
_NOT_FINITE: int = _cpu_adam.NOT_FINITE
_BLOCKS = 1 << 11
"""Number of blocks that are converted at a time. Intermediate results of this size stay in the cache."""


def encode(values: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 CPU values of shape (n,) in the int8 format. The first value begins a block.

    Returns the codes, uint8 (n,), and the biased exponents of the blocks, uint8 (ceil(n / CODE_BLOCK),).
    span: FIRST_SPAN for first moments, or SECOND_SPAN for second moments, which lose their signs.

    The error of a finite value x is at most (|x| + s) / 16, where s is the unit of the block, with two
    exceptions. A second moment between 0 and the smallest code above 0 becomes that code. A magnitude above
    3.19e38 becomes 3.19e38. If a value is not finite, all values of its block become NaN.
    """
    count = values.numel()
    codes = torch.empty(count, dtype=torch.uint8, device="cpu")
    exponents = torch.empty(-(-count // CODE_BLOCK), dtype=torch.uint8, device="cpu")
    for place, blocks in _components(count):
        part = values[place].to(torch.float32)
        rows = torch.nn.functional.pad(part, (0, -part.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
        chosen, exponent = _encode_rows(rows, span)
        codes[place] = chosen.view(-1)[: part.numel()].to(torch.uint8)
        exponents[blocks] = exponent.to(torch.uint8)
    return codes, exponents


def decode(codes: torch.Tensor, exponents: torch.Tensor, span: int) -> torch.Tensor:
    """Decode values of the int8 format to float32 CPU values of shape (n,). codes: uint8 (n,). exponents:
    biased exponents of the blocks, uint8 (ceil(n / CODE_BLOCK),). span: as in `encode`.
    """
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    for place, blocks in _components(codes.numel()):
        unit = _unit(exponents[blocks].to(torch.int32), span).repeat_interleave(CODE_BLOCK)
        code = codes[place].to(torch.int32)
        if span == FIRST_SPAN:
            magnitude = _magnitude(code & 0x7F, unit[: code.numel()])
            values[place] = torch.where(code > 0x7F, -magnitude, magnitude)
        else:
            values[place] = _magnitude(code, unit[: code.numel()])
    return values


def _encode_rows(rows: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    magnitude = rows.abs()
    exponent = _exponent(magnitude, span)
    codes, error = _nearest(magnitude, exponent, span)
    # Where a block's largest element is near the end of its binade, `exponent` is the exponent of the next
    # binade, or of NaN if there is no next binade. The lower exponent is taken if its errors are smaller. So
    # the last code of a binade keeps its value, and finite elements above the greatest code become that code.
    lower = (exponent - 1).clamp(min=span + 1)
    other, other_error = _nearest(magnitude, lower, span)
    better = ~(error <= other_error) & magnitude.isfinite().all(1)
    codes = torch.where(better.unsqueeze(1), other, codes)
    exponent = torch.where(better, lower, exponent)
    if span == FIRST_SPAN:
        codes = codes | (torch.signbit(rows).to(torch.int32) << 7)
    return codes.masked_fill_((exponent == _NOT_FINITE).unsqueeze(1), 0), exponent


def _exponent(magnitude: torch.Tensor, span: int) -> torch.Tensor:
    """Return the biased exponent of each block of an int8 moment, int32 (rows,).

    It is the biased exponent of the block's largest element in float32, or one more if the element would be
    rounded up to a power of two, but at least span + 1. magnitude: absolute values, float32
    (rows, CODE_BLOCK), one block in each row. span: as in `encode`.
    """
    largest = magnitude.view(torch.int32).to(torch.int64).amax(1)
    return ((largest + _cpu_adam.ROUNDS_UP) >> 23).clamp(span + 1, _NOT_FINITE).to(torch.int32)


def _nearest(magnitude: torch.Tensor, exponent: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the int8 code nearest to each magnitude, for blocks whose exponents are given.

    Returns (codes without the sign bit, int32 (rows, CODE_BLOCK); the sum of squared errors of each row,
    float64 (rows,)). magnitude, span: as in `_exponent`. exponent: the rows' biased exponents, int32 (rows,).
    """
    unit = _unit(exponent, span).unsqueeze(1)
    y = (magnitude.double() / unit.double() + 1).to(torch.float32)
    codes = ((y.view(torch.int32) - _ONE + (1 << (_SHIFT - 1))) >> _SHIFT).clamp(max=8 * span + 7)
    if span == SECOND_SPAN:
        codes = torch.maximum(codes, (magnitude > 0).to(torch.int32))
    error = _magnitude(codes, unit).double() - magnitude.double()
    return codes, error.square().sum(1)


def _magnitude(codes: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return (((codes << _SHIFT) + _ONE).view(torch.float32) - 1) * unit


def _unit(exponent: torch.Tensor, span: int) -> torch.Tensor:
    """Return the unit of each block, by which decoded codes are multiplied, float32. exponent: the blocks'
    biased exponents, int32. An exponent of 255 gives NaN. Exponents below span + 1, such as 0 in a page of
    zeros, count as span + 1. span: as in `encode`.
    """
    unit = ((exponent.clamp(min=span + 1) - span) << 23).view(torch.float32)
    return unit.masked_fill(exponent == _NOT_FINITE, float("nan"))


def _components(count: int) -> Iterator[tuple[slice, slice]]:
    """Divide a moment of `count` elements into ranges of at most _BLOCKS blocks. Yields for each range (slice
    of the moment's elements, slice of the exponents of its blocks).
    """
    for block in range(0, -(-count // CODE_BLOCK), _BLOCKS):
        yield (
            slice(block * CODE_BLOCK, min((block + _BLOCKS) * CODE_BLOCK, count)),
            slice(block, block + _BLOCKS),
        )
