"""Tests that benchmarks/aio.py runs and prints a complete report. The figures are not checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from fio_benchmarks import exit_code_without_fio, needs_fio, quick_run

pytestmark = pytest.mark.usefixtures("warm")


@needs_fio
def test_quick_run(tmp_path: Path) -> None:
    report, working = quick_run("aio.py", tmp_path)
    assert {(row["case"]["engine"], row["case"]["mode"]) for row in report["results"]} == {
        (engine, mode) for engine in working for mode in ("read", "write", "mixed")
    }
    assert all(row["ratio"] > 0 for row in report["results"])
    assert report["facts"]["kernel"]


def test_without_fio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_without_fio("aio.py", tmp_path, monkeypatch) == 2
    assert "fio is not installed" in capsys.readouterr().err
