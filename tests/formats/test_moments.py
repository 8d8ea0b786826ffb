"""Tests of the codec of int8 moments: its error, and that it agrees with the update kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from moment_codes import code_step

from infinity.cpu_adam import CODE_BLOCK
from infinity.formats.encodings import FIRST_SPAN, SECOND_SPAN, decode, encode

SPANS = (FIRST_SPAN, SECOND_SPAN)
LARGEST = 3.19e38
"""A float32 magnitude. Finite values of a larger magnitude are encoded as the largest code."""

finite = arrays.arrays(
    np.float32, st.integers(0, 3 * CODE_BLOCK + 5), elements=st.floats(-(2.0**127), 2.0**127, width=32)
)


def of(span: int, values: torch.Tensor) -> torch.Tensor:
    return values if span == FIRST_SPAN else values.abs()


def round_trip(values: torch.Tensor, span: int) -> torch.Tensor:
    return decode(*encode(values, span), span)


@settings(max_examples=150, deadline=None)
@given(values=finite, span=st.sampled_from(SPANS))
def test_nearest_is_within_half_a_step_and_decoded_values_are_kept(values: np.ndarray, span: int) -> None:
    x = of(span, torch.from_numpy(values))
    near = round_trip(x, span)
    error = (near.double() - x.double()).abs()
    half = code_step(x, span) / 2
    # The smallest code stands for every smaller value but 0.
    assert bool((error <= (half if span == FIRST_SPAN else torch.where(near > x, 2 * half, half))).all())
    assert torch.equal(round_trip(near, span), near)
    if span == SECOND_SPAN:
        assert torch.equal(near > 0, x > 0)


def test_what_is_not_tiny_in_its_block_is_off_by_a_sixteenth_at_most() -> None:
    x = torch.logspace(-40, 20, 64 * 4001, base=2.0).view(-1, 64)
    for span, binades in ((FIRST_SPAN, 11), (SECOND_SPAN, 27)):
        block = (
            x * 2.0 ** -torch.arange(0, 64).clamp(max=binades)
        ).flatten()  # each block spans some binades
        step = code_step(block, span) / block.double()
        assert float(step.max()) < 1 / 8 * (1 + 2.0**-3)


@pytest.mark.parametrize("span", SPANS)
def test_every_block_that_an_update_can_write_survives_a_round_trip(span: int) -> None:
    """Decoding a block of codes, encoding the values and decoding them again gives the same values.

    This holds for all blocks that an update can write. In such blocks the largest element has one of the
    nine highest codes, since its magnitude sets the block's exponent.
    """
    last = 8 * span + 7
    random = torch.Generator().manual_seed(0)
    for top in range(last - 8, last + 1):
        for lowest in (0, 4 * span):
            blocks = 254 - span
            codes = torch.randint(lowest, top + 1, (blocks, CODE_BLOCK), generator=random)
            codes[:, 5] = top
            if span == FIRST_SPAN:
                codes += 128 * torch.randint(0, 2, codes.shape, generator=random)
            exponents = torch.arange(span + 1, 255).to(torch.uint8)
            values = decode(codes.flatten().to(torch.uint8), exponents, span)
            again = round_trip(values, span)
            assert bool(values.isfinite().all())
            assert torch.equal(again, values) and torch.equal(again.signbit(), values.signbit())


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(span: int, bad: float) -> None:
    x = torch.ones(3 * CODE_BLOCK)
    x[CODE_BLOCK + 7] = bad
    codes, exponents = encode(x, span)
    assert decode(codes, exponents, span).isnan().nonzero().flatten().tolist() == list(
        range(CODE_BLOCK, 2 * CODE_BLOCK)
    )
    assert not codes[CODE_BLOCK : 2 * CODE_BLOCK].any() and exponents[1] == 255


def test_the_largest_floats_become_the_largest_code() -> None:
    for span in SPANS:
        x = torch.tensor([torch.finfo(torch.float32).max, 1.0])
        assert round_trip(x, span)[0].item() == pytest.approx(LARGEST, rel=1e-2)


def test_a_page_of_zeros_holds_zeros() -> None:
    zeros = torch.zeros(CODE_BLOCK + 3, dtype=torch.uint8)
    for span in SPANS:
        assert not decode(zeros, zeros[:2], span).any()
        assert round_trip(torch.zeros(5), span).tolist() == [0.0] * 5
    assert encode(torch.zeros(0), FIRST_SPAN)[1].numel() == 0
