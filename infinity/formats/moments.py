"""Formats of moments in optimizer pages, and the codec for values that are read or set outside of an update.

"fp32" keeps float32, "bf16" bfloat16. "int8" keeps a byte for each element and an exponent for each block
of CODE_BLOCK elements, counted from the parameter's first. A block with biased exponent e has the unit s =
2**(e - 127 - span), and a code c stands for (y - 1) * s, where y is the float32 with the bits of 1.0 plus c
<< 20: three bits of mantissa, and four of exponent for first moments (span 15; the byte's upper bit is the
sign) or five for second moments (span 31). This is the mu-law of ITU-T G.711, with more segments. Where e is
255, all of the block is NaN.

The kernels have the same codec, rounding stochastically; see [Note: int8 codes] in csrc/cpu_adam/moments.inl.
Here values are rounded to nearest, so that decoded values are encoded again without loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infinity import _cpu_adam
from infinity.cpu_adam import CODE_BLOCK

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""The dtype of a moment's elements, by `Precision.states`."""

FIRST_SPAN: int = _cpu_adam.FIRST_SPAN
"""Binades between the unit and the exponent of a block of first moments, which are means and have a sign."""

SECOND_SPAN: int = _cpu_adam.SECOND_SPAN
"""The same for second moments, which are sums of squares: they have no sign and are never rounded to 0."""

_SHIFT: int = _cpu_adam.CODE_BIT
_ONE = 0x3F800000
_NOT_FINITE: int = _cpu_adam.NOT_FINITE
_BLOCKS = 1 << 11
"""Blocks at a time, so that results between two operations stay in the cache."""


def encode(values: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, uint8 (n,), and exponents, uint8 (ceil(n / CODE_BLOCK),), of float32 CPU values (n,).

    span: FIRST_SPAN or SECOND_SPAN; second moments lose their signs. A finite element x is off by at most
    (|x| + s) / 16, with two exceptions: a second moment below the smallest code becomes that code, and a
    magnitude above 3.19e38 becomes 3.19e38. A block with an element that is not finite becomes NaN.
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
    """The float32 values (n,) of uint8 `codes` (n,) and `exponents` (ceil(n / CODE_BLOCK),)."""
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
    # Where a block's largest element is near the end of its binade, `exponent` is the next binade's, or NaN's
    # after the last one. The lower exponent is taken if its errors are smaller: so the last code of a binade
    # keeps its value, and finite elements above the last code of all become that code.
    lower = (exponent - 1).clamp(min=span + 1)
    other, other_error = _nearest(magnitude, lower, span)
    better = ~(error <= other_error) & magnitude.isfinite().all(1)
    codes = torch.where(better.unsqueeze(1), other, codes)
    exponent = torch.where(better, lower, exponent)
    if span == FIRST_SPAN:
        codes = codes | (torch.signbit(rows).to(torch.int32) << 7)
    return codes.masked_fill_((exponent == _NOT_FINITE).unsqueeze(1), 0), exponent


def _exponent(magnitude: torch.Tensor, span: int) -> torch.Tensor:
    """The biased exponents, int32 (rows,), of blocks of magnitudes, float32 (rows, CODE_BLOCK)."""
    largest = magnitude.view(torch.int32).to(torch.int64).amax(1)
    return ((largest + _cpu_adam.ROUNDS_UP) >> 23).clamp(span + 1, _NOT_FINITE).to(torch.int32)


def _nearest(magnitude: torch.Tensor, exponent: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes without sign, int32, and each row's sum of squares of their errors."""
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
    """The units, float32, of int32 biased exponents; NaN for 255. Exponents of a page of zeros count as the
    lowest."""
    unit = ((exponent.clamp(min=span + 1) - span) << 23).view(torch.float32)
    return unit.masked_fill(exponent == _NOT_FINITE, float("nan"))


def _components(count: int) -> Iterator[tuple[slice, slice]]:
    """The parts that are worked on at a time: each as its elements and its blocks."""
    for block in range(0, -(-count // CODE_BLOCK), _BLOCKS):
        yield (
            slice(block * CODE_BLOCK, min((block + _BLOCKS) * CODE_BLOCK, count)),
            slice(block, block + _BLOCKS),
        )
