"""Tests of mail: bytes that processes send each other through shared memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from infinity import _tiers

RANKS = 3
NBYTES = _tiers.Mail.nbytes(RANKS)
READER = """
import os, sys
from infinity import _tiers
pid, descriptor, ranks, count = map(int, sys.argv[1:])
nbytes = _tiers.Mail.nbytes(ranks)
own = _tiers.map_host(nbytes, huge_pages=False, shared=True)
mail = _tiers.Mail(own, ranks, 2)
print(os.getpid(), own.descriptor, flush=True)
sys.stdin.readline()
mail.meet(0, _tiers.map_window(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY), nbytes))
found = 0
while found < count and os.getppid() == pid:
    for byte in mail.read(0):
        assert byte == found % 251, (byte, found)
        found += 1
print(found)
"""


def region() -> _tiers.Region:
    return _tiers.map_host(NBYTES, huge_pages=False, shared=True)


def window(pid: int, descriptor: int) -> _tiers.Window:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    try:
        return _tiers.map_window(opened, NBYTES)
    finally:
        os.close(opened)


def pair() -> list[_tiers.Mail]:
    """The mail of ranks 0 and 1 of this process."""
    regions = [region(), region()]
    found = [_tiers.Mail(each, RANKS, rank) for rank, each in enumerate(regions)]
    for rank, mail in enumerate(found):
        mail.meet(1 - rank, window(os.getpid(), regions[1 - rank].descriptor))
    return found


def test_bytes_come_in_order_and_none_is_lost_when_a_ring_is_full() -> None:
    first, second = pair()
    chance = random.Random(0)
    sent, read = bytearray(), bytearray()
    for _ in range(400):
        data = chance.randbytes(chance.choice([0, 1, 60, 5000, 40_000]))
        sent += data[: first.write(1, data)]
        assert second.unread() == (len(read) < len(sent)) and not first.unread()
        if chance.random() < 0.5:
            read += second.read(0)
            assert read == sent
    assert len(sent) > 1 << 20


def test_sleepers_are_told_to_peers() -> None:
    first, second = pair()
    assert first.sleeper(1, 0) == first.sleeper(1, 1) == 0
    second.sleep(1, 5)
    assert (first.sleeper(1, 0), first.sleeper(1, 1)) == (0, 5)
    second.sleep(1, 0)
    assert first.sleeper(1, 1) == second.sleeper(0, 1) == 0


def test_unknown_peers_and_small_memory_are_refused() -> None:
    first, _ = pair()
    for call in (
        first.read,
        lambda peer: first.sleeper(peer, 0),
        lambda peer: first.write(peer, b"x"),
    ):
        for peer in (2, 7):
            with pytest.raises(IndexError):
                call(peer)
    with pytest.raises(IndexError):
        first.sleep(2, 1)
    with pytest.raises(IndexError):
        _tiers.Mail(region(), RANKS + 1, 0)
    with pytest.raises(IndexError):
        _tiers.Mail(region(), RANKS, RANKS)


def test_impossible_numbers_of_a_peer_are_an_error() -> None:
    others, anew = [region(), region()], region()
    first, second = (_tiers.Mail(each, RANKS, rank) for rank, each in enumerate(others))
    first.meet(1, window(os.getpid(), others[1].descriptor))
    second.meet(0, window(os.getpid(), others[0].descriptor))
    assert first.write(1, b"abc") == 3 and second.read(0) == b"abc"
    mail = _tiers.Mail(anew, RANKS, 0)  # which has written nothing
    mail.meet(1, window(os.getpid(), others[1].descriptor))
    second.meet(0, window(os.getpid(), anew.descriptor))
    with pytest.raises(RuntimeError):
        mail.write(1, b"x")
    with pytest.raises(RuntimeError):
        second.read(0)


def test_another_process_reads_what_this_one_writes() -> None:
    mine, count = region(), 300_000
    mail = _tiers.Mail(mine, RANKS, 0)
    arguments = [sys.executable, "-c", READER, *map(str, (os.getpid(), mine.descriptor, RANKS, count))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(arguments, text=True, **pipes) as reader:
        try:
            assert reader.stdin is not None and reader.stdout is not None
            mail.meet(2, window(*map(int, reader.stdout.readline().split())))
            reader.stdin.write("\n")
            reader.stdin.flush()
            sent, chance = 0, random.Random(1)
            while sent < count and reader.poll() is None:
                size = min(count - sent, chance.randrange(1, 5000))
                sent += mail.write(2, bytes(each % 251 for each in range(sent, sent + size)))
            assert int(reader.stdout.readline()) == count
        finally:
            reader.kill()
