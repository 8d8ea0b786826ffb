"""Tests that flip bits in the slabs of a commit: each is noticed, or no value lies there."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import watchdog
from parity import differences
from runs_on_disk import HOMES, Run, copied, everything

from infinity.checkpoint import commit_files
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, Damage, volume_record
from infinity.errors import CorruptState
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier
from infinity.tiers.slab_header import SLAB_HEADER_BYTES, slab_name

__all__ = ["watchdog"]

SAID = re.compile(
    r"(?P<array>[\w.]+) of (?P<name>[\w.]+)(?:,| for its) elements (?P<first>\d+) to (?P<end>\d+)"
)
"""Matches what an error says of a changed place: the parameter, and its range of elements."""


def slab_of(run: Run) -> tuple[SavedCommit, Path]:
    """The newest commit of a run, and the path of its only slab."""
    saved = commit_files.newest(run.directory, DiskFiles())
    assert saved is not None
    (slab,) = saved.manifest.volume.slabs
    (path,) = [
        each / slab_name(0, slab.uuid)
        for each in (run.swap, run.directory)
        if (each / slab_name(0, slab.uuid)).exists()
    ]
    return saved, path


def committed(run: Run) -> dict[str, Any]:
    """Train two steps and commit them; returns the state."""
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        found = everything(model, runtime)
        runtime.save(state=2).wait()
    return found


def held(saved: SavedCommit, nbytes: int) -> np.ndarray:
    """For each byte of the volume the number, counted from 1, of the array of the commit that has it, or 0.

    Returns int32 (nbytes,). The numbers are those of `arrays`.
    """
    found = np.zeros(nbytes, dtype=np.int32)
    for number, (_, _, place) in enumerate(arrays(saved), 1):
        found[place.offset : place.offset + place.nbytes] = number
    return found


def arrays(saved: SavedCommit) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (entry of the parameter, range, place) of every array of the commit."""
    for entry in saved.manifest.parameters:
        for each in entry.ranges:
            for place in each.places.values():
                yield entry, each, place


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip a bit of the file at byte `offset` of its pages."""
    with path.open("r+b") as file:
        file.seek(SLAB_HEADER_BYTES + offset)
        (byte,) = file.read(1)
        file.seek(SLAB_HEADER_BYTES + offset)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        os.fsync(file.fileno())  # direct I/O reads what is on the disk


@contextlib.contextmanager
def opened(saved: SavedCommit, path: Path) -> Iterator[CommitSource]:
    """Open the slab of a commit, to check it."""
    record = volume_record(saved)
    with NvmeTier({str(path.parent): 1 << 40}, record.nbytes, adopt=record) as tier:
        yield CommitSource(saved, tier)


def check_all(saved: SavedCommit, source: CommitSource) -> list[Damage]:
    """Compare all places of a commit with their checksums; returns what differs."""
    return [
        damage
        for entry in saved.manifest.parameters
        for checked in source.check(entry, 1 << 16)
        for damage in checked.damage
    ]


@pytest.mark.parametrize(
    "home, states, count",
    [
        pytest.param(home, states, count, marks=[pytest.mark.slow] if count == 125 else [])
        for home in HOMES
        for states in ("fp32", "int8")
        for count in (12, 125)
    ],
)
def test_every_flipped_bit_is_found(home: str, states: str, count: int, tmp_path: Path) -> None:
    """The checks name the parameter and a range with the place. With -m slow 1,000 bits are flipped."""
    run = Run(tmp_path, home=home, states=states)
    committed(run)
    saved, path = slab_of(run)
    owners = held(saved, saved.manifest.volume.nbytes)
    inside, places = np.flatnonzero(owners), list(arrays(saved))
    chance, noticed = random.Random(1), 0
    with opened(saved, path) as source:
        assert check_all(saved, source) == []
        for number in range(count):
            # Half of the bits fall in places that the commit holds, and half anywhere.
            offset = int(chance.choice(inside)) if number % 2 else chance.randrange(len(owners))
            bit = chance.randrange(8)
            flip(path, offset, bit)
            errors = check_all(saved, source)
            flip(path, offset, bit)
            if not owners[offset]:
                assert errors == [], "a place that the commit does not hold"
                continue
            noticed += 1
            (damage,) = errors
            check_range(damage.parameter, damage.first, damage.end, places[owners[offset] - 1], offset)
        assert noticed >= count // 2
        assert check_all(saved, source) == []


def check_named(error: CorruptState, array: tuple[Any, Any, Any], offset: int) -> None:
    """Assert that an error names the parameter and a range with the byte of the volume at `offset`.

    array: an item of `arrays`, in which the byte lies.
    """
    said = SAID.search(error.cause)
    assert said is not None, error.cause
    check_range(said["name"], int(said["first"]), int(said["end"]), array, offset)


def check_range(name: str, first: int, end: int, array: tuple[Any, Any, Any], offset: int) -> None:
    """Assert that elements [first, end) of parameter `name` have the byte of the volume at `offset`.

    array: an item of `arrays`, in which the byte lies.
    """
    entry, within, place = array
    element = within.first + (offset - place.offset) * within.count // place.nbytes
    assert name == entry.names[0]
    assert first <= element < end


@pytest.mark.parametrize("home", HOMES)
def test_a_resumed_run_never_uses_changed_bytes(home: str, tmp_path: Path) -> None:
    """A bit flipped before a resumption is an error there or at the first use, or changes nothing at all."""
    run = Run(tmp_path / "run", home=home)
    run.root.mkdir()
    expected = committed(run)
    saved, _ = slab_of(run)
    owners = held(saved, saved.manifest.volume.nbytes)
    inside, outside = np.flatnonzero(owners), np.flatnonzero(owners == 0)
    places = list(arrays(saved))
    chance = random.Random(2)
    for number in range(12):
        other = copied(run, tmp_path / f"copy{number}")
        offset = int(chance.choice(outside if number % 4 == 3 else inside))
        flip(slab_of(other)[1], offset, chance.randrange(8))
        if not owners[offset]:
            with other.opened(resume=True) as (model, runtime):
                assert differences(everything(model, runtime), expected) == []
            continue
        with pytest.raises(CorruptState) as caught, other.opened(resume=True) as (model, runtime):
            everything(model, runtime)
        check_named(caught.value, places[owners[offset] - 1], offset)
