"""Transfers: payloads under way between this rank and another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from infinity.distributed.failure_event import TIMEOUT_VARIABLE, FailureEvent
from infinity.errors import InfinityError, rank_failure
from infinity.tiers.link import ARRIVED, Transfer


class _Transfer:
    """A payload under way. Satisfies the protocol Transfer of infinity/tiers/link.py."""

    def __init__(
        self,
        failure_event: FailureEvent,
        peer: int,
        number: int,
        label: str,
        *,
        unit: int | None = None,
        told: Callable[[Any], None] | None = None,
    ) -> None:
        self._told = told
        """Called with this transfer when it has ended, unless None."""
        self.peer = peer
        self.number = number
        self.label = label
        self.unit = unit
        """Index of the unit to which the bytes belong; None if there is none."""
        self._failure_event = failure_event
        self._ended = False
        self._failure: InfinityError | None = None

    def done(self) -> bool:
        """Whether the transfer or the whole run has ended, successfully or with an error. Never blocks."""
        return self._ended or self._failure_event.failure is not None

    def wait(self) -> object:
        """Wait without the GIL until the transfer has ended.

        Raises RankFailure if the peer died, left, refused or took longer than the failure event's time-out;
        RankDivergence if the peer sent or refused something because its program differs; or the failure of
        the run. After an error the wire's threads may use the memory until they end.
        """
        if not self._failure_event.wait_for(lambda: self._ended):
            within = f"{self._failure_event.timeout:g} s ({TIMEOUT_VARIABLE})"
            raise rank_failure(self.peer, f"did not {self._verb} {self.label} within {within}")
        if self._failure is not None:
            raise self._failure.again()
        return None

    _verb = ""

    @property
    def timing(self) -> None:
        """None, because the wire itself reports to the meter when a payload has crossed."""
        return None

    def end(self, failure: InfinityError | None = None) -> None:
        """End the transfer, with an error or without. Called by the wire; later calls have no effect."""
        if not self._ended:
            self._failure = None if failure is None else failure.again()
            self._ended = True
            self._failure_event.notify()
            told, self._told = self._told, None  # it keeps memory
            if told is not None:
                told(self)

    @property
    def failed(self) -> bool:
        """Whether the transfer has ended with an error, which `wait` raises."""
        return self._failure is not None


class Delivery(_Transfer):
    """Bytes that are expected from a peer. The request and the answer carry `number`."""

    _verb = "deliver"

    def __init__(
        self,
        failure_event: FailureEvent,
        peer: int,
        number: int,
        label: str,
        *,
        into: tuple[torch.Tensor, ...],
        unit: int | None = None,
        told: Callable[[Any], None] | None = None,
        instead: Callable[[Delivery], object] | None = None,
        awaiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """instead: called with the delivery if the peer answers without bytes; see `follow`. awaiting: makes
        the context of a wait, as `Wire.awaiting` does.
        """
        super().__init__(failure_event, peer, number, label, unit=unit, told=told)
        self.into = into
        """Where the bytes go: contiguous uint8 tensors in CPU memory, kept until the delivery has ended."""
        self.instead = instead
        self._awaiting = awaiting
        self._after: Transfer = ARRIVED

    def follow(self, after: Transfer) -> None:
        """End the delivery, of which nothing comes. It counts as done when `after` is, with its error."""
        self._after = after
        self.end()

    def done(self) -> bool:
        return super().done() and self._after.done()

    def wait(self) -> object:
        with nullcontext() if self.done() else self._awaiting(self.label):
            super().wait()
        return self._after.wait()

    def end(self, failure: InfinityError | None = None) -> None:
        self.into, self.instead = (), None  # both keep memory
        super().end(failure)


class Dispatch(_Transfer):
    """Bytes on their way to a peer. They must not change until it is done."""

    _verb = "take"
