"""benchmarks/gpu.sh with an interpreter that only notes what it is asked: order, limits, failures."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
sys.path.insert(0, str(SCRIPT.parent))

import train  # noqa: E402

PARTS = ["facts", "tests", "train-926m", "train-4b", "train-7b", "doctor", "tune", "cpu_adam"]


@dataclass(frozen=True)
class Done:
    code: int
    summary: list[str]
    calls: list[str]
    """Of the interpreter, a line each."""
    results: Path
    swap: Path


ALL = ("CPUAdamBuilder", "AsyncIOBuilder")


def run(
    tmp_path: Path,
    *,
    failing: str = "nothing of the kind",
    builders: tuple[str, ...] = ALL,
    **environment: str,
) -> Done:
    """failing: every call of the interpreter with this text in its arguments ends with 1. builders: of
    DeepSpeed's operators, those that can be compiled."""
    compiled = "".join(f"compiled {name}\\n" for name in builders)
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
        env=os.environ | {"PYTHON": str(python), "SWAP": str(swap)} | environment,
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
    assert [(job.model, job.seconds) for job in jobs] == [("926m", 115), ("4b", 85), ("7b", 65)]
    peers = [spec.name for spec in jobs[0].specs if not spec.ours]
    assert peers == ["deepspeed:cpu", "deepspeed:nvme", "fsdp2", "torch:fused"]
    assert list(done.swap.iterdir()) == []


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    done = run(tmp_path, failing="--model 4b")
    assert done.code == 1
    assert any(line.startswith("failed    train-4b with 1") for line in done.summary)
    assert sum(line.startswith("passed") for line in done.summary) >= len(PARTS) - 1
    assert not (done.results / "train-4b.json").exists()


def test_without_deepspeed_and_tune_the_rest_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, failing="import deepspeed")
    assert done.code == 0
    assert any("deepspeed is not to be had" in line for line in done.summary)
    assert not any("--peer deepspeed" in line for line in done.calls)


@pytest.mark.parametrize(
    ("builders", "peers"),
    [(ALL[:1], ["deepspeed:cpu"]), ((), []), (ALL[1:], [])],
    ids=["no aio", "none", "aio"],
)
def test_a_peer_that_cannot_be_compiled_is_said(
    builders: tuple[str, ...], peers: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, builders=builders)
    assert done.code == 1 and any("failed    deepspeed-build" in line for line in done.summary)
    job, _ = train.parse(shlex.split(next(line for line in done.calls if "train.py" in line))[1:])
    assert [spec.name for spec in job.specs if spec.contender == "deepspeed"] == peers


def test_peers_come_from_a_folder_of_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "deepspeed-0.whl").touch()
    done = run(tmp_path, PEERS=str(wheels))
    (install,) = (line for line in done.calls if "pip install" in line)
    assert "--no-index" in install and str(wheels / "deepspeed-0.whl") in install


def test_what_does_not_fit_in_the_time_is_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, SECONDS_IN_ALL="0")
    assert done.code == 1 and sum(line.startswith("left out") for line in done.summary) >= len(PARTS)
    assert not any("train.py" in line for line in done.calls)
