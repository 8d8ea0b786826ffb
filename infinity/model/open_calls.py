"""Open calls: the calls (forwards, state_dicts) that have begun in each thread and have not ended.

Hooks record the beginning and the end of a call. An end can be missed, because torch calls no hook when
Ctrl-C interrupts a forward or when a state_dict raises an error.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any


class OpenCalls:
    """The open calls of each thread, innermost last, each with the stack frame that made it and context
    managers to exit at its end. Once the frame has left the thread's stack, the call is over, even if no hook
    has recorded its end.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self, caller: FrameType, *inside: AbstractContextManager[Any] | None) -> None:
        """Record that a call begins in this thread, after ending calls that are over (`prune`). caller: the
        frame that made the call. inside: context managers to enter now and exit when the call ends.
        """
        self.prune()
        stack = ExitStack()
        for each in inside:
            if each is not None:
                stack.enter_context(each)
        self._calls.append((caller, stack))

    def end(self) -> None:
        """End this thread's innermost open call, if there is one, and exit its context managers."""
        if self._calls:
            self._calls.pop()[1].close()

    def prune(self) -> None:
        """End the calls of this thread that are over although no hook has recorded it: the frame that made
        them has been left.
        """
        calls = self._calls
        while calls and _is_left(calls[-1][0]):
            self.end()

    def __bool__(self) -> bool:
        """Whether this thread has an open call. Calls that are over are ended first."""
        self.prune()
        return bool(self._calls)

    @property
    def _calls(self) -> list[tuple[FrameType, ExitStack]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[tuple[FrameType, ExitStack]] = self._local.calls
        return calls


def _is_left(frame: FrameType) -> bool:
    """Whether a function has returned or raised. frame: a frame of the function, which is not a generator.
    Python refuses to clear a frame that runs. Clearing drops the variables of a function that has ended.
    """
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True
