"""Tests of `infinity checkpoint ls` and `infinity checkpoint verify`."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import TinyJob, ended, run_error, run_json

from infinity import cli
from infinity.aio import Faults
from infinity.checkpoint import commit_files
from infinity.checkpoint.manifest import BLOCK, StoredArray
from infinity.checkpoint.verification import Verification
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

FILES = DiskFiles()
PARAMETERS = 13392
"""Number of parameters of the preset "tiny"."""


@pytest.fixture
def run(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> Path:
    """Train two steps, and return the directory with the commit, whose slab is there, too."""
    directory = job.folder / "run"
    job.train(capsys, "--budget-host", "64MiB", "--steps", 2, "--checkpoint", directory)
    return directory


def slab_of(directory: Path) -> Path:
    (slab,) = directory.glob("*.slab")
    return slab


def place_of(directory: Path, parameter: str, array: str) -> StoredArray:
    saved = commit_files.newest(directory, FILES)
    assert saved is not None
    entry = next(each for each in saved.manifest.parameters if each.names[0] == parameter)
    return entry.ranges[0].arrays[array]


def flip(slab: Path, offset: int) -> None:
    """Change a byte of a slab's pages. offset: in the volume, which has one slab."""
    with slab.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def ls(capsys: pytest.CaptureFixture[str], directory: Path, *more: object) -> list[dict[str, Any]]:
    found = run_json(capsys, ["checkpoint", "ls", "--json", str(directory), *map(str, more)])
    assert found["directory"] == str(directory)
    listed: list[dict[str, Any]] = found["commits"]
    return listed


def verify(capsys: pytest.CaptureFixture[str], directory: Path, *more: object) -> tuple[int, dict[str, Any]]:
    """Verify the commit in a directory; returns the exit code and the JSON object."""
    capsys.readouterr()
    code = cli.main(["checkpoint", "verify", "--json", str(directory), *map(str, more)])
    return code, json.loads(capsys.readouterr().out)


def test_a_list_of_commits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (commit,) = ls(capsys, run)
    slab = slab_of(run)
    assert (commit["generation"], commit["step"], commit["whole"]) == (1, 2, True)
    assert commit["parameters"] == PARAMETERS
    assert (commit["optimizer"], commit["states"], commit["world_size"]) == ("AdamW", "fp32", 1)
    assert set(commit["versions"]) == {"infinity", "torch", "python"}
    assert commit["bytes"] == slab.stat().st_size
    uuid = slab.stem.removeprefix("infinity-rank0-")
    assert commit["slabs"] == [{"uuid": uuid, "nbytes": commit["bytes"], "path": str(slab), "fault": None}]
    assert cli.main(["checkpoint", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"commit-1 · step 2 · {commit['created']} · 13.4k parameters · AdamW, fp32 states")
    assert out.splitlines()[0].endswith(" · whole")
    assert f"slab {uuid}" in out
    assert f" · {slab}\n" in out


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls(capsys, tmp_path) == []
    _, _, error = run_error(capsys, ["checkpoint", "ls", "--json", str(tmp_path / "absent")], 1)
    assert error["error"] == "StorageError"
    line, _, _ = run_error(capsys, ["checkpoint", "verify", "--json", str(tmp_path)], 2)
    assert "There is no commit in " in line
    assert list(tmp_path.iterdir()) == []


def test_a_newer_commit_that_is_not_whole_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "commit-7").write_bytes(b"no manifest")
    first, second = ls(capsys, run)
    assert first["whole"]
    assert (second["generation"], second["whole"]) == (7, False)
    assert "does not begin as a manifest" in second["fault"]
    assert cli.main(["checkpoint", "ls", str(run)]) == 0
    assert "commit-7 · not whole: " in capsys.readouterr().out
    code, found = verify(capsys, run)
    assert (code, found["generation"], found["damage"]) == (1, 1, [])
    assert "does not begin as a manifest" in found["skipped"][0]
    code, found = verify(capsys, run, "--generation", 1)
    assert (code, found["whole"]) == (0, True)
    _, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run), "--generation", "7"], 1)
    assert error["error"] == "CorruptState"
    line, _, _ = run_error(capsys, ["checkpoint", "verify", "--json", str(run), "--generation", "3"], 2)
    assert "There is no commit-3 in " in line


