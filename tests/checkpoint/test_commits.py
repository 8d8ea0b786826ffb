"""Tests of commits: what the directory holds, when `save` is refused, and runs that go on with equal bits."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated_device import EmulatedDevice
from faulty import watchdog
from parity import differences
from recorded_run import Recording
from run_copies import raw, train
from runs_on_disk import Run
from zoo import entry

import infinity
from infinity.aio import Faults
from infinity.checkpoint import commit_files, directory
from infinity.checkpoint.committer import Committer
from infinity.errors import StorageError
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import slab_name

__all__ = ["watchdog"]

TIED = entry("tied")


def names(directory: Path) -> list[str]:
    """The names of the files of commits in a directory."""
    return sorted(each.name for each in directory.iterdir() if each.name.startswith(("commit", ".commit")))


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["mirrored", "device", "nvme"])
@pytest.mark.parametrize("seed", range(3))
def test_on_a_device_whose_streams_are_late(home: str, seed: int, tmp_path: Path) -> None:
    with EmulatedDevice(seed).in_use(), Run(tmp_path, of=TIED, home=home).opened() as (model, runtime):
        train(model, runtime, TIED, range(2))
        runtime.save()
        losses = train(model, runtime, TIED, range(2, 4))
        end = raw(runtime, model)
    with (
        EmulatedDevice(seed).in_use(),
        Run(tmp_path, of=TIED, home=home).opened(resume=True) as (model, runtime),
    ):
        runtime.load()
        assert train(model, runtime, TIED, range(2, 4)) == losses
        assert differences(raw(runtime, model), end) == []


def test_the_directory_holds_one_commit(tmp_path: Path) -> None:
    commits = tmp_path / "commits"
    with Run(tmp_path, of=TIED).opened() as (model, runtime):
        for step in range(3):
            train(model, runtime, TIED, range(step, step + 1))
            commit = runtime.save()
            assert commit.generation == step + 1
        commit.wait()
        assert commit.done
        assert names(commits) == ["commit-3", "commit-3.safetensors"]
        assert all((each.stat().st_mode & 0o777) == 0o600 for each in commits.iterdir())
    (slab,) = (tmp_path / "swap").iterdir()
    assert slab.stat().st_mode & 0o777 == 0o600
    with Run(tmp_path, of=TIED).opened(resume=True) as (model, runtime):
        assert runtime.save().generation == 4
    assert names(commits) == ["commit-4", "commit-4.safetensors"]
    assert list((tmp_path / "swap").iterdir()) == [slab]


def test_a_run_without_a_commit_leaves_no_slab(tmp_path: Path) -> None:
    with Run(tmp_path, of=TIED).opened():
        assert list((tmp_path / "swap").iterdir()) != []
    assert list((tmp_path / "swap").iterdir()) == names(tmp_path / "commits") == []


def test_slabs_of_no_commit_are_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the rename of slabs and that of the first manifest."""
    swap, faults = tmp_path / "swap", Faults()
    files = Recording(faults)
    with Run(tmp_path, of=TIED).opened(faults=faults, observer=files) as (_, runtime):
        monkeypatch.setattr(commit_files, "_undo", lambda *_: None)
        files.fail("rename", 2, errno.EIO)
        with pytest.raises(StorageError, match="rename"):
            runtime.save().wait()
    monkeypatch.undo()
    (left,) = swap.iterdir()
    assert names(tmp_path / "commits") == [".commit-1.tmp", "commit-1.safetensors"]
    foreign = left.with_name(f"infinity-rank0-{'5' * 32}.slab")
    foreign.write_bytes(left.read_bytes())
    with Run(tmp_path, of=TIED).opened() as (_, runtime):
        assert not left.exists()
        assert names(tmp_path / "commits") == []
        runtime.save().wait()
        (kept,) = {*swap.glob("*.slab")} - {foreign}
    with Run(tmp_path, of=TIED).opened(resume=True):
        assert {*swap.glob("*.slab")} == {kept, foreign}


def test_nothing_is_removed_while_a_commit_cannot_be_read(tmp_path: Path) -> None:
    """It may need the slabs that a temporary manifest names."""
    with Run(tmp_path, of=TIED).opened() as (_, runtime):
        runtime.save().wait()
    (slab,) = (tmp_path / "swap").iterdir()
    commits = tmp_path / "commits"
    manifest = commits / "commit-1"
    (commits / ".commit-2.tmp").write_bytes(manifest.read_bytes())
    assert commit_files.unfinished_slabs(commits, DiskFiles()) == frozenset(), "commit-1 needs it"
    (commits / "commit-3").write_bytes(b"no manifest")
    manifest.unlink()
    assert commit_files.unfinished_slabs(commits, DiskFiles()) == frozenset()
    (commits / "commit-3").unlink()
    assert [slab.name] == [slab_name(0, uuid) for uuid in commit_files.unfinished_slabs(commits, DiskFiles())]


