"""Tests that the programs in examples/ run, and that the figures they print are as good as they claim."""

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
Output = Callable[[str, str], re.Match[str]]


@pytest.fixture
def output(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Output:
    """Function that runs an example and returns what `pattern` finds in its output.

    The example keeps its pages in a directory, and is to leave nothing there. It runs in this process, which
    has imported the trainers' packages for other tests: alone these take most of an example's seconds.
    """

    def run(example: str, pattern: str) -> re.Match[str]:
        monkeypatch.setattr(sys, "argv", [example, str(tmp_path)])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        assert list(tmp_path.iterdir()) == []
        printed = capsys.readouterr().out
        found = re.search(pattern, printed)
        assert found is not None, printed
        return found

    return run


def test_paged_training(output: Output) -> None:
    found = output(
        "paged_training.py",
        r"loss (\S+) -> (\S+); largest relative difference to plain PyTorch (\S+)",
    )
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_one_page(output: Output) -> None:
    found = output("one_page.py", r"AdamW: (\S+)\nread (\d+) MiB, wrote (\d+) MiB")
    assert float(found[1]) < 5e-6, "a few units in the last place of weights up to 5"
    assert (int(found[2]), int(found[3])) == (40, 48)


def test_lightning_fit(output: Output) -> None:
    pytest.importorskip("lightning.pytorch")
    found = output(
        "lightning_fit.py",
        r"loss (\S+) -> (\S+); largest relative difference to plain Lightning (\S+)",
    )
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_finetune_hf(output: Output) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    line = r"loss (\S+) -> (\S+); largest relative difference to a plain Trainer (\S+)"
    found = output("finetune_hf.py", f"(?s)full: {line}.*LoRA: {line}")
    assert float(found[2]) < 0.8 * float(found[1]) and float(found[5]) < float(found[4])
    assert max(float(found[3]), float(found[6])) < 1e-5


def test_sft_trl(output: Output) -> None:
    pytest.importorskip("trl")
    line = r"loss (\S+) -> (\S+); largest relative difference to a plain SFTTrainer (\S+)"
    found = output("sft_trl.py", line)
    assert float(found[2]) < 0.7 * float(found[1])
    assert float(found[3]) < 1e-5


def test_long_context() -> None:
    module: Any = runpy.run_path(str(EXAMPLES / "long_context.py"))
    options = argparse.Namespace(
        model="10m",
        vocabulary=4096,
        budget_device="96MiB",
        budget_host="1GiB",
        budget_nvme=None,
        machine=None,
        most=1024,
    )
    assert module["longest"](options, "keep", "all logits") == (0, None)
    length, plan = module["longest"](options, "recompute", "linear_cross_entropy")
    assert (length, len(plan.residuals.recomputed)) == (1536, 6)
