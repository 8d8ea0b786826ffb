"""Moments of an update on the device: read as float32, and kept again with the bits of the CPU's kernels.

The formats are infinity.moments'; codes, exponents and random bits are those of csrc/cpu_adam/moments.inl,
whose notes say why they are so, written as torch's operations on whole windows. All integers are 32 bits wide
and wrap, and a shift to the right is followed by a mask, for torch's copies the sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.config import round_up
from infinity.cpu_adam import CODE_BLOCK
from infinity.moments import FIRST_SPAN, SECOND_SPAN
from infinity.workspace import Workspace, high_halves, integers, quiet

_WEYL = 0x9E3779B1
_MIX = 0x85EBCA6B
_ALL = 0xFFFFFFFF
_ONE = 0x3F800000
_SHIFT = 20
_BELOW = (1 << _SHIFT) - 1
_NOT_FINITE = 255
_MARGIN = (1 << _SHIFT) + 512
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Window:
    """Elements [start, start + count) of an update's arrays, all of one parameter.

    With int8 moments, `start` is a multiple of CODE_BLOCK.
    """

    start: int
    count: int
    index: int
    """Of the first element in its parameter."""
    seed: int
    """32 bits."""

    def of(self, array: torch.Tensor) -> torch.Tensor:
        """The window's elements of an array."""
        return array[self.start : self.start + self.count]

    def blocks_of(self, array: torch.Tensor) -> torch.Tensor:
        """The window's entries of an array that has one for each CODE_BLOCK elements."""
        return array[self.start // CODE_BLOCK : -(-(self.start + self.count) // CODE_BLOCK)]


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of an update, as it is stored."""

    stored: torch.Tensor
    """float32, bfloat16, or uint8 (int8 codes), (n,)."""
    scale: torch.Tensor | None
    """Of codes: their exponents, uint8 (ceil(n / CODE_BLOCK),)."""
    first: bool
    """Whether it is the first moment, which has a sign, or the second."""

    def load(self, window: Window, space: Workspace) -> torch.Tensor:
        """float32 (window.count,): the stored values themselves, or in the workspace."""
        stored = window.of(self.stored)
        if stored.dtype == torch.float32:
            return stored
        into = space.first if self.first else space.second
        if self.scale is None:
            return into[: window.count].copy_(stored)
        padded = round_up(window.count, CODE_BLOCK)
        codes = integers(space.one)[:padded]
        codes[: window.count].copy_(stored)
        codes[window.count :].zero_()
        _decode(codes, window.blocks_of(self.scale), into[:padded], space, first=self.first)
        return into[: window.count]

    def store(self, window: Window, space: Workspace) -> None:
        """Round what `load` gave, and was changed since. `make_noise` came before; spoils `gradient`."""
        stored = window.of(self.stored)
        if stored.dtype == torch.float32:
            return
        values = space.first if self.first else space.second
        if self.scale is None:
            self._store_halves(values[: window.count], stored, space)
            return
        padded = round_up(window.count, CODE_BLOCK)
        values[window.count : padded].zero_()
        codes = _encode(values[:padded], window.blocks_of(self.scale), space, first=self.first)
        stored.copy_(codes[: window.count])

    def _store_halves(self, values: torch.Tensor, stored: torch.Tensor, space: Workspace) -> None:
        count = values.numel()
        noise, rounded = integers(space.other)[:count], integers(space.one)[:count]
        if self.first:
            torch.bitwise_and(noise, 0xFFFF, out=rounded)
        else:
            torch.bitwise_right_shift(noise, 16, out=rounded).bitwise_and_(0xFFFF)
        quiet(values)
        rounded.add_(integers(values))
        stored.view(torch.int16).copy_(high_halves(rounded))


def make_noise(window: Window, space: Workspace) -> None:
    """32 random bits for each element of the window, in `space.other`; spoils `one`.

    A hash of the seed and the element's index in its parameter: Noise of csrc/cpu_adam/moments.inl.
    """
    padded = round_up(window.count, CODE_BLOCK)
    noise, shifted = integers(space.other)[:padded], integers(space.one)[:padded]
    torch.arange(padded, out=noise, device=noise.device)  # named, or torch.set_default_device would
    noise.mul_(_signed(_WEYL)).add_(_signed(_key(window.seed) + window.index * _WEYL))
    torch.bitwise_right_shift(noise, 16, out=shifted).bitwise_and_(0xFFFF)
    noise.bitwise_xor_(shifted).mul_(_signed(_MIX))
    torch.bitwise_right_shift(noise, 13, out=shifted).bitwise_and_(0x7FFFF)
    noise.bitwise_xor_(shifted)


def _key(seed: int) -> int:
    seed = (seed ^ (seed >> 16)) * 0x7FEB352D & _ALL
    seed = (seed ^ (seed >> 15)) * 0x846CA68B & _ALL
    return seed ^ (seed >> 16)


def _signed(number: int) -> int:
    """The int32 that has the 32 low bits of a number."""
    return ((number & _ALL) ^ 0x80000000) - 0x80000000


def _decode(
    codes: torch.Tensor, scale: torch.Tensor, into: torch.Tensor, space: Workspace, *, first: bool
) -> None:
    """float32 values of int32 codes, whole blocks of them; spoils the codes."""
    span = FIRST_SPAN if first else SECOND_SPAN
    blocks = scale.numel()
    exponent, unit, mask = space.exponent[:blocks], space.unit[:blocks], space.mask[:blocks]
    exponent.copy_(scale)
    torch.eq(exponent, _NOT_FINITE, out=mask)
    torch.clamp(exponent, min=span + 1, out=unit).sub_(span).bitwise_left_shift_(23)
    units = unit.view(torch.float32).masked_fill_(mask, float("nan"))
    bits = integers(into)
    if first:
        torch.bitwise_and(codes, 0x7F, out=bits)
    else:
        bits.copy_(codes)
    bits.bitwise_left_shift_(_SHIFT).add_(_ONE)
    into.sub_(1)
    into.view(blocks, CODE_BLOCK).mul_(units.view(blocks, 1))
    if first:
        codes.bitwise_and_(0x80).bitwise_left_shift_(24)
        bits.bitwise_xor_(codes)


def _encode(values: torch.Tensor, scale: torch.Tensor, space: Workspace, *, first: bool) -> torch.Tensor:
    """int32 codes of whole blocks of values, in `space.one`; their exponents go to `scale`."""
    span = FIRST_SPAN if first else SECOND_SPAN
    blocks = scale.numel()
    exponent, unit, mask = space.exponent[:blocks], space.unit[:blocks], space.mask[:blocks]
    codes, more = integers(space.one)[: values.numel()], integers(space.gradient)[: values.numel()]
    quiet(values)
    torch.bitwise_and(integers(values), _MAGNITUDE, out=codes)
    torch.amax(codes.view(blocks, CODE_BLOCK), 1, out=exponent)
    exponent.add_(_MARGIN).bitwise_right_shift_(23).clamp_(span + 1, _NOT_FINITE)
    scale.copy_(exponent)
    torch.eq(exponent, _NOT_FINITE, out=mask)
    torch.mul(exponent, -1, out=unit).add_(254 + span).bitwise_left_shift_(23)
    scaled = codes.view(torch.float32)
    scaled.view(blocks, CODE_BLOCK).mul_(unit.view(torch.float32).view(blocks, 1))
    scaled.add_(1)
    # A block's halves share random bits: the low ones are the lower half's for the first moment.
    halves = (blocks, 2, CODE_BLOCK // 2)
    noise = integers(space.other)[: values.numel()].view(halves)[:, 0]
    low, high = (0, 1) if first else (1, 0)
    torch.bitwise_and(noise, _BELOW, out=more.view(halves)[:, low])
    torch.bitwise_right_shift(noise, 32 - _SHIFT, out=more.view(halves)[:, high]).bitwise_and_(_BELOW)
    codes.add_(more).sub_(_ONE).bitwise_right_shift_(_SHIFT)
    if first:
        codes.bitwise_or_(torch.bitwise_right_shift(integers(values), 24, out=more).bitwise_and_(0x80))
    else:  # what is not 0 is never kept as 0
        torch.bitwise_and(integers(values), _MAGNITUDE, out=more).clamp_(max=1)
        torch.maximum(codes, more, out=codes)
    codes.view(blocks, CODE_BLOCK).masked_fill_(mask.view(blocks, 1), 0)
    return codes
