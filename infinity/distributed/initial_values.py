"""Initial values: parameters and buffers that ranks take from rank 0 while their runtimes are made.

Rank 0 serves the values of its model, and the other ranks ask for the ranges that they keep. So no rank gets
more than it keeps, and all start with the same values, whatever their seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.distributed.communicator import Communicator
from infinity.distributed.exchange import Exchange
from infinity.distributed.message import Message
from infinity.layout.strides import in_memory_order

_WINDOW = 16 << 20
"""The most bytes that are asked for at once."""


class InitialValues:
    """The values of rank 0's parameters and buffers, as all ranks get them."""

    def __init__(self, communicator: Communicator, model: nn.Module) -> None:
        """model: the same on all ranks, but for its values."""
        self._communicator = communicator
        self._tensors = [*model.parameters(), *model.buffers()]
        self._exchange = Exchange(communicator, "initial values", functools.partial(_part, self._tensors))
        self._numbers = {id(each): number for number, each in enumerate(self._tensors)}
        self._buffers = [each for each in model.buffers() if not each.is_meta]
        self.serves = communicator.ranks.rank == 0
        """Whether this rank's values are the ones that all ranks get."""

    @contextmanager
    def generator(self) -> Iterator[None]:
        """Context in which torch's generator on the CPU is in rank 0's state, so that initialisers give the
        same values on all ranks. Afterwards each other rank has its own state again.
        """
        state = torch.get_rng_state()
        heard = self._communicator.agree(
            "offload()", generator=bytes(state.tolist()).hex() if self.serves else None
        )
        if self.serves:
            yield
            return
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(heard[0]["generator"])), dtype=torch.uint8))
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def take(self, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return rank 0's values of elements [first, first + count) of a tensor: (count,), as in memory."""
        flat = torch.empty(count, dtype=tensor.dtype, device="cpu")
        step = max(1, _WINDOW // max(1, flat.itemsize))
        for start in range(0, count, step):
            self._exchange.take(self._numbers[id(tensor)], first + start, flat[start : start + step])
        return flat

    def done(self) -> list[tuple[int, Message]]:
        """End the exchange: rank 0 serves until all others have ended it. Returns messages about other things
        that have come meanwhile.
        """
        with torch.no_grad():
            for buffer in self._buffers if not self.serves else ():
                there = self.take(buffer, 0, buffer.numel()).as_strided(buffer.shape, _dense(buffer))
                _apart(buffer, buffer.stride()).copy_(_apart(there, buffer.stride()))
        return self._exchange.end()


def _part(tensors: Sequence[torch.Tensor], number: int, first: int, count: int) -> torch.Tensor:
    """Elements [first, first + count) of a tensor, in memory order."""
    tensor = tensors[number].detach()
    return in_memory_order(tensor, _dense(tensor))[first : first + count].cpu().contiguous()


def _apart(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that a tensor with strides `stride`, such as an expanded one, has apart in memory:
    of a dimension with stride 0 the first element, which is all others, too.
    """
    for dimension, (size, step) in enumerate(zip(tensor.shape, stride, strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor if its elements fill one range of memory; else those of a contiguous tensor."""
    return torch.empty_like(tensor, device="meta").stride()
