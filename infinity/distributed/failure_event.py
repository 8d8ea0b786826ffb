"""FailureEvent: the condition variable of all waits for other ranks, and the failure that ends them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from infinity.errors import ConfigError, InfinityError

if TYPE_CHECKING:
    from infinity.distributed.mailbox import Listener

TIMEOUT_VARIABLE = "INFINITY_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 600.0
"""Seconds."""


def rank_timeout() -> float:
    """Return for how many seconds a rank waits for another one, from the environment variable
    INFINITY_RANK_TIMEOUT (default 600). Raises ConfigError if the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE}={text!r} is not a time.", "Give a positive number of seconds, such as 600."
        )
    return seconds


class FailureEvent:
    """A condition variable, and the first failure of the run, which stays: the run cannot continue."""

    def __init__(self, timeout: float | None = None) -> None:
        """timeout: the most seconds of a wait by default; None: `rank_timeout()`."""
        self.timeout = rank_timeout() if timeout is None else timeout
        self.listener: Listener | None = None
        """Acts on messages of ranks of this node during waits; None if there are none."""
        self._condition = threading.Condition(threading.Lock())
        self._failure: InfinityError | None = None

    @property
    def failure(self) -> InfinityError | None:
        """The first failure, or None. Callers do not raise this object itself, but a copy (`again`)."""
        return self._failure

    def notify(self) -> None:
        """Wake all waits to look at their conditions again. Call it after a change that may fulfil one."""
        with self._condition:
            self._condition.notify_all()
        if (listener := self.listener) is not None:
            listener.rouse()

    def fail(self, error: InfinityError) -> bool:
        """End all waits with `error`, if it is the first failure. Returns whether it is."""
        with self._condition:
            first = self._failure is None
            if first:
                self._failure = error.again()
        self.notify()
        return first

    def wait_for(self, come: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `come()` holds; return False if it does not within the time.

        come: called under the event's own lock, so it must not wait or notify. timeout: seconds; None: the
        event's time-out. Raises the run's failure if there is one and `come()` does not hold.
        """
        seconds = self.timeout if timeout is None else timeout
        listener = self.listener
        if listener is None or not listener.wait(lambda: self._over(come), seconds):
            with self._condition:
                self._condition.wait_for(lambda: self._over(come), seconds)
        if come():
            return True
        if self._failure is not None:
            raise self._failure.again()
        return False

    def _over(self, come: Callable[[], bool]) -> bool:
        return come() or self._failure is not None
