"""Tests marked `alone`, which look at the machine as a whole: no other worker runs a test beside them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Machine:
    """The machine as pytest's worker processes share it: many tests run at a time, or one test alone."""

    def __init__(self, directory: Path) -> None:
        """directory: a folder that all workers know. Two lock files without content are made in it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._queue, self._use = (os.open(directory / name, flags, 0o600) for name in ("queue", "use"))

    @contextlib.contextmanager
    def used(self, *, alone: bool) -> Iterator[None]:
        """Run the block, a test, once no other worker runs a test that is alone.

        alone: whether this test is alone, so that it waits until no other worker runs any test. A worker that
        waits keeps its place in the queue, so that many short tests cannot keep a lone test waiting.
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
