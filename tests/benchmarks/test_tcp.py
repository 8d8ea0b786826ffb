"""Tests of the bytes that a benchmark's process has sent."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from peers import tcp


def test_bytes_that_a_slow_reader_has_not_taken_yet_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end reads nothing before the third pause, so that two readings before it are equal."""
    nbytes, pauses, real = 32 << 20, [], time.sleep
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        before = tcp.sent()
        sender = threading.Thread(target=here.sendall, args=(bytes(nbytes),))

        def taken() -> None:
            left = nbytes
            while left:
                left -= len(there.recv(left))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                taken()
                sender.join()
            else:
                real(seconds)

        monkeypatch.setattr(tcp.time, "sleep", pause)
        with there:
            sender.start()
            assert tcp.since(before) == nbytes
        assert len(pauses) > 3
