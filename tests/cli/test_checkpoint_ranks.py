"""Tests of `infinity checkpoint ls` and `infinity checkpoint verify` where several ranks have directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import rank_processes
from tiny_job import run_error, run_json

from infinity import cli
from infinity.checkpoint import commit_files
from infinity.system.disk_files import DiskFiles
from infinity.tiers.path_lock import PathLock

FILES = DiskFiles()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the first and the second commit of a run of two ranks, in 1 and 2."""
    return made_in(tmp_path_factory.mktemp("made"))


def made_in(directory: Path) -> Path:
    found = rank_processes.run(
        "copying_ranks.py", "commits", size=2, timeout=60.0, environment={"COPIES": str(directory)}
    )
    assert [each.code for each in found] == [0, 0], found
    return directory


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """The directory of a run after its second commit."""
    shutil.copytree(made / "2", tmp_path / "run")
    return tmp_path / "run"


def ls(capsys: pytest.CaptureFixture[str], directory: Path, *more: object) -> dict[str, Any]:
    return run_json(capsys, ["checkpoint", "ls", "--json", str(directory), *map(str, more)])


def verify(capsys: pytest.CaptureFixture[str], directory: Path, *more: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["checkpoint", "verify", "--json", str(directory), *map(str, more)])
    return code, json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command prints for people."""
    capsys.readouterr()
    cli.main(["checkpoint", *map(str, arguments)])
    return capsys.readouterr().out


def slab_of(run: Path, rank: int) -> Path:
    (slab,) = (run / f"rank-{rank}").glob("*.slab")
    return slab


def test_a_list_of_the_commits_of_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ls(capsys, run)
    assert (found["commits"], found["absent"]) == ([], [])
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    for rank, each in enumerate(found["ranks"]):
        assert each["directory"] == str(run / f"rank-{rank}")
        (commit,) = each["commits"]
        assert (commit["generation"], commit["step"], commit["world_size"]) == (2, 2, 2)
        assert (commit["whole"], commit["slabs"][0]["path"]) == (True, str(slab_of(run, rank)))
        assert found["whole_on_all"] == {"generation": 2, "created": commit["created"]}
    out = said(capsys, "ls", run)
    assert f"rank 1 · {run / 'rank-1'}\n  commit-2 · step 2 · " in out
    assert out.splitlines()[-1] == "commit-2 is the newest that is whole on ranks 0, 1"


def test_parts_that_are_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["generation"], found["absent"]) == (0, True, 2, [])
    assert [(each["rank"], each["whole"], each["damage"]) for each in found["ranks"]] == [
        (0, True, []),
        (1, True, []),
    ]
    parameters = sum(128 * width + width for width in (128, 128, 128, 8))
    # A bf16 value, the rest of its fp32 master, and two fp32 moments, divided among the ranks.
    assert sum(each["bytes"] for each in found["ranks"]) == 12 * parameters
    assert all(each["bytes"] > 0 for each in found["ranks"])
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before
    out = said(capsys, "verify", run)
    assert "rank 0: commit-2 is whole: 8 parameters, " in out and "rank 1: commit-2 is whole: " in out


def test_damage_is_listed_by_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = commit_files.newest(run / "rank-1", FILES)
    assert saved is not None
    entry = next(each for each in saved.manifest.parameters if each.ranges)
    first = entry.ranges[0].first
    offset = entry.ranges[0].arrays["exp_avg"].offset
    content = bytearray(slab_of(run, 1).read_bytes())
    content[offset] ^= 1
    slab_of(run, 1).write_bytes(content)
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["ranks"][0]["whole"]) == (1, False, True)
    (damage,) = found["ranks"][1]["damage"]
    assert (damage["parameter"], damage["array"], damage["first"]) == (entry.names[0], "exp_avg", first)
    out = said(capsys, "verify", run)
    assert f"rank 1: {entry.names[0]}, exp_avg, elements {first} to " in out
    assert "rank 1: commit-2 is damaged in 1 of 8 parameters" in out


def test_a_newer_commit_that_only_one_rank_has(
    run: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a crash between the two phases: a restart goes on from the commit before, which is whole."""
    for rank in range(2):
        for name in ("commit-1", "commit-1.safetensors"):
            shutil.copy(made / "1" / f"rank-{rank}" / name, run / f"rank-{rank}" / name)
    for name in ("commit-2", "commit-2.safetensors"):
        (run / "rank-1" / name).unlink()
    found = ls(capsys, run)
    assert [[each["generation"] for each in rank["commits"]] for rank in found["ranks"]] == [[1, 2], [1]]
    assert found["whole_on_all"]["generation"] == 1
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["generation"]) == (0, True, 1)
    (run / "rank-1" / "commit-2").write_bytes(b"no manifest")
    assert ls(capsys, run)["whole_on_all"]["generation"] == 1
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["ranks"][0]["skipped"]) == (1, False, [])
    assert "does not begin as a manifest" in found["ranks"][1]["skipped"][0]
    assert verify(capsys, run, "--generation", 1)[0] == 0
    _, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run), "--generation", "2"], 1)
    assert error["error"] == "CorruptState"


