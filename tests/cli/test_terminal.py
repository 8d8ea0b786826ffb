"""Tests of `infinity train` and `infinity plan` as processes: what they write to a terminal, and how they end
after SIGTERM, after Ctrl-C, and when the reader of their output closes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import PATIENCE, TinyJob, ended

pytestmark = pytest.mark.usefixtures("warm")
ENDLESS = 1_000_000
"""A number of training steps that takes longer than any test waits."""


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_interrupted_run_leaves_nothing(job: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    running = {}
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):  # side by side, since processes take seconds to start
            folder = job.folder / number.name
            folder.mkdir()
            its = TinyJob(folder)
            options = [*its.on_disk(capsys), "--log", str(folder / "log"), "--steps", str(ENDLESS)]
            process = its.start(*its.arguments("train", *options))
            stack.enter_context(ended(process))
            running[number] = its, process
        for number, (its, process) in running.items():
            log = its.folder / "log"
            wait_for(lambda log=log: log.exists() and log.read_text().count("\n") >= 3, process)
            assert list(its.pages.iterdir()) != []
            process.send_signal(number)
            _, stderr = process.communicate(timeout=PATIENCE)
            assert process.returncode == 128 + number
            assert stderr == ""
            assert list(its.pages.iterdir()) == []
            for line in log.read_text().splitlines():
                json.loads(line)


def test_planning_that_is_ended_leaves_nothing(job: TinyJob) -> None:
    """`infinity plan` prints nothing and leaves no file when SIGTERM ends it while the disk is measured."""
    process = job.start(*job.arguments("plan", *job.nvme("200MiB"), model="10m"), program=["-m", "infinity"])

    def measures() -> bool:
        for each in Path(f"/proc/{process.pid}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
                if os.readlink(each).startswith(f"{job.pages}{os.sep}"):
                    return True
        return False

    with ended(process):
        wait_for(measures, process)
        process.terminate()
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert stdout + stderr == ""
    assert list(job.pages.iterdir()) == []


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, dict[str, Any]]]:
    """Open a pseudo terminal, and yield (descriptor to read from, arguments of Popen for a process on it)."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    try:
        yield ours, {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": environment}
    finally:
        os.close(ours)
        os.close(theirs)


def read_to_end(descriptor: int, process: subprocess.Popen[str], ready: Callable[[bytes], None]) -> str:
    """Read from `descriptor`, a terminal to which `process` writes, until the process ends; returns the text.

    ready: called with all bytes read so far, whenever more have arrived.
    """
    found = b""
    os.set_blocking(descriptor, False)
    end = time.monotonic() + PATIENCE
    while True:
        running = process.poll() is None
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(descriptor, 65536):
                found += piece
                ready(found)
        if not running:
            return found.decode()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_terminal_sees_a_bar_and_has_its_cursor_back(job: TinyJob) -> None:
    with terminal() as (ours, where):
        process = job.start(*job.arguments("train", "--steps", "3"), **where)
        with ended(process):
            output = read_to_end(ours, process, lambda _: None)
    assert process.returncode == 0, output
    assert "━" in output
    assert "step 3/3" in output
    assert "held-out loss" in output.splitlines()[-1]
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") > 0
    assert "Traceback" not in output


def test_ctrl_c_on_a_terminal_gives_the_cursor_back(job: TinyJob) -> None:
    with terminal() as (ours, where):
        process = job.start(*job.arguments("train", "--steps", str(ENDLESS), *job.nvme()), **where)
        sent = []

        def interrupt(output: bytes) -> None:
            if not sent and b"tok/s" in output:
                sent.append(True)
                process.send_signal(signal.SIGINT)

        with ended(process):
            output = read_to_end(ours, process, interrupt)
    assert process.returncode == 130, output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") > 0
    assert "Traceback" not in output
    assert list(job.pages.iterdir()) == []


def test_stdout_in_ascii(job: TinyJob) -> None:
    process = job.start(*job.arguments("train", "--steps", "1"), env={"PYTHONIOENCODING": "ascii"})
    with ended(process):
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert stdout.isascii()
    assert "smallest budgets that would do: host" in stdout
    assert "held-out loss" in stdout.splitlines()[-1]


def test_a_reader_that_leaves_causes_no_traceback(job: TinyJob) -> None:
    processes = []
    with contextlib.ExitStack() as stack:
        for options in ([], ["--json"], ["--json", "--data", "/absent"]):  # side by side
            process = job.start(*job.arguments("train", "--steps", "1", *options))
            stack.enter_context(ended(process))
            assert process.stdout is not None
            process.stdout.close()
            processes.append(process)
        for process in processes:
            assert process.stderr is not None
            stderr = process.stderr.read()
            process.stderr.close()
            assert process.wait(PATIENCE) == 1
            assert "Traceback" not in stderr
            assert "Broken" not in stderr
    assert list(job.pages.iterdir()) == []
