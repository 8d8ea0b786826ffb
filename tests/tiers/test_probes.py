"""Tests of measuring a disk's speed: how large the test file is, and that only its written part is read."""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity import aio
from infinity.planning import machine_rates
from infinity.system.io_settings import DEFAULT, IoSettings
from infinity.tiers import probes, trial_file
from infinity.tiers.trial_file import REQUEST_BYTES, SMALLEST, Memory, TestFile

MIB = 1 << 20


def test_a_slow_disk_is_filled_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarters = itertools.count()
    slow = SimpleNamespace(monotonic=lambda: next(quarters) / 4, perf_counter=time.perf_counter)
    monkeypatch.setattr(trial_file, "time", slow)
    memory = Memory(SMALLEST)
    with TestFile(os.fspath(tmp_path), 4 * SMALLEST, memory, DEFAULT, seconds=1.0) as file:
        assert file.nbytes == SMALLEST + 3 * REQUEST_BYTES
    with TestFile(os.fspath(tmp_path), 4 * SMALLEST, memory, DEFAULT, seconds=math.inf) as file:
        assert file.nbytes == 4 * SMALLEST


def test_only_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[str, int]] = []
    contents: list[bytes] = []

    class File:
        def __init__(self, file: aio.File) -> None:
            self.direct, self.sync, self.file = file.direct, file.sync, file

        def read(self, buffer: tuple[int, int, object], offset: int) -> aio.Future:
            places.append(("read", offset))
            return self.file.read(buffer, offset)

        def write(self, buffer: tuple[int, int, object], offset: int) -> aio.Future:
            places.append(("write", offset))
            return self.file.write(buffer, offset)

    real = TestFile.opened

    @contextlib.contextmanager
    def opened(file: TestFile, settings: IoSettings) -> Iterator[File]:
        with real(file, settings) as inside:
            yield File(inside)
            with open(file.path, "rb") as stored:
                contents.append(stored.read(MIB))

    monkeypatch.setattr(TestFile, "opened", opened)
    found = probes.disk_speed(tmp_path, nbytes=64 * MIB, seconds=0.05, fill_seconds=0.0)
    assert min(found.read, found.write, found.mixed) > 0
    assert {kind for kind, _ in places} == {"read", "write"}
    assert {offset for _, offset in places} == set(range(0, 32 * MIB, 4 * MIB))
    counts = torch.bincount(torch.frombuffer(bytearray(contents[0]), dtype=torch.uint8).long())
    assert counts.min() > 0.5 * MIB / 256  # random bytes, which nothing below can compress
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [4096, 3 * 4096, 5 * MIB])
def test_a_file_of_a_small_budget_is_enough(tmp_path: Path, nbytes: int) -> None:
    found = probes.disk_speed(tmp_path, nbytes=nbytes, seconds=0.01)
    assert min(found.read, found.write, found.mixed) > 0


@pytest.mark.parametrize(
    ("limit", "paths", "expected"),
    [
        (1 << 20, 1, 1 << 20),
        (100 << 20, 1, 100 << 20),
        (1 << 30, 1, 128 << 20),
        (4 << 30, 1, 512 << 20),
        (64 << 30, 1, 1 << 30),
        (64 << 30, 4, 256 << 20),
        (100, 1, 4096),
    ],
)
def test_the_plan_probes_a_larger_file_where_there_is_more_to_keep(
    monkeypatch: pytest.MonkeyPatch, limit: int, paths: int, expected: int
) -> None:
    asked: dict[str, float] = {}

    def speed(path: str, **options: float) -> probes.DiskSpeed:
        asked.update(options)
        return probes.DiskSpeed(1e9, 1e9, 1e9, "threads")

    monkeypatch.setattr(machine_rates, "disk_speed", speed)
    machine_rates._disk(os.fspath("/a"), limit, paths)
    assert asked["nbytes"] == expected
    assert asked["seconds"] * 3 * paths + asked["fill_seconds"] * paths <= 2.0
