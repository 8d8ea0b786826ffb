"""Health of a runtime: whether the runtime may still be used, and if not, why."""

from __future__ import annotations

import os

from infinity.errors import ConfigError, InfinityError
from infinity.system.lock import RuntimeLock


class Health:
    """Whether one runtime is closed, and the failure after which it can no longer be used.

    All parts of the runtime share this object.
    """

    def __init__(self, lock: RuntimeLock) -> None:
        self.closed = False
        self._lock = lock
        self._process = os.getpid()
        self._failure: InfinityError | None = None

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the runtime's process.

        A forked process has none of the runtime's threads and pages, and may change no file of the runtime.
        """
        return self._process != os.getpid()

    @property
    def failure(self) -> InfinityError | None:
        """The error after which the parameters can no longer be right; None if there was no such error."""
        if self._lock.broken and self._failure is None:
            self._failure = ConfigError(
                "An operation of the runtime was interrupted half way.",
                "Load the last checkpoint into a new runtime.",
            )
        return self._failure

    def lose(self, error: Exception) -> None:
        """Record an error after which the model's parameters can no longer be correct.

        Only the first such error is kept. One that is not an InfinityError counts as an interruption.
        """
        if isinstance(error, InfinityError):
            self._failure = self.failure or error.again()
        else:
            self._lock.broken = True

    def check(self) -> None:
        """Raise ConfigError if the runtime is closed or belongs to the process that this one was forked from,
        or the recorded failure if there is one.
        """
        if self._process != os.getpid():  # `forked`, without a call
            raise ConfigError(
                "The runtime of this model belongs to the process that this one was forked from.",
                "Use the model there, or start this process with the spawn method.",
            )
        if self.closed:
            raise ConfigError(
                "The runtime of this model is closed, and its parameters are gone with it.",
                "Use the model before runtime.close(), or keep its parameters with runtime.close(keep=True).",
            )
        if (self._lock.broken or self._failure is not None) and (failure := self.failure) is not None:
            raise failure.again()
