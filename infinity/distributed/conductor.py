"""Conductor: the thread that acts on what other ranks say, while this rank's training thread computes.

It takes the runtime's lock for moments, in turn with the training thread, and never waits for another rank.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from infinity.distributed.contributions import Contributions
from infinity.distributed.liveness import Liveness
from infinity.distributed.message import Message, MessageKind, What
from infinity.distributed.node_cache import NodeCache
from infinity.distributed.page_service import PageService
from infinity.distributed.ranked_step import RankedStep
from infinity.distributed.wire import Wire
from infinity.errors import ConfigError
from infinity.system.lock import RuntimeLock

_MOST_AT_ONCE = 32
"""The most messages that are acted on before the training thread gets the lock again."""


class Conductor:
    """Gives each message of other ranks to the component that it is for, until `stop`."""

    def __init__(
        self,
        wire: Wire,
        *,
        service: PageService,
        contributions: Contributions | None,
        step: RankedStep | None,
        drive: Callable[[int], None],
        liveness: Liveness,
        cache: NodeCache | None,
        lock: RuntimeLock,
        early: Sequence[tuple[int, Message]],
    ) -> None:
        """drive: completes what the commit with this number lacks, under the lock. cache: gives parameters
        of other nodes to the ranks of this one; None if each rank asks for its own. early: messages that
        have come already.
        """
        self._wire = wire
        self._early = early
        self._service = service
        self._contributions = contributions
        self._liveness = liveness
        self._cache = cache
        self._step = step
        self._drive = drive
        self._lock = lock
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="infinity conductor", daemon=True)

    def start(self) -> None:
        self._service.start()
        self._thread.start()

    def stop(self) -> None:
        """End the threads. Other ranks have heard that this one leaves, and ask for nothing more."""
        self._stopping = True
        self._wire.inbox.put((-1, Message(MessageKind.BYE, [])))
        with self._lock.released():
            if self._thread.is_alive():
                self._thread.join()
            self._service.stop()

    def _run(self) -> None:
        try:
            self._conduct()
        except Exception as error:  # nobody else would tell the others that this rank answers no more
            failure = ConfigError(
                f"This rank cannot serve others any more: {type(error).__name__}: {error}.",
                "Report this bug, with the text above.",
            )
            self._wire.declare(f"failed: {failure}")
            self._wire.bell.fail(failure)
            raise

    def _conduct(self) -> None:
        self._act(list(self._early))
        while True:
            waiting = [self._wire.inbox.get()]
            while len(waiting) < _MOST_AT_ONCE:
                try:
                    waiting.append(self._wire.inbox.get_nowait())
                except queue.Empty:
                    break
            if not self._act(waiting):
                return

    def _act(self, waiting: list[tuple[int, Message]]) -> bool:
        """Act on messages. Returns False if the last message of this runtime is among them."""
        others = []
        for source, message in waiting:
            if message.kind is MessageKind.REQUEST and message.fields[1] == What.RELAYED:
                self._relay(source, *message.fields)
            elif message.kind is MessageKind.REQUEST and message.fields[1] not in (What.GRADIENT, What.SUM):
                self._service.requested(source, *message.fields)
            elif message.kind is MessageKind.BYE and source < 0:
                return False
            elif message.kind is MessageKind.BYE:
                self._liveness.departed(source)
            elif message.kind is not MessageKind.FAILED:
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
                        assert self._contributions is not None
                        self._about_gradients(self._contributions, source, message)
        return True

    def _relay(self, source: int, number: int, _: int, owner: int, *wanted: int) -> None:
        assert self._cache is not None, "all ranks of a node have agreed on their caches"
        with contextlib.suppress(ConfigError):  # the wire is closed, which the asking rank has heard
            self._cache.requested(source, number, owner, *wanted)

    def _about_gradients(self, contributions: Contributions, source: int, message: Message) -> None:
        if message.kind is MessageKind.REQUEST:
            number, what, *fields = message.fields
            if what == What.SUM:
                contributions.sum_requested(source, number, *fields)
            else:
                contributions.requested(source, number, *fields)
        elif message.kind is MessageKind.ARRIVED:
            contributions.arrived(*message.fields)
        elif message.kind is MessageKind.SENT:
            contributions.sent(*message.fields)
        else:
            contributions.heard(source, message)
