"""Interrupted lines: SIGINT before a chosen line that the main thread executes inside of the package.

[Note: where Ctrl-C cannot be] Python calls handlers where functions begin, after calls and where loops
repeat. So none raises between the body of a `with` and the call of `__exit__`, nor at a `try:`, nor where an
exception has come to its handler, although trace functions are called there. What a trace function raises at
the last of these has Python 3.11 take the exception for one that is handled for ever, which keeps its frames
alive. `Lines` leaves these visits out.
"""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import infinity

_ROOT = str(Path(infinity.__file__).parent) + "/"


class Place(NamedTuple):
    """A visit of a line: its file below the package, its number, and how many visits it is, from 1 on."""

    file: str
    line: int
    visit: int


class Lines:
    """A context manager that counts the lines of the package that its thread executes, and may send SIGINT
    before one of them.
    """

    def __init__(
        self, interrupted: Place | None = None, *, times: int = 1, below: Collection[str] = ()
    ) -> None:
        """interrupted: where to send SIGINT; None: nowhere. times: how often. below: functions, such as
        "pages/ledger.py:land"; lines count only in these and in what they call. By default all count.
        """
        self.visits: Counter[tuple[str, int]] = Counter()
        """(file below the package, line) -> visits so far."""
        self.sent = False
        self._interrupted = interrupted
        self._times = times
        self._below = frozenset(below)
        self._depth = 0 if below else 1
        """Number of functions of `below` that have not returned."""

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return None
        if not self._below or f"{code.co_filename[len(_ROOT) :]}:{code.co_name}" not in self._below:
            return self._at if self._depth else None
        self._depth += 1
        return self._at_below

    def _at_below(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._depth -= 1
        self._at(frame, event, argument)
        return self._at_below

    def _at(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or frame.f_lasti in _never(frame.f_code):
            return self._at
        key = frame.f_code.co_filename[len(_ROOT) :], frame.f_lineno
        self.visits[key] += 1
        if self._interrupted == (*key, self.visits[key]):
            self.sent = True
            for _ in range(self._times):
                signal.raise_signal(signal.SIGINT)
        return self._at


@functools.cache
def _never(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which Ctrl-C is never raised: those with which a `try` or a handler
    of exceptions begins, or the call of `__exit__`, for which None is loaded three times, below the value of
    a `return`.
    """
    found = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PUSH_NULL")]
    begins = {each.offset for each in found if each.opname in ("NOP", "SETUP_FINALLY", "PUSH_EXC_INFO")}
    found = [each for each in found if each.offset not in begins]
    nones = [each.opname == "LOAD_CONST" and each.argval is None for each in found]
    exits = [at for at in range(len(found)) if nones[at : at + 3] == [True] * 3]
    swaps = [at - 1 for at in exits if found[at - 1].opname in ("SWAP", "ROT_TWO")]
    return frozenset(begins | {found[at].offset for at in exits + swaps})


def places(lines: Lines, most: int | None = None) -> list[Place]:
    """The first and the last visit of each line that `lines` has counted, in the order of the files.

    most: the greatest number of places; if there are more, every n-th is taken.
    """
    found = [
        Place(file, line, visit)
        for (file, line), count in sorted(lines.visits.items())
        for visit in sorted({1, count})
    ]
    if most is None or len(found) <= most:
        return found
    return [found[round(at * (len(found) - 1) / (most - 1))] for at in range(most)]
