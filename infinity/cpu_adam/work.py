"""Work for a thread pool, and its results: `Update`, `Gradient` (passes over gradients) and `Stream`;
and the hyper-parameters of updates, named as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity import _cpu_adam


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 weight decay (arXiv:1412.6980, algorithm 1), as torch.optim.Adam computes it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int
    """The number of the update, counted from 1 at the first update of the parameter."""
    maximize: bool = False

    _decoupled = False

    def native(self) -> _cpu_adam.AdamHyper:
        return _cpu_adam.AdamHyper(
            self._decoupled, self.lr, *self.betas, self.eps, self.weight_decay, self.step, self.maximize
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2), as in torch.optim.AdamW."""

    weight_decay: float = 1e-2

    _decoupled = True


@dataclass(frozen=True, kw_only=True)
class SGD:
    """SGD as in torch.optim.SGD, with its momentum buffer in `cpu_adam.Update.first_moment`."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first_step: bool
    """Whether the momentum buffer is empty. The update then stores the gradient in it, without dampening."""
    maximize: bool = False

    def native(self) -> _cpu_adam.SgdHyper:
        return _cpu_adam.SgdHyper(
            self.lr,
            self.momentum,
            self.dampening,
            self.weight_decay,
            self.nesterov,
            self.first_step,
            self.maximize,
        )


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Adagrad as in torch.optim.Adagrad, with the sum of squared gradients in
    `cpu_adam.Update.second_moment`.

    Before the first update the caller fills this array with the initial accumulator value.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    step: int
    maximize: bool = False

    def native(self) -> _cpu_adam.AdagradHyper:
        return _cpu_adam.AdagradHyper(
            self.lr, self.lr_decay, self.eps, self.weight_decay, self.step, self.maximize
        )


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Lion (arXiv:2302.06675, algorithm 2), with decoupled weight decay. A gradient or mean that is not
    finite makes the parameter NaN. `cpu_adam.Update.first_moment` is the mean of gradients.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    def native(self) -> _cpu_adam.LionHyper:
        return _cpu_adam.LionHyper(self.lr, *self.betas, self.weight_decay, self.maximize)


Hyper: TypeAlias = Adam | SGD | Adagrad | Lion

NativeHyper: TypeAlias = (
    _cpu_adam.AdamHyper | _cpu_adam.SgdHyper | _cpu_adam.AdagradHyper | _cpu_adam.LionHyper
)
"""Hyper-parameters as an object of the native core, made by `Hyper.native`."""


BLOCK: int = _cpu_adam.BLOCK
"""Number of elements for which one sum of squares is computed. Segments may split a parameter only at
multiples of it, counted from the parameter's first element.
"""

CODE_BLOCK: int = _cpu_adam.CODE_BLOCK
"""Number of elements of a parameter that share one exponent in int8 moments."""


AVERAGED: int = _cpu_adam.AVERAGED
"""The value of `Segment.hyper` of a segment that is averaged and not updated."""

AverageStep: TypeAlias = _cpu_adam.AverageStep
"""How averages change in a step. AverageStep(begins, weight): the average becomes the master if it `begins`,
or else torch.lerp(average, master, weight).
"""


@dataclass(frozen=True)
class MemorySpan:
    """An array in memory that no tensor describes: `count` elements of `dtype` at `address`, in bytes. A pool
    keeps the object `owner` alive until the job that uses the span is done.
    """

    address: int
    dtype: torch.dtype
    count: int
    owner: object = None


Array: TypeAlias = torch.Tensor | MemorySpan


@dataclass(frozen=True)
class Segment:
    """A range of the arrays of a page, elements [start, start + count), which belongs to one parameter.

    With bfloat16 or int8 moments, an update rounds stochastically. The random bits of an element are a
    function of `seed` and of the element's index in its parameter, modulo 2**32, so they do not depend on how
    the parameter is split into segments.
    """

    start: int
    count: int
    hyper: int = 0
    """Index of the segment's hyper-parameters in `Update.hypers`; AVERAGED for a segment that is only
    averaged. Only updates use `hyper`, `index` and `seed`.
    """
    index: int = 0
    """Index, in the parameter, of the segment's first element."""
    seed: int = 0
    """The seed of stochastic rounding: 32 bits, different for every parameter and step."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step over a page. All arrays are flat and have the same length, except the scales.

    The optimizer's rule uses the gradient (accumulated + grad) * scale. With bf16 gradients and Adam, an
    update moves this many bytes per parameter element: 28 with an fp32 master and a bf16 copy, 26 with a
    split master, 18 with a split master and bfloat16 moments, and 14 with a split master and int8 moments. A
    split master is an fp32 master stored as a bf16 parameter and the 16 bits that the parameter lacks.

    Both moments have the same format. bfloat16 moments are rounded stochastically, to one of the two
    neighbouring values with probabilities that preserve the mean. int8 moments are codes relative to the
    largest magnitude in each block of CODE_BLOCK elements, and are rounded stochastically too
    ([Note: int8 codes] in csrc/cpu_adam/moments.inl; infinity/formats/encodings.py decodes them). With int8
    moments, the start and the index of every segment are multiples of CODE_BLOCK, and one non-finite element
    makes all elements of its block NaN. In every format, moments whose bytes are all zero have the value
    zero.
    """

    grad: Array | None
    """float32, bfloat16 or float16, only read. None if all segments are only averaged."""
    parameter: Array
    """The float32 masters; or, if `remainder` is given, the bfloat16 parameters. Updated in place."""
    segments: Sequence[Segment]
    hypers: Sequence[Hyper]
    accumulated: Array | None = None
    """float32, only read, added to `grad`."""
    remainder: Array | None = None
    """The 16 bits of each fp32 master that the bfloat16 parameter lacks, as int16; None with fp32 masters.

    The bits of a master are (bits of parameter << 16) + remainder. Whoever changes the parameter in another
    way has to set the remainder to zero.
    """
    copy: Array | None = None
    """The array to which a copy of the updated fp32 master is written: float32, bfloat16 or float16.

    A bfloat16 copy is rounded to the nearest value, with ties away from zero, and so equals the bfloat16
    parameter of a split master. A float16 copy is rounded to the nearest value, with ties to even.
    """
    first_moment: Array | None = None
    """Mean of gradients (Adam, Lion) or momentum buffer (SGD): float32, bfloat16 or uint8 (int8 codes)."""
    second_moment: Array | None = None
    """Adam's mean of squares or Adagrad's sum of squares: float32, bfloat16 or uint8 (int8 codes)."""
    first_scale: Array | None = None
    """The biased exponents of the first moment's int8 codes, uint8 (ceil(n / CODE_BLOCK),) for n elements:
    entry i // CODE_BLOCK is that of element i.
    """
    second_scale: Array | None = None
    """The biased exponents of the second moment's int8 codes, in the form of `first_scale`."""
    scale: float = 1.0
    """The factor by which gradients are multiplied, for unscaling (loss scale) and clipping together."""
    average: Array | None = None
    """Running averages of the masters, float32; None if there are none. After the update of a segment its
    average becomes torch.lerp(average, master, average_step.weight).
    """
    average_step: AverageStep | None = None


