"""ServiceThread: the thread that acts on messages of other ranks while this rank's training thread computes.

It takes the runtime's lock for moments, in turn with the training thread, and never waits for another rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from infinity.distributed.gradient_shards import GradientShards
from infinity.distributed.message import Message, MessageKind, What
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError, InfinityError
from infinity.ranks import Give
from infinity.system.lock import RuntimeLock

if TYPE_CHECKING:
    from infinity.distributed.page_service import PageService
    from infinity.distributed.ranked_step import RankedStep

_MOST_AT_ONCE = 32
"""The most messages that are acted on before the training thread gets the lock again."""


class ServiceThread:
    """Passes each message of other ranks to the component that handles it, until `stop`.

    Before `attach`, while a runtime is made, it answers only requests in exchanges, and keeps other messages.
    """

    def __init__(self, wire: Wire, lock: RuntimeLock) -> None:
        self._wire = wire
        self._lock = lock
        self._kept: list[tuple[int, Message]] = []
        """(source, message) of each message that cannot be handled yet."""
        self._exchanged: dict[int, tuple[str, Give]] = {}
        """Number of an exchange -> its label, and the function that returns what this rank gives."""
        self._exchanges = self._given = 0
        self._attached = False
        self._service: PageService | None = None
        self._shards: GradientShards | None = None
        self._step: RankedStep | None = None
        self._drive: Callable[[int], None] = _nothing
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="infinity service thread", daemon=True)
        self._thread.start()

    def open_exchange(self, label: str, give: Give) -> int:
        """Begin to answer requests in the next exchange. Returns its number, equal on all ranks."""
        self._exchanges += 1
        self._exchanged[self._exchanges] = label, give
        self._look_again()
        return self._exchanges

    def close_exchange(self) -> None:
        """Forget this exchange, which all ranks have ended."""
        self._exchanged.clear()

    def has_given(self) -> bool:
        """Whether this rank has given anything in an exchange since the last call."""
        given, self._given = self._given, 0
        return bool(given)

    def attach(
        self,
        service: PageService,
        step: RankedStep | None,
        drive: Callable[[int], None],
    ) -> None:
        """Handle all kinds of messages from now on.

        step: None for inference. drive: completes the updates that a commit waits for, given the commit's
        number; called under the lock.
        """
        self._service, self._step, self._drive = service, step, drive
        self._shards = None if step is None else step.shards
        service.start()
        self._attached = True
        self._look_again()

    def _look_again(self) -> None:
        self._wire.inbox.put((-1, Message(MessageKind.REQUEST, [0, What.INITIAL, 0])))

    def stop(self) -> None:
        """End this thread and the thread of the page service. Called when this rank leaves the others, which
        ask it for nothing more.
        """
        self._stopping = True
        self._wire.inbox.put((-1, Message(MessageKind.BYE, [])))
        with self._lock.released():  # the threads may wait for it
            self._thread.join()
            if self._service is not None:
                self._service.stop()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody else would tell the others that this rank answers no more
            failure = ConfigError(
                f"This rank cannot serve others any more: {type(error).__name__}: {error}.",
                "Report this bug, with the text above.",
            )
            self._wire.declare(f"failed: {failure}")
            self._wire.failure_event.fail(failure)
            raise

    def _serve(self) -> None:
        while True:
            kept, self._kept = self._kept, []
            waiting = [*kept, self._wire.inbox.get()]
            while len(waiting) < _MOST_AT_ONCE:
                try:
                    waiting.append(self._wire.inbox.get_nowait())
                except queue.Empty:
                    break
            if not self._act(waiting):
                return

    def _act(self, waiting: list[tuple[int, Message]]) -> bool:
        """Handle messages. Returns False if the last message of this runtime is among them."""
        others = []
        attached = self._attached
        for source, message in waiting:
            if message.kind is MessageKind.BYE and source < 0:
                return False
            if message.kind in (MessageKind.BYE, MessageKind.FAILED):
                continue
            if message.kind is MessageKind.REQUEST and message.fields[1] == What.INITIAL:
                self._give(source, message)
            elif not attached:
                self._kept.append((source, message))
            elif message.kind is MessageKind.REQUEST and message.fields[1] != What.SUM:
                assert self._service is not None
                self._service.requested(source, *message.fields)
            else:
                others.append((source, message))
        if others:
            with self._lock.turn():
                if self._stopping:  # after a failure: what other ranks asked for is not there any more
                    return False
                for source, message in others:
                    if message.kind is MessageKind.CLEARED:
                        assert self._step is not None
                        self._step.cleared(source, *message.fields)
                    elif message.kind is MessageKind.DRIVE:
                        self._drive(*message.fields)
                    else:
                        assert self._shards is not None
                        self._about_gradients(self._shards, source, message)
        return True

    def _give(self, source: int, message: Message) -> None:
        """Answer a request in an exchange, or keep it until this rank begins the exchange."""
        delivery, _, exchange, *wanted = message.fields
        if exchange > self._exchanges:
            self._kept.append((source, message))
        elif source >= 0:
            label, give = self._exchanged[exchange]
            try:
                self._wire.deliver(source, delivery, [give(*wanted).view(torch.uint8)], label)
            except InfinityError as error:
                self._wire.refuse(source, delivery, error)
            self._given += 1

    def _about_gradients(self, shards: GradientShards, source: int, message: Message) -> None:
        if message.kind is MessageKind.REQUEST:
            number, _, *fields = message.fields
            shards.sum_requested(source, number, *fields)
        elif message.kind is MessageKind.ARRIVED:
            shards.arrived(*message.fields)
        elif message.kind is MessageKind.SENT:
            shards.sent(*message.fields)
        elif message.kind is MessageKind.TAKEN:
            shards.taken(*message.fields)
        elif message.kind is MessageKind.LANDED:
            shards.landed()
        else:
            shards.heard(source, message)


def _nothing(_: int) -> None:
    """Do nothing: the default of `drive`, the function that completes updates for a commit."""
