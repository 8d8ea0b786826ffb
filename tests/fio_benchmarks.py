"""Helpers that run the benchmarks that compare infinity's I/O with fio, with their quick settings."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity import aio

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")


def _file(name: str) -> Path:
    return Path(__file__).parents[1] / "benchmarks" / name


def quick_run(name: str, directory: Path) -> tuple[Any, list[str]]:
    """Run a benchmark with quick settings, and return (JSON report, engines).

    Asserts that the benchmark leaves nothing in `directory`. name: the name of a file in benchmarks/.
    engines: names of the I/O backends that were compared.
    """
    working = [report.name for report in aio.probe(directory).backends[:2] if report.ok]
    if not working:
        pytest.skip("neither io_uring nor libaio works here")
    command = [sys.executable, str(_file(name)), "--quick", "--json", "--directory", str(directory)]
    done = subprocess.run(
        [*command, "--engine", *working], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0 and "engine" in done.stderr and "not loadable" in done.stderr:
        pytest.skip("this fio lacks an engine")
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == []
    return json.loads(done.stdout.splitlines()[-1]), working


def exit_code_without_fio(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a benchmark in an environment where fio cannot be found, and return the benchmark's exit code.

    The benchmark runs in this process, so that a test can capture its output. name: a file in benchmarks/.
    """
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.syspath_prepend(str(_file(name).parent))
    code: int = runpy.run_path(str(_file(name)))["main"](["--quick", "--directory", str(directory)])
    return code
