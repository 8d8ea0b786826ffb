"""Tests of benchmarks/gpu.sh, run with a fake Python interpreter that records its calls.

The parts of the script must run in their order and with the right arguments, a part that fails must not
stop the next, and a part for which the machine has no room must be left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_idle  # noqa: E402
import train  # noqa: E402

PARTS = [
    "facts",
    "parity",
    "step-926m",
    "tests",
    "train-7b-offload",
    "train-926m",
    "ranks-926m",
    "train-7b-nvme",
    "train-14b",
    "doctor",
    "tune",
    "cpu_adam",
]
"""The parts that benchmarks/gpu.sh runs, in order, the most valuable first. "aio" is missing here, because
the script leaves that part out where fio is not installed.
"""


@dataclass(frozen=True)
class Done:
    code: int
    summary: list[str]
    calls: list[str]
    """The arguments of each call of the fake interpreter, one line a call."""
    results: Path
    swap: Path


def run(
    tmp_path: Path,
    *,
    failing: str = "nothing of the kind",
    **environment: str,
) -> Done:
    """Run benchmarks/gpu.sh with a fake interpreter, and return what the script did.

    The result has the exit code of the script, the lines of its summary, the calls of the interpreter, and
    the directories for results and for swap files. failing: every call of the interpreter with this text in
    its arguments exits with 1. environment: variables that are set for the script.
    """
    compiled = "compiled CPUAdamBuilder\\ncompiled AsyncIOBuilder\\n"
    results, swap, calls = tmp_path / "results", tmp_path / "swap", tmp_path / "calls"
    swap.mkdir()
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
printf '%s\\n' "$(echo "$@" | tr '\\n' ' ')" >>"{calls}"
case "$*" in *"{failing}"*) exit 1 ;; *op_builder*) printf '{compiled}' ;; esac
echo '{{"figures": 1}}'
"""
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(results)],
        env=os.environ
        | {"PYTHON": str(python), "SWAP": str(swap), "RAM_GIB": "500", "DISK_GIB": "500"}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    summary = results / "summary.txt"
    lines = summary.read_text().splitlines() if summary.exists() else []
    return Done(done.returncode, lines, calls.read_text().splitlines(), results, swap)


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, failing="is_available")
    assert done.code == 3 and not done.results.exists() and len(done.calls) == 2


def test_all_parts_pass_and_leave_their_results_alone(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.code == 0
    passed = [line.split()[1] for line in done.summary if line.startswith("passed")]
    assert [part for part in passed if part != "aio"] == PARTS
    assert all((done.results / f"{part}.json").read_text() == '{"figures": 1}\n' for part in PARTS)
    trained = [line for line in done.calls if "train.py" in line]
    jobs = [train.parse(shlex.split(line)[1:])[0] for line in trained]
    seconds = [("7b", 65), ("926m", 85), ("7b", 35), ("14b", 65)]
    assert [(job.model, job.seconds) for job in jobs] == seconds
    peers = [[spec.name for spec in job.specs if not spec.ours] for job in jobs]
    every = ["deepspeed:cpu", "deepspeed:nvme", "fsdp2", "torch:fused"]
    assert peers == [["deepspeed:cpu"], every, [], []]
    assert list(done.swap.iterdir()) == []
    step = next(shlex.split(line) for line in done.calls if "gpu_idle.py" in line)
    options = gpu_idle.parse(step[1:])
    assert (options.model, options.device) == ("926m", "cuda")
    assert options.timeline.parent == options.trace.parent == done.results


def test_all_cuda_tests_are_asked_for(tmp_path: Path) -> None:
    """The script's pytest options (`-k`) select every test that needs a GPU, so that none is left out."""
    done = run(tmp_path)
    chosen = [line.partition("-k ")[2] for line in done.calls if "-m pytest" in line]
    known = {word for each in chosen for word in re.findall(r"\w+", each)} - {"or", "and", "device"}
    assert len(chosen) == 2 and "cuda" in known
    marked = re.compile(
        r"(?:@needs_cuda|@pytest\.mark\.skipif\(not torch\.cuda\.is_available\(\).*?\))\n"
        r"(?:@.*\n)*(?:def|class) (\w+)"
    )
    names = {
        f"{path.stem}::{name}"
        for path in Path(__file__).parents[1].rglob("test_*.py")
        for name in marked.findall(path.read_text())
    }
    assert len(names) > 10
    assert [name for name in sorted(names) if not any(word in name.lower() for word in known)] == []


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    done = run(tmp_path, failing="--model 14b")
    assert done.code == 1
    assert any(line.startswith("failed    train-14b with 1") for line in done.summary)
    assert sum(line.startswith("passed") for line in done.summary) >= len(PARTS) - 1
    assert not (done.results / "train-14b.json").exists()


def test_what_the_machine_has_no_room_for_is_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, RAM_GIB="128", DISK_GIB="16")
    assert done.code == 0
    left = [line.split()[2].rstrip(":") for line in done.summary if line.startswith("left out")]
    assert [name for name in left if name.startswith("train")] == ["train-7b-nvme", "train-14b"]
