"""Tests of windows: ranks of a node copy parameters from each other's RAM, or send messages."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_processes
import torch
import training_ranks
from ranked_cases import Case
from warm_python import Popen
from window_stores import CPU, store_of

from infinity import _tiers
from infinity.distributed.remote_parts import LaterCopy
from infinity.distributed.windows import VARIABLE, Windows, open_windows
from infinity.errors import ConfigError
from infinity.layout.shards import HomeRange, Span
from infinity.pages.home import Home
from infinity.pages.remote import Leg
from infinity.tiers import HostArena, Tier
from infinity.tiers.link import ARRIVED, Transfer

CASES = (
    Case("decoder", 3, accumulate=2, clip=0.05, generates=True),
    Case("mlp", 3, accumulate=2, update="eager", declared=True),
    Case("mlp", 3, home="host", states="int8"),
    Case("decoder", 2, home="nvme", compute="bf16"),
    Case("mlp", 1, home="host"),
)
"""Cases that test_bits.py has with windows."""
STREAMED = (Case("experts", 3, accumulate=2), Case("mlp", 3, accumulate=2, together=True))
"""Cases in which streams have gradients of several micro-batches at once, or ranks lack some."""
OFF = {VARIABLE: "0"}
PAGE = 4096


def test_messages_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    training_ranks.check_bits((*CASES, *STREAMED), 2, tmp_path, nodes=[OFF] * 2)


def test_copies_that_fail_are_asked_for(tmp_path: Path) -> None:
    training_ranks.check_bits(CASES, 2, tmp_path, function="training_with_failing_copies")


def test_a_rank_without_windows_among_others(tmp_path: Path) -> None:
    training_ranks.check_bits(CASES[:1], 4, tmp_path, nodes=[OFF, {}, {}, {}])


@pytest.mark.parametrize("home", ["unified", pytest.param("host", marks=pytest.mark.slow), "nvme"])
def test_what_rests_in_ram_is_copied_and_all_else_is_asked_for(home: str, tmp_path: Path) -> None:
    """Gradients are read where they wait, except those for which the pool of waiting ones is too small."""
    for nodes in ([], [OFF] * 2):
        cases = [Case("even", stage, home=home) for stage in (1, 2, 3)]
        found = training_ranks.launch("bytes_over_the_wire", cases, 2, tmp_path, timeout=200.0, nodes=nodes)
        for case, ranks in zip(cases, found, strict=True):
            for each in ranks:
                copied = each["copied"]
                assert each["received"]["parameters"] == sum(each["fetches"]) > 0
                gradients = copied.pop("gradients", 0)
                roomy = home == "unified" and not nodes
                assert (gradients > 0) == (roomy and case.stage > 1), case
                assert gradients <= each["received"]["gradients"]
                parameters = {} if nodes or home == "nvme" else {"parameters": each["received"]["parameters"]}
                assert copied == parameters, case


def test_the_plan_says_when_ranks_of_a_node_send_messages() -> None:
    on, off = (
        rank_processes.run("window_ranks.py", "plans", size=2, environment={VARIABLE: each})
        for each in ("1", "0")
    )
    line = "parameters of 1 ranks of this node come by messages"
    assert all(line not in each.result for each in on)
    assert all(line in each.result for each in off)


def test_a_rank_dies_while_others_copy_from_it() -> None:
    *others, dead = rank_processes.run("window_ranks.py", "dying", size=3)
    assert dead.code == -signal.SIGKILL
    for each in others:
        times, copied = each.result or (0, 0)
        assert times and copied, each.text


def test_windows_can_be_off_or_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_windows(0, range(2)) is not None
    monkeypatch.setenv(VARIABLE, "0")
    assert open_windows(0, range(2)) is None
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match=VARIABLE):
        open_windows(0, range(2))

    def denied(*_: int, **__: bool) -> None:
        raise PermissionError

    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(_tiers, "map_host", denied)
    assert open_windows(0, range(2)) is None


class Pair:
    """Two ranks of one process. Rank 0 owns the first half of a page of two blocks, rank 1 the second."""

    def __init__(self) -> None:
        self.arenas = [HostArena(8 * PAGE, shared=True) for _ in range(2)]
        self.windows = [Windows(rank, range(2)) for rank in range(2)]
        self.pages: list[Any] = []
        for rank, arena in enumerate(self.arenas):
            memory = arena.pool("homes", 4 * PAGE).lease(PAGE).residency().fill_(rank + 1)
            other = 1 - rank
            shard = SimpleNamespace(
                own=(HomeRange(rank * PAGE, 0, PAGE),),
                others={other: (Span(other, other * PAGE, PAGE, 0),)},
                share=SimpleNamespace(whole_parameters=False),
            )
            home = Home(Tier.HOST, PAGE, memory, True)
            self.pages.append(SimpleNamespace(index=3, home=home, shard=shard, permanent=False, holds=0))

    def meet(self) -> None:
        told = [each.tell() for each in self.windows]
        for rank, each in enumerate(self.windows):
            assert each.open({1 - rank: told[1 - rank]}) == [1 - rank]
        for rank, each in enumerate(self.windows):
            each.meet([1 - rank])
        memory = {
            rank: self.windows[rank].tell_memory(store_of(self.arenas[rank]), [self.pages[rank]])
            for rank in range(2)
        }
        for each in self.windows:
            each.read_memory(memory, CPU)


def test_a_page_that_is_offered_later_is_asked_for_in_a_wait_alone() -> None:
    pair, into, asked = Pair(), torch.zeros(PAGE, dtype=torch.uint8), []
    pair.meet()
    (mine, theirs), (page, there) = pair.windows, pair.pages
    wire: Any = SimpleNamespace(failure=None)

    def ask(*question: Any) -> Transfer:
        asked.append(question)
        return ARRIVED

    def copy(owner: int, page: Any, stamp: Any, legs: Any) -> list[Leg]:
        return [leg for leg in legs if not mine.copy(owner, page, stamp, leg)]

    def later(step: int) -> LaterCopy:
        parts: Any = SimpleNamespace(copy=copy, ask_holder=ask)
        return LaterCopy(parts, wire, page, (step, 0, 0), [Leg(1, PAGE, into)])

    assert not mine.has_offered(1, 3) and not mine.has_offered(1, 1 << 20)
    theirs.offer(there, (4, 0, 0))
    assert mine.has_offered(1, 3)
    offered = later(5)
    assert not offered.done() and theirs.offer(there, (5, 0, 0))
    assert offered.done() and bool((into == 2).all())
    offered.wait()
    wire.failure = ConfigError("Rank 1 is lost.", "Start again.")
    for step in (6, 5):  # not offered; offered by a rank that may be dead
        needed = later(step)
        assert not needed.done()
        needed.wait()
        assert needed.done() and asked.pop()[2] == (step, 0, 0) and not asked


def test_a_page_is_copied_between_an_offer_and_the_next_change() -> None:
    pair, into = Pair(), torch.zeros(PAGE, dtype=torch.uint8)
    pair.meet()
    (mine, theirs), (page, there) = pair.windows, pair.pages

    def copies(stamp: tuple[int, int, int]) -> bool:
        return mine.copy(1, page, stamp, Leg(1, PAGE, into))

    assert mine.reads(1) and not mine.reads(2)
    assert not copies((0, 0, 0))
    assert not theirs.offers(there, (4, 0, 1)) and theirs.offer(there, (4, 0, 1))
    assert theirs.offers(there, (4, 0, 1)) and not theirs.offers(there, (4, 1, 1))
    assert copies((4, 0, 1)) and bool((into == 2).all())
    assert not copies((4, 0, 2)) and not copies((3, 0, 1)) and not copies((4, 1, 1))
    there.home.withdraw(PAGE, 2 * PAGE)  # not this rank's own bytes
    assert copies((4, 0, 1))
    there.home.withdraw(0, 1)
    assert not copies((4, 0, 1))
    there.permanent, there.holds = True, 1
    assert not theirs.offer(there, (4, 0, 1)), "user code may edit the home"
    there.holds = 0
    assert theirs.offer(there, (5, 0, 1)) and copies((5, 0, 1))
    mine.close()
    assert not copies((5, 0, 1))


def test_another_process_or_file_is_no_mate() -> None:
    pair = Pair()
    board, *mailbox = pair.windows[1].tell()
    process, descriptor, inode, nbytes = board
    read = os.open("/proc/self/status", os.O_RDONLY)
    strange = [
        [process, descriptor, inode + 1, nbytes],
        [process, descriptor, inode, nbytes + PAGE],
        [process, read, os.fstat(read).st_ino, PAGE],
        [process, 1 << 20, inode, nbytes],
        [1 << 22, descriptor, inode, nbytes],
    ]
    for each in strange:
        assert Pair().windows[0].open({1: [each, *mailbox]}) == []
    ended = Popen([sys.executable, "-c", ""])
    ended.wait()
    memory, *pipes = mailbox
    for each in ([1 << 22, *memory[1:]], [ended.pid, *memory[1:]], [process, read, *memory[2:]]):
        assert pair.windows[0].open({1: [board, each, *pipes]}) == []
    assert pair.windows[0].open({1: [board, memory, pipes[0], [process, read, 0, 0]]}) == []
    os.close(read)


def test_a_mate_whose_ram_cannot_be_mapped_is_asked() -> None:
    pair = Pair()
    assert pair.windows[0].open({1: pair.windows[1].tell()}) == [1]
    pair.windows[0].meet([1])
    told = ([os.getpid(), 1 << 20, 0, PAGE], None)
    pair.windows[0].read_memory({0: told, 1: told}, CPU)
    assert not pair.windows[0].reads(1)
