"""Exchange: one rank gives others ranges of what it has, while runtimes are made."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.message import Kind, Message, What
from infinity.distributed.transfers import Delivery
from infinity.errors import RankDivergence

_SLICE = 0.2
"""Seconds after which the server looks whether another rank has failed."""


class Exchange:
    """An exchange in which ranks take what they need of another rank's tensors, which have numbers.

    Each client calls `take` as often as it likes, and then `leave`; the server calls `serve`.
    """

    def __init__(
        self,
        communicator: Communicator,
        label: str,
        *,
        server: int = 0,
        clients: Collection[int] | None = None,
    ) -> None:
        """label: what the tensors are, such as "initial values", for counters and errors. clients: None: all
        other ranks.
        """
        self._communicator = communicator
        self._label = label
        self._server = server
        self._clients = set(communicator.ranks.peers if clients is None else clients)

    def take(self, number: int, first: int, into: torch.Tensor, count: int | None = None) -> None:
        """Bring what the server has for elements [first, first + count) of tensor `number`.

        into: contiguous, in RAM and of the dtype that the server gives. count: by default the number of
        elements of `into`. Raises RankFailure if the server is lost, and RankDivergence if it gives another
        number of bytes.
        """
        self.ask(number, first, into, count).wait()

    def ask(self, number: int, first: int, into: torch.Tensor, count: int | None = None) -> Delivery:
        """Begin what `take` does, and return the delivery to wait for."""
        wire = self._communicator.wire
        delivery = wire.expect(self._server, [into.view(torch.uint8)], label=self._label)
        wanted = [number, first, into.numel() if count is None else count]
        wire.post(self._server, Kind.REQUEST, delivery.number, What.INITIAL, *wanted)
        return delivery

    def leave(self) -> None:
        """Tell the server that this rank takes nothing more."""
        self._communicator.wire.post(self._server, Kind.REQUEST, 0, What.INITIAL, -1, 0, 0)

    def serve(self, part: Callable[[int, int, int, int], torch.Tensor]) -> list[tuple[int, Message]]:
        """Serve the clients until all have left, with all bytes that they have asked for.

        part: function (rank that asks, number, first, count) that returns what is sent for elements
        [first, first + count) of a tensor: flat, contiguous and in RAM. Returns messages about other things
        that have come meanwhile, as (source, message). Raises RankFailure, and RankDivergence if a rank asks
        for nothing more but does not leave.
        """
        bell, wire = self._communicator.bell, self._communicator.wire
        left, others = set(self._clients), []
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
                pieces = [part(source, number, first, count).view(torch.uint8)]
                wire.deliver(source, delivery, pieces, self._label)
        return others
