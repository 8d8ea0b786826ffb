"""Rank zero: gives the other ranks ranges of its tensors while runtimes are made."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.message import Kind, Message, What
from infinity.errors import RankDivergence

_SLICE = 0.2
"""Seconds after which rank 0 looks whether another rank has failed."""


class RankZero:
    """An exchange in which the other ranks take what they keep of rank 0's tensors, which have numbers.

    Each other rank calls `take` as often as it likes, and then `leave`; rank 0 calls `serve`.
    """

    def __init__(self, communicator: Communicator, label: str) -> None:
        """label: what the tensors are, such as "initial values", for counters and errors."""
        self._communicator = communicator
        self._label = label

    def take(self, number: int, first: int, into: torch.Tensor) -> None:
        """Bring elements [first, first + count) of tensor `number` of rank 0.

        into: (count,), contiguous, in RAM and of the dtype that rank 0 serves. Raises RankFailure if rank 0
        is lost, and RankDivergence if it serves another number of bytes.
        """
        wire = self._communicator.wire
        delivery = wire.expect(0, [into.view(torch.uint8)], label=self._label)
        wire.post(0, Kind.REQUEST, delivery.number, What.INITIAL, number, first, into.numel())
        delivery.wait()

    def leave(self) -> None:
        """Tell rank 0 that this rank takes nothing more."""
        self._communicator.wire.post(0, Kind.REQUEST, 0, What.INITIAL, -1, 0, 0)

    def serve(self, part: Callable[[int, int, int], torch.Tensor]) -> list[tuple[int, Message]]:
        """Serve the other ranks until all have left, with all bytes that they have asked for.

        part: function (number, first, count) that returns elements [first, first + count) of a tensor: flat,
        contiguous and in RAM. Returns messages about other things that have come meanwhile, as (source,
        message). Raises RankFailure, and RankDivergence if a rank asks for nothing more but does not leave.
        """
        bell, wire = self._communicator.bell, self._communicator.wire
        left, others = set(self._communicator.ranks.peers), []
        until = time.monotonic() + bell.timeout
        while left:
            try:
                source, message = wire.inbox.get(timeout=_SLICE)
            except queue.Empty:
                if bell.failure is not None:
                    raise bell.failure.again() from None
                if time.monotonic() > until:
                    raise RankDivergence(
                        f"Ranks {sorted(left)} have not taken their {self._label} within {bell.timeout:g} s.",
                        "Call offload() on all ranks with the same model.",
                    ) from None
                continue
            until = time.monotonic() + bell.timeout
            if message.kind is not Kind.REQUEST or message.fields[1] != What.INITIAL:
                others.append((source, message))
                continue
            delivery, _, number, first, count = message.fields
            if number < 0:
                left.discard(source)
            else:
                wire.deliver(source, delivery, [part(number, first, count).view(torch.uint8)], self._label)
        return others
