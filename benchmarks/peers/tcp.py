"""TCP: bytes that this process has sent over its own connections, as the kernel counts them.

The counters of an interface, in /proc/net/dev, have the bytes of all processes, with headers and
acknowledgements. Those of a socket (TCP_INFO) have the payload of this process alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
import time

_BYTES_ACKED = 120
"""Place of tcpi_bytes_acked, an unsigned 64-bit integer, in struct tcp_info of linux/tcp.h."""
_ROOM = 256
_PAUSE, _LONGEST = 0.1, 20.0
"""Seconds between two readings of counters that still grow, and after which they are taken as they are."""


def sent() -> dict[tuple[object, ...], int]:
    """Bytes that the other end has acknowledged, for each open connection of this process.

    A connection is named by the addresses of both of its ends.
    """
    return {ends: acknowledged for ends, acknowledged, _ in _connections()}


def since(before: dict[tuple[object, ...], int]) -> int:
    """Bytes sent since `before`, which `sent` returned, over connections that are open now.

    What a process has handed to its socket, or to a library's thread, is counted once the other end has
    acknowledged it. So this waits until no socket has bytes left, and two readings are equal.
    """
    last, until = -1, time.monotonic() + _LONGEST
    while time.monotonic() < until:
        found = _connections()
        total = sum(acknowledged for _, acknowledged, _ in found)
        if total == last and not any(left for _, _, left in found):
            break
        last = total
        time.sleep(_PAUSE)
    return sum(count - before.get(ends, 0) for ends, count in sent().items())


def _connections() -> list[tuple[tuple[object, ...], int, int]]:
    """(addresses, bytes acknowledged, bytes not acknowledged yet) of each open connection of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed, is not connected, or does not speak TCP
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as each:
                ends = (*each.getsockname(), *each.getpeername())
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROOM)
                acknowledged = struct.unpack_from("Q", info, _BYTES_ACKED)[0]
                left = struct.unpack("i", fcntl.ioctl(each, termios.TIOCOUTQ, bytes(4)))[0]
                found.append((ends, acknowledged, left))
    return found
