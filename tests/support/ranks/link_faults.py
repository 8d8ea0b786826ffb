"""Link faults: what a rank of a test does to the link of its node, and to its own messages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import two_nodes

from infinity.distributed import liveness
from infinity.distributed.connections import Connections

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


def delay(seed: int, most: float) -> None:
    """Have all messages and payloads of this rank be sent and received late, each by times of its own.

    most: seconds. Most are sent and received at once.
    """
    draw = random.Random(seed)

    def later(method: Callable[..., Any]) -> Callable[..., Any]:
        def late(*given: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.0, draw.uniform(0.0, most))))
            return method(*given)

        return late

    for name in ("post", "_read", "_heard_by_mail"):
        setattr(Connections, name, later(getattr(Connections, name)))
