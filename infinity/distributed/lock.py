"""Trainer's lock: the runtime's reentrant lock, which the trainer shares with the conductor.

[Note: Ctrl-C and the trainer's lock] The main thread takes the lock in `with` statements, and Ctrl-C must
leave it neither held nor freed too often. Python looks for signals after each call in Python code, but not
inside of a `with` that calls a C function. So `__enter__` and `__exit__` are properties: what they return,
and `with` calls, are the methods of threading.RLock themselves. The wait for the conductor happens in the
property, while nothing is held yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TrainerLock:
    """A reentrant lock, owned by a thread, for which the conductor need not race.

    The trainer takes and returns it thousands of times a second, and Python's locks go to whoever comes
    first, so a thread that waits could wait long. While the conductor waits in `turn`, no other thread's next
    outermost acquisition begins.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked = threading.Lock()
        """Held by the conductor while it waits for the lock."""

    @property
    def __enter__(self) -> Callable[[], bool]:
        self._let_pass()
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302
        return self._lock.__exit__

    @property
    def acquire(self) -> Callable[..., bool]:
        """As threading.RLock.acquire."""
        self._let_pass()
        return self._lock.acquire

    @property
    def release(self) -> Callable[[], None]:
        """As threading.RLock.release."""
        return self._lock.release

    def owned(self) -> bool:
        """Whether the calling thread holds the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock, as soon as whoever holds it returns it. For the conductor, which gets no signals."""
        with self._asked:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the lock up whatever its depth, and take it back afterwards, as deep as before.

        Every wait for another rank is inside. Does nothing in a thread that does not hold the lock.
        """
        depth, me = 0, threading.get_ident()
        try:
            while self.owned():
                depth += 1  # with the next call in one, as far as signals go
                self._lock.release()
            yield
        finally:
            if depth:
                self._lock._acquire_restore((depth, me))  # type: ignore[attr-defined]

    def _let_pass(self) -> None:
        if self._asked.locked() and not self.owned():
            with self._asked:
                pass