@dataclass(frozen=True)
class UpdateResult:
    nonfinite: tuple[int, ...]
    """Indices of the segments in which a scaled gradient was not finite. They were updated like all others:
    to skip a step, check the sums of a `Gradient` pass before the update.
    """


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One pass over the gradients of a page, which adds, squares or copies them.

    The pass computes x = grad, or x = grad + accumulated. It can store x in `accumulated` (float32), sum the
    squares of x * scale (fp32), and copy `grad` (float32, bfloat16 or float16). Squares are summed in fp64
    over blocks of BLOCK elements, which are counted from the start of each segment.
    """

    grad: Array
    segments: Sequence[Segment]
    accumulated: Array | None = None
    add: bool = True
    """Whether `accumulated` is added to `grad`. False for the first gradient of a step, when `accumulated`
    has no content yet.
    """
    store: bool = False
    """Whether `grad` or `grad + accumulated` is stored in `accumulated`."""
    copy: Array | None = None
    """An array of the same dtype as `grad`, to which `grad` is copied bit by bit."""
    squares: bool = False
    """Whether the sums of squares in `GradientResult.blocks` are computed."""
    scale: float = 1.0
    """The factor by which x is multiplied before it is squared. x is stored without this factor."""


@dataclass(frozen=True)
class GradientResult:
    blocks: tuple[npt.NDArray[np.float64], ...]
    """For each segment, an array of sums of squares, one for each BLOCK elements of the segment.

    The arrays are empty without `Gradient.squares`. The sums of a segment are finite if and only if all
    scaled elements of the segment are finite.
    """


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A pass that reads and writes arrays as an update does, but without arithmetic: its speed is an upper
    limit for an update over arrays of the same sizes.

    All arrays have the same length in elements; any dtype is allowed. The contents of `read_write` arrays
    (each value is combined with a constant by xor) and of `write` arrays are destroyed.
    """

    read: Sequence[Array] = ()
    read_write: Sequence[Array] = ()
    write: Sequence[Array] = ()
    granule: int = 64
    """Number of consecutive elements of one array that the pass processes before it goes on to the next
    array.
    """

    @property
    def bytes_moved(self) -> int:
        """Bytes that the pass reads plus bytes that it writes."""
        once = sum(_bytes(each) for each in (*self.read, *self.write))
        return once + 2 * sum(_bytes(each) for each in self.read_write)


def element_count(array: Array) -> int:
    return array.count if isinstance(array, MemorySpan) else array.numel()


def _bytes(array: Array) -> int:
    return element_count(array) * array.dtype.itemsize
