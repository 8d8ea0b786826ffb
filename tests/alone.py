"""Tests that look at the machine as a whole run while no other worker runs one: those marked `alone`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Machine:
    """The machine as workers share it: many tests at a time, or one alone."""

    def __init__(self, directory: Path) -> None:
        """directory: one that all workers know, for two files without content."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._queue, self._use = (os.open(directory / name, flags, 0o600) for name in ("queue", "use"))

    @contextlib.contextmanager
    def used(self, *, alone: bool) -> Iterator[None]:
        """Inside, no test of another worker is `alone`; if this one is, no other runs at all.

        Whoever waits keeps its place in the queue, so that many short tests cannot keep a lone one waiting.
        """
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._use, fcntl.LOCK_UN)