def test_slabs_that_a_crash_left_after_a_resume_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old slabs stay until the first commit. What is not removed then is when the next run commits."""
    swap = tmp_path / "swap"
    with Run(tmp_path, of=TIED).opened() as (_, runtime):
        runtime.save()
    (old,) = swap.glob("*.slab")
    monkeypatch.setattr(directory, "is_cut_alike", lambda *_: False)
    monkeypatch.setattr(Committer, "_remove_old", lambda *_: None)
    with Run(tmp_path, of=TIED).opened(resume=True) as (_, runtime):
        runtime.save().wait()
        (new,) = {*swap.glob("*.slab")} - {old}
    assert {*swap.glob("*.slab")} == {old, new}
    monkeypatch.undo()
    with Run(tmp_path, of=TIED).opened(resume=True) as (_, runtime):
        assert {*swap.glob("*.slab")} == {old, new}
        runtime.save().wait()
        assert {*swap.glob("*.slab")} == {new}


def test_save_is_refused_where_a_commit_would_be_of_no_step(tmp_path: Path) -> None:
    with Run(tmp_path, of=TIED).opened() as (model, runtime):
        inside = []

        def forward(*_: object) -> None:
            with pytest.raises(infinity.errors.ConfigError, match="inside of a forward") as caught:
                runtime.save()
            inside.append(caught)

        handle = model.blocks[0].register_forward_hook(forward)
        loss = TIED.loss(model, TIED.batch(0, 0))
        handle.remove()
        assert inside
        runtime.save()  # a forward alone changes nothing
        loss.backward()
        with pytest.raises(infinity.errors.ConfigError, match="between the first backward"):
            runtime.save()
        runtime.optimizer.step()
        runtime.save()
        with (
            runtime.full_parameters(model.head),
            pytest.raises(infinity.errors.ConfigError, match="full_parameters"),
        ):
            runtime.save()
        runtime.save().wait()


def test_save_waits_for_no_update(tmp_path: Path) -> None:
    """The updates that a lazy step has left for the next forward are left for it by save(), too."""
    with Run(tmp_path, of=TIED).opened() as (model, runtime):
        train(model, runtime, TIED, range(2))
        scheduler = runtime._components.scheduler
        before = list(scheduler.outstanding())
        assert len(before) > 1
        commit = runtime.save()
        assert list(scheduler.outstanding()) == before
        assert not commit.done
        commit.wait()
        assert list(scheduler.outstanding()) == []


@pytest.mark.parametrize("lost", ["removed", "renamed", "replaced"])
def test_no_commit_is_made_in_slabs_without_a_name(lost: str, tmp_path: Path) -> None:
    with Run(tmp_path, of=TIED).opened() as (model, runtime):
        train(model, runtime, TIED, range(1))
        runtime.save(state=1).wait()
        before = names(tmp_path / "commits")
        train(model, runtime, TIED, range(1, 2))
        (slab,) = (tmp_path / "swap").glob("*.slab")
        aside = slab.rename(tmp_path / "aside")
        if lost == "removed":
            aside.unlink()
        elif lost == "replaced":
            slab.write_bytes(aside.read_bytes())
        with pytest.raises(StorageError, match=r"find .*slab") as caught:
            runtime.save(state=2).wait()
        assert caught.value.errno == errno.ENOENT
        assert names(tmp_path / "commits") == before
        if lost != "removed":
            aside.rename(slab)
            runtime.save(state=3).wait()
    if lost != "removed":
        with Run(tmp_path, of=TIED).opened(resume=True) as (model, runtime):
            assert runtime.load() == 3


AT_EXIT = """
import sys
from pathlib import Path
from typing import Any
from run_copies import train
from runs_on_disk import Run
from zoo import entry
tied = entry("tied")
opened = Run(Path(sys.argv[1]), of=tied, home=sys.argv[2]).opened()
model, runtime = opened.__enter__()
train(model, runtime, tied, range(2))
runtime.save(state="last")
if sys.argv[3] == "failing":
    (Path(sys.argv[1]) / "commits" / "commit-1.safetensors").mkdir()
"""


def test_a_commit_at_the_end_of_a_script_lands(warm: None, tmp_path: Path) -> None:
    end_of_script(tmp_path, "nvme", "whole")
    with Run(tmp_path, of=TIED, home="nvme").opened(resume=True) as (_, runtime):
        assert runtime.load() == "last"


def test_a_commit_that_fails_at_the_end_of_a_script_is_told(warm: None, tmp_path: Path) -> None:
    assert "The last commit was not made: Could not" in end_of_script(tmp_path, "nvme", "failing")
    assert [*(tmp_path / "swap").iterdir()] == []


def end_of_script(where: Path, home: str, how: str) -> str:
    """Run a script that ends with `save` and closes nothing. Returns what it wrote to stderr."""
    command = [sys.executable, "-c", AT_EXIT, str(where), home, how]
    tests = Path(__file__).parents[1]  # not the checkout, whose package may have no native modules
    helpers = os.pathsep.join([*map(str, (tests / "support").iterdir()), os.environ.get("PYTHONPATH", "")])
    how_run: dict[str, Any] = {"cwd": tests, "env": {**os.environ, "PYTHONPATH": helpers}, "timeout": 100}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, **how_run)
    return ended.stderr
