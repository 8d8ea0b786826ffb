"""The pytest mark `alone`: while a test with this mark runs, no other worker process runs any test.

Such tests look at the machine as a whole, for example at times or at memory in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Machine:
    """A lock between pytest's worker processes, which every test holds while it runs.

    Ordinary tests hold it at the same time as each other, a test marked `alone` only while no other does.
    """

    def __init__(self, directory: Path) -> None:
        """directory: a folder that all worker processes use. Two empty lock files are made in it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._queue, self._use = (os.open(directory / name, flags, 0o600) for name in ("queue", "use"))

    @contextlib.contextmanager
    def used(self, *, alone: bool) -> Iterator[None]:
        """Hold the lock while the body of the `with` statement, which runs one test, is executed.

        alone: whether the test is marked `alone`. If so, wait until no other worker runs a test; otherwise
        wait until no other worker runs a test marked `alone`. While a test marked `alone` waits, the other
        workers end the tests that they run and start none.
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
