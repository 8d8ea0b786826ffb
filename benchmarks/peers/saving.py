"""Saving: turns of training with saves in them, run in the contender's own process (contender.py).

A contender of these turns has the methods of `Saver`. Nothing here imports infinity, because peers may have
an interpreter without it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from peers.task import Batches, Contender


class Saver(Contender, Protocol):
    """A contender that can save its run."""

    def save(self, directory: str) -> None:
        """Save the run. Training goes on when this returns; `directory` is new and empty."""

    def landed(self) -> None:
        """Wait until the last save is on the disk."""


class Committer(Saver, Protocol):
    """The contender that commits in the background (peers/ours.py)."""

    pending: bool

    def settle(self) -> None: ...

    def count_gradients(self) -> None: ...

    def written(self) -> dict[str, int]: ...


def commit_turn(
    contender: Committer,
    batches: Batches,
    *,
    steps: int,
    every: int,
    checkpoint: str | None,
    count: bool = False,
    wait: bool = False,
) -> dict[str, Any]:
    """Train `steps` steps, with a save after each `every` of them; 0: with none. Return the reply.

    checkpoint: the directory of the commits; None if they are off. count: whether to count gradients apart.
    wait: whether to wait after each save until the commit is durable.

    The reply is a dict. "losses": of all steps. "seconds": for each step, the seconds from the end of the
    step before to its end; those of the first step begin with the turn. "edge", "engine": bytes written to
    slabs in the turn, with the writes of its last updates; "gradients": how many of them are of gradients.
    "manifest": bytes of the files of the last commit.

    "saves": for each save, "after" (the number of steps done before it), "seconds" (of the call),
    "pending_steps" (the number of steps that ended before the commit was durable) and, with `wait`, "edge"
    and "engine" (bytes written to slabs from the call until the commit is durable).
    """
    contender.settle()
    contender.landed()
    if count:
        contender.count_gradients()
    before = contender.written()
    losses: list[float] = []
    seconds: list[float] = []
    saves: list[dict[str, Any]] = []
    last = time.perf_counter()
    for number in range(1, steps + 1):
        losses.append(contender.step(*batches.next()))
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        if saves and contender.pending:
            saves[-1]["pending_steps"] += 1
        if every and number % every == 0:
            assert checkpoint is not None
            saves.append({"after": number, "pending_steps": 0} | _one_save(contender, checkpoint, wait=wait))
    contender.settle()
    contender.landed()
    files = [] if checkpoint is None else [*Path(checkpoint).glob("commit-*")]
    reply = {"losses": losses, "seconds": seconds, "saves": saves, "facts": contender.facts()}
    reply["manifest"] = sum(each.stat().st_size for each in files)
    return reply | _since(contender, before)


def _one_save(contender: Committer, checkpoint: str, *, wait: bool) -> dict[str, Any]:
    before, started = contender.written(), time.perf_counter()
    contender.save(checkpoint)
    seconds = time.perf_counter() - started
    if wait:
        contender.landed()
    return {"seconds": seconds} | (_since(contender, before) if wait else {})


def _since(contender: Committer, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in contender.written().items()}


def save_turn(
    contender: Saver, batches: Batches, *, steps: int, saves: int, directory: str, kept: str | None = None
) -> dict[str, Any]:
    """Train `steps` steps without a save and `steps` steps after a save, `saves` times. Return the reply.

    directory: where each save gets a directory of its own, which is removed afterwards. kept: a directory
    where the contender saves in place, whose disk usage is counted instead; None for the save's own.

    The reply is a dict with a list "saves". Of each save it has: "blocked_s", the seconds of the call.
    "lost_s", the seconds of the call and of the steps after it until the save is on the disk, less those of
    as many steps without a save. "written_bytes": what the process wrote to storage from the call on, less
    what the steps without a save wrote. "disk_bytes": the room that the save takes on the disk. "extra_rss":
    the peak RSS in the call and the steps after it, less the peak in the steps without. "losses": of all
    steps.
    """
    found: list[dict[str, Any]] = []
    losses: list[float] = []

    def train() -> None:
        for _ in range(steps):
            losses.append(contender.step(*batches.next()))

    for _ in range(saves):
        with _measured() as plain:
            train()
        own = tempfile.mkdtemp(prefix="save-", dir=directory)
        with _measured() as saved:
            started = time.perf_counter()
            contender.save(own)
            blocked = time.perf_counter() - started
            train()
            contender.landed()
        found.append(
            {
                "blocked_s": blocked,
                "lost_s": saved["seconds"] - plain["seconds"],
                "written_bytes": saved["written"] - plain["written"],
                "disk_bytes": disk_usage(own if kept is None else kept),
                "extra_rss": max(0, saved["peak"] - plain["peak"]),
                "step_s": plain["seconds"] / steps,
            }
        )
        shutil.rmtree(own)
    return {"saves": found, "losses": losses, "facts": contender.facts()}


class _measured:
    """Context that yields a dict, which has at the end the seconds inside ("seconds"), the bytes that the
    process wrote to storage ("written"), and its peak RSS ("peak"), in bytes.
    """

    def __enter__(self) -> dict[str, Any]:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._written, self._started = _written(), time.perf_counter()
        self._found: dict[str, Any] = {}
        return self._found

    def __exit__(self, *_: object) -> None:
        self._found["seconds"] = time.perf_counter() - self._started
        self._found["written"] = _written() - self._written
        self._found["peak"] = 1024 * int(_field("/proc/self/status", "VmHWM").split()[0])


def _written() -> int:
    return int(_field("/proc/self/io", "write_bytes"))


def _field(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def disk_usage(directory: str | os.PathLike[str]) -> int:
    """Bytes that the files in `directory` take on the disk, as du counts them."""
    return sum(512 * os.lstat(each).st_blocks for each in _files(directory))


def sync_tree(directory: str | os.PathLike[str]) -> None:
    """Sync all files in `directory`, and the directories, to the disk."""
    for each in (*_files(directory), *(root for root, _, _ in os.walk(directory))):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(directory: str | os.PathLike[str]) -> Iterator[str]:
    for root, _, names in os.walk(directory):
        yield from (os.path.join(root, name) for name in names)
