"""The benchmark of training quality runs, compares what it says, and leaves nothing on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "quality.py"


def test_two_steps_have_the_same_bits_anywhere_and_nearly_those_of_plain_pytorch(tmp_path: Path) -> None:
    swap, results = tmp_path / "swap", tmp_path / "results"
    swap.mkdir()
    sizes = ["--model", "10m", "--steps", "3", "--batch", "1", "--seq", "32"]
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            *sizes,
            "--directory",
            str(swap),
            "--results",
            str(results),
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same_bits"]
    runs = {run["name"]: run for run in report["runs"]}
    assert runs["all-device"]["losses"] == runs["all-NVMe"]["losses"]
    assert len(set(runs["all-NVMe"]["losses"])) == 3
    assert 0 <= report["spreads"]["all-NVMe and plain PyTorch"]["largest_step"] < 0.02
    assert list(swap.iterdir()) == []
    assert "the same bits in every loss" in (results / "quality-10m.md").read_text()
    assert json.loads((results / "quality-10m.json").read_text()) == report
