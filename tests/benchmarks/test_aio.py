"""Tests that benchmarks/aio.py runs and prints a complete report. The figures are not checked."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import aio

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "aio.py"


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_quick_run(tmp_path: Path) -> None:
    working = [report.name for report in aio.probe(tmp_path).backends[:2] if report.ok]
    if not working:
        pytest.skip("neither io_uring nor libaio works here")
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--directory", str(tmp_path), "--engine"]
    done = subprocess.run([*command, *working], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0 and "engine" in done.stderr and "not loadable" in done.stderr:
        pytest.skip("this fio lacks an engine")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {(row["case"]["engine"], row["case"]["mode"]) for row in report["results"]} == {
        (engine, mode) for engine in working for mode in ("read", "write", "mixed")
    }
    assert all(row["ratio"] > 0 for row in report["results"])
    assert report["facts"]["kernel"]
    assert list(tmp_path.iterdir()) == []


def test_without_fio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    assert runpy.run_path(str(SCRIPT))["main"](["--quick", "--directory", str(tmp_path)]) == 2
    assert "fio is not installed" in capsys.readouterr().err
