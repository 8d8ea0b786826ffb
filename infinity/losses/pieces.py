"""Pieces: loops over parts of a tensor, of which a step without data runs one of each size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

Piece = TypeVar("Piece")


class _Times(threading.local):
    now = 1


_times = _Times()


def times() -> int:
    """How often a step with data runs what this thread runs now without data; 1 outside of all loops."""
    return _times.now


def each_size(pieces: Iterable[Piece], size: Callable[[Piece], int], tensor: torch.Tensor) -> Iterator[Piece]:
    """Yield all pieces of a loop. If `tensor` has no data, yield one piece of each size, for which `times` is
    the number of such pieces, times that of the loop around. So what a loop does may follow from the size of
    a piece alone, it must free what it makes, and what it does not yield has no result.
    """
    if not isinstance(tensor, FakeTensor):
        yield from pieces
        return
    found = list(pieces)
    numbers, around = Counter(map(size, found)), _times.now
    try:
        for number, piece in {size(each): each for each in found}.items():
            _times.now = around * numbers[number]
            yield piece
    finally:
        _times.now = around
