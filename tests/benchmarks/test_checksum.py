"""Tests that benchmarks/checksum.py runs and reports each case with its limit. Speeds are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import checksum

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checksum.py"


@pytest.mark.parametrize("implementation", checksum.implementations())
def test_quick_run_reports_every_case(implementation: str) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--implementation", implementation]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "checksum" and report["implementation"] == implementation
    assert {(row["nbytes"], row["block"]) for row in report["results"] if row["threads"] == 1} == {
        (1 << 20, block) for block in (4096, 65536, 1 << 20)
    }
    for row in report["results"]:
        assert min(row["gb_per_s"], row["sum_gb_per_s"], row["of_sum"]) > 0
    assert all(report["machine"].values())
