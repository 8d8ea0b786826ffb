"""Ranks of a run: the processes that train one language model together, as its training loop sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _alone(call: str, value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class RunRanks:
    """The processes that train a model together. Each trains on micro-batches of its own."""

    rank: int = 0
    """This process's number, from 0 on."""
    ranks: int = 1
    """Number of processes."""
    gather: Callable[[str, Any], list[Any]] = _alone
    """Function that gives a value to all ranks and returns theirs, in the order of ranks. Values are
    numbers, booleans and lists of them. All ranks call the function as often, in the same order. Its first
    argument says what the value is, for errors.
    """


ONE_RANK = RunRanks()
"""The ranks of a process that trains by itself."""
