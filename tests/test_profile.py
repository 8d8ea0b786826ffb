"""Measured bandwidths: of the disk, on files that are as large as they may be and no larger."""

import os
from pathlib import Path

import pytest
import torch

from infinity import aio, bandwidths, profile

MIB = 1 << 20


class Done:
    def result(self) -> int:
        return 0


def test_a_slow_disk_is_filled_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    written: list[int] = []

    def write(offset: int) -> Done:
        written.append(offset)
        now[0] += 0.25
        return Done()

    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(profile.aio, "wait_all", lambda futures: None)
    assert profile._fill(write, range(0, 100, 10), 1.0) == 4  # type: ignore[arg-type]
    assert written == [0, 10, 20, 30]
    assert profile._fill(write, range(0, 30, 10), 0.0) == 1  # type: ignore[arg-type]
    assert profile._fill(write, range(0, 30, 10), 100.0) == 3  # type: ignore[arg-type]


def test_only_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[str, int]] = []
    contents: list[bytes] = []

    real = profile._measure_disk

    class File:
        def __init__(self, file: aio.File) -> None:
            self.file = file

        def read(self, buffer: tuple[int, int, object], offset: int) -> aio.Future:
            places.append(("read", offset))
            return self.file.read(buffer, offset)

        def write(self, buffer: tuple[int, int, object], offset: int) -> aio.Future:
            places.append(("write", offset))
            return self.file.write(buffer, offset)

    def measure(file: aio.File, *arguments: object) -> profile.DiskSpeed:
        found = real(File(file), *arguments)  # type: ignore[arg-type]
        with open(file.path, "rb") as stored:
            contents.append(stored.read(MIB))
        return found

    monkeypatch.setattr(profile, "_measure_disk", measure)
    profile.disk_speed(tmp_path, nbytes=64 * MIB, seconds=0.05, fill_seconds=0.0)
    assert {kind for kind, _ in places} == {"read", "write"}
    assert {offset for _, offset in places} == {0}
    counts = torch.bincount(torch.frombuffer(bytearray(contents[0]), dtype=torch.uint8).long())
    assert counts.min() > 0.5 * MIB / 256  # random, so that nothing below can make less of it
    assert list(tmp_path.iterdir()) == []


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

    def speed(path: str, **options: float) -> profile.DiskSpeed:
        asked.update(options)
        return profile.DiskSpeed(1e9, 1e9, 1e9, "threads")

    monkeypatch.setattr(bandwidths, "disk_speed", speed)
    bandwidths._disk(os.fspath("/a"), limit, paths)
    assert asked["nbytes"] == expected
    assert asked["seconds"] * 3 * paths + asked["fill_seconds"] * paths <= 2.0
