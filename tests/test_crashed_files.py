"""Tests of what a crash leaves of single writes and names, from recordings made by hand."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from crash_states import Disk, Event, Recording, State, images

from infinity.aio import Faults
from infinity.system.disk_files import DiskFiles

OLD, A, B = (letter * 512 for letter in (b"o", b"a", b"b"))
"""Sectors."""
DRAWS = 300
"""States drawn at one boundary. Each of the few that are possible comes up."""


def event(kind: str, span: tuple[int, int | None], data: bytes = b"", at: int = 0, **others: object) -> Event:
    """An operation on /d/f, or what `others` say. span: submitted, completed; None where it failed."""
    ok = span[1] is not None
    given = Event(kind, "/d/f", "", at, data, *span, ok=ok, moved=len(data) if ok else 0, changed=False)
    return given._replace(**others)  # type: ignore[arg-type]


def draw(
    events: Sequence[Event], boundary: int, files: dict[str, bytes], ordered_names: bool = True
) -> list[State]:
    disk = Disk(events, {"/d": files}, ordered_names=ordered_names)
    return list(itertools.islice(disk.states(boundary, np.random.default_rng(0)), DRAWS))


def contents(events: Sequence[Event], boundary: int, old: bytes = OLD) -> set[bytes]:
    """All contents of /d/f that come up after a crash."""
    return {state.directories["/d"]["f"].tobytes() for state in draw(events, boundary, {"f": old})}


def names(events: Sequence[Event], boundary: int, *, ordered_names: bool = True) -> set[tuple[str, ...]]:
    """All sets of names that come up after a crash of a directory that had the file f."""
    states = draw(events, boundary, {"f": OLD}, ordered_names)
    return {tuple(sorted(state.directories["/d"])) for state in states}


def test_a_write_is_durable_after_a_sync_that_began_when_it_had_completed() -> None:
    events = [event("write", (1, 2), A), event("sync", (3, 4))]
    assert contents(events, 0) == {OLD}
    for boundary in (1, 2, 3):
        assert contents(events, boundary) == {OLD, A}
    assert contents(events, 4) == {A}


def test_a_sync_that_began_before_the_write_completed_promises_nothing() -> None:
    assert contents([event("write", (1, 3), A), event("sync", (2, 4))], 4) == {OLD, A}


def test_the_sync_of_another_file_promises_nothing() -> None:
    events = [event("write", (1, 2), A), event("sync", (3, 4), path="/d/g")]
    states = draw(events, 4, {"f": OLD, "g": OLD})
    assert {state.directories["/d"]["f"].tobytes() for state in states} == {OLD, A}


def test_writes_are_torn_at_sectors() -> None:
    mixes = {first + second for first in (OLD, A) for second in (OLD, A)}
    assert contents([event("write", (1, 2), A + A)], 2, OLD + OLD) == mixes


def test_a_sector_holds_any_of_its_later_writes() -> None:
    events = [event("write", (1, 2), A + A), event("write", (3, 4), B, at=512)]
    assert contents(events, 4, OLD + OLD) == {first + second for first in (OLD, A) for second in (OLD, A, B)}


def test_the_page_cache_keeps_the_order_of_writes_in_a_sector() -> None:
    events = [event("write", (1, 2), b"x", at=0), event("write", (3, 4), b"y", at=1)]
    assert contents(events, 4, b"--") == {b"--", b"x-", b"xy"}


def test_a_short_write_is_what_it_moved() -> None:
    events = [event("write", (1, 2), A + A, moved=512), event("sync", (3, 4))]
    assert contents(events, 4, OLD + OLD) == {A + OLD}


def test_after_a_failed_sync_no_sync_makes_the_writes_durable() -> None:
    events = [event("write", (1, 2), A), event("sync", (3, 4), ok=False), event("sync", (5, 6))]
    assert contents(events, 6) == {OLD, A}
    events = [*events, event("write", (7, 8), B), event("sync", (9, 10))]
    assert contents(events, 8) == {OLD, A, B}
    assert contents(events, 10) == {B}


@pytest.mark.parametrize("completed", [2, None])
def test_a_failed_write_may_be_there_in_part(completed: int | None) -> None:
    events = [event("write", (1, completed), A + A, ok=False, moved=0), event("sync", (3, 4))]
    mixes = {first + second for first in (OLD, A) for second in (OLD, A)}
    assert contents(events, 4, OLD + OLD) == mixes
    events = [*events, event("write", (5, 6), B), event("sync", (7, 8))]
    assert contents(events, 8, OLD + OLD) == {B + OLD, B + A}


CHANGES = [
    event("create", (1, 2), path="/d/new"),
    event("rename", (3, 4), path="/d/new", target="/d/named"),
    event("remove", (5, 6)),
]


def test_names_survive_in_their_order() -> None:
    assert names(CHANGES, 6) == {("f",), ("f", "new"), ("f", "named"), ("named",)}
    assert names(CHANGES, 4) == {("f",), ("f", "new"), ("f", "named")}


def test_without_a_journal_any_names_survive() -> None:
    assert names(CHANGES, 6, ordered_names=False) >= {(), ("f",), ("f", "new"), ("new",), ("named",)}


@pytest.mark.parametrize("ordered_names", [True, False])
def test_names_are_durable_after_a_sync_of_their_directory(ordered_names: bool) -> None:
    sync = event("sync directory", (7, 8), path="/d")
    assert len(names([*CHANGES, sync], 7, ordered_names=ordered_names)) > 1
    assert names([*CHANGES, sync], 8, ordered_names=ordered_names) == {("named",)}
    early = event("sync directory", (5, 8), path="/d")
    late = [*CHANGES[:2], event("remove", (6, 7)), early]
    assert names(late, 8, ordered_names=ordered_names) == {("f", "named"), ("named",)}


def test_a_name_may_survive_without_the_bytes_of_its_file() -> None:
    events = [
        event("create", (1, 2), path="/d/new"),
        event("write", (3, 4), A + B, path="/d/new"),
        event("rename", (5, 6), path="/d/new", target="/d/f"),
        event("sync directory", (7, 8), path="/d"),
    ]
    zeros = bytes(512)
    whole = {first + second for first in (zeros, A) for second in (zeros, B)}
    assert contents(events, 8) == {b"", A, *whole}
    synced = [*events, event("sync", (9, 10))]
    assert contents(synced, 10) == {A + B}


def test_a_file_made_with_its_whole_length_keeps_it() -> None:
    events = [event("preallocate", (1, 2), at=1024, path="/d/new"), event("write", (3, 4), A, path="/d/new")]
    states = draw(events, 4, {"f": OLD})
    there = {
        files["new"].tobytes() for files in (state.directories["/d"] for state in states) if "new" in files
    }
    assert there == {bytes(1024), A + bytes(512)}
    assert any("new" not in state.directories["/d"] for state in states)


def test_a_run_through_disk_files_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(OLD)
    base = images(tmp_path)
    recording = Recording(Faults())
    disk_files = DiskFiles(recording)
    disk_files.create(tmp_path / ".tmp", A + b"tail")
    recording.mark("created")
    disk_files.rename(tmp_path / ".tmp", tmp_path / "new")
    disk_files.remove(tmp_path / "old")
    disk_files.remove(tmp_path / "never there")
    disk_files.sync_directory(tmp_path)
    disk = Disk(recording.events(), base)
    assert disk.marks(disk.boundaries[-1]) == ["created"] and disk.marks(1) == []
    places = next(disk.states(disk.boundaries[-1], np.random.default_rng(0))).write_to(tmp_path / "state")
    there = places[str(tmp_path)]
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {"new": A + b"tail"}
    first = next(disk.states(0, np.random.default_rng(0)))
    assert first.write_to(tmp_path / "state") == places
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {"old": OLD}


def test_states_are_sparse_files(tmp_path: Path) -> None:
    content = bytearray(1 << 20)
    content[8192:8704] = A
    content[-1] = 1
    state = State(0, "", {"/d": {"f": np.frombuffer(content, np.uint8)}})
    written = state.write_to(tmp_path)["/d"] / "f"
    assert written.read_bytes() == content
    assert os.stat(written).st_blocks * 512 < 1 << 17


def test_a_sample_covers_every_boundary() -> None:
    events = [event("write", (n, n + 1), A) for n in range(1, 20, 2)]
    disk = Disk(events, {"/d": {"f": OLD}})
    sample = [state.boundary for state in disk.sample(200, seed=0)]
    assert len(sample) == 200 and sorted(set(sample)) == disk.boundaries == list(range(1, 21))


def test_mistakes_of_the_run_are_told(tmp_path: Path) -> None:
    changed = Disk([event("write", (1, 2), A, changed=True)], {"/d": {"f": OLD}})
    overlap = Disk([event("write", (1, 3), A + A), event("write", (2, 4), B, at=512)], {"/d": {"f": OLD}})
    for disk, words in ((changed, "changed in flight"), (overlap, "overlaps another write in flight")):
        assert words in str(disk.first_violation(lambda places, marks: None, tmp_path, count=1))
    apart = Disk([event("write", (1, 3), A), event("write", (2, 4), B, at=512)], {"/d": {"f": OLD}})
    assert apart.first_violation(lambda places, marks: None, tmp_path, count=1) is None


def test_what_is_not_modelled_is_refused() -> None:
    for odd in (
        event("write", (1, 2), A, path="/d/unknown"),
        event("sync directory", (1, 2), path="/elsewhere"),
        event("rename", (1, 2), target="/elsewhere/f"),
    ):
        with pytest.raises(ValueError, match=r"unknown|elsewhere"):
            Disk([odd], {"/d": {"f": OLD}})