def test_a_whole_commit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {each.name: each.read_bytes() for each in run.iterdir()}
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["damage"], found["skipped"]) == (0, True, [], [])
    assert found["bytes"] == 12 * PARAMETERS  # a bf16 value, the rest of its fp32 master, two fp32 moments
    assert cli.main(["checkpoint", "verify", str(run)]) == 0
    captured = capsys.readouterr()
    assert "commit-1 is whole: " in captured.out
    assert captured.err.strip() == ""
    assert {each.name: each.read_bytes() for each in run.iterdir()} == before


def test_all_damage_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = commit_files.newest(run, FILES)
    assert saved is not None
    sizes = {each.names[0]: each.numel for each in saved.manifest.parameters}
    large = max(sizes, key=lambda name: sizes[name])
    small = min(sizes, key=lambda name: sizes[name])
    assert sizes[large] == BLOCK
    flip(slab_of(run), place_of(run, large, "values").offset + 1000)
    flip(slab_of(run), place_of(run, small, "exp_avg_sq").offset)
    flip(slab_of(run), place_of(run, large, "exp_avg").offset + 5)
    code, found = verify(capsys, run)
    assert (code, found["whole"]) == (1, False)
    damage = {(each["parameter"], each["array"], each["first"], each["end"]) for each in found["damage"]}
    assert damage == {
        (large, "values", 0, sizes[large]),
        (large, "exp_avg", 0, sizes[large]),
        (small, "exp_avg_sq", 0, sizes[small]),
    }
    capsys.readouterr()
    assert cli.main(["checkpoint", "verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert f"{small}, exp_avg_sq, elements 0 to {sizes[small]}: The bytes are not those" in out
    assert f"commit-1 is damaged in 2 of {len(sizes)} parameters" in out


def test_places_that_cannot_be_read_are_listed(run: Path) -> None:
    faults = Faults()
    faults.fail("read", 3, errno.EIO, times=2)
    with Verification(run, [], FILES, faults=faults) as verification:
        found = list(verification.check())
        nbytes = verification.nbytes
    damage = [each for checked in found for each in checked.damage]
    assert len(damage) == 2
    assert all("Could not read " in each.cause and "EIO" in each.cause for each in damage)
    assert 0 < nbytes - sum(checked.nbytes for checked in found) <= 2 * 4 * BLOCK


def test_moved_slabs(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    shutil.move(slab_of(run), there)
    (commit,) = ls(capsys, run)
    assert (commit["whole"], commit["slabs"][0]["path"]) == (False, None)
    line, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
    assert error["error"] == "IncompatibleCheckpoint"
    assert "Give the directory where it lies with --slabs." in line
    assert ls(capsys, run, "--slabs", there)[0]["whole"]
    assert verify(capsys, run, "--slabs", there)[0] == 0
    shutil.copy(slab_of(there), run)
    assert ls(capsys, run, "--slabs", there)[0]["slabs"][0]["fault"] == "found 2 times"
    run_error(capsys, ["checkpoint", "verify", "--json", str(run), "--slabs", str(there)], 1)


def test_a_run_in_progress(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PathLock(run):
        line, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
        assert error["error"] == "StorageError"
        assert "are in use by this process" in line
        assert "Give each run a directory" not in line
        assert error["cure"].startswith("Wait until the run or the other verification there has ended, or ")
        assert ls(capsys, run)[0]["whole"]  # a list locks nothing
    assert verify(capsys, run)[0] == 0
    with started_owner(run) as owner:
        line, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
    assert f"are in use by process {owner.pid}." in error["cause"]
    assert error["cure"].startswith("Wait until ")


@contextlib.contextmanager
def started_owner(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has the lock of a directory."""
    program = (
        "import sys; from infinity.tiers.path_lock import PathLock; "
        "lock = PathLock(sys.argv[1]); print('locked', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", program, str(directory)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, ended(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process


def test_pages_on_other_disks(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    directory = job.folder / "run"
    options = ["--checkpoint", directory]
    job.train(capsys, *job.on_disk(capsys, *options), "--steps", 1, *options)
    assert not ls(capsys, directory)[0]["whole"]
    (commit,) = ls(capsys, directory, "--slabs", job.pages)
    assert commit["whole"]
    assert commit["slabs"][0]["path"] == str(slab_of(job.pages))
    assert verify(capsys, directory, "--slabs", job.pages)[1]["whole"]
