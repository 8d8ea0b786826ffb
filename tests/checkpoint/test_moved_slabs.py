"""Tests that resume commits whose slabs were moved, mixed up, lost or damaged, and locked directories."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import watchdog
from homes import ROOMY
from parity import OPTIMIZERS, differences
from runs_on_disk import Run, everything, names

import infinity
from infinity.errors import CorruptState, IncompatibleCheckpoint, InfinityError, StorageError
from infinity.tiers import NvmeTier, nvme

__all__ = ["watchdog"]


@pytest.fixture(autouse=True)
def stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the small volumes of the tests stripes in every path."""
    monkeypatch.setattr(nvme, "_probe", lambda path, limit: 1.0)
    defaults = NvmeTier.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "stripe_bytes", 1 << 16)


class Moved:
    """A run with its slabs on the paths a and b that has committed two steps, and what it was then."""

    def __init__(self, root: Path, *, home: str = "nvme", paths: tuple[str, ...] = ("a", "b")) -> None:
        self.run = Run(root, home=home)
        self.root = root
        for path in ("a", "b", "c", "elsewhere"):
            (root / path).mkdir()
        with self.run.opened(budget=self.budget(*paths)) as (model, runtime):
            self.run.train(model, runtime, range(2))
            runtime.save(state=2).wait()
            self.state = everything(model, runtime)
            self.losses = self.run.train(model, runtime, range(2, 4))
        self.slabs = [slab for path in paths for slab in slabs(root / path)]
        assert len(self.slabs) == len(paths)

    def budget(self, *paths: str) -> Any:
        """A budget with these paths under which pages rest at the run's home."""
        model = self.run.of.make()
        found = self.run.budget(model, OPTIMIZERS["adamw"](model.parameters()))
        disks = {str(self.root / path): ROOMY for path in paths} or None
        return infinity.Budget(device=found.device_bytes, host=found.host_bytes, nvme=disks)

    def resume(self, *paths: str, adopted: bool) -> None:
        """Resume with these paths, and go on for a step and a commit. Asserts that the bits are right."""
        before = self.names()
        with self.run.opened(resume=True, budget=self.budget(*paths)) as (model, runtime):
            assert runtime.load() == 2
            assert (self.names() == before) == adopted
            assert differences(everything(model, runtime), self.state) == []
            assert self.run.train(model, runtime, range(2, 3)) == self.losses[:1]
            runtime.save(state=3).wait()
        assert (self.names() == before) == adopted, "what was streamed is gone after the first commit"
        with self.run.opened(resume=True, budget=self.budget(*paths)) as (model, runtime):
            assert runtime.load() == 3
            assert self.run.train(model, runtime, range(3, 4)) == self.losses[1:]

    def refused(self, *paths: str, error: type[InfinityError], **options: Any) -> str:
        """Assert that no run with these paths can be resumed, and that nothing is changed. Returns why.

        options: further arguments of `infinity.offload`.
        """
        before, budget = self.bytes(), self.budget(*paths)
        with pytest.raises(error) as caught, self.run.opened(resume=True, budget=budget, **options):
            pass
        assert self.bytes() == before
        return str(caught.value)

    def names(self) -> list[str]:
        """The names of all slabs."""
        return sorted(path.name for path in self.root.rglob("*.slab"))

    def bytes(self) -> dict[str, bytes]:
        """The content of all files."""
        files = (path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path): path.read_bytes() for path in files}


def slabs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.slab"))


def move(slab: Path, directory: Path) -> None:
    slab.rename(directory / slab.name)


