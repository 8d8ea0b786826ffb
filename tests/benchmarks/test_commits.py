"""Tests of benchmarks/commits.py and benchmarks/checkpoint_peers.py, which measure what saves cost.

Quick runs report all parts and leave no file. Seconds are not checked, but bytes are. From steps whose
seconds are known, the benchmark finds the ratios.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the benchmarks' modules importable. In their processes the import of `deepspeed` fails."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "deepspeed.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)


def run(
    module: str, directory: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    directory.mkdir()
    code = importlib.import_module(module).main(["--quick", "--json", "--directory", str(directory), *more])
    assert list(directory.iterdir()) == []
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bytes_with_commits_are_those_without(
    benchmarks: None, warm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run("commits", tmp_path / "disk", capsys, "--part", "bytes")
    found = report["bytes"]
    assert code == 0 and found["exact"] is True
    assert found["on_nvme"]["on"] == found["on_nvme"]["off"]
    assert found["on_nvme"]["on"]["engine"] > found["state_bytes"] > 0
    assert len(found["in_ram"]["engine"]) == found["steps"] and min(found["in_ram"]["engine"]) > 0


def test_stalls_and_commits_that_are_not_made(
    benchmarks: None, warm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run("commits", tmp_path / "disk", capsys, "--part", "stall", "idle")
    assert code == 0 and "bytes" not in report
    stall, idle = report["stall"], report["idle"]
    assert stall["pairs"] == report["settings"]["pairs"] == len(stall["saves"]) - 1
    assert 0 < stall["save_ms"]["p50"] <= stall["save_ms"]["p95"] <= stall["save_ms"]["max"]
    assert len(stall["seconds"]) == report["settings"]["every"] * len(stall["saves"])
    assert idle["equal_losses"] is True
    assert set(idle["seconds"]) == {"off", "off again", "on"}
    assert all(len(each) == report["settings"]["rounds"] for each in idle["seconds"].values())


def test_ratios_are_those_of_the_steps(benchmarks: None) -> None:
    commits: ModuleType = importlib.import_module("commits")
    period = [6.0, 3.0, 2.0, 2.0, 4.0]
    saves = [
        {"after": 5 * number, "seconds": number / 1000, "pending_steps": number % 2} for number in (1, 2, 3)
    ]
    found = commits.stall_of([9.0] * 5 + period + period, saves, 5)
    assert found["pairs"] == 2, "after the last save there are no steps"
    assert {name: found[name]["median"] for name in ("first", "second", "noise", "lost_steps")} == {
        "first": 3.0,
        "second": 1.5,
        "noise": 2.0,
        "lost_steps": 3.5,
    }
    assert found["ratio_of_medians"] == 3.0 and found["late"] == 2 / 3
    assert found["save_ms"] == {"p50": 2.0, "p95": 3.0, "max": 3.0}


def test_quantiles(benchmarks: None) -> None:
    commits = importlib.import_module("commits")
    hundred = [float(number) for number in range(1, 101)]
    assert [commits.quantile(hundred, share) for share in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]


def test_saves_beside_a_peer_that_does_not_start(
    benchmarks: None, warm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run("checkpoint_peers", tmp_path / "disk", capsys, "--contender", "ours", "deepspeed:cpu")
    assert code == 1 and "broken on purpose" in report["failures"]["deepspeed:cpu"]
    (save,) = report["saves"]["ours"]
    assert set(save) == set(importlib.import_module("checkpoint_peers").FIGURES)
    assert save["blocked_s"] > 0 and save["disk_bytes"] >= save["written_bytes"] / 2 > 0


def test_where_ours_is_lower(benchmarks: None) -> None:
    peers = importlib.import_module("checkpoint_peers")
    ours, other = ({"lost_s": a, "written_bytes": 5.0, "extra_rss": b} for a, b in ((-0.1, 3.0), (1.0, 2.0)))
    assert peers.lower({"ours": ours, "deepspeed:cpu": other}) == {
        "deepspeed:cpu": {"lost_s": True, "written_bytes": False, "extra_rss": False}
    }
    assert peers.lower({"deepspeed:cpu": other}) == {}


@pytest.mark.parametrize(
    ("module", "wrong"), [("commits", ["--every", "3"]), ("checkpoint_peers", ["--saves", "0"])]
)
def test_numbers_that_are_too_small(benchmarks: None, module: str, wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).parse(["--directory", str(tmp_path), *wrong])
    assert ended.value.code == 2
