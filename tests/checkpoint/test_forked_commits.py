"""Tests of forks while a commit is pending: a child neither ends the parent's lock nor touches its files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import forked_run
import pytest
from commit_states import continued
from committed_runs import Job, opened
from faulty import watchdog
from recorded_run import images

from infinity.errors import StorageError

__all__ = ["watchdog"]

JOBS = {"nvme": Job(), "ram": Job(home="ram"), "device": Job(home="device")}
CASES = [
    *(("nvme", child) for child in ("use", "leave", "outlives", "loader")),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("nvme", "close"), ("nvme", "killed"), ("ram", "close"), ("device", "leave"))
    ),
]


@pytest.mark.sweep(most=2)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("home", "child"), CASES)
def test_the_parent_s_commit_lands(home: str, child: str, tmp_path: Path) -> None:
    job = JOBS[home]
    directories = job.directories(tmp_path)
    argument = json.dumps({"root": str(tmp_path), "job": asdict(job), "child": child})
    with subprocess.Popen(
        [sys.executable, forked_run.__file__, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        line = parent.stdout.readline
        try:
            process = int(line().split()[1])
            if child != "outlives":
                assert line() == f"ended {-signal.SIGKILL if child == 'killed' else 0}\n"
            before = images(*directories)
            with (
                pytest.raises(StorageError, match=f"in use by process {parent.pid}") as caught,
                opened(job, directories, resume=True),
            ):
                pass
            assert caught.value.errno == errno.EBUSY
            assert images(*directories) == before
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert line() == "durable\n"
            assert parent.wait() == (-signal.SIGKILL if child == "outlives" else 0)
            assert continued(job, directories, forked_run.STEP) is None
            if child == "outlives":
                os.kill(process, 0)  # it still lives
        finally:
            parent.kill()
            if child == "outlives":
                os.kill(process, signal.SIGKILL)
