"""Link faults: what a rank of a test does to the link of its node, and to its own messages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import two_nodes

from infinity.distributed import liveness
from infinity.distributed.mesh import Ranks

CUT, BLINK = "cut", "blink"
"""Faults: the link is lost for good, or for `SECONDS`."""
SECONDS = 5.0


def strike(fault: str) -> None:
    """Lose the link of this rank's node."""
    two_nodes.set_link(False)
    if fault == BLINK:
        again = threading.Timer(SECONDS, two_nodes.set_link, (True,))
        again.daemon = True
        again.start()


def quick_liveness() -> None:
    """Have a rank's silence noticed after 3 s."""
    begin = liveness.Liveness.__init__

    def quick(self: Any, *given: Any) -> None:
        begin(self, *given, interval=0.2, patience=3.0)

    liveness.Liveness.__init__ = quick  # type: ignore[method-assign]


class _LateWork:
    """An operation of gloo of whose end this rank hears late."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work = work
        self._seconds = seconds

    def wait(self, *given: Any) -> Any:
        ended = self._work.wait(*given)
        time.sleep(self._seconds)
        return ended


def delay(seed: int, most: float) -> None:
    """Have all messages and transfers of this rank begin and end late, each by times of its own.

    most: seconds. Most begin and end at once.
    """
    draw = random.Random(seed)

    def late_by() -> float:
        return draw.choice((0.0, 0.0, 0.0, draw.uniform(0.0, most)))

    def later(method: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any) -> Any:
            time.sleep(late_by())
            return _LateWork(method(*given), late_by())

        return late

    for name in ("send", "receive"):
        setattr(Ranks, name, later(getattr(Ranks, name)))
