"""Tests that benchmarks/tune.py runs and prints a complete report. The figures are not checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from fio_benchmarks import exit_code_without_fio, needs_fio, quick_run

from infinity import aio

pytestmark = pytest.mark.usefixtures("warm")


@needs_fio
def test_quick_run(tmp_path: Path) -> None:
    report, working = quick_run("tune.py", tmp_path)
    assert [row["mode"] for row in report["results"]] == ["read", "write", "mixed"]
    assert report["fio_points"] == len(working)
    for row in report["results"]:
        assert row["ratio"] > 0
        assert row["best"]["engine"] in working
        assert len(report["sweep"][row["mode"]]) == len(working)
    assert report["tuned"]["settings"]["backend"] in aio.BACKENDS


def test_without_fio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_without_fio("tune.py", tmp_path, monkeypatch) == 2
    assert "fio is not installed" in capsys.readouterr().err
