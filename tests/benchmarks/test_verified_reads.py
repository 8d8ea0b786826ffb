"""Tests that benchmarks/verified_reads.py runs and reports its ratios. Speeds are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verified_reads.py"


def test_quick_run_reports_ratios(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "verified_reads"
    assert set(report["ratios"]) == {"on/off", "again/off", "again/on"}
    assert report["step_seconds"] > 0 and report["checksum_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
