"""Tests that benchmarks/contention.py runs, reports and leaves no file. The figures are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fio_benchmarks import needs_fio

pytestmark = pytest.mark.usefixtures("warm")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "contention.py"


def run(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), "--quick", "--device", "cpu", "--directory", str(directory)]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, check=False)


@needs_fio
def test_a_disk_is_at_work_beside_every_second_turn(tmp_path: Path) -> None:
    done = run(tmp_path, "--rate", "0.05", "--json")
    if done.returncode != 0 and "not loadable" in done.stderr:
        pytest.skip("this fio lacks an engine")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["rate"] == 0.05e9 and len(report["rounds"]) == 2
    assert all(each["alone"] > 0 and each["beside"] > 0 for each in report["rounds"])
    # The load is held back to the rate, except for the blocks that are under way at its start.
    assert all(0 < each["speed"] < 10 * report["rate"] for each in report["rounds"])
    ratios = sorted(each["beside"] / each["alone"] for each in report["rounds"])
    assert ratios[0] <= report["ratio"] <= ratios[-1]
    assert list(tmp_path.iterdir()) == []


def test_without_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import contention

    monkeypatch.setenv("PATH", str(tmp_path))
    assert contention.main(["--quick", "--device", "cpu", "--directory", str(tmp_path)]) == 1
    assert "fio is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rate", ["0", "-1", "nan"])
def test_a_rate_that_is_none(rate: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"--rate={rate}")
    assert done.returncode == 2 and "--rate is not positive" in done.stderr
