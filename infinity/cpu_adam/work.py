"""Work for a thread pool: updates, gradient passes and streams, and the results of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity import _cpu_adam
from infinity.cpu_adam.hyper import Hyper

BLOCK: int = _cpu_adam.BLOCK
"""Number of elements whose squares have one sum: segments may split a parameter only at its multiples."""

CODE_BLOCK: int = _cpu_adam.CODE_BLOCK
"""Elements of a parameter that share an exponent in int8 moments."""


@dataclass(frozen=True)
class Span:
    """Memory that no tensor describes: `count` elements of `dtype` from `address` (bytes).

    `owner` is kept alive until the job that uses the span is done.
    """

    address: int
    dtype: torch.dtype
    count: int
    owner: object = None


Array: TypeAlias = torch.Tensor | Span


@dataclass(frozen=True)
class Segment:
    """Elements [start, start + count) of a page's arrays, all of one parameter.

    With bfloat16 and int8 moments, an update rounds up or down by random bits that are a function of `seed`
    and of an element's index in its parameter, modulo 2**32. They do not depend on how a parameter is split,
    if every part is given its own `index`.
    """

    start: int
    count: int
    hyper: int = 0
    """Index of the hyper-parameters. Only updates use it, and the fields below."""
    index: int = 0
    """Index of the segment's first element in its parameter."""
    seed: int = 0
    """The seed of rounding: 32 bits, different for every parameter and step."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step over a page. All arrays are flat and of one length.

    The gradient that the rule sees is (accumulated + grad) * scale. Bytes moved per parameter with
    bf16 gradients: 28 with an fp32 master and a bf16 copy, 26 with a split master, 18 with a split master
    and bfloat16 moments, 14 with a split master and int8 moments.

    Both moments have one format. bfloat16 moments are rounded stochastically: to one of both neighbours, with
    probabilities that make the mean right. int8 moments are codes relative to the largest magnitude of each
    block of CODE_BLOCK elements, rounded likewise ([Note: int8 codes] in csrc/cpu_adam/moments.inl;
    `infinity.formats.moments` reads them). With int8 moments, segments start, and have an index, at multiples
    of CODE_BLOCK, and an element that is not finite makes NaN of its block. A page of zeros holds zeros in
    every format.
    """

    grad: Array
    """float32, bfloat16 or float16; read."""
    parameter: Array
    """The float32 master; or, with `remainder`, the bfloat16 high half of a split master."""
    segments: Sequence[Segment]
    hypers: Sequence[Hyper]
    accumulated: Array | None = None
    """float32, added to grad; read."""
    remainder: Array | None = None
    """int16: master bits = (parameter bits << 16) + remainder. Zero it after editing the parameter."""
    copy: Array | None = None
    """Copy of the new fp32 master: float32, bfloat16 (rounded half up, equal to a split master's high
    half) or float16 (to nearest, ties to even); written."""
    first_moment: Array | None = None
    """float32, bfloat16 or uint8 (int8 codes): Adam's mean of gradients, SGD's momentum buffer."""
    second_moment: Array | None = None
    """The same dtypes: Adam's mean of squares, Adagrad's sum of squares."""
    first_scale: Array | None = None
    """uint8, ceil(n / CODE_BLOCK): the exponents of the first moment's int8 codes. The block that starts at
    element i has entry i // CODE_BLOCK."""
    second_scale: Array | None = None
    """The same for the second moment."""
    scale: float = 1.0
    """One factor for both unscaling and clipping."""


@dataclass(frozen=True)
class UpdateResult:
    nonfinite: tuple[int, ...]
    """Indices of the segments in which a scaled gradient was not finite (they were updated all the
    same; to skip a step, look at the blocks of a `Gradient` pass first)."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One pass over gradients: x = grad (+ accumulated), stored to `accumulated` and/or squared; or a copy.

    Squares are of x * scale (fp32), summed in fp64 over blocks of BLOCK elements counted from each
    segment's start.
    """

    grad: Array
    """float32, bfloat16 or float16; read."""
    segments: Sequence[Segment]
    accumulated: Array | None = None
    """float32."""
    add: bool = True
    """Whether x includes what `accumulated` holds; False for the first of several micro-batches."""
    store: bool = False
    """Whether x becomes the content of `accumulated`."""
    copy: Array | None = None
    """An array of the gradient's dtype that gets its bits as they are; written."""
    squares: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class GradientResult:
    blocks: tuple[npt.NDArray[np.float64], ...]
    """The sums of squares of each segment's blocks; empty unless squares were asked for. Their sum is finite
    if and only if every element is."""


def sum_in_order(sums: npt.NDArray[np.float64], start: float = 0.0) -> float:
    """The sum start + sums[0] + sums[1] + ..., added one after the other.

    A parameter's sum of squares is its blocks' sums in order, wherever its segments were computed; so
    sum_in_order(b, sum_in_order(a)) is the total of a parameter split into a and b.
    """
    return _cpu_adam.sum_in_order(sums, start)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A pass that moves bytes as an update over such arrays would, without arithmetic: a limit of its speed.

    Arrays have any dtype and one length in elements. Contents of `read_write` arrays (xor of a constant) and
    of `write` arrays are not kept.
    """

    read: Sequence[Array] = ()
    read_write: Sequence[Array] = ()
    write: Sequence[Array] = ()
    granule: int = 64
    """Elements of one array that are handled before the next array's turn."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        once = sum(_bytes(each) for each in (*self.read, *self.write))
        return once + 2 * sum(_bytes(each) for each in self.read_write)


def element_count(array: Array) -> int:
    return array.count if isinstance(array, Span) else array.numel()


def _bytes(array: Array) -> int:
    return element_count(array) * array.dtype.itemsize
