"""Tests of durable I/O on real slabs against plain bytes: what commits hold never changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from durable_pages import DurablePage
from durable_rig import FAILURE, Rig, checksums_of, content, memory_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinity.errors import ConfigError, CorruptState
from infinity.pages import durable_io
from infinity.pages.parts import UNKNOWN, Part, block_count

PAGE = 4096


class DurableMachine(RuleBasedStateMachine):
    """A state machine of steps, edits, reads, commits, crashes, and of the bytes that have to be found."""

    seeds = st.integers(100, 1 << 30)
    pages = st.integers(0, 3)
    where = st.tuples(st.floats(0, 1), st.floats(0, 1))

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.rig = Rig(directory)
        self.outstanding: set[tuple[int, int]] = set()

    def teardown(self) -> None:
        self.rig.close()

    def range_in(self, page: DurablePage, where: tuple[float, float], unit: int) -> tuple[int, int]:
        """A range of bytes (start, bytes) of a page, at least one. unit: what both are multiples of."""
        last = page.home.nbytes // unit
        low, high = sorted(min(last - 1, int(each * last)) for each in where)
        return low * unit, (high + 1 - low) * unit

    def editable(self, page: DurablePage, start: int, nbytes: int) -> bool:
        """Whether user code may change these bytes; a runtime completes outstanding updates first."""
        over = list(page.parts.over(start, start + nbytes))
        waiting = {part for chunk in self.outstanding for part in self.rig.chunks[chunk]}
        return not any(part in waiting or (not part.trained and part.durable is not None) for part in over)

    @rule(page=pages, where=where, seed=seeds)
    def write(self, page: int, where: tuple[float, float], seed: int) -> None:
        at = self.rig.pages[page]
        start, nbytes = self.range_in(at, where, PAGE)
        frozen = [part for part in at.parts.over(start, start + nbytes) if not part.trained]
        if any(part.free_slot() is None for part in frozen):
            if all(not part.trained for part in at.parts.over(start, start + nbytes)):
                with pytest.raises(ConfigError, match="A frozen parameter was edited after a commit"):
                    self.rig.io.write(at.home, start, memory_of(bytes(nbytes)))
        elif self.editable(at, start, nbytes):
            self.rig.write(at, start, content(seed, nbytes))

    @rule(page=pages, where=where, seed=seeds, whole=st.booleans())
    def patch(self, page: int, where: tuple[float, float], seed: int, whole: bool) -> None:
        """Write bytes that are not aligned, as `Store.patch` does: read, change and write whole pages.

        whole: whether all entries of one array of a parameter are written that lie in a part.
        """
        at = self.rig.pages[page]
        start, nbytes = self.range_in(at, where, 2)
        if whole:
            (part,) = at.parts.over(start, start + 1)
            first, nbytes, _ = part.segments[int(where[0] * (len(part.segments) - 1))].tolist()
            start = part.start + first
        low, high = start // PAGE * PAGE, -(-(start + nbytes) // PAGE) * PAGE
        over = list(at.parts.over(low, high))
        if any(not part.trained and part.free_slot() is None for part in over):
            return
        if self.editable(at, low, high - low):
            data = content(seed, nbytes)
            around = bytearray(self.rig.read(at, low, high - low))
            around[start - low : start - low + nbytes] = data
            transfer = self.rig.write(at, low, bytes(around))
            if transfer is not None:
                transfer.wait()
                self.rig.io.patched(at.home, start, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Decide the updates of some chunks."""
        for chunk in data.draw(st.sets(st.sampled_from(sorted(self.rig.chunks)))):
            awaited = self.rig.pending is not None and chunk in self.rig.pending.awaited
            if awaited or chunk in self.outstanding:
                continue
            self.outstanding.add(chunk)
            self.rig.page_of(self.rig.chunks[chunk][0]).begun[chunk[1]] = True

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), seed=seeds)
    def update(self, data: st.DataObject, seed: int) -> None:
        """Carry out an update: write the whole parts of a chunk."""
        chunk = data.draw(st.sampled_from(sorted(self.outstanding)))
        rig = self.rig
        if rig.io.ledger.blocks(chunk):
            assert chunk not in rig.io.ledger.pending.awaited
            rig.end(None)
        awaited = rig.pending is not None and chunk in rig.pending.awaited
        for number, part in enumerate(rig.chunks[chunk]):
            rig.write(rig.page_of(part), part.start, content(seed + number, part.nbytes))
            if awaited:
                rig.take(part)
        rig.io.ledger.updated(chunk)
        self.outstanding.discard(chunk)

    @rule(page=pages, where=where)
    def read(self, page: int, where: tuple[float, float]) -> None:
        at = self.rig.pages[page]
        start, nbytes = self.range_in(at, where, PAGE)
        assert self.rig.read(at, start, nbytes) == self.rig.bytes_of(at)[start : start + nbytes]

    @precondition(lambda self: self.rig.durable)
    @rule(where=where)
    def fetch(self, where: tuple[float, float]) -> None:
        at = self.rig.on_disk[0]
        start, nbytes = self.range_in(at, where, 2)
        at.home.settle(start // PAGE * PAGE, start + nbytes + PAGE, writing=False)
        found = self.rig.io.fetch(at.home, start, nbytes).numpy().tobytes()
        assert found == self.rig.bytes_of(at)[start : start + nbytes]

    @rule()
    def begin(self) -> None:
        self.rig.begin(set(self.outstanding))

    @precondition(lambda self: self.rig.pending is not None)
    @rule()
    def flush(self) -> None:
        self.rig.flush()

    @precondition(lambda self: self.rig.pending is not None)
    @rule(fails=st.sampled_from([False, False, True]))
    def end(self, fails: bool) -> None:
        self.rig.end(FAILURE if fails else None)

    @precondition(lambda self: self.rig.durable)
    @rule()
    def crash(self) -> None:
        """Go on from the last durable commit, as a new process does: nothing else is known."""
        rig = self.rig
        rig.end(FAILURE)
        for page in rig.pages:
            page.home.renew()
        rig.writes.clear()
        self.outstanding.clear()
        for page, part in rig.parts:
            slot, data, checksums, begun = rig.durable[part]
            if part.chunk_index is not None:
                page.begun[part.chunk_index] = begun
            part.newest = part.durable = slot
            part.checksums = np.full(block_count(part.segments), UNKNOWN)
            part.checksums[: len(checksums)] = checksums
            part.verified = not len(checksums)
            rig.bytes_of(page)[part.start : part.end] = data
            if page.home.in_place:
                rig.io.bring(part, page.home.view(part.start, part.nbytes)).wait()
                assert part.verified
                assert page.home.view(part.start, part.nbytes).numpy().tobytes() == data

    @invariant()
    def the_last_commit_is_whole(self) -> None:
        for part, (slot, data, *_) in self.rig.durable.items():
            assert part.durable == slot
            assert self.rig.bytes_on_disk(part, slot) == data

    @invariant()
    def known_checksums_are_right(self) -> None:
        for page, part in self.rig.parts:
            if not page.home.in_place:
                right = checksums_of(part, self.rig.known(part))
                assert ((part.checksums == right) | (part.checksums == UNKNOWN)).all()


def test_durable_io_against_plain_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_io, "_SCRATCH", 3 * PAGE)  # so that parts are copied in several pieces
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: DurableMachine(tmp_path),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def committed_twice(rig: Rig) -> Part:
    """Make a commit, write a chunk, and begin another commit. Returns a part whose slots are both held."""
    page = rig.on_disk[0]
    part = page.parts[0]
    rig.begin(set())
    rig.end(None)
    written = rig.write(page, part.start, content(1, part.nbytes))
    assert written is not None
    rig.begin(set())
    assert {part.durable, part.pending} == {0, 1}
    written.wait()  # `bytes_on_disk` reads without regard to writes in flight
    return part


