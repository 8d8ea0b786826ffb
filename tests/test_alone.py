"""Tests of the mark `alone`: a test with this mark begins when all running tests have ended, and tests that
come later begin when it has ended.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from alone import Machine

SOON = 0.2
"""Seconds after which a Worker whose event `entered` is not set counts as waiting for other Workers."""
BOUND = 30.0


class Worker:
    """A thread that stands for a worker process of pytest. As soon as it is made, it asks to run a test. It
    sets the event `entered` when the test may begin, and runs the test until leave() is called.

    It has an `alone.Machine` of its own. The lock files of all Workers' Machines are in `directory`, and so
    shared. alone: whether the Worker's test has the mark `alone`.
    """

    def __init__(self, directory: Path, *, alone: bool) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(Machine(directory), alone), daemon=True)
        self._thread.start()

    def _run(self, machine: Machine, alone: bool) -> None:
        with machine.used(alone=alone):
            self.entered.set()
            self._leave.wait(BOUND)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(BOUND)
        assert not self._thread.is_alive()


def test_one_alone_waits_for_all_and_is_not_overtaken(tmp_path: Path) -> None:
    running = [Worker(tmp_path, alone=False) for _ in range(3)]
    assert all(each.entered.wait(BOUND) for each in running)
    lone = Worker(tmp_path, alone=True)
    assert not lone.entered.wait(SOON)
    later = Worker(tmp_path, alone=False)
    assert not later.entered.wait(SOON), "whoever waits to be alone keeps its place"
    for each in running:
        each.leave()
    assert lone.entered.wait(BOUND)
    assert not later.entered.wait(SOON)
    lone.leave()
    assert later.entered.wait(BOUND)
    later.leave()


def test_an_error_inside_lets_the_next_one_in(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with pytest.raises(ZeroDivisionError), machine.used(alone=True):
        raise ZeroDivisionError
    other = Worker(tmp_path, alone=True)
    assert other.entered.wait(BOUND)
    other.leave()
