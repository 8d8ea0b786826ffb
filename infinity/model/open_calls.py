"""Open calls: the calls (forwards, state_dicts) that have begun in each thread and have not ended.

Hooks note the beginning and the end of a call. An end can be missed, because torch calls no hook when Ctrl-C
interrupts a forward or when a state_dict raises an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType


class OpenCalls:
    """The forwards or state_dicts that have begun and not ended: a list for each thread, innermost last.

    With each call the list keeps a context manager, which is exited when the call ends, and the stack frame
    that made the call. Once this frame has left the thread's stack, the call is over, even if no hook has
    noted its end.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self, caller: FrameType, inside: AbstractContextManager[None] | None = None) -> None:
        """Note that a call (a forward or a state_dict) begins in this thread.

        caller: the frame that made the call. inside: a context manager to enter now and exit when the call
        ends. Calls of this thread that turn out to be over are ended first, as `prune` does.
        """
        self.prune()
        stack = ExitStack()
        if inside is not None:
            stack.enter_context(inside)
        self._calls.append((caller, stack))

    def end(self) -> None:
        """Note that this thread's innermost open call has ended, and exit the context manager that `begin`
        was given for that call. Does nothing if the thread has no open call.
        """
        if self._calls:
            self._calls.pop()[1].close()

    def prune(self) -> None:
        """Find the calls of this thread that are over although no hook has noted their end, and do for each
        what `end` does. A call is over if the frame that made it is no longer on the thread's stack.
        """
        calls = self._calls
        if not calls:
            return
        alive = set(_frames(sys._getframe(1)))
        while calls and calls[-1][0] not in alive:
            self.end()

    def __bool__(self) -> bool:
        """Whether this thread has an open call.

        Call `prune` first to leave out calls that are over without a hook having noted their end.
        """
        return bool(self._calls)

    @property
    def _calls(self) -> list[tuple[FrameType, ExitStack]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[tuple[FrameType, ExitStack]] = self._local.calls
        return calls


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame`, its caller, the caller of that frame, and so on.

    A function should pass its caller's frame. If it passes its own and keeps the result in a variable, frame
    and result form a reference cycle, which keeps all variables of the function alive.
    """
    while frame is not None:
        yield frame
        frame = frame.f_back