def test_a_run_in_ram_adopts_slabs_on_other_paths(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    first, second = moved.slabs
    move(first, tmp_path / "b")
    move(second, tmp_path / "a")
    moved.run = Run(tmp_path, home="unified")
    moved.resume("a", "b", adopted=True)


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize(
    "to, paths, adopted",
    [
        (("b", "a"), ("b", "a"), True),
        (("c", "elsewhere"), ("c", "elsewhere"), True),
        (("a", "a"), ("a",), True),
        (("a", "b"), ("a", "b", "c"), True),
        (("a", "b"), ("c", "b", "a"), True),
        (("commits", "commits"), ("a", "b"), False),
        (("commits", "b"), ("a", "b"), False),
        (("commits", "commits"), ("c",), False),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else str(each),
)
def test_where_slabs_may_lie(
    to: tuple[str, str], paths: tuple[str, ...], adopted: bool, tmp_path: Path
) -> None:
    moved = Moved(tmp_path)
    aside = tmp_path / "aside"
    aside.mkdir()
    for slab in moved.slabs:
        move(slab, aside)
    for slab, path in zip(moved.slabs, to, strict=True):
        move(aside / slab.name, tmp_path / path)
    moved.resume(*paths, adopted=adopted)


def test_slabs_in_the_directory_of_commits(tmp_path: Path) -> None:
    """Without paths the slab lies there, and is adopted there; with a path its pages are streamed to it."""
    run = Run(tmp_path, home="unified")
    with run.opened() as (model, runtime):
        run.train(model, runtime, range(2))
        runtime.save(state=2).wait()
        state = everything(model, runtime)
        losses = run.train(model, runtime, range(2, 5))
    (slab,) = slabs(run.directory)
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == 2
        assert slabs(run.directory) == [slab]
        assert run.train(model, runtime, range(2, 3)) == losses[:1]
    disk = infinity.Budget(host=ROOMY, nvme={str(run.swap): ROOMY})
    with run.opened(resume=True, budget=disk) as (model, runtime):
        assert runtime.load() == 2
        assert differences(everything(model, runtime), state) == []
        assert slabs(run.directory) == [slab] != []
        assert len(slabs(run.swap)) == 1
        assert run.train(model, runtime, range(2, 3)) == losses[:1]
        runtime.save(state=3).wait()
        assert slabs(run.directory) == []
    with (
        pytest.raises(IncompatibleCheckpoint, match=r"is in none of the directories"),
        run.opened(resume=True),
    ):
        pass
    move(slabs(run.swap)[0], run.directory)
    with run.opened(resume=True) as (model, runtime):
        assert runtime.load() == 3
        assert run.train(model, runtime, range(3, 5)) == losses[1:]


def test_a_run_that_ends_before_its_first_commit_leaves_the_old_slabs(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    for slab in moved.slabs:
        move(slab, moved.run.directory)
    before = moved.bytes()
    with moved.run.opened(resume=True, budget=moved.budget("c")) as (model, runtime):
        moved.run.train(model, runtime, range(2, 3))
    assert moved.bytes() == before
    moved.resume("c", adopted=False)


def missing(moved: Moved) -> None:
    moved.slabs[1].unlink()


def elsewhere(moved: Moved) -> None:
    move(moved.slabs[1], moved.root / "elsewhere")


def twice(moved: Moved) -> None:
    shutil.copy(moved.slabs[1], moved.root / "a")


def exchanged(moved: Moved) -> None:
    first, second = moved.slabs
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)


def shorter(moved: Moved) -> None:
    os.truncate(moved.slabs[1], moved.slabs[1].stat().st_size - 4096)


def empty(moved: Moved) -> None:
    os.truncate(moved.slabs[0], 0)


def linked(moved: Moved) -> None:
    move(moved.slabs[0], moved.root / "elsewhere")
    moved.slabs[0].symlink_to(moved.root / "elsewhere" / moved.slabs[0].name)


def fifo(moved: Moved) -> None:
    moved.slabs[0].unlink()
    os.mkfifo(moved.slabs[0])


def folder(moved: Moved) -> None:
    moved.slabs[0].unlink()
    moved.slabs[0].mkdir()


DAMAGES: dict[Callable[[Moved], None], Any] = {
    missing: IncompatibleCheckpoint,
    elsewhere: IncompatibleCheckpoint,
    twice: IncompatibleCheckpoint,
    shorter: CorruptState,
    empty: CorruptState,
    linked: (StorageError, CorruptState),
    fifo: (StorageError, CorruptState),
    folder: (StorageError, CorruptState),
}
"""What is done to slabs, and the errors that it leads to."""


@pytest.mark.parametrize(
    "damage, error, streamed",
    [
        pytest.param(
            damage,
            error,
            streamed,
            id=f"{damage.__name__}-{'streamed' if streamed else 'adopted'}",
            marks=[pytest.mark.slow] if streamed else [],
        )
        for damage, error in DAMAGES.items()
        for streamed in (False, True)
    ],
)
def test_slabs_that_cannot_be_used(
    damage: Callable[[Moved], None], error: Any, streamed: bool, tmp_path: Path
) -> None:
    moved = Moved(tmp_path)
    damage(moved)
    options = {"checkpoint": tmp_path / "new"} if streamed else {}  # another directory needs new slabs
    said = moved.refused("a", "b", error=error, **options)
    assert any(slab.name in said or slab.stem[-32:] in said for slab in moved.slabs), said


@pytest.mark.parametrize("home", ["nvme", "unified"])
def test_pages_of_another_slab_are_never_used(home: str, tmp_path: Path) -> None:
    """Two slabs have each other's name. Pages in RAM are checked when the run is resumed, and those on NVMe
    when they are first read. Nothing that the commit holds is overwritten.
    """
    moved = Moved(tmp_path)
    exchanged(moved)
    moved.run = Run(tmp_path, home=home)
    with (
        pytest.raises(CorruptState, match="not those that were committed"),
        moved.run.opened(resume=True, budget=moved.budget("a", "b")) as (model, runtime),
    ):
        assert home == "nvme"
        moved.run.train(model, runtime, range(2, 3))
    exchanged(moved)
    moved.resume("a", "b", adopted=True)


HOLD = """
import fcntl, os, sys, time
file = open(os.path.join(sys.argv[1], "infinity-rank0.lock"), "w")
fcntl.lockf(file, fcntl.LOCK_EX)
if sys.argv[2] == "fork" and os.fork() == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "hold":
    print("held", flush=True)
    time.sleep(60)
os._exit(0)
"""
"""A program that holds the lock of the directory argv[1], or forks a child and dies with the lock."""


@pytest.mark.parametrize("which", ["a", "commits"])
def test_a_lock_of_another_process(which: str, tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path / which), "hold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            with (
                pytest.raises(StorageError, match=f"in use by process {other.pid}") as caught,
                moved.run.opened(resume=True, budget=moved.budget("a", "b")),
            ):
                pass
            assert caught.value.errno == errno.EBUSY
        finally:
            other.kill()
    moved.resume("a", "b", adopted=True)
    assert [name for path in ("a", "b", "commits") for name in names(tmp_path / path) if "lock" in name] == []


def test_the_lock_of_a_dead_process_whose_child_lives(tmp_path: Path) -> None:
    moved = Moved(tmp_path)
    children = []
    try:
        for which in ("a", "commits"):
            command = [sys.executable, "-c", HOLD, str(tmp_path / which), "fork"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
                assert parent.stdout is not None
                children.append(int(parent.stdout.readline().split()[1]))
                assert parent.wait() == 0
            assert any("lock" in name for name in names(tmp_path / which)), "it has died with the lock"
        moved.resume("a", "b", adopted=True)
        for child in children:
            os.kill(child, 0)  # it still lives
    finally:
        for child in children:
            os.kill(child, 9)
