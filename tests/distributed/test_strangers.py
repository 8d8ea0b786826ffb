"""Tests of strangers, who connect to ranks and send bytes, and of a network that others can read."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import wire_ranks
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.distributed.connections import PORTION, Connections, Endpoint
from infinity.distributed.failure_event import FailureEvent
from infinity.distributed.liveness import Liveness
from infinity.distributed.message import Message, MessageKind
from infinity.distributed.secret import FILE_VARIABLE, VARIABLE, Secret
from infinity.errors import ConfigError

KEY = os.urandom(32)
SECRET = "a secret of the ranks of this test"
MARK = b"these bytes are of a parameter: " * 64
SECONDS = 30.0
"""A limit for waits that end sooner."""


class Recorder:
    """The ends of a rank's connections. Notes all that is heard."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.event = FailureEvent(SECONDS)

    def _note(self, *what: Any) -> None:
        self.noted.append(what)
        self.event.notify()

    def heard(self, peer: int, message: Message, portion: Sequence[memoryview]) -> None:
        self._note("heard", peer, message, b"".join(portion))

    def lost(self, rank: int, what: str) -> None:
        self._note("lost", rank, what)


class Pair:
    """Two ranks of this process. Rank 1 reaches rank 0 by a proxy, which keeps the bytes that go there."""

    def __init__(self, secret: Secret | None) -> None:
        endpoints = [Endpoint("127.0.0.1", secret) for _ in range(2)]
        self.address, other = (each.address for each in endpoints)
        self.proxy = Proxy(self.address)
        self.ends = Recorder(), Recorder()
        self.zero, self.one = (
            Connections(rank, addresses, endpoint, ends, key=KEY, liveness=Liveness(rank, [0, 0]))
            for rank, (addresses, endpoint, ends) in enumerate(
                zip(([self.address, other], [self.proxy.address, other]), endpoints, self.ends, strict=True)
            )
        )
        for each in (self.zero, self.one):
            each.start()
        self.wanted: list[Any] = []

    def speak(self) -> None:
        """Send two messages from rank 1 to rank 0, and check that it has heard nothing else."""
        number = len(self.wanted)
        self.one.post(0, Message(MessageKind.BARRIER, [number, "step()", None]))
        self.one.post(0, Message(MessageKind.STREAM, [number]), [memoryview(MARK)])
        self.wanted += [
            ("heard", 1, Message(MessageKind.BARRIER, [number, "step()", None]), b""),
            ("heard", 1, Message(MessageKind.STREAM, [number]), MARK),
        ]
        self.ends[0].event.wait_for(lambda: len(self.ends[0].noted) >= len(self.wanted))
        assert self.ends[0].noted == self.wanted

    def close(self) -> None:
        for rank, each in enumerate((self.zero, self.one)):
            each.say_bye(1 - rank)
            each.close()
        for each in (self.zero, self.one):
            each.thread.join(SECONDS)
            assert not each.thread.is_alive()
        assert [each[0] for each in self.ends[0].noted[len(self.wanted) :]] == ["heard"], "BYE"
        self.proxy.close()


class Proxy:
    """Accepts connections, and copies bytes between them and another address."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.captured = bytearray()
        """The bytes from those that have connected."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server, self.captured), (server, client, bytearray())):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture(params=["no secret", "a secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ranks = Pair(None if request.param == "no secret" else Secret(SECRET.encode()))
    ranks.speak()
    yield ranks
    ranks.speak()
    ranks.close()


@contextlib.contextmanager
def stranger(pair: Pair, secret: Secret | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket of a process that is no rank, and which connects to rank 0."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as found:
        found.linger = 200
        if secret is not None:
            secret.secure(found, serves=False)
        found.connect(pair.address)
        yield found


def say(other: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    """Send a message, and return True, if the rank has not refused the connection."""
    while True:
        try:
            other.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.Again:  # refused, or the rank has yet to read
            if not other.poll(1000, zmq.POLLOUT):
                return False


def send_raw(pair: Pair, data: bytes) -> None:
    """Send bytes over a connection, and wait until rank 0 has closed it or has read for a moment."""
    with socket.create_connection(("127.0.0.1", int(pair.address.rpartition(":")[2]))) as line:
        line.settimeout(0.05)
        with contextlib.suppress(OSError):
            line.sendall(data)
            while line.recv(1 << 16):
                pass


MESSAGES = st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), max_size=20)
EACH_PAIR = [HealthCheck.function_scoped_fixture]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "infinity"]


