"""Tests of a full disk at every write of a copy and of a commit, in runs that go on afterwards."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_resources
import pytest
from failing_disk import FailingDisk
from faulty import start_torch_threads, watchdog
from parity import differences
from recorded_run import Recording
from runs_on_disk import Run, copied, everything, names

from infinity.aio import Faults
from infinity.errors import StorageError, StorageFull

__all__ = ["watchdog"]

FULL = (errno.ENOSPC, errno.EDQUOT)
COMMIT = {"create": 2, "write": 2, "sync": 2, "rename": 1}
"""The operations of a commit's two files that a full disk can refuse, with their numbers."""


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_every_write_of_a_copy(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind, the losses are those of a run without it, and the commit before is whole."""
    run = Run(tmp_path, home=home)
    with run.opened() as (model, runtime):
        losses = run.train(model, runtime, range(4))
    for directory in (run.swap, run.directory):
        assert names(directory) == [], "no commit was made, so nothing stays"
    start_torch_threads()
    with run.opened() as (model, runtime):
        again = run.train(model, runtime, range(2))
        runtime.save(state="two").wait()
        two = everything(model, runtime)
        before = names(tmp_path), names(run.swap), names(run.directory)
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch)
            runtime.save(tmp_path / "copy", state="copy")
            count = disk.calls
            assert count > 30
            with process_resources.nothing_left(garbage=True):
                for nth in range(1, count + 1):
                    disk.calls, disk.failing = 0, (nth, FULL[nth % 2])
                    with pytest.raises(StorageFull) as caught:
                        runtime.save(tmp_path / "a" / "b", state="copy")
                    assert caught.value.errno == FULL[nth % 2]
                    assert caught.value.path.startswith(str(tmp_path / "a"))
                    assert "budget" not in caught.value.cure
                    del caught
                    found = [name for name in names(tmp_path) if name != "copy"]
                    assert (found, names(run.swap), names(run.directory)) == before
            disk.failing = None
            runtime.save(tmp_path / "a" / "b", state="copy")
            assert len(names(tmp_path / "a" / "b")) == len(names(tmp_path / "copy")) == 3
        assert again + run.train(model, runtime, range(2, 4)) == losses
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "two"
        assert differences(everything(model, runtime), two) == []
        assert run.train(model, runtime, range(2, 4)) == losses[2:]


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("home", ["nvme", "unified", "mixed"])
def test_every_write_of_a_commit(home: str, tmp_path: Path) -> None:
    """`wait` says it, the run goes on, the commit before is whole, and the next commit is made."""
    run = Run(tmp_path, home=home)
    cases = [(operation, nth) for operation, count in COMMIT.items() for nth in range(1, count + 1)]
    steps = 2 * len(cases)
    with run.opened() as (model, runtime):
        losses = run.train(model, runtime, range(steps))
    faults = Faults()
    files = Recording(faults)
    with run.opened(observer=files, faults=faults) as (model, runtime):
        again: list[float] = []
        for case, (operation, nth) in enumerate(cases):
            again += run.train(model, runtime, range(2 * case, 2 * case + 1))
            runtime.save(state=case).wait()
            whole = everything(model, runtime)
            again += run.train(model, runtime, range(2 * case + 1, 2 * case + 2))
            before, code = names(run.directory), FULL[case % 2]
            files.fail(operation, nth, code)
            commit = runtime.save(state="lost")
            with pytest.raises(StorageFull) as caught:
                commit.wait()
            assert (caught.value.errno, commit.done) == (code, True)
            assert Path(caught.value.path).parent == run.directory
            assert names(run.directory) == before, "nothing is left of it"
            with copied(run, tmp_path / f"case{case}").opened(resume=True) as (other, resumed):
                assert resumed.load() == case
                assert differences(everything(other, resumed), whole) == []
        assert again == losses
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == len(cases) - 1


@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("home", ["nvme", "unified", "mixed"])
def test_a_name_that_the_first_commit_cannot_give_a_slab(home: str, code: int, tmp_path: Path) -> None:
    """The commit fails, the run goes on, and the next commit gives the name and is whole."""
    run, faults = Run(tmp_path, home=home), Faults()
    with run.opened() as (model, runtime):
        losses = run.train(model, runtime, range(4))
    files = Recording(faults)
    with run.opened(observer=files, faults=faults) as (model, runtime):
        again = run.train(model, runtime, range(1))
        files.fail("rename", 1, code)
        with pytest.raises(StorageError) as caught:
            runtime.save(state="lost").wait()
        assert (caught.value.errno, Path(caught.value.path).suffix) == (code, ".slab")
        assert names(run.directory) == ["infinity-rank0.lock"] or home != "nvme"
        assert not runtime._components.store.nvme.keep
        again += run.train(model, runtime, range(1, 2))
        runtime.save(state="two").wait()
        two = everything(model, runtime)
        again += run.train(model, runtime, range(2, 4))
        assert again == losses
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "two"
        assert differences(everything(model, runtime), two) == []
        assert run.train(model, runtime, range(2, 4)) == losses[2:]


@contextlib.contextmanager
def trained(run: Run) -> Iterator[tuple[Any, Any, Recording]]:
    """A run after one step. Yields the model, the runtime, and its operations on files, which may fail."""
    faults = Faults()
    files = Recording(faults)
    with run.opened(observer=files, faults=faults) as (model, runtime):
        run.train(model, runtime, range(1))
        yield model, runtime, files


def refuse(runtime: Any, files: Recording, operation: str, nth: int = 1) -> None:
    """Make a commit fail, because the disk is full at the nth next operation of a kind."""
    files.fail(operation, nth, errno.ENOSPC)
    with pytest.raises(StorageFull):
        runtime.save().wait()


@pytest.mark.parametrize(
    ("home", "operation", "nth"),
    [("nvme", "create", 1), ("nvme", "rename", 1), ("nvme", "rename", 2), ("unified", "rename", 2)],
)
def test_a_run_whose_only_commit_failed_leaves_nothing(
    home: str, operation: str, nth: int, tmp_path: Path
) -> None:
    """The slabs have their old names back, which say that they belong to no commit."""
    run = Run(tmp_path, home=home)
    with trained(run) as (_, runtime, files):
        refuse(runtime, files, operation, nth)
        (slab,) = (run.swap if home == "nvme" else run.directory).glob("*.slab")
        assert slab.name == "infinity-rank0.slab"
    assert [*run.swap.iterdir()] == [*run.directory.iterdir()] == []


def test_a_commit_after_one_that_failed_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with trained(run) as (model, runtime, files):
        refuse(runtime, files, "rename")
        runtime.save(state="one").wait()
        refuse(runtime, files, "rename")
        whole = everything(model, runtime)
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "one"
        assert differences(everything(model, runtime), whole) == []


def test_names_of_slabs_that_cannot_be_synced_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with trained(run) as (model, runtime, files):
        files.fail("sync directory", 1, errno.EIO)
        with pytest.raises(StorageError, match="sync"):
            runtime.save().wait()
        with pytest.raises(StorageError, match="sync"):
            run.train(model, runtime, range(1, 2))


def test_a_full_disk_that_nobody_waits_for(tmp_path: Path) -> None:
    """The next `save` raises the error, once, and the one after that makes a commit."""
    run = Run(tmp_path)
    with trained(run) as (model, runtime, files):
        runtime.save(state=1).wait()
        run.train(model, runtime, range(1, 2))
        files.fail("create", 1, errno.ENOSPC)
        runtime.save(state=2)
        run.train(model, runtime, range(2, 3))
        with pytest.raises(StorageFull):
            runtime.save(state=3)
        runtime.save(state="3 again").wait()
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == "3 again"


@pytest.mark.parametrize("home", ["nvme", "unified", "mixed"])
def test_a_commit_that_may_be_durable_keeps_its_places(home: str, tmp_path: Path) -> None:
    """The sync of the directory fails after the rename: both commits are whole, whatever is written then."""
    run = Run(tmp_path, home=home)
    with trained(run) as (model, runtime, files):
        runtime.save(state=1).wait()
        run.train(model, runtime, range(1, 2))
        two = everything(model, runtime)
        files.fail("sync directory", 1, errno.EIO)
        commit = runtime.save(state=2)
        with pytest.raises(StorageError, match="sync directory"):
            commit.wait()
        with pytest.raises(StorageError, match="sync directory"):
            run.train(model, runtime, range(2, 3))
        parts = [
            part
            for page in runtime._components.pages
            for at in (page.home, runtime._components.states.pages[page.index].home)
            for part in at.parts
        ]
        assert len(parts) > 10
        assert all(part.pending is not None and part.durable is not None for part in parts)
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == 2
        assert differences(everything(model, runtime), two) == []
