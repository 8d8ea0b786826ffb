"""Descriptors and threads of this process, and the check that nothing is left of them after a test.

[Note: what is ending] The kernel ends a thread after the thread has reported that it is done. The join of
`threading` returns when the interpreter lets go of the thread, and C's join returns when the thread's
memory is free. The thread stays in /proc/self/task until it has been scheduled once more, at first without
PF_EXITING, and it may even close descriptors then. Listing /proc once therefore proves nothing:
`check_nothing_left` lists it again until nothing is left, or time is over.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOUND = 30.0
"""Seconds to wait until threads that are ending have ended. A leak is still there after any time."""


@dataclass(frozen=True)
class Resources:
    """The open descriptors and the threads of a process at one moment."""

    descriptors: Counter[str]
    """Number of open descriptors of each file, by the name that readlink gives, such as "socket:[...]"."""
    threads: dict[int, str]
    """Name of each thread by the kernel's id. Threads that are ending may be included."""

    def since(self, before: Resources, *, threads: bool = True) -> list[str]:
        """Return readable texts about the descriptors and threads in this object that are not in `before`.

        A file on which more descriptors are open than in `before` gets one text, with the number of new
        descriptors. A new thread gets one text. threads: whether to list new threads.
        """
        opened = (self.descriptors - before.descriptors).items()
        started = self.threads.keys() - before.threads.keys() if threads else ()
        pythons = {each.native_id: each.name for each in threading.enumerate()}
        return [f"{count} open on {name}" for name, count in sorted(opened)] + [
            f"thread {task} ({pythons.get(task, self.threads[task])})" for task in sorted(started)
        ]


def resources() -> Resources:
    """The descriptors and threads of this process now, with which `check_nothing_left` compares later."""
    return Resources(Counter(_descriptors()), dict(_threads()))


def threads_of(name: str) -> set[int]:
    """The kernel's ids of this process's threads named `name`. Threads that are ending may be included."""
    return {task for task, found in _threads() if found == name}


def check_nothing_left(
    before: Resources, *, garbage: bool = False, threads: bool = True, bound: float = BOUND
) -> None:
    """Assert that within `bound` seconds nothing is held any more that was not held before.

    garbage: whether to run gc.collect() each time before resources are listed. threads: False to ignore new
    threads. The AssertionError names what is left. What `before` lists may be gone by now.
    """
    end = time.monotonic() + bound
    while True:
        if garbage:
            gc.collect()
        left = resources().since(before, threads=threads)
        if not left or time.monotonic() > end:
            assert left == [], f"left after {bound:g} s: {'; '.join(left)}"
            return
        time.sleep(0.01)


@contextlib.contextmanager
def nothing_left(*, garbage: bool = False) -> Iterator[None]:
    """Assert at the end of the `with` that no new descriptor or thread is left, unless its body raised.

    garbage: whether to run gc.collect() each time before resources are listed.
    """
    if garbage:
        gc.collect()
    before = resources()
    yield
    check_nothing_left(before, garbage=garbage)


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own, or closed meanwhile
            yield os.readlink(f"/proc/self/fd/{number}")


def _threads() -> Iterator[tuple[int, str]]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            yield int(task.name), (task / "comm").read_text().strip()
