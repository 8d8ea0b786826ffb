"""Signals: how SIGTERM and SIGINT end a command, at once or where a run can end with nothing lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Raised by `interrupt` at the place where a signal arrives."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)
        """The signal that has arrived."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal, for `signal.signal`: raises Interrupted."""
    raise Interrupted(number)


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised `error`. SIGINT if `interrupt` did not raise it, since Python's own handler of
    SIGINT is the only other one that raises KeyboardInterrupt.
    """
    return error.signal if isinstance(error, Interrupted) else signal.SIGINT


class Stopped(Exception):
    """Raised by `StopFlag.check` after a signal."""


class StopFlag:
    """Remembers the first SIGTERM or SIGINT. A second one raises Interrupted at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that has arrived; None if none has."""

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if self.signal is not None:
            raise Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the flag takes the signals. Does nothing outside of the main thread."""
        before = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
                    before[number] = signal.signal(number, self._arrived)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            interrupt(number, frame)
        self.signal = signal.Signals(number)
