"""Runtime's lock: a reentrant lock within which signals wait, and which the service thread need not race for.

[Note: safe points] Python calls the handler of a signal, such as the one that raises KeyboardInterrupt, in
the main thread between any two instructions. While the main thread holds a runtime's lock, or gives it up to
wait for other ranks, our handler only notes the signal. The program's own handler is called when the lock is
returned. So Ctrl-C finds each operation of a runtime done or not begun. If the same signal comes once more
before that, the program's handler is called at once. An operation that an exception other than an Exception
ends half way (KeyboardInterrupt, SystemExit) loses the runtime: `RuntimeLock.broken` is true then, and every
later call raises a ConfigError. What is on disk stays right, as after a kill.

Our handler takes the place of the program's when the main thread takes the lock, also if the program has set
another one since. Signals without a handler in Python are left alone, and so is the
handler of asyncio.run.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import weakref
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""The signals whose handlers usually raise: Ctrl-C, the end of a job, a timeout."""

_locks: weakref.WeakSet[RuntimeLock] = weakref.WeakSet()
"""The locks that are not closed."""
_main = threading.main_thread().ident
_found: list[Any] = [None] * len(_SIGNALS)
"""The handlers of _SIGNALS, as `_adopt` has last found or set them."""
_waiting: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""The signals that have come and have not been handled, in their order -> the program's handler."""


class RuntimeLock:
    """A reentrant lock, owned by a thread; see [Note: safe points].

    The training thread takes and returns the lock thousands of times a second. Python's locks keep no queue,
    so another thread could wait for it for a long time. Therefore, while the service thread waits in `turn`,
    every thread that does not hold the lock waits behind the service thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked = threading.Lock()
        """Held by the service thread while it waits for the lock."""
        self._released_by: set[int] = set()
        """The threads that have given up the lock in `released`."""
        self._at_safe_point: BaseException | None = None
        """The exception that a signal's handler has raised in `safe_point`, until the lock is returned."""
        self.broken = False
        """Whether an operation was ended half way; see [Note: safe points]."""
        self.look: Callable[[], object] | None = None
        """Called under the lock whenever a thread has taken it anew, before anything else."""
        _locks.add(self)

    def __enter__(self) -> None:
        owned = self._lock._is_owned()  # type: ignore[attr-defined]
        look = None if owned else self.look
        if not owned and self._asked.locked():
            with self._asked:
                pass
        if threading.get_ident() == _main and not (
            _getsignal(2) is _found[0] and _getsignal(15) is _found[1] and _getsignal(14) is _found[2]
        ):
            _adopt()
        self._lock.acquire()
        if look is not None:
            try:
                look()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and error is not self._at_safe_point:
            self.broken |= not issubclass(kind, (Exception, GeneratorExit))
        self._lock.release()
        if kind is not None and not self.owned():
            self._at_safe_point = None
        if _waiting:
            _deliver()

    def owned(self) -> bool:
        """Whether the calling thread holds the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def given_up(self) -> bool:
        """Whether the calling thread has given up the lock in `released`, and does not hold it now."""
        return threading.get_ident() in self._released_by and not self.owned()

    def safe_point(self) -> None:
        """Call the handlers of signals that have come. The caller holds the lock, and is at a point where an
        exception leaves nothing half done.
        """
        if _waiting and threading.get_ident() == _main:
            try:
                _call_handlers()
            except BaseException as error:
                self._at_safe_point = error
                raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock as soon as its present holder returns it. Only the service thread calls this."""
        with self._asked:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give up the lock for the time of the context, and take it back afterwards, as deep as before.

        For waits for other ranks. Does nothing in a thread that does not hold the lock.
        """
        if not self.owned():
            yield
            return
        thread = threading.get_ident()
        outermost = thread not in self._released_by
        self._released_by.add(thread)
        state = self._lock._release_save()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._lock._acquire_restore(state)  # type: ignore[attr-defined]
            if outermost:
                self._released_by.discard(thread)

    def close(self) -> None:
        """Give the program its handlers back if no other runtime is open."""
        _locks.discard(self)
        if not _locks and threading.get_ident() == _main:
            for number in _SIGNALS:
                if isinstance(now := _getsignal(number), _Waiting):
                    signal.signal(number, now.program)

    @property
    def _in_use(self) -> bool:
        """Whether the main thread is in an operation of the runtime. Only the main thread may ask."""
        return _main in self._released_by or self.owned()


def undivided(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that signals wait from its first instruction until it returns."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            if _waiting:
                _deliver()

    return call


_UNDIVIDED = undivided(lambda: None).__code__


class _Waiting:
    """A handler of a signal that this package installs in place of the program's own handler. It calls the
    program's handler at once, or, while a runtime's lock is held, when the lock is returned.
    """

    def __init__(self, program: Callable[[int, FrameType | None], Any]) -> None:
        self.program = program

    def __call__(self, number: int, frame: FrameType | None) -> None:
        held = [lock for lock in _locks if lock._in_use]
        if not held and not _is_undivided(frame):
            self.program(number, frame)
        elif number not in _waiting:
            _waiting[number] = self.program
        else:
            try:
                self.program(number, frame)
            except BaseException:
                del _waiting[number]
                for lock in held or _locks:
                    lock.broken = True
                raise


def _adopt() -> None:
    """Replace the handler in Python of each signal in _SIGNALS by a `_Waiting` around it. A `_Waiting`, and
    the handler of asyncio.run, stay as they are.
    """
    for place, number in enumerate(_SIGNALS):
        now = _getsignal(number)
        if callable(now) and not isinstance(now, _Waiting) and not _is_asyncio_s(now):
            now = _Waiting(now)
            signal.signal(number, now)
        _found[place] = now


def _is_asyncio_s(handler: Any) -> bool:
    """Whether a signal handler is the one that asyncio.run installs. That handler raises nothing at the first
    signal, but cancels the main task. asyncio.run restores the default handler only if it finds its own.
    """
    return (
        isinstance(handler, functools.partial)
        and hasattr(handler.func, "__self__")
        and (type(handler.func.__self__).__module__ == "asyncio.runners")
    )


def _is_undivided(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _UNDIVIDED:
        frame = frame.f_back
    return frame is not None


def _deliver() -> None:
    """Call the handlers of signals that have come, if this is the main thread and nothing is half done."""
    if threading.get_ident() != _main or any(lock._in_use for lock in _locks):
        return
    if not _is_undivided(sys._getframe(2)):
        _call_handlers()


def _call_handlers() -> None:
    while _waiting:
        number = next(iter(_waiting))
        _waiting.pop(number)(number, sys._getframe(2))
