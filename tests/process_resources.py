"""What this process holds of the kernel's, descriptors and threads: that nothing is left of what a test did.

[Note: what is ending] The kernel ends a thread after that thread has told everybody that it is done:
threading's join returns when the interpreter lets go of it, C's when its memory is free, and the thread is
in /proc/self/task until it has been scheduled once more, at first without PF_EXITING. It may even close
descriptors then. So one look says nothing: `check_nothing_left` looks until nothing is left, or time is over.
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
"""Seconds that may pass until what is ending has ended. What leaks is there after any time."""


@dataclass(frozen=True)
class Resources:
    """What a process holds."""

    descriptors: Counter[str]
    """How many are open on what, as readlink names it: a path, "socket:[...]", "anon_inode:[io_uring]"."""
    threads: dict[int, str]
    """The kernel's id of each -> its name. Those that are ending may be among them."""

    def since(self, before: Resources, *, threads: bool = True) -> list[str]:
        """What is held now and was not before, for people; descriptors by number of each name."""
        opened = (self.descriptors - before.descriptors).items()
        started = self.threads.keys() - before.threads.keys() if threads else ()
        pythons = {each.native_id: each.name for each in threading.enumerate()}
        return [f"{count} open on {name}" for name, count in sorted(opened)] + [
            f"thread {task} ({pythons.get(task, self.threads[task])})" for task in sorted(started)
        ]


def resources() -> Resources:
    """What this process holds now. Take it before; `check_nothing_left` compares."""
    return Resources(Counter(_descriptors()), dict(_threads()))


def threads_of(name: str) -> set[int]:
    """The kernel's ids of this process's threads of that name. Those that are ending may be among them."""
    return {task for task, found in _threads() if found == name}


def check_nothing_left(
    before: Resources, *, garbage: bool = False, threads: bool = True, bound: float = BOUND
) -> None:
    """Assert that what is held now was held before, or is not held any more within `bound` seconds.

    garbage: what only garbage holds is let go of first. threads: False where new ones are nobody's fault. An
    AssertionError names what is left. What was held before may have gone: it may have been ending.
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
    """No descriptor or thread is left of what happens inside, unless that raises. `garbage` as above."""
    if garbage:
        gc.collect()
    before = resources()
    yield
    check_nothing_left(before, garbage=garbage)


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory's own, or closed meanwhile
            yield os.readlink(f"/proc/self/fd/{number}")


def _threads() -> Iterator[tuple[int, str]]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            yield int(task.name), (task / "comm").read_text().strip()