@pytest.mark.parametrize("nbytes", [PAGE, 4 * PAGE], ids=["a piece", "a whole part"])
def test_a_write_without_a_free_slot_waits_for_the_end_of_the_commit(rig: Rig, nbytes: int) -> None:
    part = committed_twice(rig)
    begun = threading.Event()
    ended: list[bool] = []

    def write() -> None:
        begun.set()
        rig.io.write(part.home, part.start, memory_of(content(2, nbytes))).wait()
        ended.append(rig.io.ledger.pending is None)

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    held = rig.bytes_on_disk(part, 0), rig.bytes_on_disk(part, 1)
    rig.end(None)
    writer.join()
    assert ended == [True]
    assert (part.durable, part.newest) == (1, 0)
    assert rig.bytes_on_disk(part, 1) == held[1] != held[0]
    assert rig.bytes_on_disk(part, 0) == content(2, nbytes) + held[1][nbytes:]


@pytest.mark.parametrize("whole", [False, True], ids=["a piece", "a whole part"])
def test_bytes_of_an_earlier_process_are_checked_when_they_are_first_read(rig: Rig, whole: bool) -> None:
    """Also when they are first written: their checksums could not be told from those of changed bytes."""
    page = rig.on_disk[0]
    part = page.parts[1]
    rig.write(page, 0, content(3, page.home.nbytes))
    rig.begin(set())
    rig.end(None)
    part.verified = False
    wrong = bytearray(rig.known(part))
    wrong[2 * PAGE + 5] ^= 1
    rig.tier.write(rig.io.lease, memory_of(bytes(wrong)), offset=part.offset).result()
    start, nbytes = (0, page.home.nbytes) if whole else (part.start, PAGE)
    for _ in range(2):
        with pytest.raises(CorruptState, match=r"values of 0\.weight for its elements 12288 to 16384"):
            rig.read(page, start, nbytes)
    with pytest.raises(CorruptState):
        rig.io.write(page.home, part.start, memory_of(bytes(PAGE)))
    rig.tier.write(rig.io.lease, memory_of(rig.known(part)), offset=part.offset).result()
    assert rig.read(page, start, nbytes) == rig.bytes_of(page)[start : start + nbytes]
    assert part.verified
