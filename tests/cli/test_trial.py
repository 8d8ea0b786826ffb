"""Tests that a trial ends as a finding, whatever its process does, and that the next trial then begins."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from infinity.cli import trial
from infinity.cli.finding import Finding
from infinity.cli.trial import Trial
from infinity.errors import StorageFull


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "START", "fork")
    monkeypatch.setattr(trial, "_AFTER", 0.3)


def found(name: str) -> Finding:
    return Finding("training", name, "works", {"process": os.getpid()})


def passes() -> Iterator[Finding]:
    yield found("one")
    yield found("two")


def full() -> Iterator[Finding]:
    yield found("one")
    raise StorageFull("It is full.", "Free space.", path="/disk")


def stumbles() -> Iterator[Finding]:
    print("on the way", flush=True)
    raise KeyError("lost")


def crashes() -> Iterator[Finding]:
    os.write(2, b"last words")
    os.kill(os.getpid(), signal.SIGKILL)
    yield found("never")


def leaves() -> Iterator[Finding]:
    os._exit(3)
    yield found("never")


def sleeps() -> Iterator[Finding]:
    time.sleep(60)
    yield found("never")


def keeps_the_interpreter() -> Iterator[Finding]:
    ctypes.PyDLL(None).sleep(60)
    yield found("never")


def stops() -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGSTOP)
    yield found("never")


def run(*functions: Callable[[], Iterator[Finding]], seconds: float = 10.0) -> list[Finding]:
    """The findings of a trial of these functions, and of one behind it, which must pass."""
    both = [Trial("training", "a trial", functions, seconds), Trial("training", "the next", [passes])]
    *findings, one, two = trial.run(both, seconds=20.0)
    assert [one.name, two.name] == ["one", "two"] and not one.missing
    return findings


def test_findings_come_from_another_process() -> None:
    findings = run(passes)
    assert [each.name for each in findings] == ["one", "two"]
    assert os.getpid() not in [each.figures["process"] for each in findings]


def test_functions_of_a_trial_run_beside_each_other() -> None:
    ours, theirs = os.pipe(), os.pipe()

    def talk(hears: int, tells: int) -> Iterator[Finding]:
        os.write(tells, b"x")
        os.read(hears, 1)
        yield found("talked")

    talks = [functools.partial(talk, ours[0], theirs[1]), functools.partial(talk, theirs[0], ours[1])]
    assert [each.name for each in run(*talks)] == ["talked", "talked"]


def test_a_typed_error_is_named_with_cause_and_cure() -> None:
    one, error = run(full)
    assert one.name == "one"
    assert (error.name, error.cost, error.cure) == ("a trial", "It is full.", "Free space.")
    assert error.failed and error.figures["error"] == "StorageFull"


def test_another_error_is_named_with_its_traceback() -> None:
    (error,) = run(stumbles)
    assert error.figures["error"] == "KeyError" and "lost" in error.cost
    assert "stumbles" in error.figures["log"]


@pytest.mark.parametrize("function, end", [(crashes, "SIGKILL"), (leaves, "exit code 3")])
def test_a_process_that_is_gone_is_named(function: Callable[[], Iterator[Finding]], end: str) -> None:
    (error,) = run(function)
    assert error.failed and error.found == "crashes" and end in error.cost
    assert error.figures["log"] == ("last words" if function is crashes else "")


@pytest.mark.parametrize("function", [sleeps, keeps_the_interpreter, stops])
def test_a_process_that_hangs_is_ended_in_time(function: Callable[[], Iterator[Finding]]) -> None:
    (error,) = run(function, seconds=0.3)
    assert error.failed and error.found == "hangs"
    if function is not stops:
        assert function.__name__ in error.figures["log"], "the log says where"


def test_one_process_that_is_gone_leaves_the_others_findings() -> None:
    findings = run(crashes, passes)
    assert sorted(each.name for each in findings) == ["a trial", "one", "two"]


def test_trials_without_time_fail() -> None:
    first, *_, last = trial.run([Trial("training", "late", [sleeps], 0.2)] * 3, seconds=0.3)
    assert first.found == "hangs"
    assert last.failed and last.found == "not tried"


def test_nobody_outlives_trials_that_are_given_up() -> None:
    def says() -> Iterator[Finding]:
        yield found("alive")
        time.sleep(60)

    findings = trial.run([Trial("training", "a trial", [says])], seconds=20.0)
    process = next(findings).figures["process"]
    findings.close()
    (child,) = [each for each in multiprocessing.active_children() if each.pid == process] or [None]
    if child is not None:
        child.join(10)
        assert child.exitcode == -signal.SIGKILL
