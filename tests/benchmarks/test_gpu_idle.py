"""Tests of benchmarks/gpu_idle.py, which reports how much of a training step a GPU is idle.

They cover the arithmetic of busy intervals, reading torch profiler traces, a step on a machine without a GPU,
and the initial values of the benchmark's model.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

import infinity

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_idle
from gpu_idle import Interval, gaps, gpu_work, length, report, union
from peers import pattern
from peers.pattern import fill_by_pattern

from infinity.lm.decoder import PRESETS, Decoder, DecoderConfig


def test_the_union_of_intervals_is_that_of_their_moments() -> None:
    chosen = random.Random(7)
    for _ in range(300):
        count = chosen.randrange(9)
        starts = [chosen.randrange(40) for _ in range(count)]
        intervals = [Interval(start, start + chosen.randrange(9)) for start in starts]
        moments = {moment for start, end in intervals for moment in range(int(start), int(end))}
        merged = union(intervals)
        assert length(intervals) == len(moments)
        assert {m for start, end in merged for m in range(int(start), int(end))} == moments
        assert all(gap > 0 for gap in gaps(intervals))
        assert sum(gaps(intervals)) == (max(moments) + 1 - min(moments) - len(moments) if moments else 0)


def test_copies_beside_kernels_count_once() -> None:
    work = {"kernels": [Interval(0, 4), Interval(6, 7)], "copies": [Interval(1, 5)], "fills": []}
    found = report(work, 10.0)
    assert found["busy_seconds"] == 6 and found["idle_share"] == pytest.approx(0.4)
    assert found["copies_alone_seconds"] == 1 and found["profiled_span_seconds"] == 7
    assert found["of_kind"]["copies"] == {"count": 1, "seconds": 4}
    assert found["gaps"]["below inf s"] == {"count": 1, "seconds": 1}
    assert sum(each["count"] for each in found["gaps"].values()) == 1


def test_a_gpu_that_is_not_seen_is_not_called_idle() -> None:
    found = report({"kernels": [], "copies": [], "fills": []}, 10.0)
    assert found["idle_share"] is None and "CUPTI" in found["why"]


def test_of_a_trace_only_the_gpu_s_work_counts() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1000.0, "dur": 500.0, "name": "gemm"},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 1200, "dur": 1000, "name": "Memcpy HtoD"},
        {"ph": "X", "cat": "gpu_memset", "ts": 9000, "dur": 0, "name": "Memset"},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 90000, "name": "cudaLaunchKernel"},
        {"ph": "X", "cat": "gpu_user_annotation", "ts": 0, "dur": 90000, "name": "step"},
        {"ph": "M", "name": "process_name"},
        {"ph": "s", "cat": "ac2g", "ts": 3},
        {"ph": "i", "cat": "kernel", "ts": 5},
    ]
    found = gpu_work(events)
    assert {kind: len(each) for kind, each in found.items()} == {"kernels": 1, "copies": 1, "fills": 1}
    assert length(found["kernels"] + found["copies"]) == pytest.approx(1.2e-3)


def test_a_step_without_a_gpu_says_why_and_leaves_its_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = tmp_path / "kept" / "timeline.json"
    timeline.parent.mkdir()
    arguments = ["--model", "10m", "--device", "cpu", "--batch", "1", "--seq", "16", "--warm-up", "1"]
    arguments += [
        "--steps",
        "1",
        "--host",
        "512MiB",
        "--directory",
        str(tmp_path),
        "--timeline",
        str(timeline),
    ]
    assert gpu_idle.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["idle_share"] is None and found["why"]
    assert found["seconds"] > 0 and found["last_step"]["seconds"] > 0
    assert any(event.get("name", "").startswith("step") for event in json.loads(timeline.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


CONFIG = DecoderConfig(width=128, layers=2, heads=2, hidden=384)


def patterned() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    fill_by_pattern(model, CONFIG.layers)
    budget = infinity.Budget(host="64MiB")
    optimizer = torch.optim.AdamW(model.parameters())
    precision = infinity.Precision(compute="fp32")
    with infinity.offload(model, optimizer, budget=budget, precision=precision, device="cpu"):
        return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("width", [each.decoder.width for each in PRESETS.values()])
def test_a_pattern_meets_itself_in_no_matrix(width: int) -> None:
    assert math.gcd(pattern._LENGTH, width) == 1


def test_a_pattern_fills_a_model_like_its_own_initialiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """fill_by_pattern gives matrices the mean and the deviation that the model's initialiser gives them.

    Vectors get the initialiser's values. No two rows of a matrix are equal, and every run gives the same
    values.
    """
    monkeypatch.setattr(pattern, "_LENGTH", 4001)  # shorter than a matrix, as for large models
    found, again = patterned(), patterned()
    torch.manual_seed(0)
    own = Decoder(CONFIG).state_dict()
    assert found.keys() == own.keys()
    for name, values in found.items():
        assert torch.equal(values, again[name])
        if values.dim() < 2:
            assert torch.equal(values, own[name])
            continue
        assert values.std().item() == pytest.approx(own[name].std().item(), rel=0.05)
        assert abs(values.mean().item()) < 0.001
        assert len({tuple(row) for row in values.tolist()}) == len(values)
