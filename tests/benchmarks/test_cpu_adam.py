"""Tests that benchmarks/cpu_adam.py runs and reports each AdamW that it compares: infinity's in every
format, and torch's. Speeds are not checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_adam.py"


def test_quick_run_reports_every_contender() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "cpu_adam" and report["skipped"]
    names = list(report["results"])
    assert [name.partition(":")[0] for name in names[:5]] == ["plain", "split", "fp32", "bf16", "int8"]
    assert "torch fused AdamW, fp32" in names
    assert [report["results"][name]["bytes_per_parameter"] for name in names[:5]] == [28, 26, 28, 18, 14]
    assert all(each["median_s"] > 0 for each in report["results"].values())
    assert all(report["machine"].values())
