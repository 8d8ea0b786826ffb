"""ServiceThread: acts on messages of other ranks, in a thread of its own while this rank's training thread
computes, or in the training thread itself.

It holds the runtime's lock for moments, in turn with the training thread, and never waits for another rank.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from infinity.distributed.gradient_shards import GradientShards
from infinity.distributed.mailbox import Listener, Mailbox
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
        self._service: PageService | None = None
        self._step: RankedStep | None = None
        self._drive: Callable[[int], None] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="infinity service thread", daemon=True)
        self._thread.start()

    def open_exchange(self, label: str, give: Give) -> int:
        """Begin to answer requests in the next exchange. Returns its number, equal on all ranks."""
        with self._lock:
            self._exchanges += 1
            self._exchanged[self._exchanges] = label, give
            self._look_again()
        return self._exchanges

    def close_exchange(self) -> None:
        """Forget this exchange, which all ranks have ended."""
        with self._lock:
            self._exchanged.clear()

    def has_given(self) -> bool:
        """Whether this rank has given anything in an exchange since the last call."""
        given, self._given = self._given, 0
        return bool(given)

    def attach(
        self, service: PageService, step: RankedStep | None, drive: Callable[[int], None] | None
    ) -> None:
        """Handle all kinds of messages from now on.

        step: None for inference. drive: completes the updates that a commit waits for, given the commit's
        number; called under the lock. None if there are no commits.
        """
        with self._lock:
            self._service, self._step, self._drive = service, step, drive
            service.start()
            self._look_again()

    def _look_again(self) -> None:
        """Handle the messages that were kept, before later ones."""
        kept, self._kept = self._kept, []
        self._wire.inbox.messages.extendleft(reversed(kept))
        self._wire.inbox.wake()

    def stop(self) -> None:
        """End this thread and the thread of the page service. Called when this rank leaves the others, which
        ask it for nothing more.
        """
        self._stopping = True
        self._lock.look = None
        self._wire.failure_event.listener = None
        self._wire.inbox.wake()
        with self._lock.released():  # the threads may wait for it
            self._thread.join()
            if self._service is not None:
                self._service.stop()

    def read_mail(self, mailbox: Mailbox) -> None:
        """Have other threads of this rank read messages of its mates, and act on them, too:
        [Note: who reads messages of mates] in infinity/distributed/mailbox.py.
        """
        self._wire.failure_event.listener = Listener(mailbox, self._attend, self._may_listen)
        self._lock.look = self._look

    def _may_listen(self) -> bool:
        # With the lock it is in the middle of something. One that has no lock to take back, such as that of a
        # commit, may not wait for the lock: its owner may wait for this thread (Ledger.wait).
        return self._lock.given_up() and _is_plain()

    def _look(self) -> None:
        """Act on all messages that are here. The calling thread has just taken the lock."""
        if _is_plain():
            self._wire.read_mail(block=False)
            if self._wire.inbox.messages:
                self._act()

    def _attend(self) -> None:
        """Act on all messages that are here. The calling thread waits without the lock."""
        self._wire.read_mail(block=True)
        if self._wire.inbox.messages:
            with self._lock.turn():
                self._act()

    def _run(self) -> None:
        while not self._stopping:
            self._wire.inbox.wait()
            with self._lock.turn():
                self._act(_MOST_AT_ONCE)
            if self._wire.inbox.messages:
                self._wire.inbox.wake()

    def _act(self, most: int = sys.maxsize) -> None:
        """Handle messages, `most` at most. The calling thread has the lock."""
        messages = self._wire.inbox.messages
        while messages and most and not self._stopping:  # the rest asks for what is not there any more
            most -= 1
            try:
                self._handle(*messages.popleft())
            except Exception as error:  # nobody else would tell the others that this rank answers no more
                failure = ConfigError(
                    f"This rank cannot serve others any more: {type(error).__name__}: {error}.",
                    "Report this bug, with the text above.",
                )
                self._stopping = True
                self._wire.declare(f"failed: {failure}")
                self._wire.failure_event.fail(failure)
                raise

    def _handle(self, source: int, message: Message) -> None:
        kind, fields = message
        if kind in (MessageKind.BYE, MessageKind.FAILED):
            return
        if kind is MessageKind.REQUEST and fields[1] == What.INITIAL:
            self._give(source, message)
        elif self._service is None:
            self._kept.append((source, message))
        elif kind is MessageKind.REQUEST and fields[1] != What.SUM:
            self._service.requested(source, *fields)
        elif kind is MessageKind.DRIVE:
            assert self._drive is not None
            self._drive(*fields)
        elif kind is MessageKind.CLEARED:
            assert self._step is not None
            self._step.cleared(source, *fields)
        else:
            assert self._step is not None and self._step.shards is not None
            self._about_gradients(self._step.shards, source, message)

    def _give(self, source: int, message: Message) -> None:
        """Answer a request in an exchange, or keep it until this rank begins the exchange."""
        delivery, _, exchange, *wanted = message.fields
        if exchange > self._exchanges:
            self._kept.append((source, message))
        else:
            label, give = self._exchanged[exchange]
            try:
                self._wire.deliver(source, delivery, [give(*wanted).view(torch.uint8)], label)
            except InfinityError as error:
                self._wire.refuse(source, delivery, error)
            self._given += 1

    def _about_gradients(self, shards: GradientShards, source: int, message: Message) -> None:
        handlers: dict[MessageKind, Callable[..., None]] = {
            MessageKind.ARRIVED: shards.arrived,
            MessageKind.SENT: shards.sent,
            MessageKind.TAKEN: shards.taken,
            MessageKind.LANDED: shards.landed,
        }
        if message.kind in handlers:
            handlers[message.kind](*message.fields)
        elif message.kind is MessageKind.REQUEST:
            number, _, *fields = message.fields
            shards.sum_requested(source, number, *fields)
        else:
            shards.heard(source, message)


def _is_plain() -> bool:
    """Whether operations on tensors are ordinary ones in this thread now: user code is in no context that
    would change those of a handled message.
    """
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
