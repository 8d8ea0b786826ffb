"""The largest rounding error that int8 moments may have, computed without the code under test.

See [Note: int8 codes] in csrc/cpu_adam/moments.inl.
"""

from __future__ import annotations

import torch


def code_step(values: torch.Tensor, span: int) -> torch.Tensor:
    """Return for each of `values` the distance between the two decodable values just below and above it.

    The decodable values are those to which int8 codes decode. The result is float64 (n,). Its elements are
    the largest error of one stochastic rounding, and twice the largest error of rounding to nearest.
    values: finite moments, float32 (n,). Each 64 successive values, from the first on, are a block: their
    codes share one scale, which the largest magnitude of the block sets. span: FIRST_SPAN for first
    moments, SECOND_SPAN for second moments, both of infinity.formats.encodings.
    """
    count = values.numel()
    rows = torch.nn.functional.pad(values.abs(), (0, -count % 64)).view(-1, 64)
    largest = rows.view(torch.int32).to(torch.int64).amax(1)
    # A largest magnitude that would round up to the next binade takes the exponent of that binade.
    exponent = ((largest + (1 << 20) + 512) >> 23).clamp(span + 1, 255)
    unit = (2.0 ** (exponent.double() - 127 - span)).masked_fill(exponent == 255, float("nan")).unsqueeze(1)
    binade = torch.frexp(rows.double() / unit + 1)[1] - 1
    return (torch.ldexp(torch.ones_like(rows, dtype=torch.float64), binade) * unit / 8).view(-1)[:count]
