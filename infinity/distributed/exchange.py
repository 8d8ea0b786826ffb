"""Exchange: ranks give each other ranges of what they have, while runtimes are made.

[Note: serving while waiting]
No other thread acts on messages yet. So a rank that waits for bytes serves others meanwhile, and one that has
all it needs serves until nobody needs anything of it. Ranks may take from each other in any order, and none
waits for one that waits for it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection

import torch

from infinity.distributed.communicator import Communicator
from infinity.distributed.message import Message, MessageKind, What
from infinity.distributed.transfers import Delivery
from infinity.errors import RankDivergence

_SLICE = 0.2
"""Seconds after which a rank that waits looks whether another rank has failed."""

Part = Callable[[int, int, int], torch.Tensor]
"""Function (number, first, count) that returns what is sent for elements [first, first + count) of a tensor:
flat, contiguous and in RAM.
"""


class Exchange:
    """An exchange in which ranks take what they need of other ranks' tensors, which have numbers.

    Each rank calls `take` as often as it likes, and then `end`. The same ranks may then begin another
    exchange, once all have ended this one.
    """

    def __init__(
        self,
        communicator: Communicator,
        label: str,
        part: Part,
        *,
        servers: Collection[int] = (0,),
        clients: Collection[int] | None = None,
    ) -> None:
        """label: what the tensors are, such as "initial values", for counters and errors. part: gives what
        this rank has. servers: ranks that this one may take from. clients: ranks that may take from this one;
        None: all others if this rank is a server, and else none. All ranks see the same.
        """
        rank, peers = communicator.ranks.rank, communicator.ranks.peers
        if clients is None:
            clients = peers if rank in servers else ()
        self._communicator = communicator
        self._label = label
        self._part = part
        self._servers = [each for each in servers if each != rank]
        self._clients = clients
        self._left = set(clients)
        """The clients that may still ask for something."""
        self._others: list[tuple[int, Message]] = []

    def take(
        self, number: int, first: int, into: torch.Tensor, count: int | None = None, *, server: int = 0
    ) -> None:
        """Bring what a rank has for elements [first, first + count) of tensor `number`.

        into: contiguous, in RAM and of the dtype that the server gives. count: by default the number of
        elements of `into`. Raises RankFailure if the server is lost, and RankDivergence if it gives another
        number of bytes.
        """
        self.await_next(self.ask(number, first, into, count, server=server))

    def ask(
        self, number: int, first: int, into: torch.Tensor, count: int | None = None, *, server: int = 0
    ) -> Delivery:
        """Begin what `take` does; `await_next` ends it."""
        wire = self._communicator.wire
        delivery = wire.expect(server, [into.view(torch.uint8)], label=self._label, tell=bool(self._clients))
        wanted = [number, first, into.numel() if count is None else count]
        wire.post(server, MessageKind.REQUEST, delivery.number, What.INITIAL, *wanted)
        return delivery

    def await_next(self, delivery: Delivery) -> None:
        """Wait until bytes are there, and serve others meanwhile. Called in the order of `ask`."""
        if self._clients:
            self._serve_until_told()
        delivery.wait()

    def serve_waiting(self) -> None:
        """Serve the ranks that wait for this one now. Called between long pieces of other work."""
        while self._left:
            try:
                self._act(*self._communicator.wire.inbox.get_nowait())
            except queue.Empty:
                return

    def end(self) -> list[tuple[int, Message]]:
        """Take nothing more, and serve others until they have ended, too.

        Returns messages about other things that have come meanwhile, as (source, message). Raises
        RankFailure, and RankDivergence if a rank asks for nothing more but does not end.
        """
        bell, wire = self._communicator.bell, self._communicator.wire
        for server in self._servers:
            wire.post(server, MessageKind.REQUEST, 0, What.INITIAL, -1, 0, 0)
        until = time.monotonic() + bell.timeout
        while self._left:
            try:
                self._act(*wire.inbox.get(timeout=_SLICE))
                until = time.monotonic() + bell.timeout
            except queue.Empty:
                if bell.failure is not None:
                    raise bell.failure.again() from None
                if time.monotonic() > until:
                    raise RankDivergence(
                        f"Ranks {sorted(self._left)} have not taken their {self._label} within "
                        f"{bell.timeout:g} s.",
                        "Call offload() on all ranks with the same model.",
                    ) from None
        others, self._others = self._others, []
        self._left = set(self._clients)
        return others

    def _serve_until_told(self) -> None:
        """Act on messages up to that of a delivery's end, or of the wire if the run has failed."""
        bell, wire = self._communicator.bell, self._communicator.wire
        until = time.monotonic() + bell.timeout
        while bell.failure is None and time.monotonic() < until:
            try:
                source, message = wire.inbox.get(timeout=_SLICE)
            except queue.Empty:
                continue
            if message.kind is MessageKind.ARRIVED:
                return
            self._act(source, message)

    def _act(self, source: int, message: Message) -> None:
        if message.kind is not MessageKind.REQUEST or message.fields[1] != What.INITIAL:
            self._others.append((source, message))
            return
        delivery, _, number, first, count = message.fields
        if number < 0:
            self._left.discard(source)
        else:
            pieces = [self._part(number, first, count).view(torch.uint8)]
            self._communicator.wire.deliver(source, delivery, pieces, self._label)
