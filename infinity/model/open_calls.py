"""Open calls: calls whose beginning a hook saw, and whose end it may miss.

torch calls no hook when Ctrl-C interrupts a forward, nor when a state_dict raises.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType


class OpenCalls:
    """The calls that each thread is in, innermost last, each with a context to leave at its end.

    Each is kept with the frame that made the call. Once that frame is off the thread's stack the call is
    over, whether its end was seen or not.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self, caller: FrameType, inside: AbstractContextManager[None] | None = None) -> None:
        """Note the beginning of a call by the frame `caller`; `inside` is a context entered until its end."""
        self.prune()
        stack = ExitStack()
        if inside is not None:
            stack.enter_context(inside)
        self._calls.append((caller, stack))

    def end(self) -> None:
        """Note the end of the innermost call; does nothing if none is open."""
        if self._calls:
            self._calls.pop()[1].close()

    def prune(self) -> None:
        """End the calls whose end was not seen."""
        calls = self._calls
        if not calls:
            return
        alive = set(_frames(sys._getframe(1)))
        while calls and calls[-1][0] not in alive:
            self.end()

    def __bool__(self) -> bool:
        """Whether this thread is in a call whose end was not seen; `prune` first ends those that are over."""
        return bool(self._calls)

    @property
    def _calls(self) -> list[tuple[FrameType, ExitStack]]:
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[tuple[FrameType, ExitStack]] = self._local.calls
        return calls


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and its callers.

    Pass the frame of your caller, not your own: a function whose list holds its own frame is a reference
    cycle, which keeps all of its variables alive.
    """
    while frame is not None:
        yield frame
        frame = frame.f_back
