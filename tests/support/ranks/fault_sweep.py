"""Fault sweep: runs with commits in each of which one call to the disk fails, and a table of what came of it.

A run trains, commits, writes a copy of itself, loads it, ends, and is resumed. For every kind of call and
every phase, the 1st, 2nd, 3rd... call is made to fail until the phase needs no more. What may come of it:

- "refused": the runtime could not be made. Nothing is left, and the next attempt succeeds.
- "repeated": a call raised a typed error, and succeeded when it was repeated.
- "half": an eager step raised a typed error when some units had been updated, which cannot be undone. The
  newest commit is resumed, with the right bits.
- "lost": the runtime refuses all further use. The newest commit is resumed, with the right bits.
- "unnoticed": no error was raised, for the call was not needed or its failure was made good.

In every case all losses and states are those of a run without faults, or else an AssertionError is raised.
`python fault_sweep.py` prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from faulty import places, start_torch_threads, watched
from parity import differences, seeded_loss
from process_resources import check_nothing_left, resources
from recorded_run import Recording
from runs_on_disk import Run, everything, names

from infinity.aio import Faults
from infinity.checkpoint import commit_files
from infinity.errors import InfinityError, StorageError
from infinity.system.disk_files import DiskFiles
from infinity.tiers.slab import slab_name

HANG = 120
"""Seconds after which a run counts as hung. The process then prints the stacks of all threads and ends."""
ENGINE = ("read", "write", "sync")
"""Kinds of calls of the I/O engine."""
FILES = ("create", "open", "lock", "write", "sync", "rename", "sync directory", "remove", "read")
"""Kinds of operations of DiskFiles."""
PHASES = ("offload", "train", "save", "copy", "load", "end", "resume")
OUTCOMES = ("refused", "repeated", "half", "lost", "unnoticed")


class Fault(NamedTuple):
    """A call that is to fail."""

    where: str
    """"engine" or "files"."""
    kind: str
    phase: str
    nth: int
    """Number of the call of this kind in the phase, counted from 1."""

    @property
    def code(self) -> int:
        """The errno with which the call fails."""
        return errno.ENOSPC if self.kind in ("write", "create") and self.nth % 2 else errno.EIO


class Lost(Exception):
    """The runtime refuses all further use."""


class HalfDone(Exception):
    """A step ended when some units had been updated, and cannot be repeated."""


class Refused(Exception):
    """The runtime could not be made."""


@dataclass
class Session:
    """One run, and what it has said."""

    run: Run
    fault: Fault | None = None
    expected: Session | None = None
    """A run without faults to compare with; None for such a run."""
    losses: dict[int, float] = field(default_factory=dict)
    """Loss by the number of the step."""
    states: dict[int, Any] = field(default_factory=dict)
    """`everything` by the number of steps that were trained; of a run without faults only."""
    begun: list[int] = field(default_factory=list)
    """The number of steps at each commit that was begun."""
    durable: int | None = None
    """The number of steps at the last commit of which `wait` has said that it is durable."""
    errors: int = 0
    fired: bool = False
    calls: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Number of calls by (where, kind, phase)."""

    def __post_init__(self) -> None:
        self.faults = Faults()
        self.files = Recording(self.faults)
        self.steps = 0
        self.model: Any = None
        self.runtime: Any = None

    # --- what is done ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Make the fault act inside of the `with` statement, if it belongs to this phase."""
        before = self._counts()
        due = self.fault is not None and self.fault.phase == name
        if due:
            assert self.fault is not None
            if self.fault.where == "engine":
                self.faults.fail(self.fault.kind, self.fault.nth, self.fault.code)
            else:
                self.files.fail(self.fault.kind, self.fault.nth, self.fault.code)
        try:
            yield
        finally:
            after = self._counts()
            for key, count in after.items():
                self.calls[(*key, name)] = count - before[key]
            if due:
                assert self.fault is not None
                key = self.fault.where, self.fault.kind
                self.fired = after[key] - before[key] >= self.fault.nth
                self.faults.clear()
                self.files.forget()

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Do something, again if it raises an error that leaves the runtime usable. Raises Lost otherwise."""
        while True:
            try:
                return action()
            except InfinityError as error:
                self.check(error)
                try:
                    self.runtime.optimizer.zero_grad()
                except InfinityError as again:
                    assert isinstance(again, StorageError), again
                    raise Lost from error

    def check(self, error: InfinityError) -> None:
        """Assert that an error is the one that was injected."""
        assert self.fault is not None, error
        assert isinstance(error, StorageError), error
        assert error.errno == self.fault.code, error
        self.errors += 1
        assert self.errors < 8, error

    def open(self, *, resume: bool = False) -> None:
        before = self.errors
        self._ends = contextlib.ExitStack()
        opened = self.run.opened(resume=resume, faults=self.faults, observer=self.files)
        try:
            self.model, self.runtime = self._ends.enter_context(opened)
        except InfinityError as error:
            self.check(error)
            assert self.errors == before + 1
            raise Refused from error

    def close(self) -> None:
        """Close the runtime, if there is one. Its error is that of the pending commit."""
        self.model = self.runtime = None
        try:
            self._ends.close()
        except InfinityError as error:
            self.check(error)

    def train(self, count: int) -> None:
        for _ in range(count):
            step, loss = self.steps, self.attempt(self._step)
            assert loss == self.losses.setdefault(step, loss), f"the loss of step {step}"
            if self.expected is not None:
                assert loss == self.expected.losses[step], f"the loss of step {step}"
            self.steps += 1
            self.attempt(self.runtime.optimizer.zero_grad)
            if self.expected is None:
                self.states[self.steps] = everything(self.model, self.runtime)

    def save(self) -> Any:
        """Begin a commit of the present state, and return it."""
        self.begun.append(self.steps)
        return self.attempt(lambda: self.runtime.save(state=self.steps))

    def wait(self, commit: Any, steps: int) -> None:
        """Wait for a commit. If it fails and the runtime does not, commit the present state instead."""
        failed: list[int] = []

        def wait() -> None:
            if failed:
                self.save().wait()
                return
            failed.append(1)
            commit.wait()
            failed.clear()

        self.attempt(wait)
        self.durable = self.steps if failed else steps

    def compare(self) -> None:
        """Assert that the state is that of the run without faults after as many steps."""
        if self.expected is None:
            return
        found = self.attempt(lambda: everything(self.model, self.runtime))
        assert differences(found, self.expected.states[self.steps]) == []

    def verify(self) -> None:
        """Resume the newest commit without faults: it is the last durable one or a later one, and right."""
        self.fault = None
        # A directory that was made for a run is removed again if the run cannot begin.
        if not self.run.directory.is_dir() or not commit_files.generations(self.run.directory):
            assert self.durable is None
            with self.run.opened():
                pass
            for directory in (self.run.swap, self.run.directory):
                assert names(directory) == []
            return
        self.open(resume=True)
        self.steps = self.runtime.load()
        assert self.steps in self.begun
        assert self.durable is None or self.begun.index(self.steps) >= self.begun.index(self.durable)
        self.compare()
        self.train(1)
        self.wait(self.save(), self.steps)
        self.close()
        self.check_files()

    def check_files(self) -> None:
        """Assert that the directories have the files of one commit and nothing else."""
        (generation,) = commit_files.generations(self.run.directory)
        saved = commit_files.read(self.run.directory, generation, DiskFiles())
        slabs = [slab_name(0, each.uuid) for each in saved.manifest.volume.slabs]
        found = sorted(names(self.run.swap) + names(self.run.directory))
        assert found == sorted([*slabs, f"commit-{generation}", f"commit-{generation}.safetensors"])

    def _step(self) -> float:
        of, step = self.run.of, self.steps
        try:
            loss = seeded_loss(of, self.model, of.batch(step, 0), step, 0)
            loss.backward()
            self.runtime.optimizer.step()
        except InfinityError as error:
            eager = self.runtime.training_step._eager
            lost = self.runtime._components.health.failure is not None
            if eager is not None and eager._updated and not lost:
                self.check(error)
                raise HalfDone from error
            raise
        return loss.item()

    def _counts(self) -> dict[tuple[str, str], int]:
        engine, calls = self.faults.calls, self.files.calls
        found = {("engine", kind): engine[kind] for kind in ENGINE}
        return found | {("files", kind): calls[kind] for kind in FILES}


def story(session: Session) -> None:
    """The run. Raises Lost, HalfDone or Refused where it ends early."""
    with session.phase("offload"):
        session.open()
    with session.phase("train"):
        session.train(2)
    with session.phase("save"):
        session.wait(session.save(), session.steps)
        session.train(1)
        commit, steps = session.save(), session.steps
        session.train(1)
        session.wait(commit, steps)
    with session.phase("copy"):
        copy = session.run.root / "copy"
        session.attempt(lambda: session.runtime.save(copy, state="copy"))
        copied = session.steps
    with session.phase("load"):
        session.train(1)
        assert session.attempt(lambda: session.runtime.load(copy)) == "copy"
        session.steps = copied
        session.compare()
        session.train(1)
    with session.phase("end"):
        session.wait(session.save(), session.steps)
        session.close()
    with session.phase("resume"):
        session.open(resume=True)
        session.steps = session.attempt(session.runtime.load)
        assert session.steps == session.durable
        session.compare()
        session.train(1)
        session.wait(session.save(), session.steps)
        session.close()


def outcome(run: Run, fault: Fault, expected: Session) -> str | None:
    """Run with one fault; returns what came of it, or None if the phase has fewer calls.

    Raises AssertionError if anything is wrong or left behind.
    """
    before = resources()
    session = Session(run, fault, expected)
    with watched(HANG):
        found = "unnoticed"
        try:
            story(session)
        except Lost:
            found = "lost"
        except HalfDone:
            found = "half"
        except Refused:
            found = "refused"
        if found == "unnoticed" and session.errors:
            found = "repeated"
        session.close()
        fired = session.fired
        session.verify()
    check_nothing_left(before, garbage=found != "unnoticed")
    return found if fired else None


def sweep(make: Callable[[Path], Run], spread: int | None = None) -> Counter[tuple[str, str, str, str]]:
    """Make each call fail in turn; returns the number of runs by (where, kind, phase, outcome).

    make: makes the run in a new directory. spread: number of calls of each kind and phase to choose, at equal
    distances; None: all of them.
    """
    start_torch_threads()
    with fresh() as root:
        expected = Session(make(root))
        story(expected)
        expected.verify()  # for one more step
    with fresh() as root:
        counted = Session(make(root), expected=expected)
        story(counted)
    table: Counter[tuple[str, str, str, str]] = Counter()
    for (where, kind, phase), count in counted.calls.items():
        for nth in places(count, spread) if spread is not None else itertools.count(1):
            fault = Fault(where, kind, phase, nth)
            with fresh() as root:
                try:
                    found = outcome(make(root), fault, expected)
                except BaseException:
                    print(f"{fault} in {make(root)}")
                    raise
            if found is None:
                if spread is None:
                    break
                continue
            table[where, kind, phase, found] += 1
    return table


@contextlib.contextmanager
def fresh() -> Iterator[Path]:
    """A new directory, which is removed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def text_of(table: Counter[tuple[str, str, str, str]]) -> str:
    """The table as Markdown: a row for each kind of call and phase, a column for each outcome."""
    lines = [f"| call | phase | {' | '.join(OUTCOMES)} |", f"|---|---|{'--:|' * len(OUTCOMES)}"]
    rows = dict.fromkeys((where, kind, phase) for where, kind, phase, _ in table)
    for where, kind, phase in rows:
        counts = " | ".join(str(table[where, kind, phase, each] or "") for each in OUTCOMES)
        lines.append(f"| {where}: {kind} | {phase} | {counts} |")
    total = " | ".join(str(sum(n for key, n in table.items() if key[3] == each)) for each in OUTCOMES)
    return "\n".join([*lines, f"| all | | {total} |"])


CASES: dict[str, dict[str, Any]] = {
    f"{home}, {update}": {"home": home, "update": update, "accumulation": 1 if update == "eager" else None}
    for home in ("nvme", "unified", "mixed")
    for update in ("lazy", "eager")
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes every call to the disk fail in turn.")
    parser.add_argument("--case", choices=CASES, action="append", help="one of the cases; by default all")
    parser.add_argument("--spread", type=int, help="calls to choose of each kind and phase; by default all")
    options = parser.parse_args()
    for case in options.case or CASES:
        print(
            f"\n{case}:\n\n{text_of(sweep(lambda root, case=case: Run(root, **CASES[case]), options.spread))}"
        )


if __name__ == "__main__":
    main()