@settings(deadline=None, max_examples=20, suppress_health_check=EACH_PAIR)
@given(MESSAGES)
def test_messages_of_strangers_change_nothing(pair: Pair, messages: list[list[bytes]]) -> None:
    with stranger(pair) as other:
        for each in messages:
            if not say(other, each):
                break
    pair.speak()


@settings(deadline=None, max_examples=20, suppress_health_check=EACH_PAIR)
@given(st.binary(max_size=500))
def test_bytes_of_strangers_change_nothing(pair: Pair, data: bytes) -> None:
    send_raw(pair, data)
    send_raw(pair, bytes(pair.proxy.captured[:64]) + data)  # behind a greeting that is right
    pair.speak()


def test_messages_of_strangers_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Pair(None)
    with caplog.at_level(logging.WARNING), stranger(ranks) as other:
        for number in range(300):
            say(other, [os.urandom(number), b"more"])
        ranks.speak()
    ranks.close()
    assert len(lines(caplog)) == 1 and VARIABLE in lines(caplog)[0]


def test_bytes_that_were_captured_and_come_again_change_nothing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    for size in (len(pair.proxy.captured), len(pair.proxy.captured) // 2):
        send_raw(pair, bytes(pair.proxy.captured[:size]))
        pair.speak()
    assert len(lines(caplog)) <= 1


def test_messages_that_are_larger_than_any_are_not_taken(pair: Pair) -> None:
    with stranger(pair) as other:
        say(other, [bytes(PORTION + 65)])
    pair.speak()


@pytest.mark.slow
def test_a_hundred_thousand_messages_of_strangers_change_nothing(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(0)
    with stranger(pair) as other:
        for number in range(100_000):
            frame = draw.randbytes(draw.choice((0, 1, 33, 34, 200, 5000)))
            if not say(other, [frame] * draw.randint(1, 3)):
                break
            if number % 10_000 == 0:
                pair.speak()
    pair.speak()
    assert len(lines(caplog)) <= 1


def test_a_secret_keeps_parameters_out_of_the_network() -> None:
    open_pair, closed_pair = Pair(None), Pair(Secret(SECRET.encode()))
    for each in (open_pair, closed_pair):
        each.speak()
        each.close()
    assert MARK[:32] in open_pair.proxy.captured, "the test can find them"
    assert MARK[:32] not in closed_pair.proxy.captured
    assert len(closed_pair.proxy.captured) > len(MARK)


def test_who_has_another_secret_or_none_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Pair(Secret(SECRET.encode()))
    ranks.speak()
    for secret in (None, Secret(b"another secret of 16 bytes or more")):
        with stranger(ranks, secret) as other:
            say(other, [b"junk"])
            ranks.speak()
    ranks.close()
    assert lines(caplog) == []


# --- ranks in processes of their own --------------------------------------------------------------------


def outcomes(function: str, *secrets: str) -> list[rank_processes.Outcome]:
    nodes = [{VARIABLE: each} for each in secrets]
    return rank_processes.run("wire_ranks.py", function, size=len(secrets), nodes=nodes)


def test_ranks_with_a_secret_pull_the_right_bytes() -> None:
    for each in outcomes("pulls", SECRET, SECRET):
        assert each.result and each.result["right"] == [True] * (2 * wire_ranks.PULLS), each


@pytest.mark.parametrize(("other", "text"), [("", "has none"), (SECRET[::-1], "has another one")])
def test_ranks_with_other_secrets_are_refused(other: str, text: str) -> None:
    zero, one = outcomes("meeting", SECRET, other)
    assert zero.result == ["RankDivergence", f"This rank has a secret, and rank 1 {text}."], zero
    assert one.result[0] == "RankDivergence" and "rank 0 has" in one.result[1]


def test_a_secret_comes_from_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Secret.of_environment() is None
    path = tmp_path / "secret"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        Secret.of_environment()
    path.write_text(f"{SECRET}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Secret.of_environment()
    path.chmod(0o600)
    found = Secret.of_environment()
    assert found is not None and found.sign("address") == Secret(SECRET.encode()).sign("address")
    assert found.sign("address") != Secret(SECRET[::-1].encode()).sign("address")


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "15 bytes of it.")
    with pytest.raises(ConfigError, match="has 15 bytes"):
        Secret.of_environment()
