"""benchmarks/train.py runs, reports and leaves nothing; its figures are not looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def command(directory: Path, *arguments: str) -> list[str]:
    script = str(BENCHMARKS / "train.py")
    return [sys.executable, script, "--quick", "--device", "cpu", "--directory", str(directory), *arguments]


def test_quick_run_reports_both_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--peer", "torch", "--json"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["contenders"]) == {"infinity", "torch"} and report["failures"] == {}
    ours, theirs = (report["contenders"][name] for name in ("infinity", "torch"))
    assert len(ours["seconds"]) == len(theirs["seconds"]) == report["settings"]["rounds"]
    assert len(report["ratios"]["torch"]["rounds"]) == report["settings"]["rounds"]
    assert all(abs(mine - other) < 0.5 for mine, other in zip(ours["losses"], theirs["losses"], strict=True))
    limit = report["limit"]
    assert limit["seconds"] == max(limit["compute"] + limit["update"], limit["disk"])
    assert report["plan"]["predicted_s"] > 0 and report["plan"]["rss_growth"] > 0
    assert all(report["machine"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_does_not_start_is_said_and_ours_goes_on(tmp_path: Path) -> None:
    # An interpreter without torch: one that starts without any site.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    swap = tmp_path / "swap"
    swap.mkdir()
    done = subprocess.run(
        command(swap, "--peer", "deepspeed", "--peer-python", str(bare), "--json"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1
    assert "deepspeed nvme ended with 1" in done.stderr and "torch" in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["contenders"]) == {"infinity"} and "deepspeed nvme" in report["failures"]
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
def test_an_early_end_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        command(tmp_path, "--capacity"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (children := _children(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children and list(tmp_path.iterdir())
    parent.send_signal(number)
    assert parent.wait(60) != 0
    assert list(tmp_path.iterdir()) == []
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_contenders_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        command(tmp_path, "--capacity"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (children := _children(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait(60)
    while any(_running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children and not any(_running(child) for child in children)


def _children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def _running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_deepspeed_trains(tmp_path: Path) -> None:
    """Where it is installed for this interpreter. Its operators are compiled when they are first used."""
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        command(tmp_path, "--peer", "deepspeed", "--json"),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])["contenders"]["deepspeed nvme"]["losses"]
    assert all(0 < loss < 7 for loss in losses)
