"""Tests that flip bits in the slabs of a commit, exchange its places, or put old ones in: each is noticed, or
no value lies there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty import watchdog
from manifests import put, signed
from parity import differences
from runs_on_disk import HOMES, Run, copied, everything
from zoo import entry as zoo_entry

from infinity.checkpoint import commit_files
from infinity.checkpoint.codec import Tensors
from infinity.checkpoint.commit_files import SavedCommit
from infinity.checkpoint.commit_source import CommitSource, Damage, RankCommit, reader_of
from infinity.checkpoint.manifest import array_bytes
from infinity.checkpoint.tensor_files import packed, unpacked
from infinity.checksum import crc32c
from infinity.errors import CorruptState
from infinity.system.disk_files import DiskFiles
from infinity.tiers import NvmeTier
from infinity.tiers.slab import slab_name

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
        found[place.start : place.stop] = number
    return found


def arrays(saved: SavedCommit) -> Iterator[tuple[Any, Any, range]]:
    """Yield (entry of the parameter, range, bytes of the volume) of every array of the commit."""
    for entry in saved.manifest.parameters:
        forms = entry.arrays(saved.manifest.rule)
        for each in entry.ranges:
            for name, stored in each.arrays.items():
                end = stored.offset + array_bytes(forms[name], each.count)
                yield entry, each, range(stored.offset, end)


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip a bit of the file at byte `offset` of its pages."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        os.fsync(file.fileno())  # direct I/O reads what is on the disk


@contextlib.contextmanager
def opened(saved: SavedCommit, path: Path) -> Iterator[CommitSource]:
    """Open the slab of a commit, to check it."""
    record = saved.manifest.volume
    with NvmeTier({str(path.parent): 1 << 40}, record.nbytes, adopt=record) as tier:
        yield CommitSource([RankCommit(saved, reader_of(tier))])


def check_all(saved: SavedCommit, source: CommitSource) -> list[Damage]:
    """Compare all places of a commit with their checksums; returns what differs."""
    return [damage for checked in source.check(1 << 16) for damage in checked.damage]


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
    element = within.first + (offset - place.start) * within.count // len(place)
    assert name == entry.names[0]
    assert first <= element < end


@pytest.mark.sweep(most=2)
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


Table = np.ndarray[Any, np.dtype[np.uint32]]


def content(run: Run) -> tuple[Any, Table, Tensors]:
    """The tree of the newest manifest, the table in its data file as it lies there, and the other tensors."""
    number = max(commit_files.generations(run.directory))
    text = commit_files.manifest_path(run.directory, number).read_bytes().split(b"\n", 1)[1]
    tensors = unpacked(commit_files.data_path(run.directory, number).read_bytes(), "data")
    return json.loads(text), tensors.pop("checksums").numpy(), tensors


def forge(run: Run, tree: Any, table: Table, tensors: Tensors) -> None:
    """Write the newest commit anew with this content, and all that protects it as a whole."""
    data = packed({"checksums": torch.from_numpy(table), **tensors})
    tree["data"] = {"nbytes": len(data), "crc32c": crc32c(data)}
    put(run.directory, signed(json.dumps(tree).encode()), data, tree["generation"])


def same_form(tree: Any) -> tuple[Any, Any]:
    """The entries of two trained parameters of the same form."""
    found: dict[Any, Any] = {}
    for each in tree["parameters"]:
        form = each["shape"], each["trainable"], [within[:2] for within in each["ranges"]]
        if each["trainable"] and (other := found.setdefault(repr(form), each)) is not each:
            return other, each
    raise AssertionError("no two parameters have the same form")


def exchange_places(tree: Any) -> None:
    """Exchange what the manifest says of two parameters: their places with their indices of checksums."""
    first, second = same_form(tree)
    first["ranges"], second["ranges"] = second["ranges"], first["ranges"]


def copy_places(tree: Any) -> None:
    """Have two parameters lie in the same places, with the same checksums."""
    first, second = same_form(tree)
    first["ranges"] = second["ranges"]


def exchange_arrays(tree: Any) -> None:
    """Exchange the places of the two moments of a parameter."""
    first, _ = same_form(tree)
    for _, _, places in first["ranges"]:
        places["exp_avg"], places["exp_avg_sq"] = places["exp_avg_sq"], places["exp_avg"]


@pytest.mark.parametrize("change", (exchange_places, copy_places, exchange_arrays))
def test_exchanged_places_are_found(change: Callable[[Any], None], tmp_path: Path) -> None:
    """A manifest that is whole, and says that arrays lie where others do, is not believed."""
    run = Run(tmp_path, of=zoo_entry("transformer"))
    committed(run)
    tree, table, tensors = content(run)
    forge(run, tree, table, tensors)
    saved, path = slab_of(run)
    with opened(saved, path) as source:
        assert check_all(saved, source) == [], "what was forged without a change is believed"
    change(tree)
    forge(run, tree, table, tensors)
    saved, path = slab_of(run)
    with opened(saved, path) as source:
        names = {each["names"][0] for each in same_form(content(run)[0])}
        assert {each.parameter for each in check_all(saved, source)} & names
    with pytest.raises(CorruptState), run.opened(resume=True) as (model, runtime):
        everything(model, runtime)


def test_places_of_an_older_commit_are_found(tmp_path: Path) -> None:
    """A parameter's places of the commit before, which still hold its bytes, do not pass with their own
    checksums either.
    """
    run = Run(tmp_path, of=zoo_entry("transformer"))
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        runtime.save(state=2).wait()
        old_tree, old_table, _ = content(run)
        run.train(model, runtime, range(2, 3))
        runtime.save(state=3).wait()
    tree, table, tensors = content(run)
    name = same_form(tree)[0]["names"][0]
    old, new = (
        next(each for each in of["parameters"] if each["names"][0] == name) for of in (old_tree, tree)
    )
    for before, now in zip(old["ranges"], new["ranges"], strict=True):
        for array, place in before[2].items():
            count = -(-before[1] // 4096)
            assert place[0] != now[2][array][0], "the parts have two places each"
            index = now[2][array][1]
            table[index : index + count] = old_table[place[1] : place[1] + count]
            now[2][array] = [place[0], index]
    forge(run, tree, table, tensors)
    saved, path = slab_of(run)
    with opened(saved, path) as source:
        assert {each.parameter for each in check_all(saved, source)} == {name}
