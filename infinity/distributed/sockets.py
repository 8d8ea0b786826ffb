"""Sockets: the network connections of this process, and calls of torch that end because theirs are ended.

[Note: calls that nothing ends] Torch's store sends a request and waits for the answer without a time-out.
Even a wait that has one ends with a request that the store forget it, whose answer is waited for. If the
network is lost, TCP tells nobody for a quarter of an hour. Torch has no call that ends such a wait, but the
end of its connection does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
_LAST = 1.0
"""Seconds that a call has to end in after its connections were ended."""


def sockets() -> dict[int, int]:
    """Descriptor -> inode of all sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def opened_since(before: Mapping[int, int], store_port: int | None = None) -> dict[int, int]:
    """The sockets that were not there when `sockets` returned `before`.

    store_port: that of the ranks' store. What other ranks have opened to it is left out, if it is here.
    """
    found = {number: inode for number, inode in sockets().items() if before.get(number) != inode}
    return {number: inode for number, inode in found.items() if _port_here(number) != store_port}


def _port_here(number: int) -> int:
    """The port of a socket on this machine; 0 if it has none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            return int(one.getsockname()[1])
    return 0


def hang_up(those: Mapping[int, int], *, to_port: int | None = None) -> None:
    """End TCP connections at once, so that each thread that waits in one gets an error.

    those: descriptor -> inode. What has another inode by now is left alone, and so is a socket that listens.
    to_port: end those alone whose other end has this port.
    """
    for number, inode in sockets().items():
        if those.get(number) != inode:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue  # gloo needs the socket that listens
            if to_port is None or connection.getpeername()[1] == to_port:
                connection.shutdown(socket.SHUT_RDWR)


class Deadline:
    """A time by which calls of torch end, whatever the network does."""

    def __init__(self, seconds: float, *, store_port: int | None = None) -> None:
        """store_port: that of the store which the calls use; None: it has none."""
        self._seconds = min(seconds, threading.TIMEOUT_MAX)
        self._store_port = store_port
        self.passed = False
        """Whether a call has been ended."""

    def run(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, or raise what it raises: in a thread of its own.

        When the time is up, the connections that it has opened are ended, and those to the store. Raises
        RuntimeError then; gloo waits for a rank that does not connect for five times its time-out, and is
        left to its thread.
        """
        before = sockets()
        outcome: Future[T] = Future()
        threading.Thread(target=_settle, args=(outcome, call), name="infinity meeting", daemon=True).start()
        try:
            wait([outcome], self._seconds)
        finally:  # Ctrl-C ends the wait, too
            if not outcome.done():
                self.passed = True
                self._end(before)
                wait([outcome], _LAST)
        if not outcome.done():
            raise RuntimeError(f"no end within {self._seconds:g} s")
        return outcome.result()

    def _end(self, before: Mapping[int, int]) -> None:
        if self._store_port is not None:
            hang_up(sockets(), to_port=self._store_port)
        hang_up(opened_since(before, self._store_port))


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
        del outcome  # the error's traceback has this frame
