"""Tests of benchmarks/quality.py, which trains in several ways and compares the losses.

It must run, tell differences within noise from others, see a single differing bit, and leave no file behind.
"""

import importlib
import json
import math
import os
from pathlib import Path
from types import ModuleType

import pytest

from infinity.lm.decoder import PRESETS, DecoderConfig, Preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Add a preset "small" whose steps take almost no time, and return the module benchmarks/quality.py."""
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    small = DecoderConfig(width=64, layers=2, heads=2, hidden=128)
    monkeypatch.setitem(PRESETS, "small", Preset(small, 2e-3))
    return importlib.import_module("quality")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(os.fspath(BENCHMARKS))
    return importlib.import_module("quality_report")


def test_two_steps_have_the_same_bits_anywhere_and_nearly_those_of_plain_pytorch(
    quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap, results = tmp_path / "swap", tmp_path / "results"
    swap.mkdir()
    sizes = ["--model", "small", "--steps", "2", "--batch", "1", "--seq", "32"]
    chosen = ["--seeds", "2", "--states", "fp32,int8"]
    files = ["--directory", str(swap), "--results", str(results), "--json"]
    assert quality.main([*sizes, *chosen, *files]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert report["same_bits"] == {"fp32": True, "int8": True}
    runs = {(run["variant"], run["seed"]): run["losses"] for run in report["runs"]}
    fp32, int8, plain = "all-device, fp32 moments", "all-device, int8 moments", "plain PyTorch"
    once = {"all-NVMe, fp32 moments", "all-NVMe, int8 moments", "plain PyTorch, foreach"}
    assert set(runs) == {(name, seed) for name in (fp32, int8, plain) for seed in (0, 1)} | {
        (name, 0) for name in once
    }
    assert len(runs) == report["planned"]
    assert runs[fp32, 0] == runs["all-NVMe, fp32 moments", 0]
    assert len({*runs[fp32, 0], *runs[fp32, 1]}) == 4, "a seed gives weights and text of its own"
    assert 0 <= report["differences"][fp32]["largest_step"] < 0.02
    assert report["differences"][int8]["seeds"] == 2
    assert report["start"]["loss"] == pytest.approx(runs[fp32, 0][0], rel=1e-5)

    assert list(swap.iterdir()) == []
    text = (results / "quality-small.md").read_text()
    assert text.count("the same bits in every loss") == 2
    assert "first loss has the same bits as here" in text
    assert "Cut short" not in text
    assert json.loads((results / "quality-small.json").read_text()) == report


def test_a_difference_is_within_noise_where_its_error_or_the_seeds_cover_it(report: ModuleType) -> None:
    def runs(variant: str, held_out: list[float]) -> list[object]:
        return [report.Run(variant, seed, [3.0, loss], loss, 1.0) for seed, loss in enumerate(held_out)]

    plain = runs(report.PLAIN, [2.0, 2.1, 2.2])  # standard deviation 0.1
    told = report.summary(
        [
            *plain,
            *runs("above, always as far", [2.25, 2.35, 2.45]),
            *runs("above, by less than seeds differ", [2.05, 2.15, 2.25]),
            *runs("above, but any distance", [2.8, 2.1, 2.2]),
            *runs("one seed", [2.0]),
        ]
    )["differences"]
    assert report.PLAIN not in told
    verdicts = {
        name: tuple(
            each["held-out loss"].get(key)
            for key in ("within_two_standard_errors", "within_seeds", "within_noise")
        )
        for name, each in told.items()
    }
    assert verdicts == {
        "above, always as far": (False, False, False),
        "above, by less than seeds differ": (False, True, True),
        "above, but any distance": (True, False, True),
        "one seed": (None, None, None),
    }
    assert told["above, but any distance"]["held-out loss"]["mean"] == pytest.approx(0.8 / 3)
    error = math.sqrt(0.64 / 3) / math.sqrt(3)  # of 0.8, 0, 0
    assert told["above, but any distance"]["held-out loss"]["standard_error"] == pytest.approx(error)


def test_one_bit_elsewhere_is_seen(report: ModuleType) -> None:
    losses = [5.0, 4.0]
    here = report.Run(report.all_device("bf16"), 0, losses, 3.0, 1.0)
    there = report.Run(report.all_nvme("bf16"), 0, [5.0, math.nextafter(4.0, 5.0)], 3.0, 1.0)
    assert report.same_bits([here, there], ["fp32", "bf16"]) == {"bf16": False}
    assert report.same_bits([here], ["bf16"]) == {}