def test_parts_of_several_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commits with one number are of one run only if they were made at one time."""
    (tmp_path / "other").mkdir()
    other = made_in(tmp_path / "other")
    shutil.rmtree(run / "rank-1")
    shutil.copytree(other / "2" / "rank-1", run / "rank-1")
    assert ls(capsys, run)["whole_on_all"] is None
    assert said(capsys, "ls", run).splitlines()[-1] == "no commit is whole on ranks 0, 1"
    line, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
    assert error["error"] == "CorruptState"
    assert "whose rank commits are all whole: rank 0 has commit-2 of " in line
    line, _, _ = run_error(capsys, ["checkpoint", "verify", "--json", str(run), "--generation", "2"], 1)
    assert f"The rank commits numbered 2 in {run} are of several commits" in line


def test_a_rank_on_another_node(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "rank-0")
    found = ls(capsys, run)
    assert (found["absent"], found["whole_on_all"]["generation"]) == ([0], 2)
    assert said(capsys, "ls", run).splitlines()[-1] == (
        "commit-2 is the newest that is whole on rank 1; without a directory here: rank 0"
    )
    code, found = verify(capsys, run)
    assert (code, found["whole"], found["absent"]) == (0, True, [0])
    assert said(capsys, "verify", run).splitlines()[-1] == "not verified, without a directory here: rank 0"


def test_a_rank_without_commits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for each in (run / "rank-1").iterdir():
        each.unlink()
    assert ls(capsys, run)["whole_on_all"] is None
    assert f"rank 1 · {run / 'rank-1'} · no commit\n" in said(capsys, "ls", run)
    line, _, _ = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
    assert "rank 1 has none." in line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_of_ranks_in_progress(rank: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / f"rank-{rank}"
    with PathLock(path, rank=rank):
        _, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
        assert error["error"] == "StorageError"
        assert f"{path} are in use by this process" in error["cause"]
        assert ls(capsys, run)["whole_on_all"]["generation"] == 2  # a list locks nothing
    with PathLock(path, rank=1 - rank):  # of a rank whose commits do not lie there
        assert verify(capsys, run)[0] == 0


def test_one_of_the_ranks_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, run / "rank-1")
    assert (code, found["whole"], found["damage"], found["generation"]) == (0, True, [], 2)
    assert "ranks" not in found
    shutil.move(run / "rank-1", run / "moved")
    assert verify(capsys, run / "moved")[0] == 0


def test_slabs_of_ranks_in_one_directory(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for rank in range(2):
        shutil.move(slab_of(run, rank), there)
    assert ls(capsys, run)["whole_on_all"] is None
    _, _, error = run_error(capsys, ["checkpoint", "verify", "--json", str(run)], 1)
    assert error["error"] == "IncompatibleCheckpoint"
    assert "infinity-rank0-" in error["cause"]
    assert ls(capsys, run, "--slabs", there)["whole_on_all"]["generation"] == 2
    assert verify(capsys, run, "--slabs", there)[0] == 0
