"""Draws: fills large tensors with random numbers on several threads, with the bits that one thread draws.

[Note: draws in parallel]
Torch draws the numbers of a tensor on one thread, because each word of its generator, a Mersenne Twister,
follows from those before. Counting the words takes a twentieth of the time. Most of it goes into making
numbers of the right distribution out of them. Here the calling thread counts on (csrc/twister/twister.hpp),
and other threads call torch's own operator for pieces of the tensor, each with a generator in the state with
which its piece begins. Both `normal_` and `uniform_` take one word for an element of float32. `normal_` makes
16 elements at a time, and takes 16 words more for a last group that is not full, so pieces are cut at
multiples of 16 elements. The default generator goes on behind the last piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from infinity import _twister

if TYPE_CHECKING:
    from typing_extensions import Self

_GROUP = 16
_PIECE = 1 << 20
"""Elements of a piece, some 5 ms of work for one thread. A multiple of _GROUP."""
_LEAST = 1 << 16
"""Elements of the smallest tensor that is worth the handing over."""

_NORMAL = torch.ops.aten.normal_.default
_FILLS = (_NORMAL, torch.ops.aten.uniform_.default)


class Draws:
    """Takes over calls of `normal_` and `uniform_` that fill large tensors from the default generator.

    A context manager, at whose end no fill is under way. threads: number of threads that fill tensors. With
    one, no call is taken over.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 and draws_as_noted() else None
        self._under_way: dict[int, list[Future[None]]] = {}
        """Address of a storage -> the pieces in it that were handed over since the last `wait` for it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def take(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Take over a call of an operator of torch if it is such a fill. Returns whether it was taken over.

        Waits first until the tensors among the arguments have all numbers that were drawn for them.
        """
        if self._under_way:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor):
                    self.wait(each)
        if self._pool is None or function not in _FILLS or kwargs.get("generator") is not None:
            return False
        tensor, *numbers = args
        plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
        if not plain or tensor.numel() < _LEAST:
            return False
        fill = functools.partial(_fill, function, tensor.detach().view(-1), numbers, pool=self._pool)
        self._under_way[_address(tensor)] = fill(piece=_PIECE)
        return True

    def wait(self, tensor: torch.Tensor) -> None:
        """Wait until a tensor has all numbers that were drawn for it."""
        if not tensor.is_meta:
            for each in self._under_way.pop(_address(tensor), ()):
                each.result()


@functools.cache
def draws_as_noted() -> bool:
    """Try whether the installed torch draws as [Note: draws in parallel] says. Changes no generator."""
    with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(1) as pool:
        for function, numel in itertools.product(_FILLS, (128, 101)):
            before = torch.get_rng_state()
            expected = function(torch.empty(numel, device="cpu"), -0.5, 2.0)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            found = torch.empty(numel, device="cpu")
            for each in _fill(function, found, (-0.5, 2.0), pool=pool, piece=3 * _GROUP):
                each.result()
            if not (torch.equal(found, expected) and torch.equal(torch.get_rng_state(), after)):
                return False
    return True


def _fill(
    function: Any, flat: torch.Tensor, numbers: Sequence[float], *, pool: ThreadPoolExecutor, piece: int
) -> list[Future[None]]:
    """Have `pool` fill a flat tensor in pieces of `piece` elements; the last one has up to _GROUP more.
    Returns the pieces that are under way. The default generator is then in the state behind them.
    """
    states, numel = _States(), flat.numel()
    cuts = [0, *range(piece, numel - _GROUP + 1, piece), numel]
    under_way = []
    for start, end in itertools.pairwise(cuts):
        under_way.append(pool.submit(_draw, function, flat[start:end], numbers, states.now()))
        states.count_on(end - start)
    if function is _NORMAL and numel % _GROUP:
        states.count_on(_GROUP)
    torch.set_rng_state(states.now())
    return under_way


def _draw(function: Any, piece: torch.Tensor, numbers: Sequence[float], state: torch.Tensor) -> None:
    generator = torch.Generator(device="cpu")
    generator.set_state(state)
    function(piece, *numbers, generator=generator)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _States:
    """The states of the default generator from now on.

    A state of torch is bytes (CPUGeneratorImplStateLegacy in aten/src/ATen/CPUGeneratorImpl.cpp). At byte 8
    is the number of words that are left, and one (int32); at byte 16 the index of the next word (int64); at
    byte 24 the 624 words of 32 bits, in 64 bits each. All other bytes stay as they are.
    """

    _WORDS = 624

    def __init__(self) -> None:
        self._state = torch.get_rng_state().numpy()
        left, following, words = self._parts(self._state)
        self._words = words.astype(np.uint32)
        self._place = self._WORDS if left[0] == 1 else int(following[0])

    def count_on(self, count: int) -> None:
        self._place = _twister.count_on(self._words, self._place, count)

    def now(self) -> torch.Tensor:
        """The present state, as `torch.Generator.set_state` takes it."""
        found = self._state.copy()
        left, following, words = self._parts(found)
        left[0], following[0], words[:] = self._WORDS + 1 - self._place, self._place, self._words
        return torch.from_numpy(found)

    def _parts(self, state: Any) -> tuple[Any, Any, Any]:
        """Views of the parts of a state that change."""
        return (
            state[8:12].view(np.int32),
            state[16:24].view(np.int64),
            state[24 : 24 + 8 * self._WORDS].view(np.int64),
        )
