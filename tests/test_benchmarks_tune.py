"""The benchmark of tuning runs and says what it should; its figures are nobody's business here."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import aio

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "tune.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_quick_run(tmp_path: Path) -> None:
    working = [report.name for report in aio.probe(tmp_path).backends[:2] if report.ok]
    if not working:
        pytest.skip("neither io_uring nor libaio works here")
    done = run("--quick", "--json", "--directory", tmp_path, "--engine", *working)
    if done.returncode != 0 and "engine" in done.stderr and "not loadable" in done.stderr:
        pytest.skip("this fio lacks an engine")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["mode"] for row in report["results"]] == ["read", "write", "mixed"]
    assert report["fio_points"] == len(working)
    for row in report["results"]:
        assert row["ratio"] > 0
        assert row["best"]["engine"] in working
        assert len(report["sweep"][row["mode"]]) == len(working)
    assert report["tuned"]["settings"]["backend"] in aio.BACKENDS
    assert list(tmp_path.iterdir()) == []


def test_without_fio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    assert runpy.run_path(str(BENCHMARK))["main"](["--quick", "--directory", str(tmp_path)]) == 2
    assert "fio is not installed" in capsys.readouterr().err
